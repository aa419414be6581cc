"""The device interface: buffers, and programs compiled from graphs.

Small on purpose. `numpy` walks a graph with the ops' references; the others (`kompute`, `vulkan`, `null`) share
`dispatching.py`, which schedules the graph into dispatches, checks them against the device's limits and records
them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vkbackend.graph import F32, Graph

Array = NDArray[Any]
Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Limits:
    """What one device allows. Sizes in bytes; `subgroup_arithmetic`: kernels use their subgroup variant."""

    max_push_bytes: int = 128
    max_groups: tuple[int, int, int] = (65535, 65535, 65535)
    max_invocations: int = 128
    max_shared_bytes: int = 16384
    max_storage_range: int = 128 << 20
    max_buffer_bytes: int = (4 << 30) - 4096
    subgroup_size: int = 1
    subgroup_arithmetic: bool = False

    @property
    def team_lanes(self) -> int:
        """Lanes of a team in include/lanes.glsl: for sizing dispatches only, a driver may pick another number."""
        return self.subgroup_size if self.subgroup_arithmetic else 32


@dataclass(frozen=True)
class DeviceInfo:
    """A device as `vkb.devices()` lists it. `kind` is "gpu", "cpu" or "reference"; memory in bytes (0: unknown)."""

    name: str
    description: str
    kind: str
    limits: Limits
    memory: int = 0
    driver: str = ""
    api_version: str = ""


class Buffer(Protocol):
    """A region of device memory, `n_words` 4-byte words long."""

    @property
    def n_words(self) -> int: ...


class Program(Protocol):
    """A graph made ready to run on one device."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Writes the inputs (all of them, exact shapes), runs once, returns the outputs as fresh arrays."""
        ...


class Device(Protocol):
    """Where graphs run. Word counts and offsets are in 4-byte words."""

    @property
    def info(self) -> DeviceInfo: ...

    @property
    def holds_packed_weights(self) -> bool:
        """True: weights are uploaded in packed planes (`quants.py`). False: as float32 (the NumPy device)."""
        ...

    def allocate(self, n_words: int, dtype: str = F32, label: str = "") -> Buffer:
        """Memory that outlives graphs. Contents are undefined. Raises `DeviceError` when it does not fit."""
        ...

    def upload(self, buffer: Buffer, offset: int, data: Array) -> None:
        """Copies float32, int32 or uint32 words to the buffer from word `offset`."""
        ...

    def download(self, buffer: Buffer, offset: int, n_words: int) -> Words:
        """The raw words of a region (for float64 reference buffers: rounded to float32 first)."""
        ...

    def fill(self, buffer: Buffer, offset: int, n_words: int, word: int) -> None:
        """Sets every word of a region to one uint32 pattern."""
        ...

    def copy(self, source: Buffer, source_at: int, target: Buffer, target_at: int, n_words: int) -> None:
        """Copies words between buffers, or between regions of one buffer that do not overlap."""
        ...

    def compile(self, graph: Graph, poison: bool = False, timestamps: bool = False) -> Program:
        """Makes a graph runnable. `poison` fills temporaries with NaN first, so that tests see unwritten reads."""
        ...

    def close(self) -> None:
        """Frees everything. Buffers and programs of this device must not be used afterwards."""
        ...
