"""The whole model against golden values from independent implementations (tests/fixtures and ../shared/fixtures).

Bounds are those of the fixtures' README: logits within 1e-3, greedy tokens equal where the margin is above 1e-2,
hidden rows and states within an NMSE of 1e-8. The KV cache is float32.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from fixture_paths import fixture

from vkbackend.device import open_device
from vkbackend.model.context import Context
from vkbackend.model.loader import Model, load
from vkbackend.model.memory import Memory
from vkbackend.ops.case import nmse

DEVICES = ["numpy", "kompute:0"]
MODELS = [
    "dense-q8_0",
    "dense-f32",
    "dense-f16",
    "dense-k-f16",
    "dense-k-q8_0",
    "dense-q4_k_m",
    "dense-k-q4_k_m",
    "dense-k-q6_k",
    "moe-q4_k_m",
    "next-q4_k_m",
]
if os.environ.get("VKBACKEND_FULL"):
    MODELS += [f"{m}-{q}" for m in ("moe", "next") for q in ("f16", "q8_0", "q4_0")]
LENGTHS = [1, 5, 33, 100]


@lru_cache(maxsize=2)
def model_on(name: str, device: str) -> Model:
    return load(fixture(f"gguf/{name}.gguf"), device=open_device(device), n_ubatch=64)


def golden(name: str, kind: str = "") -> Any:
    """The golden archive of a fixture: its own, or "hf" / "ref" of its unquantised model."""
    base, _, quantisation = name.rpartition("-")
    return np.load(fixture(f"goldens/{base}/{kind or quantisation}.npz"))


def reference(name: str) -> Any:
    return golden(name, "ref") if name.endswith("-f32") else golden(name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", LENGTHS)
def test_logits(name: str, device: str, n: int) -> None:
    want = reference(name)
    if f"logits_{n}" not in want:
        pytest.skip(f"the goldens of {name} have no prompt of {n} tokens")
    ctx = model_on(name, device).context(n_ctx=256)
    out = ctx.decode(golden(name, "hf")[f"prompt_{n}"].tolist(), logits="all")
    assert np.abs(out.logits - want[f"logits_{n}"]).max() <= 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", LENGTHS)
def test_greedy_continuation(name: str, device: str, n: int) -> None:
    want = reference(name)
    if f"greedy_{n}" not in want:
        pytest.skip(f"the goldens of {name} have no continuation of a prompt of {n} tokens")
    ctx = model_on(name, device).context(n_ctx=256)
    prompt = golden(name, "hf")[f"prompt_{n}"].tolist()
    tokens = []
    token = int(ctx.decode(prompt, greedy=True).argmax[0])
    for _ in range(64):
        tokens.append(token)
        token = int(ctx.decode([token], greedy=True).argmax[0])
    differ = np.flatnonzero(np.array(tokens) != want[f"greedy_{n}"])
    # Only a near tie may fall the other way; after it the two texts are about different things.
    assert len(differ) == 0 or want[f"margin_{n}"][differ[0]] <= 1e-2, f"token {differ[0]} of {tokens}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["pre_norm", "post_norm"])
def test_hidden_rows_and_states(device: str, kind: str) -> None:
    want = golden("dense-f32", "ref")
    ctx = model_on("dense-f32", device).context(n_ctx=64, n_rs_seq=3, hidden=kind)
    out = ctx.decode(golden("dense-f32", "hf")["prompt_33"].tolist())
    assert out.hidden is not None
    assert nmse(out.hidden, want["h_pre_33" if kind == "pre_norm" else "h_post_33"]) <= 1e-8
    for i, ring in enumerate(memory_of(ctx).rings):
        state = read(ctx, ring.state)[0, 32 % ring.state.shape[1]]
        assert nmse(state, want["state_S_33"][i].transpose(0, 2, 1)) <= 1e-8
        columns = read(ctx, ring.conv)[0]
        newest = np.stack([columns[p % len(columns)] for p in (30, 31, 32)])
        assert nmse(newest, want["conv_33"][i]) <= 1e-8


@pytest.mark.parametrize("where", ["kompute:0", "numpy"])
@pytest.mark.parametrize("name", ["dense-q8_0", "dense-k-q8_0"])
def test_decode_batches_are_bitwise_invariant(name: str, where: str) -> None:
    """A token's logits are the same bits alone, in any batch up to 16, and however the earlier ones were split."""
    model = model_on(name, where)
    tokens = golden(name, "hf")["prompt_100"].tolist()[:48]
    alone = model.context(n_ctx=64)
    want = np.concatenate([alone.decode([t]).logits for t in tokens])
    rng = np.random.default_rng()
    seed = int(rng.integers(1 << 30))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for splits in ([16, 16, 16], [3] * 16, [1, 2, 15, 14, 16], random_split(rng, 48), random_split(rng, 48)):
        ctx = model.context(n_ctx=64, n_rs_seq=int(rng.integers(0, 9)))
        at = 0
        for n in splits:
            got = ctx.decode(tokens[at : at + n], logits="all").logits
            np.testing.assert_array_equal(got.view(np.uint32), want[at : at + n].view(np.uint32), f"{splits} at {at}")
            at += n
    # The prompt kernels are within 1e-4 of that.
    chunked = model.context(n_ctx=64).decode(tokens, logits="all").logits
    assert np.abs(chunked - want).max() <= 1e-4


def random_split(rng: np.random.Generator, n: int) -> list[int]:
    out: list[int] = []
    while n:
        out.append(int(rng.integers(1, min(16, n) + 1)))
        n -= out[-1]
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["post_norm", "pre_norm"])
def test_mtp_logits_and_chain(name: str, device: str, kind: str) -> None:
    want = reference(name)
    prefix = "mtp_" if kind == "post_norm" else "mtp_pre_"
    if f"{prefix}logits" not in want:
        pytest.skip(f"the goldens of {name} have no {prefix}logits")
    model = model_on(name, device)
    prompt = golden(name, "hf")["prompt_33"].tolist()
    ctx = model.context(n_ctx=64, hidden=kind)
    rows = ctx.decode(prompt).hidden
    assert rows is not None
    mtp = model.mtp_context(n_ctx=64, hidden=kind)
    before = np.concatenate([np.zeros_like(rows[:1]), rows[:-1]])
    out = mtp.decode(prompt, before)
    assert np.abs(out.logits - want[f"{prefix}logits"]).max() <= 1e-3
    tokens = want[f"{prefix}chain_tokens"].tolist()
    hidden = rows[-1:]
    for i, token in enumerate(tokens[:4]):
        step = mtp.decode([token], hidden)
        assert np.abs(step.logits[0] - want[f"{prefix}chain_logits"][i]).max() <= 1e-3
        assert step.hidden is not None
        hidden = step.hidden


def memory_of(ctx: Context) -> Memory:
    return ctx._memory


def read(ctx: Context, tensor: Any) -> Any:
    words = ctx._device.download(tensor.storage.buffer, tensor.storage.base, tensor.size)
    return words.view(np.float32).reshape(tensor.shape)
