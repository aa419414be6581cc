"""The Kompute device: buffers, algorithms and sequences of `kp`, through one wrapper.

Nothing outside this module touches Kompute memory. What was measured and worked around: docs/kompute.md.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from vkbackend.device.base import Array, Buffer, DeviceInfo, Words, check_range
from vkbackend.device.copy import COPY_WORDS, FILL_WORDS, GRID
from vkbackend.device.dispatching import Command, DispatchProgram, HostRegion, RegionPool, check_allocation
from vkbackend.device.kompute_order import GROUPS, RUN_STEPS, SEEN_TO_WAIT, WITNESS, Witness, push
from vkbackend.device.probe import uses_subgroups, vulkan_devices
from vkbackend.device.shared_memory import check_shared
from vkbackend.errors import DeviceError
from vkbackend.graph import F32, Graph
from vkbackend.ops.op import Kernel
from vkbackend.shaders.compiler import spirv

STAGING_WORDS = 8 << 20  # 32 MiB: large enough to amortise an eval, small enough to keep


@dataclass(eq=False)
class KomputeAlgorithm:
    """A pipeline with its buffers bound. Lives as long as a recording or a buffer holds it."""

    algorithm: Any
    tensors: list[Any]


@dataclass(eq=False)
class KomputeBuffer:
    """An eStorage tensor: device memory without a host copy. `copies` keeps the algorithms that fill and read it."""

    tensor: Any
    n_words: int
    copies: list[KomputeAlgorithm] = field(default_factory=list)


@dataclass(eq=False)
class KomputeHostRegion:
    """An eDevice or eHost tensor with Kompute's mapped host side."""

    tensor: Any
    n_words: int
    mapped: Words
    copies: list[KomputeAlgorithm] = field(default_factory=list)

    @property
    def words(self) -> Words:
        """The host's words. Raises `DeviceError` when the device was closed, which unmaps them."""
        _check_open(self.tensor)
        return self.mapped


class KomputeRecording:
    """A recorded sequence. One `run` is one Kompute eval."""

    def __init__(
        self,
        sequence: Any,
        algorithms: list[KomputeAlgorithm],
        level_ends: list[int],
        timestamp_ns: float,
        witness: Witness | None = None,
    ) -> None:
        self._sequence = sequence
        self._witness = witness  # none where a barrier stands between levels
        self._algorithms = algorithms
        self._level_ends = level_ends
        self._timestamp_ns = timestamp_ns

    def run(self) -> None:
        _check_open(self._sequence)
        try:
            self._sequence.eval()
        except RuntimeError as error:
            raise DeviceError(f"kompute: running a recording failed: {error}{_advice(error)}") from error
        if self._witness is not None:
            self._witness.check()

    def level_seconds(self) -> list[float]:
        _check_open(self._sequence)
        ticks = self._sequence.get_timestamps()
        ends = [ticks[i] for i in self._level_ends]
        return [(b - a) * self._timestamp_ns * 1e-9 for a, b in zip(ends, ends[1:], strict=False)]


class KomputeDevice:
    """One physical device driven through Kompute. Raises `DeviceError` when it can not be opened.

    `relaxed`: whether what stands for a barrier between levels is left out. None: where the driver was seen to wait for
    earlier dispatches without it (kompute_order.py); False: never; True: on any driver. If a trial fails, it stays.
    """

    holds_packed_weights = True

    def __init__(self, index: int = 0, subgroups: bool = True, relaxed: bool | None = None) -> None:
        kp = _import_kp()
        found = vulkan_devices("kompute")
        if not 0 <= index < len(found):
            raise DeviceError(
                f"kompute:{index}: there is no such Vulkan device; found {len(found)}: "
                + (", ".join(f"{d.info.name} ({d.info.description})" for d in found) or "none, install a Vulkan driver")
            )
        info = found[index].info
        self._timestamp_ns = found[index].timestamp_ns
        self.subgroups = subgroups and uses_subgroups(info.limits)
        self.info: DeviceInfo = replace(info, limits=replace(info.limits, subgroup_shuffle=self.subgroups))
        self.max_burst = 16 if info.kind == "gpu" else 1  # a CPU driver's steps are long, its submissions cheap
        self._kp = kp
        try:
            self._manager = kp.Manager(index, [], [])
        except RuntimeError as error:
            raise DeviceError(
                f"{self.info.name} ({self.info.description}): Kompute can not open it: {error}"
            ) from error
        # Held weakly, or the buffers of every context there ever was would stay. The ids in a key are not reused while
        # it is there: the algorithm holds its tensors.
        self._algorithms: weakref.WeakValueDictionary[tuple[Any, ...], KomputeAlgorithm] = weakref.WeakValueDictionary()
        self._sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # tensor -> bytes
        self.pool = RegionPool(self)
        self._staging: KomputeHostRegion | None = None
        self._staging_lock = threading.Lock()  # a thread fills it, copies, and reads it in one turn
        # What stands for a barrier, and tells whether the device is open.
        self._barrier = self._manager.tensor_t(np.zeros(1, np.uint32), kp.TensorTypes.device)
        self._self_test()
        self._witness: Witness | None = None
        if relaxed or (relaxed is None and found[index].driver_id in SEEN_TO_WAIT):
            self._witness = self._new_witness()
            if not self._witness.try_out(self._manager.sequence):
                self._witness = None

    @property
    def relaxed(self) -> bool:
        """Whether nothing stands for a barrier between levels, as the driver waits without it."""
        return self._witness is not None

    # ---- memory

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the tensors that this device holds now; host copies are not counted."""
        return sum(self._sizes.values())

    @property
    def free_bytes(self) -> int | None:
        """What was free when the device was opened, less what it holds now: Kompute itself does not know."""
        return max(0, self.info.memory_free - self.allocated_bytes) if self.info.memory_free else None

    def allocate(self, n_words: int, dtype: str = F32, label: str = "") -> KomputeBuffer:
        check_allocation(n_words, label, self.info)
        # np.empty only reserves address space: Kompute reads the size of this array, not its contents.
        return KomputeBuffer(self._tensor(np.empty(n_words, np.uint32), self._kp.TensorTypes.storage, label), n_words)

    def host_region(self, n_words: int, label: str) -> KomputeHostRegion:
        check_allocation(n_words, label, self.info)
        tensor = self._tensor(np.zeros(n_words, np.uint32), self._kp.TensorTypes.device, label)
        return KomputeHostRegion(tensor, n_words, cast(Words, tensor.data()))

    def upload(self, buffer: Buffer, offset: int, data: Array) -> None:
        words = np.ascontiguousarray(data).reshape(-1).view(np.uint32)
        check_range(self.info.name, buffer, offset, words.size)
        with self._staging_lock:
            staging = self._get_staging()
            for start in range(0, words.size, staging.n_words):
                part = words[start : start + staging.n_words]
                staging.words[: part.size] = part
                self._eval(COPY_WORDS, [staging, buffer], (0, offset + start, part.size))

    def download(self, buffer: Buffer, offset: int, n_words: int) -> Words:
        check_range(self.info.name, buffer, offset, n_words)
        out = np.empty(n_words, np.uint32)
        with self._staging_lock:
            staging = self._get_staging()
            for start in range(0, n_words, staging.n_words):
                n = min(staging.n_words, n_words - start)
                self._eval(COPY_WORDS, [buffer, staging], (offset + start, 0, n))
                out[start : start + n] = staging.words[:n]
        return out

    def fill(self, buffer: Buffer, offset: int, n_words: int, word: int) -> None:
        check_range(self.info.name, buffer, offset, n_words)
        self._eval(FILL_WORDS, [buffer], (offset, n_words, word))

    def copy(self, source: Buffer, source_at: int, target: Buffer, target_at: int, n_words: int) -> None:
        check_range(self.info.name, source, source_at, n_words)
        check_range(self.info.name, target, target_at, n_words)
        self._eval(COPY_WORDS, [source, target], (source_at, target_at, n_words))

    def _tensor(self, data: Words, kind: Any, label: str) -> Any:
        _check_open(self._barrier)
        try:
            tensor = self._manager.tensor_t(data, kind)
            self._sizes[tensor] = data.nbytes
            return tensor
        except RuntimeError as error:
            raise DeviceError(
                f"{self.info.name}: allocating {data.nbytes} bytes for {label or 'a buffer'} failed: {error}"
                f"{_advice(error)} (this process holds {self.allocated_bytes} bytes there)"
            ) from error

    def _get_staging(self) -> KomputeHostRegion:
        if self._staging is None:
            n = min(STAGING_WORDS, self.info.limits.max_storage_range // 4)
            tensor = self._tensor(np.zeros(n, np.uint32), self._kp.TensorTypes.host, "staging")
            self._staging = KomputeHostRegion(tensor, n, cast(Words, tensor.data()))
        return self._staging

    # ---- programs

    def compile(self, graph: Graph, poison: bool = False, timestamps: bool = False) -> DispatchProgram:
        return DispatchProgram(self, graph, poison, timestamps)

    def record(
        self,
        levels: Sequence[Sequence[Command]],
        inputs: HostRegion,
        outputs: HostRegion,
        timestamps: bool,
        used: tuple[int, int] | None = None,
    ) -> KomputeRecording:
        _check_open(self._barrier)
        kp = self._kp
        n_ops = sum(len(level) for level in levels) + len(levels) + 2 + (RUN_STEPS + 1 if self.relaxed else 0)
        sequence = self._manager.sequence(0, n_ops if timestamps else 0)
        sequence.record(kp.OpTensorSyncDevice([_tensor_of(inputs)]))
        n, ends, used_algorithms = 1, [1], []
        for i, level in enumerate(levels):
            if i > 0 and not self.relaxed:
                # Kompute has no compute-to-compute barrier; a one-word transfer between two levels is one.
                sequence.record(kp.OpTensorSyncLocal([self._barrier]))
                n += 1
            for command in level:
                algorithm = self._algorithm(command.kernel, command.buffers, command.spec, command.groups, command.push)
                sequence.record(kp.OpAlgoDispatch(algorithm.algorithm, np.array(command.push, np.uint32)))
                used_algorithms.append(algorithm)
                n += 1
            ends.append(n)
        sequence.record(kp.OpTensorSyncLocal([_tensor_of(outputs)]))
        if self._witness is not None:
            self._witness.record(sequence, RUN_STEPS)
        return KomputeRecording(sequence, used_algorithms, ends, self._timestamp_ns, self._witness)

    def _algorithm(
        self,
        kernel: Kernel,
        buffers: Sequence[Any],
        spec: tuple[int, ...],
        groups: tuple[int, int, int],
        push: Sequence[int],
    ) -> KomputeAlgorithm:
        tensors = [_tensor_of(b) for b in buffers]
        key = (kernel, tuple(id(t) for t in tensors), spec, groups, len(push))
        found = self._algorithms.get(key)
        if found is None:
            check_shared(kernel, self.subgroups, spec, self.info)
            try:
                # Both arrays must be uint32: Kompute reads the push constants with the spec constants' type.
                algorithm = self._manager.algorithm(
                    tensors,
                    spirv(kernel, self.subgroups),
                    list(groups),
                    np.array(spec, np.uint32),
                    np.array(push, np.uint32),
                )
            except RuntimeError as error:
                raise DeviceError(f"{self.info.name}: pipeline for {kernel.name}.comp failed: {error}") from error
            found = self._algorithms[key] = KomputeAlgorithm(algorithm, tensors)
        return found

    def _eval(self, kernel: Kernel, buffers: Sequence[Any], push: tuple[int, ...]) -> None:
        _check_open(self._barrier)
        algorithm = self._algorithm(kernel, buffers, (), GRID, push)
        others = {id(b) for b in buffers if b is not self._staging}
        if len(others) == 1 and all(algorithm is not known for b in buffers for known in b.copies):
            # Kept for the next piece, with the one buffer that it binds beside the staging memory.
            next(b for b in buffers if id(b) in others).copies.append(algorithm)
        sequence = self._manager.sequence()
        try:
            sequence.record(self._kp.OpAlgoDispatch(algorithm.algorithm, np.array(push, np.uint32)))
            sequence.eval()
        except RuntimeError as error:
            raise DeviceError(
                f"{self.info.name} ({self.info.description}): copying failed: {error}{_advice(error)}"
            ) from error
        finally:
            sequence.destroy()

    def _new_witness(self) -> Witness:
        region = self.host_region(2 * GROUPS, "order witness")
        algorithm = self._algorithm(WITNESS, [region], (), (GROUPS, 1, 1), push(0))
        return Witness(self.info.name, self._kp, region.tensor, region.words, algorithm.algorithm)

    def _self_test(self) -> None:
        """Writes and reads a pattern: kp 0.9.0 built for another NumPy reads wrong values without an error."""
        pattern = np.arange(1, 1 + 64, dtype=np.uint32) * np.uint32(0x9E3779B1)
        buffer = self.allocate(64, label="self-test")
        self.upload(buffer, 0, pattern)
        if not np.array_equal(self.download(buffer, 0, 64), pattern):
            raise DeviceError(
                f"{self.info.name}: Kompute reads back other values than were written (NumPy {np.__version__}); "
                "kp 0.9.0 needs numpy < 2: pip install 'numpy<2'"
            )

    def close(self) -> None:
        self._algorithms.clear()
        self.pool = RegionPool(self)
        self._staging = None
        self._manager.destroy()


def _check_open(made: Any) -> None:
    """Kompute does not look whether what it made (a tensor, a sequence) is still there when it is used."""
    if not made.is_init():
        raise DeviceError("kompute: the device is closed; open it again")


def _advice(error: RuntimeError) -> str:
    """What to do about an error of Vulkan, which Kompute passes on by name."""
    text = str(error)
    if "DeviceLost" in text:
        return "; the device was lost, often by a driver's watchdog: use a smaller n_ubatch, and open it again"
    if "OutOf" in text:
        return "; use a smaller n_ctx, n_seq_max or n_ubatch, or a smaller quantisation"
    return ""


def _tensor_of(buffer: Any) -> Any:
    return buffer.tensor


def _import_kp() -> Any:
    try:
        import kp
    except ImportError as error:
        raise DeviceError(f"the kompute device needs the package kp ({error}); install it with: make setup") from error
    if int(np.__version__.split(".")[0]) >= 2:
        raise DeviceError(f"kp 0.9.0 reads wrong values with NumPy {np.__version__}: pip install 'numpy<2'")
    return kp
