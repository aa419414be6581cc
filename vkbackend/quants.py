"""Weight formats on the device: GGUF blocks repacked into word-aligned planes, and their decoding.

GGUF interleaves scales and quants in blocks of odd sizes (34 bytes for q8_0). Kernels want 16-byte loads, so at
upload each row of blocks is split into planes: one of quants (every row padded to 16 bytes) and one or more of
scales (every row padded to 4 bytes). `unpack` is the reference of the GLSL decoders in shaders/include/weights.glsl.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gguf
import numpy as np
from numpy.typing import NDArray

from vkbackend.errors import ModelError

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


def _plain(name: str, item: int, decode: Callable[[Bytes], Floats]) -> WeightFormat:
    """Unquantised elements, as they are: one plane."""

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
    blocks = raw.reshape(raw.shape[0], cols // 32, 34)
    return [as_plane(blocks[:, :, 2:], 16), as_plane(blocks[:, :, :2], 4)]


def _unpack_q8_0(planes: Sequence[Words], cols: int) -> Floats:
    q = planes[0].view(np.int8)[:, :cols].reshape(-1, cols // 32, 32).astype(np.float32)
    d = planes[1].view(np.float16)[:, : cols // 32].astype(np.float32)
    return (q * d[:, :, None]).reshape(-1, cols)


Q8_0 = WeightFormat("q8_0", 32, lambda cols: (pad(cols, 16), pad(cols // 32 * 2, 4)), _pack_q8_0, _unpack_q8_0)

_FORMATS = {int(gguf.GGMLQuantizationType[f.name.upper()]): f for f in (F32, F16, BF16, Q8_0)}


def weight_format(ggml_type: int) -> WeightFormat:
    """The device format of a GGUF quantisation id. Raises `ModelError` for one that no kernel decodes."""
    if int(ggml_type) not in _FORMATS:
        try:
            name = gguf.GGMLQuantizationType(ggml_type).name.lower()
        except ValueError:
            name = "unknown"
        raise ModelError(
            f"quantisation {int(ggml_type)} ({name}) can not be used on this device; supported are "
            + ", ".join(f.name for f in _FORMATS.values())
        )
    return _FORMATS[int(ggml_type)]


def dequantize(raw: Bytes, ggml_type: int, shape: tuple[int, ...]) -> Floats:
    """File bytes of any quantisation that gguf-py knows as float32 of the given shape."""
    kind = gguf.GGMLQuantizationType(ggml_type)
    if kind == gguf.GGMLQuantizationType.F32:
        return np.ascontiguousarray(raw).view(np.float32).reshape(shape)
    return np.asarray(gguf.quants.dequantize(np.ascontiguousarray(raw), kind), np.float32).reshape(shape)
