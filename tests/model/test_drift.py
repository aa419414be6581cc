"""Long runs with rollbacks in between: float32 stays near float64, and going back leaves no trace however often."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from synthetic import write_model

from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.model.context import Context
from vkbackend.model.loader import load

FULL = bool(os.environ.get("VKBACKEND_FULL"))
LIMIT = 1e-3  # logits of these models are about 3 in size
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("drift") / "tiny.gguf", seed=9)


def detour(ctx: Context, n: int, rng: np.random.Generator) -> None:
    """Decodes n random tokens and takes them back."""
    n_past = ctx.seq_pos_max(0) + 1
    ctx.decode(rng.integers(0, 64, n).tolist(), logits="none")
    assert ctx.seq_rm(0, n_past)


def difference(got: Floats, want: Floats) -> float:
    assert np.isfinite(got).all() and np.isfinite(want).all()  # a NaN would vanish in a maximum
    return float(np.abs(got - want).max())


@pytest.mark.parametrize("n_steps", [512, 4096])
def test_numpy(path: Path, n_steps: int, rng: np.random.Generator) -> None:
    """Single steps with detours of up to three tokens, in float32, against float64 without any."""
    single = load(path, device=NumpyDevice()).context(n_ctx=n_steps + 3, n_rs_seq=3)
    double = load(path, device=NumpyDevice(np.float64)).context(n_ctx=n_steps)
    worst = 0.0
    for _ in range(0, n_steps, 16):
        tokens = rng.integers(0, 64, 16).tolist()
        got = []
        for i, token in enumerate(tokens):
            if i % 7 == 3:
                detour(single, int(rng.integers(1, 4)), rng)
            got.append(single.decode([token]).logits)
        worst = max(worst, difference(np.concatenate(got), double.decode(tokens, logits="all").logits))
    print(f"{n_steps} steps: worst logit difference {worst:.2e}")
    assert worst <= LIMIT


@pytest.mark.parametrize("n_steps", [512, pytest.param(4096, marks=pytest.mark.skipif(not FULL, reason="minutes"))])
def test_vulkan(kompute: KomputeDevice, path: Path, n_steps: int, rng: np.random.Generator) -> None:
    """Batches as speculation makes them, and a detour before each: against float64, and bit for bit without detours."""
    model = load(path, device=kompute)
    ctx = model.context(n_ctx=n_steps + 16, n_rs_seq=3)
    straight = model.context(n_ctx=n_steps)
    double = load(path, device=NumpyDevice(np.float64)).context(n_ctx=n_steps)
    worst = 0.0
    for n_past in range(0, n_steps, 16):
        tokens = rng.integers(0, 64, 16).tolist()
        got = []
        for at in range(0, 16, 4):  # four accepted, up to three rejected
            detour(ctx, int(rng.integers(1, 4)), rng)
            got.append(ctx.decode(tokens[at : at + 4], logits="all").logits)
        logits = np.concatenate(got)
        assert ctx.seq_pos_max(0) == n_past + 15
        np.testing.assert_array_equal(
            logits.view(np.uint32), straight.decode(tokens, logits="all").logits.view(np.uint32)
        )
        worst = max(worst, difference(logits, double.decode(tokens, logits="all").logits))
    print(f"{n_steps} steps: worst logit difference {worst:.2e}")
    assert worst <= LIMIT
