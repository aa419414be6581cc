"""The null device: plans and records like a GPU, checks every limit, runs nothing. For scheduler tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.device.base import Array, Buffer, DeviceInfo, Limits, Words, check_range
from vkbackend.device.dispatching import Command, DispatchProgram, HostRegion, RegionPool, check_allocation
from vkbackend.graph import F32, Graph


@dataclass(eq=False)
class NullBuffer:
    """A size without memory, or (for host regions) with host memory only."""

    n_words: int
    label: str = ""

    @property
    def words(self) -> Words:
        if not hasattr(self, "_words"):
            self._words: Words = np.zeros(self.n_words, np.uint32)
        return self._words


@dataclass
class NullRecording:
    """Keeps the commands so that tests can look at them."""

    levels: list[list[Command]]
    runs: int = 0

    def run(self) -> None:
        self.runs += 1

    def level_seconds(self) -> list[float]:
        return [0.0] * len(self.levels)


class NullDevice:
    """Records and runs nothing; every allocation and recording is kept for inspection."""

    holds_packed_weights = True
    max_burst = 16
    free_bytes: int | None = None

    def __init__(self, limits: Limits | None = None) -> None:
        self.info = DeviceInfo("null", "records, runs nothing", "reference", limits or Limits())
        self.buffers: list[NullBuffer] = []
        self.recordings: list[NullRecording] = []
        self.pool = RegionPool(self)

    def allocate(self, n_words: int, dtype: str = F32, label: str = "") -> NullBuffer:
        check_allocation(n_words, label, self.info)
        self.buffers.append(NullBuffer(n_words, label))
        return self.buffers[-1]

    def host_region(self, n_words: int, label: str) -> NullBuffer:
        return self.allocate(n_words, label=label)

    @property
    def allocated_bytes(self) -> int:
        return sum(4 * b.n_words for b in self.buffers)

    def upload(self, buffer: Buffer, offset: int, data: Array) -> None:
        check_range("null", buffer, offset, data.size)

    def download(self, buffer: Buffer, offset: int, n_words: int) -> Words:
        check_range("null", buffer, offset, n_words)
        return np.zeros(n_words, np.uint32)

    def fill(self, buffer: Buffer, offset: int, n_words: int, word: int) -> None:
        check_range("null", buffer, offset, n_words)

    def copy(self, source: Buffer, source_at: int, target: Buffer, target_at: int, n_words: int) -> None:
        check_range("null", source, source_at, n_words)
        check_range("null", target, target_at, n_words)

    def record(
        self,
        levels: Sequence[Sequence[Command]],
        inputs: HostRegion,
        outputs: HostRegion,
        timestamps: bool,
        used: tuple[int, int] | None = None,
    ) -> NullRecording:
        self.recordings.append(NullRecording([list(level) for level in levels]))
        return self.recordings[-1]

    def compile(self, graph: Graph, poison: bool = False, timestamps: bool = False) -> DispatchProgram:
        return DispatchProgram(self, graph, poison, timestamps)

    def close(self) -> None:
        self.buffers.clear()
        self.recordings.clear()
