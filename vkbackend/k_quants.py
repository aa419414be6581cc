"""Weight formats with blocks of 256 columns: the K-quants and iq4_xs. What the comments say: see `quants.py`.

A K-scales plane holds one record for each 256 columns: 16 bytes of small numbers and a word with f16 d in its low half
and, where the format has offsets, f16 dmin in its high half (else 0); 5 words in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkbackend.planes import (
    Bytes,
    Floats,
    Words,
    as_plane,
    bits_plane,
    bits_row_bytes,
    blocks_of,
    columns_of,
    five_bits,
    nibbles_plane,
    packed,
    pairs_plane,
    scaled,
)

IQ4_VALUES: NDArray[np.int8] = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


def _spread_bytes(words: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Byte i of each word moved to byte 2 i of a double word."""
    x = words.astype(np.uint64)
    x = (x | (x << np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return (x | (x << np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)


def _k_scales(small: Bytes, halves: Bytes) -> Words:
    """K-scales plane: records of small numbers [rows, n_blocks, 8 or 16] and 1 or 2 halves as bytes."""
    rows, n_blocks, n_small = small.shape
    out = np.zeros((rows, n_blocks, n_small + 4), np.uint8)
    out[:, :, :n_small] = small
    out[:, :, n_small : n_small + halves.shape[2]] = halves
    return as_plane(out, 4)


def _k_records(plane: Words, n_small: int) -> tuple[Bytes, Floats, Floats]:
    """Small numbers [rows, n_blocks, n_small], d and dmin [rows, n_blocks, 1] of a K-scales plane."""
    raw = plane.view(np.uint8).reshape(plane.shape[0], -1, n_small + 4)
    halves = np.ascontiguousarray(raw[:, :, n_small:]).view(np.float16).astype(np.float32)
    return raw[:, :, :n_small], halves[:, :, :1], halves[:, :, 1:]


def _minus_32(words: NDArray[np.integer[Any]]) -> Bytes:
    return words.view(np.uint8) - np.uint8(32)  # int8 in two's complement


def _per_group(d: Floats, small: NDArray[np.generic]) -> Floats:
    """d times each small number, [rows, n_blocks * n_small]."""
    return (d * small.astype(np.float32)).reshape(small.shape[0], -1)


# ---- q4_k: 144-byte blocks of 256: f16 d, f16 dmin, 8 scales and 8 mins of 6 bits in 12 bytes, nibbles;
# value = ((d * s) * q) - (dmin * m).
# Plane 0: bits plane of 4, q. Plane 1: K-scales with s and m in turns: columns 32 j .. 32 j + 31 of the record's block
# have s in byte 2 j and m in byte 2 j + 1, which is to say: half j % 2 of word j / 2 holds s + 256 m.
# ---- q5_k: 176-byte blocks of 256: the same with 32 bytes of high bits; value = ((d * s) * (q + 16 * h)) - (dmin * m).
# Plane 0: bits plane of 4, q. Plane 1: bits plane of 1, h. Plane 2: K-scales as in q4_k.


def _scales_and_mins(blocks: Bytes) -> Words:
    words = np.ascontiguousarray(blocks[:, :, 4:16]).view(np.uint32)  # [rows, n_blocks, 3]
    low, mid, high = words[:, :, 0], words[:, :, 1], words[:, :, 2]
    out = np.empty((*low.shape, 2), np.uint64)
    for i, (scales, mins) in enumerate((
        (low & 0x3F3F3F3F, mid & 0x3F3F3F3F),
        ((high & 0x0F0F0F0F) | ((low >> 2) & 0x30303030), ((high >> 4) & 0x0F0F0F0F) | ((mid >> 2) & 0x30303030)),
    )):  # fmt: skip
        out[:, :, i] = _spread_bytes(scales) | (_spread_bytes(mins) << np.uint64(8))
    return _k_scales(out.view(np.uint8), blocks[:, :, :4])


def _with_scales_and_mins(q: Bytes, plane: Words) -> Floats:
    small, d, dmin = _k_records(plane, 16)
    return scaled(q, _per_group(d, small[:, :, 0::2]), _per_group(dmin, small[:, :, 1::2]))


def _pack_q4_k(raw: Bytes, cols: int) -> list[Words]:
    blocks = blocks_of(raw, cols, 256, 144)
    return [nibbles_plane(blocks[:, :, 16:], 32), _scales_and_mins(blocks)]


def _pack_q5_k(raw: Bytes, cols: int) -> list[Words]:
    blocks = blocks_of(raw, cols, 256, 176)
    return [nibbles_plane(blocks[:, :, 48:], 32), bits_plane(blocks[:, :, 16:48]), _scales_and_mins(blocks)]


def _k_bytes(cols: int) -> int:
    return cols // 256 * 20


Q4_K = packed(
    "q4_k", 256, lambda cols: (bits_row_bytes(cols, 4), _k_bytes(cols)), _pack_q4_k,
    lambda planes, cols: _with_scales_and_mins(columns_of(planes[0], cols, 4), planes[1]),
)  # fmt: skip
Q5_K = packed(
    "q5_k", 256, lambda cols: (bits_row_bytes(cols, 4), bits_row_bytes(cols, 1), _k_bytes(cols)), _pack_q5_k,
    lambda planes, cols: _with_scales_and_mins(five_bits(planes, cols), planes[2]),
)  # fmt: skip


# ---- q6_k: 210-byte blocks of 256: low nibbles, high pairs of bits, 16 int8 scales, f16 d;
# value = (d * s) * ((q + 16 * h) - 32).
# Plane 0: bits plane of 4, q. Plane 1: bits plane of 2, h. Plane 2: K-scales, int8 s of columns 16 j .. in byte j.


def _pack_q6_k(raw: Bytes, cols: int) -> list[Words]:
    blocks = blocks_of(raw, cols, 256, 210)
    scales = _k_scales(blocks[:, :, 192:208], blocks[:, :, 208:])
    return [nibbles_plane(blocks[:, :, :128], 64), pairs_plane(blocks[:, :, 128:192]), scales]


def _unpack_q6_k(planes: Sequence[Words], cols: int) -> Floats:
    q = columns_of(planes[0], cols, 4) | (columns_of(planes[1], cols, 2) << np.uint8(4))
    small, d, _ = _k_records(planes[2], 16)
    return scaled(q.view(np.int8) - np.int8(32), _per_group(d, small.view(np.int8)))


Q6_K = packed(
    "q6_k",
    256,
    lambda cols: (bits_row_bytes(cols, 4), bits_row_bytes(cols, 2), _k_bytes(cols)),
    _pack_q6_k,
    _unpack_q6_k,
)


# ---- q2_k: 84-byte blocks of 256: 16 bytes of scale (low nibble) and min (high nibble), pairs of bits,
# f16 d, f16 dmin; value = ((d * s) * q) - (dmin * m).
# Plane 0: bits plane of 2, q. Plane 1: K-scales, byte j of columns 16 j .. 16 j + 15 is s + 16 m.


def _pack_q2_k(raw: Bytes, cols: int) -> list[Words]:
    blocks = blocks_of(raw, cols, 256, 84)
    return [pairs_plane(blocks[:, :, 16:80]), _k_scales(blocks[:, :, :16], blocks[:, :, 80:])]


def _unpack_q2_k(planes: Sequence[Words], cols: int) -> Floats:
    small, d, dmin = _k_records(planes[1], 16)
    return scaled(columns_of(planes[0], cols, 2), _per_group(d, small & 0x0F), _per_group(dmin, small >> 4))


Q2_K = packed("q2_k", 256, lambda cols: (bits_row_bytes(cols, 2), _k_bytes(cols)), _pack_q2_k, _unpack_q2_k)


# ---- q3_k: 110-byte blocks of 256: 32 bytes of high bits, low pairs of bits, 16 scales of 6 bits in 12 bytes, f16 d;
# value = (d * s) * ((q + 4 * h) - 4), s from -32 to 31.
# Plane 0: bits plane of 2, q. Plane 1: bits plane of 1, h. Plane 2: K-scales, int8 s of columns 16 j .. in byte j.


def _pack_q3_k(raw: Bytes, cols: int) -> list[Words]:
    blocks = blocks_of(raw, cols, 256, 110)
    words = np.ascontiguousarray(blocks[:, :, 96:108]).view(np.uint32)  # [rows, n_blocks, 3]
    small = np.empty((*blocks.shape[:2], 4), np.uint32)
    for i in range(4):
        low, high = words[:, :, i % 2] >> (4 * (i // 2)), words[:, :, 2] >> (2 * i)
        small[:, :, i] = (low & 0x0F0F0F0F) | ((high & 0x03030303) << 4)
    return [
        pairs_plane(blocks[:, :, 32:96]),
        bits_plane(blocks[:, :, :32]),
        _k_scales(_minus_32(small), blocks[:, :, 108:]),
    ]


def _unpack_q3_k(planes: Sequence[Words], cols: int) -> Floats:
    q = columns_of(planes[0], cols, 2) | (columns_of(planes[1], cols, 1) << np.uint8(2))
    small, d, _ = _k_records(planes[2], 16)
    return scaled(q.view(np.int8) - np.int8(4), _per_group(d, small.view(np.int8)))


Q3_K = packed(
    "q3_k",
    256,
    lambda cols: (bits_row_bytes(cols, 2), bits_row_bytes(cols, 1), _k_bytes(cols)),
    _pack_q3_k,
    _unpack_q3_k,
)


# ---- iq4_xs: 136-byte blocks of 256: f16 d, 8 scales of 6 bits (u16 of high pairs, 4 bytes of low nibbles), nibbles;
# value = (d * s) * IQ4_VALUES[q], s from -32 to 31.
# Plane 0: bits plane of 4, q. Plane 1: records of 3 words for each 256 columns: int8 s of columns 32 j .. in byte j of
# the first two words, f16 d in the low half of the third.


def _pack_iq4_xs(raw: Bytes, cols: int) -> list[Words]:
    blocks = blocks_of(raw, cols, 256, 136)
    words = np.ascontiguousarray(blocks[:, :, :8]).view(np.uint32)  # [rows, n_blocks, 2]
    pairs = (words[:, :, 0, None] >> np.array([16, 24], np.uint32)) & 0xFF
    high = (pairs | (pairs << 6) | (pairs << 12) | (pairs << 18)) & 0x03030303  # of four columns' scales each
    low = _spread_bytes(words[:, :, 1])
    low = (low | (low << np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    small = low.view(np.uint32).reshape(high.shape) | (high << 4)
    return [nibbles_plane(blocks[:, :, 8:], 16), _k_scales(_minus_32(small), blocks[:, :, :2])]


def _unpack_iq4_xs(planes: Sequence[Words], cols: int) -> Floats:
    small, d, _ = _k_records(planes[1], 8)
    return scaled(IQ4_VALUES[columns_of(planes[0], cols, 4)], _per_group(d, small.view(np.int8)))


IQ4_XS = packed("iq4_xs", 256, lambda cols: (bits_row_bytes(cols, 4), cols // 256 * 12), _pack_iq4_xs, _unpack_iq4_xs)
