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

from vkbackend.errors import DeviceError, VkBackendError
from vkbackend.graph import F32, Graph, Tensor

Array = NDArray[Any]
Words = NDArray[np.uint32]

ALIGN = 64  # words: 256 bytes, the largest alignment any device asks of a storage buffer offset


@dataclass(frozen=True)
class MatrixShape:
    """One cooperative product result[m, n] = a[m, k] * b[k, n] + c of a subgroup; types like "f16", "f32", "s8"."""

    m: int
    n: int
    k: int
    a: str
    b: str
    c: str
    result: str


@dataclass(frozen=True)
class Features:
    """Optional features that are switched on for kernels. All off where only core Vulkan 1.1 may be used (Kompute).

    `storage8` and `storage16` allow 8 and 16 bit elements in storage buffers; `int8`, `int16`, `int64` and
    `float16` arithmetic on them. `subgroup_sizes` is the range of sizes that a pipeline may require ((0, 0): none).
    `integer_dot` is SPV_KHR_integer_dot_product with four products of signed bytes in one instruction. Without shapes
    there are no cooperative matrices.
    """

    storage8: bool = False
    storage16: bool = False
    int8: bool = False
    int16: bool = False
    int64: bool = False
    float16: bool = False
    integer_dot: bool = False
    memory_model: bool = False
    full_subgroups: bool = False
    subgroup_sizes: tuple[int, int] = (0, 0)
    matrix_shapes: tuple[MatrixShape, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What one device allows. Sizes in bytes; `subgroup_shuffle`: kernels use their subgroup variant.

    `subgroup_size` is the size that a driver reports, `min_subgroup_size` the smallest that it may run a kernel with.
    """

    max_push_bytes: int = 128
    max_groups: tuple[int, int, int] = (65535, 65535, 65535)
    max_invocations: int = 128
    max_shared_bytes: int = 16384
    max_storage_range: int = 128 << 20
    max_buffer_bytes: int = (4 << 30) - 4096
    subgroup_size: int = 1
    min_subgroup_size: int = 1
    subgroup_shuffle: bool = False
    features: Features = Features()

    @property
    def few_lanes(self) -> bool:
        """Subgroups as narrow as a CPU driver's: few cores to fill, and no use in many invocations for one sum."""
        return self.subgroup_size <= 8


@dataclass(frozen=True)
class DeviceInfo:
    """A device as `vkb.devices()` lists it. `kind` is "gpu", "cpu" or "reference".

    `memory` is the size of its largest local heap in bytes, `memory_free` what this process could still take from
    it when the device was looked at (0: unknown).
    """

    name: str
    description: str
    kind: str
    limits: Limits
    memory: int = 0
    driver: str = ""
    api_version: str = ""
    memory_free: int = 0


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

    @property
    def max_burst(self) -> int:
        """Consecutive decode steps worth recording into one submission: 1 where submitting costs next to nothing."""
        ...

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the buffers and regions of this device take now."""
        ...

    @property
    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated, as far as the system says; None where it says nothing."""
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


def feed(name: str, tensor: Tensor, feeds: Mapping[str, Array]) -> Array:
    """The array given for a graph input. Raises `VkBackendError` when it is missing or has another shape."""
    if name not in feeds:
        raise VkBackendError(f"graph input '{name}' was not given; this graph needs shape {tensor.shape}")
    data = np.asarray(feeds[name])
    if data.shape != tensor.shape:
        raise VkBackendError(f"graph input '{name}' has shape {data.shape}; this graph was built for {tensor.shape}")
    return data


def check_range(device: str, buffer: Buffer, offset: int, n_words: int) -> None:
    """Raises `DeviceError` when words [offset, offset + n_words) are not all inside a buffer."""
    if offset < 0 or n_words < 0 or offset + n_words > buffer.n_words:
        raise DeviceError(
            f"{device}: words [{offset}, {offset + n_words}) are outside a buffer of {buffer.n_words} words"
        )


def check_memory(device: Device, n_bytes: int, what: str, remedy: str) -> None:
    """Raises `DeviceError` when something is larger than the memory that is known to be free."""
    free = device.free_bytes
    if free is not None and n_bytes > free:
        raise DeviceError(
            f"{device.info.name} ({device.info.description}): {what} need {n_bytes} bytes, {free} are free; {remedy}"
        )
