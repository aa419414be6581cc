"""Commands for tests of the direct Vulkan device, and its library with faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vkbackend.device.base import Buffer
from vkbackend.device.copy import COPY_WORDS, FILL_WORDS
from vkbackend.device.dispatching import Command
from vkbackend.device.vulkan import VulkanDevice, VulkanRecording


class Faulty:
    """The Vulkan library with some functions replaced."""

    def __init__(self, lib: Any, **replaced: Callable[..., Any]) -> None:
        self._lib = lib
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)


def fill_command(target: Buffer, at: int, n: int, word: int, groups: int = 4) -> Command:
    return Command("fill", FILL_WORDS, (target,), (at, n, word), (groups, 1, 1), ())


def copy_command(source: Buffer, source_at: int, target: Buffer, target_at: int, n: int) -> Command:
    return Command("copy", COPY_WORDS, (source, target), (source_at, target_at, n), (4, 1, 1), ())


def recorded(
    device: VulkanDevice, levels: list[list[Command]], timestamps: bool = False, used: tuple[int, int] | None = None
) -> VulkanRecording:
    inputs, outputs = device.pool.host("inputs", 1), device.pool.host("outputs", 1)
    return device.record(levels, inputs, outputs, timestamps, used)
