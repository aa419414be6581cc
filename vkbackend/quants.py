"""Weight formats on the device: GGUF blocks repacked into word-aligned planes, and their decoding.

GGUF interleaves scales and quants in blocks of odd sizes (34 bytes for q8_0), and orders a block's low bits so that
a CPU's byte shuffles like them. Kernels want wide loads of consecutive columns, so at upload each row of blocks is
split into at most three planes (rules: `planes.py`). `unpack` is the reference of the GLSL decoders in
shaders/include/weights.glsl. Formats with blocks of 256 columns are in `k_quants.py`.

Each format's comment gives its planes and the value of column c, in float32, bitwise gguf-py's result. Every product
is exact (an f16 times small integers has at most 24 significant bits), so only a final addition rounds: the order of
the factors and a compiler's choice of fma make no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gguf
import numpy as np
from numpy.typing import NDArray

from vkbackend.errors import ModelError
from vkbackend.k_quants import IQ4_VALUES, IQ4_XS, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from vkbackend.planes import (
    Bytes,
    Floats,
    WeightFormat,
    Words,
    as_plane,
    bits_row_bytes,
    blocks_of,
    columns_of,
    five_bits,
    nibbles_plane,
    packed,
    pad,
    scaled,
    transposed_bits,
)

__all__ = ["ALL_FORMATS", "WeightFormat", "as_plane", "dequantize", "pad", "random_blocks", "weight_format"]


def _halves(plane: Words, n: int) -> Floats:
    return plane.view(np.float16)[:, :n].astype(np.float32)


# ---- f32, f16, bf16: elements as they are, in one plane.


def _plain(name: str, item: int, decode: Callable[[Bytes], Floats]) -> WeightFormat:
    def unpack(planes: Sequence[Words], cols: int) -> Floats:
        return decode(np.ascontiguousarray(planes[0].view(np.uint8)[:, : cols * item]))

    return WeightFormat(name, 1, lambda cols: (pad(cols * item, 16),), lambda raw, cols: [as_plane(raw, 16)], unpack)


def _decode_bf16(raw: Bytes) -> Floats:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


F32 = _plain("f32", 4, lambda raw: raw.view(np.float32))
F16 = _plain("f16", 2, lambda raw: raw.view(np.float16).astype(np.float32))
BF16 = _plain("bf16", 2, _decode_bf16)


# ---- q8_0: 34-byte blocks of 32: f16 d, int8 q[32]; value = d * q.
# Plane 0: int8 q, cols bytes a row. Plane 1: f16 d, cols / 32 halves a row.


def _pack_q8_0(raw: Bytes, cols: int) -> list[Words]:
    blocks = blocks_of(raw, cols, 32, 34)
    return [as_plane(blocks[:, :, 2:], 16), as_plane(blocks[:, :, :2], 4)]


def _unpack_q8_0(planes: Sequence[Words], cols: int) -> Floats:
    return scaled(planes[0].view(np.int8)[:, :cols], _halves(planes[1], cols // 32))


Q8_0 = packed("q8_0", 32, lambda cols: (pad(cols, 16), pad(cols // 32 * 2, 4)), _pack_q8_0, _unpack_q8_0)


# ---- q4_0: 18-byte blocks of 32: f16 d, nibbles; value = d * (q - 8).
# Plane 0: bits plane of 4, q. Plane 1: f16 d, half c / 32 of the row.
# ---- iq4_nl: the same blocks and planes; value = d * IQ4_VALUES[q].


def _pack_q4_0(raw: Bytes, cols: int) -> list[Words]:
    blocks = blocks_of(raw, cols, 32, 18)
    return [nibbles_plane(blocks[:, :, 2:], 16), as_plane(blocks[:, :, :2], 4)]


def _row_bytes_q4_0(cols: int) -> tuple[int, ...]:
    return bits_row_bytes(cols, 4), pad(cols // 32 * 2, 4)


def _unpack_q4_0(planes: Sequence[Words], cols: int) -> Floats:
    return scaled(columns_of(planes[0], cols, 4).view(np.int8) - np.int8(8), _halves(planes[1], cols // 32))


def _unpack_iq4_nl(planes: Sequence[Words], cols: int) -> Floats:
    return scaled(IQ4_VALUES[columns_of(planes[0], cols, 4)], _halves(planes[1], cols // 32))


Q4_0 = packed("q4_0", 32, _row_bytes_q4_0, _pack_q4_0, _unpack_q4_0)
IQ4_NL = packed("iq4_nl", 32, _row_bytes_q4_0, _pack_q4_0, _unpack_iq4_nl)


# ---- q4_1: 20-byte blocks of 32: f16 d, f16 m, nibbles; value = (d * q) + m.
# Plane 0: bits plane of 4, q. Plane 1: word c / 32 of the row holds d (low half) and m (high half).


def _pack_q4_1(raw: Bytes, cols: int) -> list[Words]:
    blocks = blocks_of(raw, cols, 32, 20)
    return [nibbles_plane(blocks[:, :, 4:], 16), as_plane(blocks[:, :, :4], 4)]


def _unpack_q4_1(planes: Sequence[Words], cols: int) -> Floats:
    both = _halves(planes[1], cols // 16)
    return scaled(columns_of(planes[0], cols, 4), both[:, 0::2], -both[:, 1::2])


Q4_1 = packed("q4_1", 32, lambda cols: (bits_row_bytes(cols, 4), cols // 8), _pack_q4_1, _unpack_q4_1)


# ---- q5_0: 22-byte blocks of 32: f16 d, 32 high bits, nibbles; value = d * ((q + 16 * h) - 16).
# Plane 0: bits plane of 4, q. Plane 1: bits plane of 1, h. Plane 2: f16 d, half c / 32 of the row.


def _high_bits(qh: Bytes) -> Words:
    """The bits plane of 1 from 4 bytes a block [rows, n_blocks, 4], whose bit c is column c."""
    return transposed_bits(as_plane(np.array(qh), 16))


def _pack_q5_0(raw: Bytes, cols: int) -> list[Words]:
    blocks = blocks_of(raw, cols, 32, 22)
    return [nibbles_plane(blocks[:, :, 6:], 16), _high_bits(blocks[:, :, 2:6]), as_plane(blocks[:, :, :2], 4)]


def _row_bytes_q5_0(cols: int) -> tuple[int, ...]:
    return bits_row_bytes(cols, 4), bits_row_bytes(cols, 1), pad(cols // 32 * 2, 4)


def _unpack_q5_0(planes: Sequence[Words], cols: int) -> Floats:
    return scaled(five_bits(planes, cols).view(np.int8) - np.int8(16), _halves(planes[2], cols // 32))


Q5_0 = packed("q5_0", 32, _row_bytes_q5_0, _pack_q5_0, _unpack_q5_0)


# ---- q5_1: 24-byte blocks of 32: f16 d, f16 m, 32 high bits, nibbles; value = (d * (q + 16 * h)) + m.
# Plane 0: bits plane of 4, q. Plane 1: bits plane of 1, h. Plane 2: word c / 32 holds d (low half) and m (high half).


def _pack_q5_1(raw: Bytes, cols: int) -> list[Words]:
    blocks = blocks_of(raw, cols, 32, 24)
    return [nibbles_plane(blocks[:, :, 8:], 16), _high_bits(blocks[:, :, 4:8]), as_plane(blocks[:, :, :4], 4)]


def _row_bytes_q5_1(cols: int) -> tuple[int, ...]:
    return bits_row_bytes(cols, 4), bits_row_bytes(cols, 1), cols // 8


def _unpack_q5_1(planes: Sequence[Words], cols: int) -> Floats:
    both = _halves(planes[2], cols // 16)
    return scaled(five_bits(planes, cols), both[:, 0::2], -both[:, 1::2])


Q5_1 = packed("q5_1", 32, _row_bytes_q5_1, _pack_q5_1, _unpack_q5_1)


# ---- mxfp4: 17-byte blocks of 32: byte e, nibbles; value = d(e) * MXFP4_VALUES[q], d(e) the float32 with bits
# 0x00200000 << e for e < 2 (subnormal numbers, which a GPU may flush to zero) and (e - 1) << 23 above.
# Plane 0: bits plane of 4, q. Plane 1: e, byte c / 32 of the row.

MXFP4_VALUES: NDArray[np.int8] = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def _pack_mxfp4(raw: Bytes, cols: int) -> list[Words]:
    blocks = blocks_of(raw, cols, 32, 17)
    return [nibbles_plane(blocks[:, :, 1:], 16), as_plane(blocks[:, :, :1], 4)]


def _unpack_mxfp4(planes: Sequence[Words], cols: int) -> Floats:
    e = planes[1].view(np.uint8)[:, : cols // 32].astype(np.int64)
    d = np.where(e < 2, 0x00200000 << np.minimum(e, 1), (e - 1) << 23).astype(np.uint32).view(np.float32)
    return scaled(MXFP4_VALUES[columns_of(planes[0], cols, 4)], d)


MXFP4 = packed("mxfp4", 32, lambda cols: (bits_row_bytes(cols, 4), pad(cols // 32, 4)), _pack_mxfp4, _unpack_mxfp4)


# ---- which formats there are

WITH_KERNELS = (
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1",
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4",
)  # fmt: skip; add a name when shaders/include/weights.glsl decodes it
ALL_FORMATS = {
    int(gguf.GGMLQuantizationType[f.name.upper()]): f
    for f in (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4)
}
_FORMATS = {kind: f for kind, f in ALL_FORMATS.items() if f.name in WITH_KERNELS}


def weight_name(ggml_type: int) -> str:
    """A quantisation's name as used for tensor dtypes ("q8_0"); "unknown" for ids that gguf-py does not know."""
    try:
        return str(gguf.GGMLQuantizationType(ggml_type).name.lower())
    except ValueError:
        return "unknown"


def weight_format(ggml_type: int) -> WeightFormat:
    """The device format of a GGUF quantisation id. Raises `ModelError` for one that no kernel decodes."""
    if int(ggml_type) not in _FORMATS:
        raise ModelError(
            f"quantisation {int(ggml_type)} ({weight_name(ggml_type)}) can not be used on this device; supported are "
            + ", ".join(f.name for f in _FORMATS.values())
        )
    return _FORMATS[int(ggml_type)]


_NOT_ALONE = ("nvfp4",)  # such matrices may come with scales in tensors of their own, which nothing here reads


def dequantize(raw: Bytes, ggml_type: int, shape: tuple[int, ...]) -> Floats:
    """File bytes of a quantisation that gguf-py decodes as float32 of the given shape. Raises `ModelError`."""
    if weight_name(ggml_type) == "f32":
        return np.ascontiguousarray(raw).view(np.float32).reshape(shape)
    try:
        if weight_name(ggml_type) in _NOT_ALONE:
            raise NotImplementedError
        values = gguf.quants.dequantize(np.ascontiguousarray(raw), gguf.GGMLQuantizationType(ggml_type))
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(
            f"quantisation {int(ggml_type)} ({weight_name(ggml_type)}) can not be decoded here; convert the file to "
            "one of " + ", ".join(f.name for f in ALL_FORMATS.values())
        ) from error
    return np.asarray(values, np.float32).reshape(shape)


# Where the f16 factors of a block are. mxfp4 has an exponent instead.
_HALVES_AT = {
    "q8_0": (0,), "q4_0": (0,), "iq4_nl": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q2_k": (80, 82),
    "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_xs": (0,),
}  # fmt: skip


def random_blocks(rng: np.random.Generator, ggml_type: int, rows: int, cols: int, scale: float = 1.0) -> Bytes:
    """File bytes [rows, file_row_bytes] of random blocks: every bit of quants and scales drawn, values near `scale`.

    For tests and cases of formats that gguf-py decodes but does not make from floats.
    """
    kind, name = gguf.GGMLQuantizationType(ggml_type), weight_name(ggml_type)
    if name in ("f32", "f16", "bf16"):
        values = (rng.standard_normal((rows, cols)) * scale).astype(np.float32)
        return np.asarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(rows, -1)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    if name == "mxfp4":
        raw[:, :, 0] = 125 + round(np.log2(scale)) + rng.integers(-2, 1, raw.shape[:2])
        return raw.reshape(rows, -1)
    factor = 1.0
    for _ in range(2):  # the first round finds out how large values with factors near 1 are
        for at in _HALVES_AT[name]:
            halves = (rng.uniform(0.5, 1.0, raw.shape[:2]) * factor).astype(np.float16)
            raw[:, :, at : at + 2] = halves[..., None].view(np.uint8)
        factor *= scale / float(np.sqrt(np.mean(np.square(dequantize(raw.reshape(rows, -1), kind, (rows, cols))))))
    return raw.reshape(rows, -1)
