"""A device whose calls can be made to fail, as a lost GPU, a watchdog or a full memory would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vkbackend.device.base import Array, Device, DeviceInfo, Program
from vkbackend.errors import DeviceError
from vkbackend.graph import Graph


class FaultyDevice:
    """Passes everything on to a real device; `fail_in[what]` calls later, "run", "allocate", "upload"... fails once."""

    def __init__(self, device: Device, **info: Any) -> None:
        self._device = device
        self.info: DeviceInfo = replace(device.info, **info)
        self.fail_in: dict[str, int] = {}
        self.error = "the device was lost"
        self.max_burst = device.max_burst
        self.free_bytes: int | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._device, name)
        return found if not callable(found) else lambda *args, **kwargs: (self.count(name), found(*args, **kwargs))[1]

    def count(self, what: str) -> None:
        left = self.fail_in.get(what)
        if left is not None:
            if left == 0:
                del self.fail_in[what]
                raise DeviceError(f"{self.info.name}: {self.error}")
            self.fail_in[what] = left - 1

    def compile(self, graph: Graph, poison: bool = False, timestamps: bool = False) -> Program:
        self.count("compile")
        return FaultyProgram(self, self._device.compile(graph, poison, timestamps))


class FaultyProgram:
    def __init__(self, device: FaultyDevice, program: Program) -> None:
        self._device = device
        self._program = program

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self._device.count("run")
        return self._program.run(feeds)
