"""What every device that runs dispatches shares: limit checks before recording, and programs.

A driver (`kompute`, `vulkan`, `null`) gives buffers and recordings; this module plans a graph, checks every
launch against the device's limits (Kompute itself checks almost nothing), makes the program's own regions and
moves inputs and outputs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from vkbackend.chains import STATUS_AT
from vkbackend.device.base import Array, Buffer, DeviceInfo, Limits, Words, feed
from vkbackend.device.side_by_side import Tried, all_run, check_ended
from vkbackend.errors import DeviceError
from vkbackend.graph import I32, Graph, Tensor
from vkbackend.launch import ARENA, INPUTS, OUTPUTS, Launch
from vkbackend.ops.op import Kernel
from vkbackend.schedule import Plan, plan

NAN_WORD = 0x7FC00000


@dataclass(frozen=True, eq=False)
class Command:
    """A checked launch with every buffer known."""

    label: str
    kernel: Kernel
    buffers: tuple[Buffer, ...]
    push: tuple[int, ...]
    groups: tuple[int, int, int]
    spec: tuple[int, ...]


class HostRegion(Protocol):
    """A device buffer with a host-side copy that a recording moves at its start (inputs) or end (outputs)."""

    @property
    def n_words(self) -> int: ...

    @property
    def words(self) -> Words:
        """The host-side words, writable in place."""
        ...


class Recording(Protocol):
    """Commands recorded once; `run` submits them and waits. `seconds` (with timestamps) is per level."""

    def run(self) -> None: ...

    def level_seconds(self) -> list[float]: ...


class RegionPool:
    """The activation arenas and host regions of a device, shared by all its programs.

    Programs of one device run one after another (`lock`), so they can use the same scratch memory; and as they
    bind the same buffers, they also share pipelines. Sizes are rounded up to powers of two.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._arenas: dict[int, Buffer] = {}
        self._hosts: dict[tuple[str, int], HostRegion] = {}
        self.lock = threading.Lock()
        self.chains = True  # until one fails its trial (side_by_side.py)
        self.tried: Tried = set()

    def arena(self, n_words: int) -> Buffer:
        size = self._size_class(n_words)
        if size not in self._arenas:
            self._arenas[size] = self._driver.allocate(size, label="activation arena")
        return self._arenas[size]

    def host(self, kind: str, n_words: int) -> HostRegion:
        size = self._size_class(n_words)
        if (kind, size) not in self._hosts:
            self._hosts[kind, size] = self._driver.host_region(size, f"graph {kind}")
        return self._hosts[kind, size]

    def _size_class(self, n_words: int) -> int:
        largest = min(self._driver.info.limits.max_storage_range, self._driver.info.limits.max_buffer_bytes) // 4
        size = max(1024, 1 << (n_words - 1).bit_length())
        return size if size <= largest else n_words


class Driver(Protocol):
    """What a dispatching device implements beyond `Device`."""

    @property
    def info(self) -> DeviceInfo: ...

    @property
    def pool(self) -> RegionPool: ...

    def allocate(self, n_words: int, dtype: str = ..., label: str = ...) -> Buffer: ...

    def host_region(self, n_words: int, label: str) -> HostRegion: ...

    def fill(self, buffer: Buffer, offset: int, n_words: int, word: int) -> None: ...

    def record(
        self,
        levels: Sequence[Sequence[Command]],
        inputs: HostRegion,
        outputs: HostRegion,
        timestamps: bool,
        used: tuple[int, int] | None = ...,
    ) -> Recording:
        """`used`: how many words of the inputs and the outputs this program touches; a driver may copy no more."""
        ...


class DispatchProgram:
    """A planned and recorded graph. Runs as one submission."""

    def __init__(self, driver: Driver, graph: Graph, poison: bool, timestamps: bool) -> None:
        limits = driver.info.limits
        if not driver.pool.chains:
            limits = replace(limits, resident_groups=0)
        self.plan: Plan = plan(graph, limits)
        self._lock = driver.pool.lock
        if not all_run(self.plan.chains, driver.pool.tried, lambda launch: self._trial(driver, launch)):
            warnings.warn(
                f"{driver.info.name} ({driver.info.description}) does not run {limits.resident_groups} workgroups side "
                "by side, though it has as many multiprocessors: going on without chains of products",
                RuntimeWarning,
                stacklevel=4,
            )
            driver.pool.chains = False
            self.plan = plan(graph, replace(limits, resident_groups=0))
        n = self.plan.n_words
        self._name = driver.info.name
        self._in = driver.pool.host(INPUTS, n[INPUTS])
        self._out = driver.pool.host(OUTPUTS, n[OUTPUTS])
        arena = driver.pool.arena(n[ARENA])
        if poison:
            driver.fill(arena, 0, arena.n_words, NAN_WORD)
            driver.fill(self._out, 0, self._out.n_words, NAN_WORD)
        regions: dict[str, Buffer] = {ARENA: arena, INPUTS: self._in, OUTPUTS: self._out}
        levels = [[_command(launch, regions, driver.info) for launch in level] for level in self.plan.levels]
        self._recording = driver.record(levels, self._in, self._out, timestamps, (n[INPUTS], n[OUTPUTS]))

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        words = {name: _as_words(name, tensor, feeds) for name, (_, tensor) in self.plan.inputs.items()}
        with self._lock:
            for name, (offset, tensor) in self.plan.inputs.items():
                self._in.words[offset : offset + tensor.size] = words[name]
            # The region is shared, and a run that failed may have left anything.
            self._in.words[self.plan.counters.start : self.plan.counters.stop] = 0
            self._in.words[self.plan.chain_at : self.plan.chain_at + self.plan.chain_words.size] = self.plan.chain_words
            self._recording.run()
            check_ended(self._out.words[self.plan.chain_status.start : self.plan.chain_status.stop], self._name)
            return {name: self._read(offset, tensor) for name, (offset, tensor) in self.plan.outputs.items()}

    def level_seconds(self) -> list[float]:
        """Device time of each level of the last run; needs `timestamps=True` at compile time."""
        return self._recording.level_seconds()

    def _trial(self, driver: Driver, launch: Launch) -> int:
        """Runs one launch by itself, on regions full of zeros; its status word afterwards."""
        n = self.plan.n_words
        ins, outs = driver.pool.host(INPUTS, n[INPUTS]), driver.pool.host(OUTPUTS, n[OUTPUTS])
        regions: dict[str, Buffer] = {ARENA: driver.pool.arena(n[ARENA]), INPUTS: ins, OUTPUTS: outs}
        levels = [[_command(launch, regions, driver.info)]]
        recording = driver.record(levels, ins, outs, False, (n[INPUTS], n[OUTPUTS]))
        with self._lock:
            ins.words[: n[INPUTS]] = 0
            recording.run()
            return int(outs.words[launch.push[STATUS_AT]])

    def _read(self, offset: int, tensor: Tensor) -> Array:
        start, stop = tensor.span()
        words = self._out.words[offset : offset + stop - start]
        typed = words.view(np.int32 if tensor.dtype == I32 else np.float32)
        return np.lib.stride_tricks.as_strided(typed, tensor.shape, [4 * s for s in tensor.strides]).copy()


def _as_words(name: str, tensor: Tensor, feeds: Mapping[str, Array]) -> Words:
    data = np.asarray(feed(name, tensor, feeds), np.int32 if tensor.dtype == I32 else np.float32)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint32)


def _command(launch: Launch, regions: Mapping[str, Buffer], info: DeviceInfo) -> Command:
    buffers = tuple(regions[b] if isinstance(b, str) else b for b in launch.buffers)
    check_launch(launch, buffers, info)
    return Command(launch.label, launch.kernel, buffers, launch.push, launch.groups, launch.spec)


def check_launch(launch: Launch, buffers: Sequence[Buffer], info: DeviceInfo) -> None:
    """Raises `DeviceError` when a launch exceeds a limit of the device."""
    limits: Limits = info.limits
    where = f"{launch.label} ({launch.kernel.name}.comp) on {info.name}"
    if 4 * len(launch.push) > limits.max_push_bytes:
        raise DeviceError(
            f"{where}: needs {4 * len(launch.push)} bytes of push constants, the device allows {limits.max_push_bytes}"
        )
    for axis, need, allowed in zip("xyz", launch.groups, limits.max_groups, strict=True):
        if not 1 <= need <= allowed:
            raise DeviceError(
                f"{where}: needs {need} workgroups along {axis}, the device allows 1..{allowed}; "
                "use a smaller batch (n_ubatch)"
            )
    if launch.kernel.local_size > limits.max_invocations:
        raise DeviceError(
            f"{where}: needs {launch.kernel.local_size} invocations in a workgroup, "
            f"the device allows {limits.max_invocations}"
        )
    for i, buffer in enumerate(buffers):
        if 4 * buffer.n_words > limits.max_storage_range:
            raise DeviceError(
                f"{where}: binding {i} is a buffer of {4 * buffer.n_words} bytes, the device can bind "
                f"{limits.max_storage_range}; use a smaller n_ctx or n_ubatch"
            )


def check_allocation(n_words: int, label: str, info: DeviceInfo) -> None:
    """Raises `DeviceError` when a buffer is larger than the device can allocate or bind at once."""
    allowed = min(info.limits.max_buffer_bytes, info.limits.max_storage_range)
    if not 0 < 4 * n_words <= allowed:
        raise DeviceError(
            f"{info.name}: {label or 'a buffer'} needs {4 * n_words} bytes in one buffer, the device allows "
            f"1..{allowed}; use a smaller n_ctx, n_seq_max or n_ubatch"
        )
