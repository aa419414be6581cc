"""Models split over several GGUF files, named NAME-00001-of-00003.gguf and so on, opened as one.

Each part is a GGUF file with some of the tensors and the keys `split.no` (from 0), `split.count` and
`split.tensors.count` (of all parts together); the first has the model's metadata. Format: ggml's gguf-split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vkbackend.errors import ModelError, quoted, shown
from vkbackend.model.gguf import GGUFFile, TensorInfo, open_gguf

MAX_PARTS = 99_999  # what five digits hold
_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>\.gguf)", re.IGNORECASE | re.DOTALL)


def open_model(path: str | Path) -> GGUFFile:
    """Opens a model file; given any part of a split model, all of it.

    Raises `ModelError` for an unsound file, and for parts that are missing, in each other's place or of another model,
    naming which.
    """
    file = open_gguf(path)
    n_parts = _number(file, "split.count", 1)
    if n_parts <= 1:  # gguf-split leaves 0 in a file that it has merged
        return file
    number = _number(file, "split.no", 0) + 1
    paths = _part_paths(file.path, number, n_parts)
    if missing := [p.name for p in paths if not p.is_file()]:
        shown_names = missing if len(missing) <= 3 else [*missing[:3], f"{len(missing) - 3} more"]
        raise ModelError(
            f"{file.path}: is part {number} of {n_parts} of a model; missing beside it: {', '.join(shown_names)}"
        )
    parts = [file if p == file.path else open_gguf(p) for p in paths]
    for i, part in enumerate(parts, start=1):
        _check_part(part, i, n_parts, parts[0])
    return _joined(parts)


def _part_paths(path: Path, number: int, n_parts: int) -> list[Path]:
    """All parts of a model, one of which has been opened and says its number (from 1)."""
    match = _NAME.fullmatch(path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (number, n_parts):
        wanted = f"-{number:05d}-of-{n_parts:05d}.gguf"
        raise ModelError(
            f"{path}: is part {number} of {n_parts} of a model (split.no counts from 0), so its name must end in "
            f"{wanted}; rename it, or put the right part in its place"
        )
    return [path.with_name(f"{match['stem']}-{i + 1:05d}-of-{n_parts:05d}{match['end']}") for i in range(n_parts)]


def _check_part(part: GGUFFile, i: int, n_parts: int, first: GGUFFile) -> None:
    """Refuses what is not part i (from 1) of the model whose first part is `first`."""
    number, count = _number(part, "split.no", 0) + 1, _number(part, "split.count", 1)
    if (number, count) != (i, n_parts):
        raise ModelError(
            f"{part.path}: holds part {number} of {count} (split.no counts from 0); its name says part {i} of "
            f"{n_parts}: parts are exchanged or of different models"
        )
    for key, value in part.metadata.items():
        same = key not in first.metadata or np.array_equal(value, first.metadata[key])
        if not same and key != "split.no":
            raise ModelError(
                f"{part.path}: {quoted(key)} is {shown(value)}, in {first.path.name} it is "
                f"{shown(first.metadata[key])}: parts of different models are mixed"
            )


def _joined(parts: Sequence[GGUFFile]) -> GGUFFile:
    first = parts[0]
    tensors: dict[str, TensorInfo] = {}
    for i, part in enumerate(parts):
        for name, info in part.tensors.items():
            if name in tensors:
                raise ModelError(
                    f"{part.path}: tensor {quoted(name)} is in {parts[tensors[name].part].path.name} too: parts of "
                    "different models are mixed"
                )
            tensors[name] = replace(info, part=i)
    wanted = _number(first, "split.tensors.count", len(tensors))
    if len(tensors) != wanted:
        raise ModelError(
            f"{first.path}: the {len(parts)} parts hold {len(tensors)} tensors together, split.tensors.count is "
            f"{wanted}: parts of different models are mixed"
        )
    return replace(first, tensors=tensors, _later_maps=tuple(p._map for p in parts[1:]))


def _number(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    most = 1 << 31 if key == "split.tensors.count" else MAX_PARTS
    if type(value) is not int or not 0 <= value <= most:
        raise ModelError(f"{file.path}: {key} is {shown(value)}; a whole number from 0 to {most} is needed")
    return value
