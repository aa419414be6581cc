"""Converted checkpoints against files of the reference converter: every tensor's bytes, every key."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from fixture_paths import fixture
from hf_checkpoint import from_gguf
from next_checkpoint import next_checkpoint

from vkbackend.model.convert import convert
from vkbackend.model.gguf import GGUFFile, open_gguf

Kind = gguf.GGMLQuantizationType


def check_equal(made: GGUFFile, wanted: GGUFFile, exact_decay: bool = True, n_off: int = 0) -> None:
    """Equal keys, value types and tensors. exact_decay: else ssm_a went through a logarithm and may be an ulp off.

    n_off: how many bytes of all tensors may be off by one.
    """
    off = 0
    assert set(made.metadata) == set(wanted.metadata)
    for key, value in wanted.metadata.items():
        mine = made.metadata[key]
        assert type(mine) is type(value), key
        if isinstance(value, np.ndarray):
            assert mine.dtype == value.dtype, key
        assert np.array_equal(mine, value), key
    assert set(made.tensors) == set(wanted.tensors)
    for name, info in wanted.tensors.items():
        mine = made.tensors[name]
        # llama.cpp's quantiser writes [1, n] as [n]; its converter does not.
        shapes = [shape[1:] if shape[0] == 1 else shape for shape in (mine.shape, info.shape)]
        assert (mine.type, shapes[0]) == (info.type, shapes[1]), name
        a, b = made.tensor_bytes(name), wanted.tensor_bytes(name)
        if name.endswith("ssm_a") and not exact_decay:
            np.testing.assert_array_max_ulp(a.view(np.float32), b.view(np.float32), 2)
        elif n_off:
            assert np.abs(a.view(np.int8).astype(int) - b.view(np.int8)).max() <= 1, name
            off += int((a != b).sum())
        else:
            assert np.array_equal(a, b), f"{name}: {(a != b).sum()} of {a.size} bytes differ"
    assert off <= n_off


@pytest.mark.parametrize(
    ("name", "kind"), [("dense", "f32"), ("dense", "f16"), ("dense", "q8_0"), ("moe", "f16"), ("moe", "q8_0")]
)
def test_checkpoints_of_the_fixtures(tmp_path: Path, name: str, kind: str) -> None:
    folder = fixture(f"hf/{name}/model.safetensors").parent
    out = convert(folder, tmp_path / "out.gguf", kind)
    check_equal(open_gguf(out), open_gguf(fixture(f"gguf/{name}-{kind}.gguf")))


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_the_checkpoint_of_next(tmp_path: Path, kind: str) -> None:
    """In q8_0 one weight lies on the boundary between two numbers, and next_checkpoint may have it an ulp off."""
    out = convert(next_checkpoint(tmp_path / "hf"), tmp_path / "out.gguf", kind)
    check_equal(open_gguf(out), open_gguf(fixture(f"gguf/next-{kind}.gguf")), n_off=int(kind == "q8_0"))


@pytest.mark.parametrize("name", ["dense", "moe", "next"])
def test_bf16(tmp_path: Path, name: str) -> None:
    """No fixture is in bf16: matrices against gguf-py's rounding of float32 weights, the rest against the f16 file."""
    if name == "next":
        folder = next_checkpoint(tmp_path / "hf")
    else:
        folder = fixture(f"hf/{name}/model.safetensors").parent
    made, float32 = (open_gguf(convert(folder, tmp_path / f"{kind}.gguf", kind)) for kind in ("bf16", "f32"))
    f16 = open_gguf(fixture(f"gguf/{name}-f16.gguf"))
    assert made.metadata["general.file_type"] == 32 and set(made.tensors) == set(f16.tensors)
    for tensor, info in f16.tensors.items():
        mine = made.tensor_bytes(tensor)
        if info.type == Kind.F32:
            assert made.tensors[tensor].type == Kind.F32
            np.testing.assert_array_equal(mine, f16.tensor_bytes(tensor), tensor)
        else:
            values = float32.tensor_bytes(tensor).view(np.float32)
            assert made.tensors[tensor].type == Kind.BF16
            np.testing.assert_array_equal(mine, gguf.quants.quantize(values, Kind.BF16).reshape(-1), tensor)


def test_the_mtp_block_alone(tmp_path: Path) -> None:
    folder = fixture("hf/dense/model.safetensors").parent
    out = convert(folder, tmp_path, "f32", mtp="only")
    assert out == tmp_path / "mtp-dense-F32.gguf"
    check_equal(open_gguf(out), open_gguf(fixture("gguf/mtp-dense-f32.gguf")))


@pytest.mark.parametrize(
    ("name", "kind", "mtp"),
    [
        ("dense-q8_0", "q8_0", "with"),
        ("mtp-dense-f32", "f32", "only"),
        ("dense-f32", "f32", "with"),
        ("moe-f16", "f16", "with"),
        ("next-f16", "f16", "with"),
        ("next-q8_0", "q8_0", "with"),
    ],
)
def test_files_turned_back_into_checkpoints(tmp_path: Path, name: str, kind: str, mtp: str) -> None:
    wanted = fixture(f"gguf/{name}.gguf")
    out = convert(from_gguf(wanted, tmp_path / "hf"), tmp_path / "mtp-out.gguf", kind, mtp)
    check_equal(open_gguf(out), open_gguf(wanted), exact_decay=False)
