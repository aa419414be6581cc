"""Checkpoints, failed decodes, clamping, and a long run: the books and the device never part."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import write_model

from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import ContextError, DeviceError
from vkbackend.model.loader import Model, load
from vkbackend.model.memory import SeqRm


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("state") / "tiny.gguf", seed=9)


@pytest.fixture(scope="module")
def model(kompute: KomputeDevice, path: Path) -> Model:
    return load(path, device=kompute)


def test_a_checkpoint_moves_between_contexts_of_other_sizes(model: Model, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 64, 21).tolist()
    source = model.context(n_ctx=64, n_rs_seq=4)
    source.decode(tokens[:16], logits="none")
    source.decode(tokens[16:20], logits="none")
    data = source.state_get(0)
    want = source.decode(tokens[20:]).logits
    for n_ctx, n_seq_max, n_rs_seq in ((32, 1, 0), (200, 3, 8)):
        target = model.context(n_ctx=n_ctx, n_seq_max=n_seq_max, n_rs_seq=n_rs_seq)
        target.state_set(n_seq_max - 1, data)
        assert target.rollback_depth(n_seq_max - 1) == 0
        got = target.decode(tokens[20:], seq=n_seq_max - 1).logits
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    with pytest.raises(ContextError, match="20 tokens, this context holds 16"):
        model.context(n_ctx=16).state_set(0, data)


def test_damaged_checkpoints_are_refused_and_change_nothing(model: Model, rng: np.random.Generator) -> None:
    ctx = model.context(n_ctx=64)
    ctx.decode(rng.integers(0, 64, 7).tolist(), logits="none")
    data = ctx.state_get(0)
    for bad in (b"", data[:20], data[:-4], data + b"\0\0\0\0", b"\0" * len(data), data[:4] + b"\xff" * 4 + data[8:]):
        with pytest.raises(ContextError, match="state_set"):
            ctx.state_set(0, bad)
        assert ctx.state_get(0) == data


@pytest.mark.parametrize("n_rs_seq", [0, 4])
def test_a_failed_decode_leaves_the_sequence_as_it_was_or_says_that_it_is_gone(
    model: Model, n_rs_seq: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = model.context(n_ctx=64, n_rs_seq=n_rs_seq)
    tokens = rng.integers(0, 64, 9).tolist()
    ctx.decode(tokens[:6], logits="none")
    ctx.decode(tokens[6:8])
    program: Any = next(reversed(ctx._programs.values()))

    def lost(feeds: object) -> None:
        raise DeviceError("injected: device lost")

    with monkeypatch.context() as patch:
        patch.setattr(program, "run", lost)
        with pytest.raises(DeviceError, match="injected" if n_rs_seq else "cleared"):
            ctx.decode(tokens[6:8])
    if not n_rs_seq:
        assert ctx.seq_pos_max(0) == -1
        return
    assert ctx.seq_pos_max(0) == 7
    straight = model.context(n_ctx=64)
    straight.decode(tokens[:8], logits="none")
    np.testing.assert_array_equal(ctx.decode(tokens[8:]).logits, straight.decode(tokens[8:]).logits)


def test_kinds_of_removal_and_clamping(
    model: Model, tmp_path: Path, kompute: KomputeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    assert model.context(n_ctx=16).seq_rm_kind is SeqRm.FULL
    assert model.context(n_ctx=16, n_rs_seq=2).seq_rm_kind is SeqRm.PART_BOUNDED
    attention = load(write_model(tmp_path / "attention.gguf", seed=1, interval=1), device=kompute)
    with caplog.at_level(logging.WARNING, "vkbackend"):
        ctx = attention.context(n_ctx=32, n_rs_seq=5)
    assert ctx.n_rs_seq == 0 and "clamped to 0" in caplog.text
    assert ctx.seq_rm_kind is SeqRm.PART
    ctx.decode(list(range(20)), logits="none")
    assert ctx.rollback_depth(0) == 20 and ctx.seq_rm(0, 3) and ctx.seq_pos_max(0) == 2


@pytest.mark.parametrize("n_steps", [512, 4096])
def test_the_state_does_not_drift(path: Path, n_steps: int, seed: int) -> None:
    """Thousands of single steps with rollbacks in between, in float32 against float64 without any."""
    rng = np.random.default_rng(seed)
    single = load(path, device=NumpyDevice()).context(n_ctx=n_steps + 1, n_rs_seq=3)
    double = load(path, device=NumpyDevice(np.float64)).context(n_ctx=n_steps + 1)
    worst = 0.0
    for step in range(n_steps):
        if step % 7 == 3:  # a detour of up to three tokens, taken back
            detour = rng.integers(0, 64, rng.integers(1, 4)).tolist()
            n_past = single.seq_pos_max(0) + 1
            if n_past + len(detour) <= n_steps:
                single.decode(detour, logits="none")
                assert single.seq_rm(0, n_past)
        token = int(rng.integers(0, 64))
        got, want = single.decode([token]).logits[0], double.decode([token]).logits[0]
        worst = max(worst, float(np.abs(got - want).max()))
    print(f"{n_steps} steps: worst logit difference {worst:.2e}")
    assert worst <= 1e-3


def test_the_state_does_not_drift_on_vulkan(model: Model, path: Path, rng: np.random.Generator) -> None:
    n_steps = 512
    ctx = model.context(n_ctx=n_steps + 16, n_rs_seq=3)
    double = load(path, device=NumpyDevice(np.float64)).context(n_ctx=n_steps + 16)
    worst = 0.0
    for _ in range(n_steps // 4):
        detour = rng.integers(0, 64, 2).tolist()
        n_past = ctx.seq_pos_max(0) + 1
        ctx.decode(detour, logits="none")
        assert ctx.seq_rm(0, n_past)
        tokens = rng.integers(0, 64, 4).tolist()
        got = ctx.decode(tokens, logits="all").logits
        want = np.concatenate([double.decode([t]).logits for t in tokens])
        worst = max(worst, float(np.abs(got - want).max()))
    assert worst <= 1e-3
