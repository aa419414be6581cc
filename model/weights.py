"""Weights on a device: matrices stacked, interleaved and split as the kernels want them, in a few arenas.

A `Matrix` is the recipe of one product's weight: which tensors of the file, in which order. Loading first sizes
everything, then allocates arenas, then uploads in chunks of rows straight from the memory-mapped file, so that
host memory holds one chunk at a time. Weights stay in their quantised bytes (`vkbackend/quants.py`) except on
the NumPy device, which gets float32 once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import gguf
import numpy as np
from numpy.typing import NDArray

from vkbackend.device.base import ALIGN, Array, Buffer, Device, check_memory
from vkbackend.errors import ModelError
from vkbackend.graph import F32, I32, Tensor, bound
from vkbackend.model.gguf import GGUFFile, TensorInfo
from vkbackend.ops.linear import FORMATS
from vkbackend.packing import plane_starts, plane_words
from vkbackend.quants import dequantize, weight_format

CHUNK_BYTES = 16 << 20  # file bytes converted and uploaded at a time
FLOAT_CHUNK_BYTES = 1 << 20  # the same where weights become float32: while the numbers are in the CPU's cache
ARENA_BYTES = 2 << 30  # largest single allocation asked of a driver

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Matrix:
    """One product's weight: tensors [rows_i, cols] of the file stacked along rows, or interleaved.

    Experts [n_expert, unit, cols] are n_expert * unit rows; `unit` rows stay together, in turns and in parts.
    """

    path: str
    sources: tuple[str, ...]
    interleave: bool = False
    unit: int = 1

    @property
    def together(self) -> int:
        """Rows that are never cut apart: one turn of interleaved tensors, one expert."""
        return self.unit * len(self.sources) if self.interleave else self.unit


@dataclass
class _Part:
    """A run of rows that lies in one arena under one format; `key` names the matrix it belongs to."""

    key: Matrix | str
    infos: tuple[TensorInfo, ...]
    file: GGUFFile
    dtype: str
    rows: int
    cols: int
    first_row: int  # of the (possibly interleaved) tensors, when a large matrix is split
    arena: int = 0
    base: int = 0

    def n_words(self) -> int:
        return self.rows * self.cols if self.dtype == F32 else sum(plane_words(self.dtype, self.rows, self.cols))


@dataclass
class WeightLoader:
    """Collects what a model needs, then puts all of it on the device at once.

    `matrix` and `vector` return keys; after `load`, `parts(key)` and `tensor(key)` give the tensors.
    """

    device: Device
    _parts: list[_Part] = field(default_factory=list)
    _tensors: dict[object, list[Tensor]] = field(default_factory=dict)
    _constants: dict[str, Tensor] = field(default_factory=dict)

    def matrix(self, file: GGUFFile, sources: Sequence[str], interleave: bool = False, unit: int = 1) -> Matrix:
        """Asks for the stack of the named tensors. All need the same number of columns; a vector is one row.

        Neighbours of one quantisation become one part, each change of it starts another; a part larger than the
        device can bind is split by rows. Interleaved tensors need one shape; where their quantisations differ they are
        stacked instead: `interleave` of the returned key tells which. unit: rows of one expert in tensors
        [n_expert, unit, cols]; no part ends inside an expert, and interleaved tensors give one expert in turn.
        """
        infos = [self._info(file, name) for name in sources]
        cols = infos[0].shape[-1]
        for info in infos:
            fits = len(info.shape) <= 2 if unit == 1 else len(info.shape) == 3 and info.shape[1] == unit
            if not fits or info.shape[-1] != cols:
                need = f"[rows, {cols}]" if unit == 1 else f"[n_expert, {unit}, {cols}]"
                raise ModelError(
                    f"{file.path}: tensor '{info.name}' has shape {info.shape}; {need} is needed to match "
                    f"'{infos[0].name}'"
                )
        if interleave and len({i.shape for i in infos}) != 1:
            shapes = " and ".join(str(i.shape) for i in infos)
            raise ModelError(f"{file.path}: {', '.join(sources)} have shapes {shapes}; they must be alike")
        key = Matrix(str(file.path), tuple(sources), interleave and len({i.type for i in infos}) == 1, unit)
        if any(p.key == key for p in self._parts):
            return key
        if key.interleave:
            groups = [infos]
        else:
            groups = []
            for info in infos:
                if groups and groups[-1][0].type == info.type:
                    groups[-1].append(info)
                else:
                    groups.append([info])
        for group in groups:
            self._add(key, file, group, sum(math.prod(i.shape[:-1]) for i in group), cols)
        return key

    def vector(self, file: GGUFFile, name: str, shape: tuple[int, ...] | None = None) -> str:
        """Asks for one small float tensor as float32 (norm weights, biases, convolution taps)."""
        info = self._info(file, name)
        if shape is not None and math.prod(info.shape) != math.prod(shape):
            raise ModelError(f"{file.path}: tensor '{name}' has shape {info.shape}; {shape} is needed")
        key = f"{file.path}:{name}"
        if not any(p.key == key for p in self._parts):
            target = shape or info.shape
            rows, cols = (1, target[0]) if len(target) == 1 else (target[0], math.prod(target[1:]))
            if cols % _block(info)[0]:
                raise ModelError(
                    f"{file.path}: tensor '{name}' is {_dtype_name(info)} with shape {info.shape}; as rows of {cols} "
                    "it must be f32, f16 or bf16"
                )
            self._parts.append(_Part(key, (info,), file, F32, rows, cols, 0))
        return key

    def add_constant(self, key: str, values: NDArray[np.int32]) -> str:
        """Puts a small integer table on the device, once per key."""
        if key not in self._constants:
            buffer = self.device.allocate(values.size, I32, key)
            self.device.upload(buffer, 0, values)
            self._constants[key] = bound(key, buffer, 0, values.shape, I32)
        return key

    def _info(self, file: GGUFFile, name: str) -> TensorInfo:
        if name not in file.tensors:
            raise ModelError(f"{file.path}: tensor '{name}' is missing; the file is incomplete or of another layout")
        info = file.tensors[name]
        file.readable(name)  # refuses unknown quantisation ids, naming tensor and id
        try:
            dequantize(np.zeros(_block(info)[1], np.uint8), info.type, (-1,))
        except ModelError as error:
            raise ModelError(f"{file.path}: tensor '{name}': {error}") from error
        return info

    def _add(self, key: Matrix, file: GGUFFile, infos: Sequence[TensorInfo], rows: int, cols: int) -> None:
        packed = self.device.holds_packed_weights
        dtype = _dtype_name(infos[0]) if packed else F32
        if packed and dtype not in FORMATS:
            raise ModelError(
                f"{file.path}: tensor '{infos[0].name}' is {dtype}; kernels exist for {', '.join(FORMATS)}. "
                "Use --device numpy, or a file in one of these"
            )
        words_per_row = _Part(key, tuple(infos), file, dtype, 1, cols, 0).n_words()
        most = max(1, self._arena_words() // words_per_row)
        most = most // key.together * key.together or most
        for first in range(0, rows, most):
            self._parts.append(_Part(key, tuple(infos), file, dtype, min(most, rows - first), cols, first))

    def _arena_words(self) -> int:
        limits = self.device.info.limits
        return min(limits.max_storage_range, limits.max_buffer_bytes, ARENA_BYTES) // 4

    def load(self, progress: Progress | None = None) -> int:
        """Allocates the arenas and uploads everything; returns the bytes held on the device."""
        capacity = self._arena_words()
        sizes: list[int] = []
        # Small tensors first: together in one arena, as the ops that take several of them need it.
        for part in sorted(self._parts, key=lambda p: isinstance(p.key, Matrix)):
            need = -(-part.n_words() // ALIGN) * ALIGN
            home = next((i for i, used in enumerate(sizes) if used + need <= capacity), None)
            if home is None:
                home = len(sizes)
                sizes.append(0)
            part.arena, part.base = home, sizes[home]
            sizes[home] += need
        check_memory(self.device, 4 * sum(sizes), "the weights", "use a smaller quantisation or another device")
        arenas = [self.device.allocate(n, label=f"weight arena {i}") for i, n in enumerate(sizes)]
        done, total = 0, sum(4 * p.n_words() for p in self._parts)
        for part in self._parts:
            for n_bytes in _upload(self.device, arenas[part.arena], part):
                done += n_bytes
                if progress is not None:
                    progress(done, total)
            tensor = bound(
                part.infos[0].name, arenas[part.arena], part.base, (part.rows, part.cols), part.dtype, part.n_words()
            )
            self._tensors.setdefault(part.key, []).append(tensor)
        self._parts.clear()
        return 4 * sum(sizes)

    def parts(self, key: Matrix) -> tuple[Tensor, ...]:
        """The tensors of a matrix, in row order."""
        return tuple(self._tensors[key])

    def constant(self, key: str) -> Tensor:
        """The tensor of `add_constant`."""
        return self._constants[key]

    def tensor(self, key: str, *shape: int) -> Tensor:
        """A small tensor under the given shape."""
        return self._tensors[key][0].reshape(*shape)


def check_shape(file: GGUFFile, name: str, shape: tuple[int, ...]) -> None:
    """Refuses a tensor of another shape than the metadata ask for. One row may be written as a vector and the reverse.

    A missing tensor is the loader's to report.
    """
    if name not in file.tensors:
        return
    have = file.tensors[name].shape
    if have not in (shape, (1, *shape)) and (1, *have) != shape:
        raise ModelError(f"{file.path}: tensor '{name}' has shape {have}; the metadata ask for {shape}")


def _dtype_name(info: TensorInfo) -> str:
    return str(gguf.GGMLQuantizationType(info.type).name.lower())


def _block(info: TensorInfo) -> tuple[int, int]:
    """Elements and bytes of a block of a known quantisation."""
    elements, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.type)]
    return int(elements), int(n_bytes)


def _upload(device: Device, arena: Buffer, part: _Part) -> Iterator[int]:
    """Converts and uploads one part in chunks of rows; yields the device bytes of each chunk."""
    if part.dtype == F32:
        yield from _upload_float(device, arena, part)
        return
    fmt = weight_format(part.infos[0].type)
    starts = plane_starts(part.dtype, part.rows, part.cols)
    for first, raw in _raw_chunks(part, CHUNK_BYTES):
        n_bytes = 0
        for start, plane in zip(starts, fmt.pack(raw, part.cols), strict=True):
            device.upload(arena, part.base + start + first * plane.shape[1], plane)
            n_bytes += plane.nbytes
        yield n_bytes


def _upload_float(device: Device, arena: Buffer, part: _Part) -> Iterator[int]:
    for first, raw in _raw_chunks(part, FLOAT_CHUNK_BYTES):
        values = dequantize(raw, part.infos[0].type, (raw.shape[0], part.cols))
        device.upload(arena, part.base + first * part.cols, np.ascontiguousarray(values, np.float32))
        yield values.size * 4


def _raw_chunks(part: _Part, chunk_bytes: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(row within the part, raw block bytes [n, row_bytes]) covering the part's rows in order, about so many a time."""
    sources = [part.file.tensor_bytes(i.name) for i in part.infos]
    row_bytes = part.infos[0].nbytes // max(1, math.prod(part.infos[0].shape) // part.cols)
    matrices: list[Array] = [s.reshape(-1, row_bytes) for s in sources]
    turns = part.key if isinstance(part.key, Matrix) and part.key.interleave else None
    together = turns.together if turns else 1
    step = max(together, chunk_bytes // row_bytes // together * together)
    for first in range(0, part.rows, step):
        n = min(step, part.rows - first)
        at = part.first_row + first
        if turns:
            k = len(matrices)
            raw = np.empty((n, row_bytes), np.uint8)
            by_turn = raw.reshape(-1, k, turns.unit, row_bytes)
            for i, m in enumerate(matrices):
                by_turn[:, i] = m[at // k : at // k + n // k].reshape(-1, turns.unit, row_bytes)
        else:
            raw = _stacked(matrices, at, n)
        yield first, raw


def _stacked(matrices: Sequence[Array], at: int, n: int) -> NDArray[np.uint8]:
    """Rows [at, at + n) of the matrices put on top of each other."""
    pieces = []
    for m in matrices:
        lo, hi = max(at, 0), min(at + n, m.shape[0])
        if lo < hi:
            pieces.append(m[lo:hi])
        at -= m.shape[0]
    return np.ascontiguousarray(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
