"""Weight formats: the planes hold what gguf-py reads from the blocks, and lie as the format's comment says.

The scalar decoders below are written from the comments in quants.py and k_quants.py, word by word as a shader reads
them; they share no code with `unpack`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from vkbackend.errors import ModelError
from vkbackend.quants import ALL_FORMATS, dequantize, random_blocks, weight_format, weight_name

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
KINDS = sorted(ALL_FORMATS)
by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda k: ALL_FORMATS[k].name)

Row = Sequence[Sequence[int]]  # one row of each plane, as Python words
f32 = np.float32


def bits(words: Sequence[int], c: int, n: int) -> int:
    """Column c of a bits plane of n: the chunk of 16 columns as one number, then the place the comment tells."""
    chunk = sum(word << (32 * j) for j, word in enumerate(words)) >> (c // 16 * 16 * n)
    i, k = c % 16 // 4, c % 4
    at = {1: 4 * k + i, 2: 16 * (i // 2) + 4 * k + 2 * (i % 2), 4: 16 * i + 4 * k}[n]
    return chunk >> at & ((1 << n) - 1)


def byte(words: Sequence[int], i: int) -> int:
    return words[i // 4] >> (8 * (i % 4)) & 0xFF


def signed(b: int) -> int:
    return b - 256 if b > 127 else b


def half(words: Sequence[int], i: int) -> np.float32:
    value = struct.unpack("<e", struct.pack("<H", words[i // 2] >> (16 * (i % 2)) & 0xFFFF))[0]
    return f32(value)


def as_float(word: int) -> np.float32:
    return f32(struct.unpack("<f", struct.pack("<I", word))[0])


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12)


def k_scale(plane: Sequence[int], c: int, group: int, n_small: int = 16) -> tuple[np.float32, np.float32, list[int]]:
    """d, dmin and the bytes of a column's record."""
    at = c // 256 * (n_small // 4 + 1)
    record = plane[at : at + n_small // 4 + 1]
    return half(record, n_small // 2), half(record, n_small // 2 + 1), [byte(record, i) for i in range(n_small)]


def decode_mxfp4(p: Row, c: int) -> np.float32:
    e, q = byte(p[1], c // 32), bits(p[0], c, 4)
    return as_float(0x00200000 << e if e < 2 else (e - 1) << 23) * f32(-FP4[q - 8] if q > 7 else FP4[q])


def decode_with_mins(q: int, plane: Sequence[int], c: int) -> np.float32:
    d, dmin, small = k_scale(plane, c, 32)
    j = c % 256 // 32
    return (d * f32(small[2 * j])) * f32(q) - dmin * f32(small[2 * j + 1])


def decode_q2_k(p: Row, c: int) -> np.float32:
    d, dmin, small = k_scale(p[1], c, 16)
    b = small[c % 256 // 16]
    return (d * f32(b & 15)) * f32(bits(p[0], c, 2)) - dmin * f32(b >> 4)


def decode_signed_k(q: int, plane: Sequence[int], c: int) -> np.float32:
    d, _, small = k_scale(plane, c, 16)
    return (d * f32(signed(small[c % 256 // 16]))) * f32(q)


def decode_iq4_xs(p: Row, c: int) -> np.float32:
    d, _, small = k_scale(p[1], c, 32, 8)
    return (d * f32(signed(small[c % 256 // 32]))) * f32(IQ4[bits(p[0], c, 4)])


DECODERS: dict[str, Callable[[Row, int], np.float32]] = {
    "f32": lambda p, c: as_float(p[0][c]),
    "f16": lambda p, c: half(p[0], c),
    "bf16": lambda p, c: as_float((p[0][c // 2] >> (16 * (c % 2)) & 0xFFFF) << 16),
    "q8_0": lambda p, c: half(p[1], c // 32) * f32(signed(byte(p[0], c))),
    "q4_0": lambda p, c: half(p[1], c // 32) * f32(bits(p[0], c, 4) - 8),
    "iq4_nl": lambda p, c: half(p[1], c // 32) * f32(IQ4[bits(p[0], c, 4)]),
    "q4_1": lambda p, c: half(p[1], c // 32 * 2) * f32(bits(p[0], c, 4)) + half(p[1], c // 32 * 2 + 1),
    "q5_0": lambda p, c: half(p[2], c // 32) * f32(bits(p[0], c, 4) + 16 * bits(p[1], c, 1) - 16),
    "q5_1": lambda p, c: (
        half(p[2], c // 32 * 2) * f32(bits(p[0], c, 4) + 16 * bits(p[1], c, 1)) + half(p[2], c // 32 * 2 + 1)
    ),
    "mxfp4": decode_mxfp4,
    "q4_k": lambda p, c: decode_with_mins(bits(p[0], c, 4), p[1], c),
    "q5_k": lambda p, c: decode_with_mins(bits(p[0], c, 4) + 16 * bits(p[1], c, 1), p[2], c),
    "q6_k": lambda p, c: decode_signed_k(bits(p[0], c, 4) + 16 * bits(p[1], c, 2) - 32, p[2], c),
    "q2_k": decode_q2_k,
    "q3_k": lambda p, c: decode_signed_k(bits(p[0], c, 2) + 4 * bits(p[1], c, 1) - 4, p[2], c),
    "iq4_xs": decode_iq4_xs,
}


def any_bytes(rng: np.random.Generator, kind: int, rows: int, cols: int) -> Bytes:
    """Blocks of any bytes: factors of 0, subnormal, huge, infinite and NaN among them."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    return rng.integers(0, 256, (rows, cols // block * size), dtype=np.uint8)


def widths(kind: int) -> list[int]:
    block = max(ALL_FORMATS[kind].block, 8)
    return [block, 2 * block, 3 * block, 7 * block, 16 * block]


def assert_same_bits(got: Floats, want: Floats) -> None:
    """Equal bit by bit, except that any NaN equals any other."""
    assert got.dtype == want.dtype == np.float32 and got.shape == want.shape
    differs = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
    assert not differs.any(), f"{differs.sum()} of {differs.size} differ, first at {np.argwhere(differs)[0]}"


@by_kind
def test_unpacked_planes_are_bitwise_what_gguf_reads(kind: int, rng: np.random.Generator) -> None:
    fmt = ALL_FORMATS[kind]
    for cols in widths(kind):
        for raw in (any_bytes(rng, kind, 5, cols), random_blocks(rng, kind, 5, cols)):
            with np.errstate(invalid="ignore", over="ignore"):
                assert_same_bits(fmt.unpack(fmt.pack(raw, cols), cols), dequantize(raw, kind, (5, cols)))


@by_kind
@pytest.mark.parametrize("value", [0x00, 0x01, 0x7B, 0x7F, 0x80, 0xFB, 0xFF])
def test_blocks_of_one_byte_value(kind: int, value: int) -> None:
    """The extremes of every field at once: largest and smallest scales, quants and exponents."""
    fmt = ALL_FORMATS[kind]
    cols = 2 * max(fmt.block, 8)
    raw = np.full_like(any_bytes(np.random.default_rng(0), kind, 1, cols), value)
    with np.errstate(invalid="ignore", over="ignore"):
        assert_same_bits(fmt.unpack(fmt.pack(raw, cols), cols), dequantize(raw, kind, (1, cols)))


@by_kind
def test_words_lie_as_the_comments_say(kind: int, rng: np.random.Generator) -> None:
    fmt = ALL_FORMATS[kind]
    cols = 3 * max(fmt.block, 32)
    raw = random_blocks(rng, kind, 2, cols)
    want = dequantize(raw, kind, (2, cols))
    planes = fmt.pack(raw, cols)
    for row in range(2):
        words = [plane[row].tolist() for plane in planes]
        got = np.array([DECODERS[fmt.name](words, c) for c in range(cols)], np.float32)
        assert_same_bits(got, want[row])


@by_kind
def test_rows_are_padded_for_wide_loads(kind: int, rng: np.random.Generator) -> None:
    fmt = ALL_FORMATS[kind]
    for cols in widths(kind):
        planes = fmt.pack(any_bytes(rng, kind, 3, cols), cols)
        sizes = fmt.row_bytes(cols)
        assert tuple(plane.shape for plane in planes) == tuple((3, n // 4) for n in sizes)
        assert all(plane.dtype == np.uint32 and plane.flags.c_contiguous for plane in planes)
        n_quants = {1: 1, 2: 1, 3: 2}[len(planes)]
        assert all(n % 16 == 0 for n in sizes[:n_quants]) and all(n % 4 == 0 for n in sizes)


@by_kind
def test_many_rows_are_packed_like_single_ones(kind: int, rng: np.random.Generator) -> None:
    """More rows than are repacked at a time, from memory that is read-only and not aligned."""
    fmt = ALL_FORMATS[kind]
    cols = 4 * max(fmt.block, 32)
    raw = any_bytes(rng, kind, 1 + (1 << 19) // (cols // fmt.block * 17), cols)
    file = bytes(3) + raw.tobytes()
    mapped = np.frombuffer(file, np.uint8, raw.size, 3).reshape(raw.shape)
    whole = fmt.pack(mapped, cols)
    for row in [*rng.integers(0, raw.shape[0], 10).tolist(), 0, raw.shape[0] - 1]:
        for plane, single in zip(whole, fmt.pack(raw[row : row + 1], cols), strict=True):
            np.testing.assert_array_equal(plane[row], single[0])


@by_kind
def test_random_blocks_have_the_scale_asked_for(kind: int, rng: np.random.Generator) -> None:
    for scale in (0.02, 1.0):
        values = dequantize(random_blocks(rng, kind, 8, 1024, scale), kind, (8, 1024))
        assert 0.3 * scale < np.sqrt(np.mean(np.square(values))) < 3 * scale
        assert np.unique(values).size > 20


def test_a_q4_k_block_by_hand() -> None:
    """Sub-block 5 takes its scale's high bits from where sub-block 1 keeps its own."""
    block = np.zeros(144, np.uint8)
    block[:4] = np.array([0.5, 0.25], np.float16).view(np.uint8)
    block[4 + 1], block[4 + 5], block[4 + 9] = 0b10_000011, 0b01_000001, 0x21
    block[16 + 64 + 7] = 0xA3  # columns 64 * 2 + 7 and 64 * 2 + 32 + 7: sub-blocks 4 and 5
    fmt = ALL_FORMATS[int(gguf.GGMLQuantizationType.Q4_K)]
    values = fmt.unpack(fmt.pack(block[None], 256), 256)[0]
    assert values[32] == -0.25 * 1  # q 0, min 1
    assert values[5 * 32 + 7] == 0.5 * (1 + 32) * 10 - 0.25 * (2 + 16)
    assert values[5 * 32 + 8] == -0.25 * (2 + 16)
    assert values[4 * 32 + 7] == 0  # scale 0, min 0


def test_unknown_quantisations_are_named() -> None:
    raw = np.zeros(64, np.uint8)
    for call in (lambda: weight_format(77), lambda: dequantize(raw, 77, (1, 32))):
        with pytest.raises(ModelError, match=r"quantisation 77 \(unknown\)"):
            call()
    for kind in (gguf.GGMLQuantizationType.I32, gguf.GGMLQuantizationType.Q8_K):
        with pytest.raises(ModelError, match=rf"quantisation {int(kind)} \({kind.name.lower()}\).*q8_0"):
            dequantize(np.zeros(292, np.uint8), kind, (1, 1))
    assert weight_name(12) == "q4_k"


def test_quantisations_without_a_device_format_are_still_decoded(rng: np.random.Generator) -> None:
    kind = gguf.GGMLQuantizationType.IQ3_S
    raw = any_bytes(rng, kind, 2, 512)
    with np.errstate(invalid="ignore"):
        assert dequantize(raw, kind, (2, 512)).shape == (2, 512)
    with pytest.raises(ModelError, match="iq3_s"):
        weight_format(kind)
