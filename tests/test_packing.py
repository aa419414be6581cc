"""Weight matrices as planes: sizes, places, and the values that come back, for every format there is."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from vkbackend.errors import ModelError
from vkbackend.packing import format_named, pack_matrix, plane_starts, plane_words
from vkbackend.quants import _FORMATS, as_plane, dequantize, pad, weight_format

NAMES = sorted(f.name for f in _FORMATS.values())
ROUNDED = ["f32", "f16", "bf16", "q8_0"]  # gguf-py can make these from floats


def random_blocks(rng: np.random.Generator, name: str, rows: int, cols: int) -> NDArray[np.uint8]:
    """Any bytes are blocks of some values (NaN scales among them)."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    return rng.integers(0, 256, (rows, cols // block * size), dtype=np.uint8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_planes_hold_the_values_of_the_file(name: str, rows: int, blocks: int, rng: np.random.Generator) -> None:
    fmt = format_named(name)
    cols = blocks * max(fmt.block, 16)
    raw = random_blocks(rng, name, rows, cols)
    planes = fmt.pack(raw, cols)
    assert tuple(p.size for p in planes) == plane_words(name, rows, cols)
    assert all(p.dtype == np.uint32 and p.shape[0] == rows for p in planes)
    with np.errstate(invalid="ignore"):
        want = dequantize(raw, gguf.GGMLQuantizationType[name.upper()], (rows, cols))
        got = fmt.unpack(planes, cols)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.float32


@pytest.mark.parametrize("name", NAMES)
def test_rows_can_be_packed_apart(name: str, rng: np.random.Generator) -> None:
    """Loading uploads a matrix in chunks of rows; each plane's rows follow each other."""
    cols = 3 * max(format_named(name).block, 16)
    raw = random_blocks(rng, name, 6, cols)
    whole = format_named(name).pack(raw, cols)
    for first, last in ((0, 2), (2, 3), (3, 6)):
        for plane, part in zip(whole, format_named(name).pack(raw[first:last], cols), strict=True):
            np.testing.assert_array_equal(part, plane[first:last])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_planes_follow_each_other(name: str, rows: int) -> None:
    cols = 5 * max(format_named(name).block, 16)
    words, starts = plane_words(name, rows, cols), plane_starts(name, rows, cols)
    assert starts == tuple(sum(words[:i]) for i in range(len(words)))
    assert len(starts) <= 3  # kernels take three places
    row_bytes = format_named(name).row_bytes(cols)
    assert row_bytes[0] % 16 == 0 and all(n % 4 == 0 for n in row_bytes)


@pytest.mark.parametrize("name", ROUNDED)
def test_pack_matrix_rounds_and_tells_what_to(name: str, rng: np.random.Generator) -> None:
    data = rng.standard_normal((7, 96)).astype(np.float32)
    words, values = pack_matrix(data, name)
    assert words.dtype == np.uint32 and words.size == sum(plane_words(name, 7, 96))
    ends = np.cumsum(plane_words(name, 7, 96))
    planes = [part.reshape(7, -1) for part in np.split(words, ends[:-1])]
    np.testing.assert_array_equal(format_named(name).unpack(planes, 96), values)
    relative = {"f32": 0.0, "f16": 2.0**-10, "bf16": 2.0**-8, "q8_0": 2.0**-7}[name]
    assert np.abs(values - data).max() <= relative * np.abs(data).max()


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "iq4_nl"])
def test_pack_matrix_draws_what_gguf_can_not_round_to(name: str, rng: np.random.Generator) -> None:
    data = (rng.standard_normal((6, 512)) * 0.02).astype(np.float32)
    words, values = pack_matrix(data, name)
    ends = np.cumsum(plane_words(name, 6, 512))
    planes = [part.reshape(6, -1) for part in np.split(words, ends[:-1])]
    np.testing.assert_array_equal(format_named(name).unpack(planes, 512), values)
    assert 0.3 < values.std() / data.std() < 3
    np.testing.assert_array_equal(pack_matrix(data, name)[0], words)
    assert not np.array_equal(pack_matrix(data[::-1], name)[0], words)


def test_short_rows_are_padded_with_zeros() -> None:
    plane = as_plane(np.arange(1, 7, dtype=np.uint8).reshape(2, 3), 16)
    assert plane.view(np.uint8).tolist() == [[1, 2, 3] + [0] * 13, [4, 5, 6] + [0] * 13]
    assert [pad(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]


def test_formats_without_a_kernel_are_named() -> None:
    with pytest.raises(ModelError, match=r"quantisation 16 \(iq2_xxs\) can not be used.*supported are f32, f16"):
        weight_format(gguf.GGMLQuantizationType.IQ2_XXS)
    with pytest.raises(ModelError, match=r"quantisation 999 \(unknown\)"):
        weight_format(999)
    assert {weight_format(kind).name for kind in _FORMATS} == set(NAMES)
