"""Whole models in every quantisation: a file against the float32 file of what gguf-py decodes from it.

Logits of trunk and MTP block, greedy text, and the text with speculation; VKBACKEND_FULL=1: every quantisation in every
architecture on every device. Golden values of independent implementations: test_goldens.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import synthetic
from gguf_content import Content, Stored, read_content, stored, write_content
from packed import as_qwen3next

import vkbackend as vkb
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.errors import ModelError
from vkbackend.model.loader import Model, load
from vkbackend.ops.case import nmse
from vkbackend.quants import WITH_KERNELS, random_blocks

FULL = bool(os.environ.get("VKBACKEND_FULL"))
ARCHS = ["qwen35", "qwen35moe", "qwen3next"]
KINDS = [name.upper() for name in WITH_KERNELS]
DEVICES = ["numpy_device", "kompute", "vulkan"]
CASES = [(arch, device, kind) for arch in ARCHS for device in DEVICES for kind in KINDS]
if not FULL:  # most of the time on a GPU goes into compiling shaders, for a CPU in most runs
    CASES = [(ARCHS[i % 3], "numpy_device", kind) for i, kind in enumerate(KINDS)]
    CASES += [("qwen35moe", "vulkan", "Q8_0"), ("qwen3next", "kompute", "Q8_0")]
WIDTH = 256  # of every matrix: the longest block
NUMPY_ONLY = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"]
FLOAT32 = ("norm.weight", "conv1d.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")  # in files of all types


def quantised(content: Content, kind: str, rng: np.random.Generator) -> Content:
    """Random blocks in place of every matrix."""
    tensors = {}
    for name, t in content.tensors.items():
        if t.data.ndim < 2 or name.endswith(FLOAT32):
            tensors[name] = t
        elif kind in ("F32", "F16", "BF16"):
            tensors[name] = t.cast(kind)
        else:
            assert not t.data.shape[-1] % WIDTH
            raw_kind = gguf.GGMLQuantizationType[kind]
            rows, cols = t.data.size // t.data.shape[-1], t.data.shape[-1]
            blocks = random_blocks(rng, raw_kind, rows, cols, float(t.data.std()))
            tensors[name] = Stored(blocks.reshape(*t.data.shape[:-1], -1), raw_kind)
    return Content(content.arch, dict(content.keys), tensors)


def check_alike(got: Model, want: Model, tokens: list[int]) -> None:
    rows = []
    for model in (got, want):
        ctx = model.context(n_ctx=64, hidden="post_norm")
        out = ctx.decode(tokens, logits="all")
        rows.append([out.logits, model.mtp_context(n_ctx=64).decode(tokens, out.hidden).logits])
    for mine, theirs in zip(*rows, strict=True):
        assert np.isfinite(theirs).all() and theirs.std() > 0.1
        assert nmse(mine, theirs) <= 1e-9


@pytest.mark.parametrize(("arch", "device", "kind"), CASES)
def test_a_quantised_file_is_what_is_decoded_from_it(
    arch: str, device: str, kind: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    for name in ("N_EMBD", "N_FF", "N_FF_EXP", "N_FF_SHEXP"):
        monkeypatch.setattr(synthetic, name, WIDTH)
    heads = synthetic.Heads(2, 1, 128, 32, 1, 2, 128)
    seed = int(rng.integers(1 << 30))
    experts = None if arch == "qwen35" else (2, 4)
    path = synthetic.write_model(tmp_path / "m.gguf", seed, n_main=2, experts=experts, heads=heads)
    content = read_content(path)
    content = quantised(as_qwen3next(content) if arch == "qwen3next" else content, kind, rng)
    plain = Content(content.arch, dict(content.keys), {n: stored(t.values()) for n, t in content.tensors.items()})
    got = load(write_content(content, tmp_path / "q.gguf"), device=request.getfixturevalue(device))
    want = load(write_content(plain, tmp_path / "f.gguf"), device="numpy")
    for n in (6, 24):  # the kernels for few rows, and those for prompts
        check_alike(got, want, rng.integers(0, 64, n).tolist())
    plain_text, text, drafted = (
        vkb.generate(model, [3, 7, 9], 12, spec=spec, n_ctx=64, ignore_eos=True)
        for model, spec in ((want, None), (got, None), (got, vkb.DraftMTP(3)))
    )
    assert plain_text.tokens == text.tokens == drafted.tokens and drafted.stats.drafted > 0


def with_one_matrix_in(kind: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A float32 model but for one matrix, blk.1.ffn_down, whose bytes are all 0."""
    monkeypatch.setattr(synthetic, "N_FF", WIDTH)
    content = read_content(synthetic.write_model(tmp_path / "m.gguf", seed))
    raw_kind = gguf.GGMLQuantizationType[kind]
    rows = content.tensors["blk.1.ffn_down.weight"]
    raw = np.zeros(gguf.quant_shape_to_byte_shape(rows.data.shape, raw_kind), np.uint8)
    content.tensors["blk.1.ffn_down.weight"] = Stored(raw, raw_kind)
    return write_content(content, tmp_path / "q.gguf")


@pytest.mark.parametrize("kind", NUMPY_ONLY)
def test_what_no_kernel_decodes_runs_on_numpy_only(
    kind: str, kompute: KomputeDevice, vulkan: VulkanDevice, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There gguf-py decodes it."""
    path = with_one_matrix_in(kind, tmp_path, seed, monkeypatch)
    for device in (kompute, vulkan):
        with pytest.raises(ModelError, match=rf"'blk.1.ffn_down.weight' is {kind.lower()}; kernels exist for f32, f16"):
            load(path, device=device)
    assert np.isfinite(load(path, device="numpy").context(n_ctx=8).decode([3, 7]).logits).all()


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "NVFP4"])
def test_what_nothing_decodes_is_refused(kind: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_one_matrix_in(kind, tmp_path, seed, monkeypatch)
    with pytest.raises(ModelError, match=rf"'blk.1.ffn_down.weight': .*\({kind.lower()}\) can not be decoded here"):
        load(path, device="numpy")


def test_scales_in_tensors_of_their_own_are_refused(tmp_path: Path, seed: int) -> None:
    """Left out, they would give another model without a word."""
    content = read_content(synthetic.write_model(tmp_path / "m.gguf", seed))
    content.tensors["blk.1.ffn_down.scale"] = stored(np.full(1, 2.0, np.float32))
    with pytest.raises(ModelError, match=r"q\.gguf: tensor 'blk.1.ffn_down.scale' scales another one.*f32, f16"):
        load(write_content(content, tmp_path / "q.gguf"), device="numpy")
