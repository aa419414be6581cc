"""Weight matrices as words on a device: the planes of `quants.py`, one after another, and where they start."""

from __future__ import annotations

import zlib

import gguf
import numpy as np
from numpy.typing import NDArray

from vkbackend.quants import WeightFormat, random_blocks, weight_format

Words = NDArray[np.uint32]


def format_named(name: str) -> WeightFormat:
    """The format of a tensor dtype such as "q8_0" (GGUF's own type names in lower case)."""
    return weight_format(gguf.GGMLQuantizationType[name.upper()])


def plane_words(name: str, rows: int, cols: int) -> tuple[int, ...]:
    """Size in words of each plane of a matrix [rows, cols]; planes follow each other without gaps."""
    return tuple(rows * n // 4 for n in format_named(name).row_bytes(cols))


def plane_starts(name: str, rows: int, cols: int) -> tuple[int, ...]:
    """First word of each plane, relative to the matrix."""
    starts, at = [], 0
    for n in plane_words(name, rows, cols):
        starts.append(at)
        at += n
    return tuple(starts)


def pack_matrix(data: NDArray[np.float32], name: str) -> tuple[Words, NDArray[np.float32]]:
    """Rounds a float32 matrix to a GGUF type; returns its packed words and the values they stand for.

    For test cases. Types that gguf-py can not make from floats get random blocks of the matrix's size and spread.
    """
    rows, cols = data.shape
    kind = gguf.GGMLQuantizationType[name.upper()]
    if name == "f32":
        return np.ascontiguousarray(data).reshape(-1).view(np.uint32), data
    try:
        raw = gguf.quants.quantize(data, kind).view(np.uint8).reshape(rows, -1)
    except NotImplementedError:
        rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(data).tobytes()))
        raw = random_blocks(rng, int(kind), rows, cols, float(data.std()))
    values = np.asarray(gguf.quants.dequantize(raw, kind), np.float32).reshape(rows, cols)
    planes = weight_format(kind).pack(raw, cols)
    return np.concatenate([np.ascontiguousarray(p).reshape(-1) for p in planes]), values
