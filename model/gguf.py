"""Reads GGUF files: header and tensor table from a memory map, nothing copied that is not asked for.

Versions 2 and 3, little-endian. Every length, count and offset is checked against the bytes left before
anything is allocated. Format: the GGUF specification of the ggml project; constants from gguf-py.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from vkbackend.errors import ModelError, quoted, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_STARTS = tuple(MAGIC + struct.pack("<I", version) for version in VERSIONS)
MAX_DIMS = 4
MAX_NESTING = 2  # arrays of arrays, no deeper

_SCALARS: dict[int, tuple[str, int]] = {  # struct code and bytes
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("?", 1),
    10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_QUANT_SIZES = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}  # elements and bytes of a block
_EMPTY: NDArray[np.uint8] = np.zeros(0, np.uint8)  # shared: a file can hold one empty array every 12 bytes
_EMPTY.flags.writeable = False


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Some rows of a tensor that has n_groups groups of group_rows rows.

    Each run (first, end) takes those rows of every group; one run follows the other.
    """

    n_groups: int
    group_rows: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: NumPy-order shape, quantisation id, place and size in bytes.

    part: which file of a split model it lies in. runs: the rows that it is of what lies at offset, where not all.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int  # -1: the quantisation is unknown
    part: int = 0
    runs: RowRuns | None = None


@dataclass(eq=False)
class GGUFFile:
    """An open file, or all files of a split model. `metadata` maps keys to Python values; arrays of numbers are
    NumPy arrays. `path` and `metadata` are those of the first file."""

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: dict[str, TensorInfo]
    alignment: int
    _map: mmap.mmap = field(repr=False)
    _later_maps: tuple[mmap.mmap, ...] = field(default=(), repr=False)  # of the other parts

    @property
    def n_parts(self) -> int:
        """How many files it is split over."""
        return 1 + len(self._later_maps)

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """The raw block bytes of a tensor, a read-only view of the file; a copy where it is some rows of another.

        Raises `ModelError` if it can not be read.
        """
        info = self.readable(name)
        data = (self._map, *self._later_maps)[info.part]
        if info.runs is None:
            return np.frombuffer(data, np.uint8, info.nbytes, info.offset)
        block, size = _QUANT_SIZES[info.type]
        shape = (info.runs.n_groups, info.runs.group_rows, info.shape[-1] // block * size)
        groups = np.frombuffer(data, np.uint8, math.prod(shape), info.offset).reshape(shape)
        return np.concatenate([groups[:, first:end].reshape(-1) for first, end in info.runs.runs])

    def readable(self, name: str) -> TensorInfo:
        """A tensor that is there, in a known quantisation. Raises `ModelError` where it is not."""
        if name not in self.tensors:
            raise ModelError(f"{self.path}: there is no tensor {quoted(name)}")
        info = self.tensors[name]
        if info.nbytes < 0:
            raise ModelError(
                f"{self.path}: tensor {quoted(name)} has quantisation id {info.type}, which is unknown here; "
                f"known ids are {', '.join(str(int(t)) for t in gguf.GGMLQuantizationType)}"
            )
        return info


class _Reader:
    """A cursor over the map that refuses to pass the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.size, self.at = data, path, len(data), 0
        self.what = "header"

    def fail(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {self.what} at byte {self.at}: {problem}")

    def need(self, n: int) -> None:
        if n > self.size - self.at:
            raise self.fail(f"needs {n} bytes, {self.size - self.at} are left; the file is truncated or damaged")

    def scalar(self, code: str, size: int) -> Any:
        self.need(size)
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += size
        return value

    def u32(self) -> int:
        return int(self.scalar("I", 4))

    def u64(self) -> int:
        return int(self.scalar("Q", 8))

    def count(self, smallest: int) -> int:
        """A number of things of at least `smallest` bytes each: more than fit in the file is refused."""
        n = self.u64()
        if n > (self.size - self.at) // smallest:
            raise self.fail(f"counts {n} items, at most {(self.size - self.at) // smallest} fit in the bytes left")
        return n

    def string(self) -> str:
        n = self.u64()
        self.need(n)
        raw = self.data[self.at : self.at + n]
        self.at += n
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(depth)
        if kind not in _SCALARS:
            raise self.fail(f"value type {kind} is unknown; allowed are 0..12")
        return self.scalar(*_SCALARS[kind])

    def array(self, depth: int) -> Any:
        if depth >= MAX_NESTING:
            raise self.fail(f"arrays are nested deeper than {MAX_NESTING}")
        kind = self.u32()
        if kind == _STRING:
            return self.strings(self.count(8))
        if kind == _ARRAY:
            return [self.array(depth + 1) for _ in range(self.count(12))]
        if kind not in _SCALARS:
            raise self.fail(f"array element type {kind} is unknown; allowed are 0..12")
        code, size = _SCALARS[kind]
        n = self.count(size)
        if n == 0 and depth:
            return _EMPTY
        if code == "?":  # any byte but 0 is true
            values = np.frombuffer(self.data, np.uint8, n, self.at) != 0
        else:
            values = np.frombuffer(self.data, np.dtype(code).newbyteorder("<"), n, self.at).copy()
        self.at += n * size
        return values

    def strings(self, n: int) -> list[str]:
        # The hot loop of large vocabularies: local names, one unpack and one slice a string.
        data, at, size, unpack = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        out = []
        for _ in range(n):
            if size - at < 8:
                self.at = at
                self.need(8)
            length = unpack(data, at)[0]
            at += 8
            if length > size - at:
                self.at = at
                self.need(length)
            out.append(data[at : at + length].decode("utf-8", "replace"))
            at += length
        self.at = at
        return out


def open_gguf(path: str | Path) -> GGUFFile:
    """Opens a GGUF file. Raises `ModelError` naming the file, the place and the numbers when it is not sound."""
    if not isinstance(path, str | PathLike):
        raise ModelError(f"the path of a model is {shown(path)}; a str or a path is needed")
    path = Path(path)
    if path.is_dir():
        raise ModelError(f"{path}: is a folder; give the .gguf file in it (or vkbackend convert, for a checkpoint)")
    if path.is_fifo():  # opening one waits for a writer
        raise ModelError(f"{path}: is a pipe; a model is read from a file")
    try:
        with path.open("rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: can not be opened as a model file: {error}") from error
    reader = _Reader(data, path)
    reader.need(24)
    if data[:4] != MAGIC:
        raise ModelError(f"{path}: starts with {data[:4]!r}, a GGUF file starts with {MAGIC!r}")
    reader.at = 4
    version = reader.u32()
    if version not in VERSIONS:
        swapped = int.from_bytes(struct.pack("<I", version), "big")
        hint = "; it is big-endian, convert it to little-endian" if swapped in VERSIONS else ""
        raise ModelError(f"{path}: GGUF version {version} is not supported, versions {VERSIONS} are{hint}")
    reader.what = "tensor count"
    n_tensors = reader.count(32)
    reader.what = "metadata count"
    n_kv = reader.count(13)
    metadata = _metadata(reader, n_kv)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise ModelError(f"{path}: general.alignment is {shown(alignment)}; a power of two up to {1 << 20} is needed")
    tensors = _tensor_table(reader, n_tensors, alignment)
    return GGUFFile(path, version, metadata, tensors, alignment, data)


def _metadata(reader: _Reader, n: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(n):
        reader.what = f"metadata key {i}"
        key = reader.string()
        reader.what = f"metadata {quoted(key)}"
        if key in metadata:
            raise reader.fail("the key appears twice")
        metadata[key] = reader.value(reader.u32())
    return metadata


def _tensor_table(reader: _Reader, n: int, alignment: int) -> dict[str, TensorInfo]:
    rows: list[tuple[int, str, tuple[int, ...], int, int]] = []
    for i in range(n):
        reader.what, at = f"tensor {i}", reader.at
        name = reader.string()
        reader.what = f"tensor {quoted(name)}"
        n_dims = reader.u32()
        if not 1 <= n_dims <= MAX_DIMS:
            raise reader.fail(f"has {n_dims} dimensions; allowed are 1..{MAX_DIMS}")
        shape = tuple(reversed([reader.u64() for _ in range(n_dims)]))
        if any(d == 0 for d in shape) or math.prod(shape) >= 1 << 62:
            raise reader.fail(f"has shape {shape}; every dimension must be at least 1 and the size below 2^62")
        rows.append((at, name, shape, reader.u32(), reader.u64()))
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for at, name, shape, kind, offset in rows:
        reader.what, reader.at = f"tensor {quoted(name)}", at
        if name in tensors:
            raise reader.fail("the name appears twice")
        nbytes = _nbytes(reader, shape, kind)
        if offset % alignment:
            raise reader.fail(f"data offset {offset} is not a multiple of the alignment {alignment}")
        if start + offset + max(nbytes, 0) > reader.size:
            raise reader.fail(
                f"data ends at byte {start + offset + max(nbytes, 0)}, the file has {reader.size}; it is truncated"
            )
        tensors[name] = TensorInfo(name, shape, kind, start + offset, nbytes)
    _check_apart(reader, tensors)
    _check_end(reader, max((t.offset + max(t.nbytes, 0) for t in tensors.values()), default=start), alignment)
    return tensors


def _check_end(reader: _Reader, end: int, alignment: int) -> None:
    """Refuses a file that goes on with another one: parts of a split model are not joined by writing them in a row."""
    reader.what, reader.at = "end of data", -(-end // alignment) * alignment
    for at in (end, reader.at):
        if reader.data[at : at + 8] in _STARTS:
            raise reader.fail(
                "another GGUF file follows; parts of a split model stay files of their own (or are joined by a tool "
                "for GGUF files): cut them apart here"
            )


def _check_apart(reader: _Reader, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuses tensors that share bytes: a small file could otherwise ask for any amount of device memory."""
    placed = sorted((t for t in tensors.values() if t.nbytes > 0), key=lambda t: t.offset)
    for one, two in zip(placed, placed[1:], strict=False):
        if two.offset < one.offset + one.nbytes:
            reader.what, reader.at = f"tensor {quoted(two.name)}", two.offset
            raise reader.fail(f"its data begins inside that of {quoted(one.name)}; the file is damaged")


def _nbytes(reader: _Reader, shape: tuple[int, ...], kind: int) -> int:
    if kind not in _QUANT_SIZES:
        return -1
    block, size = _QUANT_SIZES[kind]
    if shape[-1] % block:
        raise reader.fail(f"has rows of {shape[-1]} elements; its quantisation needs a multiple of {block}")
    return int(math.prod(shape) // block * size)
