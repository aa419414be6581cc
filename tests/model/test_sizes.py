"""Sizes at the edges of what models have: heads, ratios, vocabularies, weights that no single buffer holds.

Tiny models with random weights; a GPU's logits against those of the NumPy device, whose ops are tested by themselves.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_content import read_content, write_content
from numpy.typing import NDArray
from packed import as_qwen3next
from synthetic import Heads, write_model

import vkbackend as vkb
from vkbackend.device.base import Device
from vkbackend.model.loader import Model, load
from vkbackend.ops.case import nmse

FULL = bool(os.environ.get("VKBACKEND_FULL"))
DEVICES = ["kompute", "vulkan"]

# (heads, kv heads, size, rotated) of attention; (k heads, v heads, size) of gated delta net layers
SOME = [
    ((16, 1, 64, 16), (1, 1, 16)),
    ((6, 2, 128, 128), (2, 4, 128)),
    ((4, 4, 256, 64), (2, 6, 64)),
    ((8, 1, 256, 64), (2, 8, 32)),
]
ALL = [
    *(((n, 1, size, size // 4), (2, 2 * r, 32)) for size in (64, 128, 256) for n, r in ((1, 1), (2, 2), (16, 4))),
    *(((2 * ratio, 2, 64, 32), (3, 3 * r, 64)) for ratio, r in ((3, 1), (5, 2), (8, 3), (12, 4))),
    *(((4, 2, 64, 64), (n_k, n_k * r, size)) for n_k in (1, 4) for r in (1, 2, 3, 4) for size in (16, 128)),
    *(((ratio, 1, 64, 32), (2, 2, 32)) for ratio in range(1, 17)),
]  # fmt: skip


def outputs(model: Model, tokens: list[int], then: list[int]) -> list[NDArray[np.float32]]:
    """Logits of a prompt, of tokens after it one by one, and of the MTP block."""
    ctx = model.context(n_ctx=64, n_rs_seq=2, hidden="post_norm")
    out = ctx.decode(tokens, logits="all")
    later = [ctx.decode([t]).logits for t in then]
    return [out.logits, *later, model.mtp_context(n_ctx=64).decode(tokens, out.hidden).logits]


def check_close(got: Model, want: Model, tokens: list[int], then: list[int]) -> None:
    for a, b in zip(outputs(got, tokens, then), outputs(want, tokens, then), strict=True):
        assert nmse(a, b) <= 1e-9


@pytest.mark.parametrize("device_name", DEVICES)
@pytest.mark.parametrize("arch", ["qwen35", "qwen3next"])
@pytest.mark.parametrize(("attention", "linear"), ALL if FULL else SOME)
def test_heads(
    attention: tuple[int, int, int, int], linear: tuple[int, int, int], arch: str, device_name: str, tmp_path: Path,
    seed: int, rng: np.random.Generator, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    device = request.getfixturevalue(device_name)
    if arch == "qwen3next" and not FULL and linear[0] == linear[1]:
        pytest.skip("one v head a k head: grouped is the same as tiled")
    experts = (2, 4) if arch == "qwen3next" else None
    path = write_model(tmp_path / "m.gguf", seed, n_main=2, heads=Heads(*attention, *linear), experts=experts)
    if experts:
        path = write_content(as_qwen3next(read_content(path)), tmp_path / "next.gguf")
    n = 24 if FULL else 6  # longer ones take the kernels for prompts
    tokens = rng.integers(0, 64, n + 1).tolist()
    check_close(load(path, device=device), load(path, device="numpy"), tokens[:-1], tokens[-1:])


@pytest.mark.parametrize("device_name", DEVICES if FULL else ["kompute"])
def test_a_vocabulary_of_248320(
    device_name: str, tmp_path: Path, seed: int, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    device = request.getfixturevalue(device_name)
    n_vocab = 248_320
    path = write_model(tmp_path / "m.gguf", seed, n_vocab=n_vocab, n_main=2, head_type="Q8_0")
    model, want = load(path, device=device), load(path, device="numpy")
    tokens = [0, n_vocab - 1, *rng.integers(0, n_vocab, 2).tolist()]
    check_close(model, want, tokens, [n_vocab - 2])
    greedy = [m.context(n_ctx=8).decode(tokens, greedy=True, logits="all") for m in (model, want)]
    assert greedy[0].argmax is not None and greedy[1].argmax is not None
    assert greedy[0].argmax.tolist() == greedy[1].argmax.tolist()
    assert len(model.tokenizer.encode("a")) == 1
    for sampling in (vkb.Sampling(temperature=1.0, top_k=40, seed=seed), *([vkb.Sampling()] if FULL else [])):
        plain, drafted = (
            vkb.generate(model, tokens, 6, sampling, spec, n_ctx=32, ignore_eos=True)
            for spec in (None, vkb.DraftMTP(2))
        )
        assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0


def load_within(path: Path, device: Device, n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Loads a model onto a device that binds n_bytes at most while it does."""
    with monkeypatch.context() as patch:
        limits = replace(device.info.limits, max_storage_range=n_bytes)
        patch.setattr(device, "info", replace(device.info, limits=limits))
        return load(path, device=device)


@pytest.mark.parametrize("n_bytes", [24_000, 40_000, 100_000])
@pytest.mark.parametrize("arch", ["qwen35", "qwen3next"])
@pytest.mark.parametrize("device_name", DEVICES if FULL else ["vulkan"])
def test_weights_larger_than_a_buffer(
    device_name: str, arch: str, n_bytes: int, tmp_path: Path, seed: int, rng: np.random.Generator,
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Matrices are spread over several buffers by rows. (Sums over experts are made part by part: other last bits.)"""
    device = request.getfixturevalue(device_name)
    heads, experts = Heads(n_k_heads=2, n_v_heads=4), (2, 4) if arch == "qwen3next" else None
    path = write_model(tmp_path / "m.gguf", seed, n_vocab=500, heads=heads, experts=experts)
    if experts:
        path = write_content(as_qwen3next(read_content(path), packed_in=True), tmp_path / "next.gguf")
    one, many = load(path, device=device), load_within(path, device, n_bytes, monkeypatch)
    assert one._trunk is not None and many._trunk is not None
    parts = many._loader.parts(many._trunk.head.output)
    assert len(parts) == -(-500 // (n_bytes // 256))
    assert len({id(p.storage.buffer) for p in parts}) == len(parts)
    assert len(one._loader.parts(one._trunk.head.output)) == 1
    tokens = rng.integers(0, 500, 21).tolist()
    for n in (5, 20):
        for a, b in zip(outputs(one, tokens[:n], tokens[20:]), outputs(many, tokens[:n], tokens[20:]), strict=True):
            assert nmse(b, a) <= 1e-11
