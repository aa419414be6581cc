"""Planes: how rows of packed weights lie in words on a device, and the parts that packed formats share.

Rules of every plane: rows follow each other; the columns of a row are in order; numbers are little-endian, so within
a word the earlier column has the lower bits. Planes of quants have rows padded with zeros to 16 bytes, planes of
scales to 4.

A bits plane of b bits a column (b = 1, 2, 4) has 16 columns (a chunk) in 2 b bytes, read as one number. Column
4 i + k of a chunk is at bit

    4 bits: 16 i + 4 k          2 bits: 16 (i / 2) + 4 k + 2 (i % 2)          1 bit: 4 k + i

so that for every i the columns k = 0..3 are 4 bits apart, whatever b is: one shift and the same mask bring fields of
planes together (shaders/include/weights.glsl).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class WeightFormat:
    """How one quantisation lies on the device.

    `block`: columns per block. `row_bytes(cols)`: bytes of one row in each plane. `pack(raw, cols)`: file bytes
    [rows, file_row_bytes] to planes, uint32 [rows, row_words]. `unpack(planes, cols)`: float32 [rows, cols], bitwise
    what gguf-py's dequantisation gives.
    """

    name: str
    block: int
    row_bytes: Callable[[int], tuple[int, ...]]
    pack: Callable[[Bytes, int], list[Words]]
    unpack: Callable[[Sequence[Words], int], Floats]


def pad(n_bytes: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-n_bytes // to) * to


def as_plane(rows: NDArray[np.generic], to: int) -> Words:
    """Rows of any element type as words, each row zero-padded to a multiple of `to` bytes."""
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(rows.shape[0], -1)
    width = pad(raw.shape[1], to)
    if width != raw.shape[1]:
        raw = np.pad(raw, ((0, 0), (0, width - raw.shape[1])))
    return raw.view(np.uint32)


# ---- parts that formats share

_SLICE_BYTES = 256 << 10  # of file bytes repacked at a time: temporaries stay in the cache


def packed(
    name: str,
    block: int,
    row_bytes: Callable[[int], tuple[int, ...]],
    pack: Callable[[Bytes, int], list[Words]],
    unpack: Callable[[Sequence[Words], int], Floats],
) -> WeightFormat:
    """A format of blocks, whose rows are repacked a few at a time."""

    def pack_slices(raw: Bytes, cols: int) -> list[Words]:
        step = max(1, _SLICE_BYTES // raw.shape[1])
        planes = [np.empty((raw.shape[0], n // 4), np.uint32) for n in row_bytes(cols)]
        for first in range(0, raw.shape[0], step):
            rows = slice(first, first + step)
            for plane, part in zip(planes, pack(raw[rows], cols), strict=True):
                plane[rows] = part
        return planes

    return WeightFormat(name, block, row_bytes, pack_slices, unpack)


def blocks_of(raw: Bytes, cols: int, block: int, size: int) -> Bytes:
    return raw.reshape(raw.shape[0], cols // block, size)  # [rows, n_blocks, bytes of a block]


def nibbles_plane(qs: Bytes, group: int) -> Words:
    """Bits plane of 4: of each `group` bytes the low nibbles are the first columns, the high ones the next."""
    pairs = np.ascontiguousarray(qs).view(np.uint16)
    high = pairs >> 4
    firsts, nexts = (pairs & 0x0F) | (high & 0xF0), (high & 0x0F) | ((high >> 4) & 0xF0)
    return _gather([firsts, nexts], group // 2, qs.shape[0])


def pairs_plane(qs: Bytes) -> Words:
    """Bits plane of 2: of each 32 bytes the lowest two bits are the first 32 columns, and so on."""
    fours = np.ascontiguousarray(qs).view(np.uint32)
    parts = []
    for i in range(4):
        x = (fours >> (2 * i)) & 0x03030303
        parts.append(x | (x >> 6) | (x >> 12) | (x >> 18))
    plane = _gather(parts, 8, qs.shape[0])  # bit 16 (i / 2) + 8 (i % 2) + 2 k
    _swap(plane, 0x00F000F0, 4)
    _swap(plane, 0x0C0C0C0C, 2)
    return plane


def bits_plane(qh: Bytes) -> Words:
    """Bits plane of 1: of each 32 bytes the lowest bits are the first 32 columns, and so on."""
    eights = np.ascontiguousarray(qh).view(np.uint64)
    parts = []
    for i in range(8):
        x = (eights >> np.uint64(i)) & np.uint64(0x0101010101010101)
        # The product brings bit 0 of byte k to bit 56 + k; nothing else reaches the top byte.
        parts.append((x * np.uint64(0x0102040810204080)) >> np.uint64(56))
    return transposed_bits(_gather(parts, 4, qh.shape[0]))


def transposed_bits(plane: Words) -> Words:
    """Bits plane of 1 from one with bit c of each half word for column c (4 x 4 bits transposed), in place."""
    _swap(plane, 0x00CC00CC, 6)
    _swap(plane, 0x0A0A0A0A, 3)
    return plane


def _swap(words: Words, mask: int, distance: int) -> None:
    """Exchanges the bits of `mask` with those `distance` higher, in place."""
    by = np.uint32(distance)
    differ: Words = ((words >> by) ^ words) & np.uint32(mask)
    words ^= differ
    words ^= differ << by


def _gather(parts: Sequence[NDArray[np.integer[Any]]], width: int, rows: int) -> Words:
    """The lowest bytes of the parts' elements, `width` bytes of each part in turn, as rows of a plane."""
    item = np.dtype(np.uint64 if width % 8 == 0 else np.uint32)  # whole words: far faster than moving bytes
    out = np.empty((rows, parts[0].size // (rows * width), len(parts), width // item.itemsize), item)
    for i, part in enumerate(parts):
        out[:, :, i] = part.astype(np.uint8).view(item).reshape(rows, -1, width // item.itemsize)
    return as_plane(out, 16)


def columns_of(plane: Words, cols: int, bits: int) -> Bytes:
    """The columns of a bits plane, [rows, cols]."""
    chunk = np.dtype({1: np.uint16, 2: np.uint32, 4: np.uint64}[bits])
    i, k = np.divmod(np.arange(16), 4)
    at = {1: 4 * k + i, 2: 16 * (i // 2) + 4 * k + 2 * (i % 2), 4: 16 * i + 4 * k}[bits].astype(chunk)
    raw = plane.view(chunk)[:, : cols // 16, None]
    fields: Bytes = ((raw >> at) & chunk.type((1 << bits) - 1)).astype(np.uint8)
    return fields.reshape(plane.shape[0], cols)


def scaled(q: NDArray[np.generic], factor: Floats, offset: Floats | None = None) -> Floats:
    """q * factor - offset, with one factor (and offset) for as many columns as q has per factor."""
    x = q.astype(np.float32).reshape(*factor.shape, -1) * factor[..., None]
    if offset is not None:
        x = x - offset[..., None]
    return x.reshape(q.shape)


def bits_row_bytes(cols: int, bits: int) -> int:
    return pad(cols * bits // 8, 16)


def five_bits(planes: Sequence[Words], cols: int) -> Bytes:
    """Columns of a bits plane of 4 and one of 1 above it."""
    return columns_of(planes[0], cols, 4) | (columns_of(planes[1], cols, 1) << np.uint8(4))
