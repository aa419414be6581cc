"""Speculation is exact on every Vulkan path: the same tokens, greedy and sampled, from the same seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import vkbackend as vkb
from vkbackend.cli.common import demo_model
from vkbackend.model.loader import Model, load
from vkbackend.ops import linear_dots
from vkbackend.ops.case import nmse

DOTS = "vulkan:0 as a GPU with dot products of bytes"


@pytest.fixture(scope="module", params=["kompute:0", "vulkan:0", DOTS])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    if request.param == DOTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear_dots, "ENOUGH_WEIGHTS", 0)
            yield load(demo_model(), device=request.getfixturevalue("dots_device"))
        return
    if request.param not in {d.name for d in vkb.devices()}:
        pytest.skip(f"{request.param} is not here")
    loaded = load(demo_model(), device=request.param)
    yield loaded
    loaded.close()


def test_logits_are_those_of_numpy(model: Model, demo: Model, seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, 4000, 6).tolist()
    logits = []
    for each in (model, demo):
        ctx = each.context(n_ctx=64)
        logits.append(np.stack([ctx.decode(tokens[i : i + 2]).logits for i in range(0, 6, 2)]))
    assert nmse(*logits) <= 1e-7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("n_max", [1, 3, 6])
def test_speculation_changes_nothing(model: Model, temperature: float, n_max: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 4000, int(rng.integers(1, 40))).tolist()
    sampling = vkb.Sampling(temperature, repeat_penalty=1.0 + temperature / 10, seed=seed)
    plain = vkb.generate(model, prompt, 24, sampling, n_ctx=128)
    fast = vkb.generate(model, prompt, 24, sampling, vkb.DraftMTP(n_max), n_ctx=128)
    assert (fast.tokens, fast.text, fast.stop_reason) == (plain.tokens, plain.text, plain.stop_reason)
