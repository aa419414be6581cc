"""Reads safetensors checkpoints: the table of tensors, and rows of them as float32.

Nothing is held but the table: every read opens the file, so that memory does not grow with the checkpoint. Format: a
64-bit header length, a JSON header naming dtype, shape and byte range of every tensor, the data.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkbackend.errors import ModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER = 100 << 20  # the format's own limit
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_READ_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: where it lies."""

    path: Path
    dtype: str  # as in the header: "F32", "BF16", ...
    shape: tuple[int, ...]
    offset: int

    @property
    def n_cols(self) -> int:
        """Columns when seen as a matrix: the last dimension; 1 for a vector, whose rows are its values."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape) // self.n_cols


def open_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder with one safetensors file or several, by name.

    Raises `ModelError` naming the file for a missing shard, an unsound header, or data that ends early.
    """
    tensors: dict[str, StoredTensor] = {}
    for path, names in _shards(folder).items():
        found = _read_header(path)
        if missing := sorted(names - set(found)):
            raise ModelError(f"{path}: {missing[0]!r} is not in it, though {INDEX} says so ({len(missing)} in all)")
        if twice := sorted(set(found) & set(tensors)):
            raise ModelError(f"{path}: {twice[0]!r} is also in {tensors[twice[0]].path.name}")
        tensors.update(found)
    return tensors


def read_rows(tensor: StoredTensor, name: str, start: int, stop: int) -> NDArray[np.float32]:
    """Rows [start, stop) of a tensor seen as a matrix: float32 [stop - start, n_cols].

    Raises `ModelError` for an element type that is not f32, f16 or bf16.
    """
    if tensor.dtype not in _SIZES:
        raise ModelError(
            f"{tensor.path}: '{name}' has elements of type {tensor.dtype}; {', '.join(_SIZES)} can be converted: take "
            "the model's unquantised checkpoint"
        )
    count = (stop - start) * tensor.n_cols
    offset = tensor.offset + start * tensor.n_cols * _SIZES[tensor.dtype]
    raw = np.fromfile(tensor.path, _READ_AS[tensor.dtype], count, offset=offset)
    if raw.size != count:
        raise ModelError(f"{tensor.path}: '{name}': {count} elements are needed at byte {offset}, {raw.size} are there")
    if tensor.dtype == "BF16":  # the upper half of a float32
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32, copy=False).reshape(stop - start, tensor.n_cols)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `ModelError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file; a Hugging Face checkpoint has one") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: can not be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}; a JSON object is needed")
    return value


def _shards(folder: Path) -> dict[Path, set[str]]:
    """The files of a checkpoint, each with the tensors that the index promises in it."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; the folder of a Hugging Face checkpoint is needed")
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise ModelError(f"{folder}: has neither {SINGLE} nor {INDEX}; only safetensors can be converted")
        return {folder / SINGLE: set()}
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
        raise ModelError(f"{folder / INDEX}: 'weight_map' must map tensor names to file names")
    shards: dict[Path, set[str]] = {}
    for name, file in places.items():
        if Path(file).name != file:
            raise ModelError(f"{folder / INDEX}: {name!r} is placed in {file!r}; a file beside the index is needed")
        shards.setdefault(folder / file, set()).add(name)
    if missing := sorted(path.name for path in shards if not path.is_file()):
        raise ModelError(f"{folder}: {len(missing)} of {len(shards)} files are missing: {', '.join(missing[:5])}")
    return shards


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ModelError(
                f"{path}: the header is to have {length} bytes, at most {max(min(size - 8, MAX_HEADER), 0)} are "
                "possible; it is truncated or no safetensors file"
            )
        raw = f.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise ModelError(f"{path}: the header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is no JSON object")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        sound = all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, begin, end)) and begin <= end
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ModelError(f"{path}: the header's entry of {name!r} is not sound: {str(entry)[:200]}")
    if start + end > size:
        raise ModelError(f"{path}: '{name}' ends at byte {start + end}, the file has {size}; it is truncated")
    if dtype in _SIZES and end - begin != math.prod(shape) * _SIZES[dtype]:
        raise ModelError(
            f"{path}: '{name}' has {end - begin} bytes; {dtype} {list(shape)} has {math.prod(shape) * _SIZES[dtype]}"
        )
    return StoredTensor(path, dtype, shape, start + begin)


def layer_count(names: Iterable[str], prefix: str) -> int:
    """One more than the highest number N in names PREFIX.N.*; 0 when there is none."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    return max((int(m.group(1)) + 1 for n in names if (m := pattern.match(n))), default=0)
