"""The NumPy device: walks a graph with the ops' references. Reference (float64) and fallback (float32).

The fallback takes the faster form that some ops have (`Op.prepare`); the reference never does.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from vkbackend.device.base import Array, Buffer, DeviceInfo, Limits, Words, check_range, feed
from vkbackend.device.numpy_parts import Run, Workspace
from vkbackend.errors import DeviceError
from vkbackend.graph import F32, I32, Graph, Node, Role, Storage, Tensor


@dataclass(eq=False)
class NumpyBuffer:
    """A one-dimensional array, one element a word."""

    data: Array

    @property
    def n_words(self) -> int:
        return int(self.data.size)


class NumpyDevice:
    """Runs graphs on the CPU with NumPy. `real` is the type of every "f32" tensor: float32, or float64 in tests."""

    holds_packed_weights = False
    max_burst = 1

    def __init__(self, real: type[np.floating[Any]] = np.float32) -> None:
        self.real = np.dtype(real)
        self._buffers: weakref.WeakSet[NumpyBuffer] = weakref.WeakSet()
        self.info = DeviceInfo(
            name="numpy",
            description=f"NumPy {np.__version__} ({self.real.name})",
            kind="reference",
            limits=Limits(max_storage_range=1 << 62, max_buffer_bytes=1 << 62),
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers that are still held."""
        return sum(b.data.nbytes for b in list(self._buffers))

    @property
    def free_bytes(self) -> int | None:
        """Memory that the system can give without swapping (Linux): what is overdrawn here ends the process."""
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return None
        found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        return found[0] if found else None

    def _dtype(self, dtype: str) -> np.dtype[Any]:
        if dtype == F32:
            return self.real
        if dtype == I32:
            return np.dtype(np.int32)
        raise DeviceError(f"numpy: dtype '{dtype}' has no array type here; upload such weights as float32")

    def allocate(self, n_words: int, dtype: str = F32, label: str = "") -> NumpyBuffer:
        try:
            data = np.empty(n_words, self._dtype(dtype))
        except MemoryError as error:
            raise DeviceError(f"numpy: allocating {4 * n_words} bytes for {label or 'a buffer'} failed") from error
        buffer = NumpyBuffer(data)
        self._buffers.add(buffer)
        return buffer

    def upload(self, buffer: Buffer, offset: int, data: Array) -> None:
        target = _array(buffer)
        flat = np.ascontiguousarray(data).reshape(-1)
        check_range("numpy", buffer, offset, flat.size)
        if flat.dtype == np.uint32:
            flat = flat.view(np.int32 if target.dtype == np.int32 else np.float32)
        target[offset : offset + flat.size] = flat

    def download(self, buffer: Buffer, offset: int, n_words: int) -> Words:
        check_range("numpy", buffer, offset, n_words)
        part = _array(buffer)[offset : offset + n_words]
        if part.dtype == np.float64:
            part = part.astype(np.float32)
        return part.view(np.uint32).copy()

    def fill(self, buffer: Buffer, offset: int, n_words: int, word: int) -> None:
        check_range("numpy", buffer, offset, n_words)
        self.upload(buffer, offset, np.full(n_words, word, np.uint32))

    def copy(self, source: Buffer, source_at: int, target: Buffer, target_at: int, n_words: int) -> None:
        check_range("numpy", source, source_at, n_words)
        check_range("numpy", target, target_at, n_words)
        _array(target)[target_at : target_at + n_words] = _array(source)[source_at : source_at + n_words]

    def compile(self, graph: Graph, poison: bool = False, timestamps: bool = False) -> NumpyProgram:
        return NumpyProgram(self, graph)

    def close(self) -> None:
        return None


class NumpyProgram:
    """Arrays for a graph's storages, made once, and a walk over its nodes."""

    def __init__(self, device: NumpyDevice, graph: Graph) -> None:
        self._device = device
        self._graph = graph
        self._memory: dict[int, Array] = {}
        self._workspace = Workspace()
        self._steps = [self._step(node) for node in graph.nodes]
        self._inputs = {name: self._view(t) for name, t in graph.inputs.items()}
        self._outputs = {name: self._view(t) for name, t in graph.outputs.items()}

    def _step(self, node: Node) -> Run:
        inputs, outputs = [self._view(t) for t in node.inputs], [self._view(t) for t in node.outputs]
        if node.op.prepare is not None and self._device.real == np.float32:
            return node.op.prepare(node, inputs, outputs, self._workspace)
        return partial(node.op.reference, node, inputs, outputs)

    def _view(self, tensor: Tensor) -> Array:
        base = self._storage(tensor.storage)
        if tensor.is_packed:
            raise DeviceError(
                f"numpy: '{tensor.storage.label}' holds packed {tensor.dtype} words; this device takes float32 weights"
            )
        return np.lib.stride_tricks.as_strided(
            base[tensor.offset :], tensor.shape, [s * base.itemsize for s in tensor.strides]
        )

    def _storage(self, storage: Storage) -> Array:
        if storage.role is Role.BOUND:
            assert storage.buffer is not None
            return _array(storage.buffer)[storage.base : storage.base + storage.n_words]
        if id(storage) not in self._memory:
            dtype = self._device._dtype(storage.dtype)
            # A result that a reference forgets to write must not look like a plausible number.
            self._memory[id(storage)] = np.full(storage.n_words, np.nan if dtype.kind == "f" else -1, dtype)
        return self._memory[id(storage)]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        for name, view in self._inputs.items():
            view[...] = feed(name, self._graph.inputs[name], feeds)
        with np.errstate(over="ignore", under="ignore"):
            for step in self._steps:
                step()
        return {name: view.copy() for name, view in self._outputs.items()}


def _array(buffer: Buffer) -> Array:
    return cast(NumpyBuffer, buffer).data
