"""sample: the device draws what the host draws, whatever the rows are computed with, and follows the distribution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vkbackend.device.base import Device
from vkbackend.device.kompute import KomputeDevice
from vkbackend.draw import draw, settings_words
from vkbackend.errors import VkBackendError
from vkbackend.graph import I32, Graph
from vkbackend.ops import sample as eager_sample
from vkbackend.ops.sample import SPAN, sample
from vkbackend.spec.sampling import Sampling, distribution

DEVICES = ["numpy_device", "kompute", "kompute_shared", "vulkan"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = request.getfixturevalue(request.param)
    return found


class Drawer:
    """A program that draws from n_rows rows, for any logits and settings."""

    def __init__(self, device: Device, n_rows: int, n: int) -> None:
        g = Graph()
        x, settings = g.input("x", (n_rows, n)), g.input("settings", (6,), I32)
        g.output("y", sample(g, x, settings, g.input("n_past", (1,), I32)))
        self._program = device.compile(g, poison=True)

    def __call__(self, x: Any, words: Any, n_past: int) -> list[int]:
        found: list[int] = self._program.run({"x": x, "settings": words, "n_past": np.array([n_past])})["y"].tolist()
        return found


RANDOM = {
    "temperature": (0.2, 0.8, 1.0, 3.0), "top_k": (0, 1, 40, 3000), "top_p": (1.0, 0.95, 0.3), "min_p": (0.0, 0.05),
}  # fmt: skip


def test_any_settings_and_logits_with_one_program(device: Device, rng: np.random.Generator) -> None:
    n = 2 * SPAN + 100
    drawer = Drawer(device, 3, n)
    for i in range(60):
        x = (rng.standard_normal((3, n)) * rng.choice([0.01, 1, 4, 30])).astype(np.float32)
        x = np.round(x) if rng.random() < 0.3 else x
        given = {name: rng.choice(values) for name, values in RANDOM.items()}
        words = settings_words(int(rng.integers(1 << 62)), **given)
        want = [draw(row, words, 100 * i + r + 1) for r, row in enumerate(x)]
        assert drawer(x, words, 100 * i) == want, given


def test_rows_do_not_depend_on_each_other(device: Device, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((16, SPAN + 9)) * 3).astype(np.float32)
    words = settings_words(int(rng.integers(1 << 62)), 1.2, top_k=500, top_p=0.9)
    alone = Drawer(device, 1, x.shape[1])
    one_by_one = [alone(row[None], words, 7 + i)[0] for i, row in enumerate(x)]
    assert len(set(one_by_one)) > 1
    for n_rows in (2, 5, 16):
        assert Drawer(device, n_rows, x.shape[1])(x[:n_rows], words, 7) == one_by_one[:n_rows]


def test_extremes(device: Device) -> None:
    x = np.zeros((2, 50), np.float32)
    x[:, 20], x[0, 30] = 2, 2
    drawer = Drawer(device, 2, 50)

    def drawn(**given: Any) -> set[tuple[int, int]]:
        words = [settings_words(seed, **({"temperature": 1e9} | given)) for seed in range(40)]
        return {(token, row) for w in words for row, token in enumerate(drawer(x, w, 5))}

    assert drawn(temperature=1e-30) == {(20, 0), (30, 0), (20, 1)}  # equal ones share
    assert drawn(top_k=1) == {(20, 0), (20, 1)}  # the lowest of equal ones
    assert drawn(top_p=1e-6) == {(20, 0), (20, 1)}
    assert drawn(min_p=1.0) == {(20, 0), (30, 0), (20, 1)}
    assert {token for token, _ in drawn(top_k=3)} == {0, 20, 30, 1}  # ids 0 and 1 of the equal ones below
    assert len(drawn()) > 40  # nearly all are possible
    x[:, :20] = -np.inf
    assert min(drawn())[0] == 20


def test_unusable_rows_beside_others(device: Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 2 * SPAN + 1)).astype(np.float32)
    good = eager_sample(x, settings_words(3, 1.0), np.array([0]), device=device).tolist()
    x[0, 2 * SPAN], x[2], x[3, 5] = np.nan, -np.inf, np.inf
    got = eager_sample(x, settings_words(3, 1.0), np.array([0]), device=device).tolist()
    assert got == [-1, good[1], -1, -1, good[4]]


def test_draws_follow_the_float64_distribution(device: Device) -> None:
    """Chi-square with 22 degrees of freedom and a fixed seed; chance exceeds 70 once in a million seeds."""
    seed, n_runs = 20261204, 250
    print(f"seed {seed}")
    logits = np.random.default_rng(20261203).normal(0, 1.2, 40).astype(np.float32)
    s = Sampling(0.9, top_k=25, top_p=0.97, min_p=0.02)
    p, words = distribution(s, logits), settings_words(seed, s.temperature, s.top_k, s.top_p, s.min_p)
    drawer, rows = Drawer(device, 16, 40), np.tile(logits, (16, 1))
    tokens = [token for i in range(n_runs) for token in drawer(rows, words, 16 * i)]
    counts, kept, n = np.bincount(tokens, minlength=40), p > 0, 16 * n_runs
    assert kept.sum() == 23 and not counts[~kept].any()
    assert float(np.sum((counts[kept] - n * p[kept]) ** 2 / (n * p[kept]))) < 70


@pytest.mark.parametrize("limits", [{"max_groups": (4, 65535, 65535)}, {"max_invocations": 128}])
def test_smaller_devices(kompute: KomputeDevice, limits: dict[str, Any], rng: np.random.Generator) -> None:
    x = (rng.standard_normal((11, SPAN + 1)) * 2).astype(np.float32)
    usual, words = kompute.info, settings_words(5, 1.0, top_k=100, top_p=0.9)
    kompute.info = replace(usual, limits=replace(usual.limits, **limits))
    try:
        got = eager_sample(x, words, np.array([0]), device=kompute)
    finally:
        kompute.info = usual
    assert got.tolist() == [draw(row, words, i + 1) for i, row in enumerate(x)]


def test_shapes_are_checked() -> None:
    g = Graph()
    x, settings, n_past = g.temp("x", (5, 3)), g.temp("settings", (6,), I32), g.temp("n_past", (1,), I32)
    with pytest.raises(VkBackendError, match="contiguous"):
        sample(g, x.permute(1, 0), settings, n_past)
    with pytest.raises(VkBackendError, match="settings must be i32"):
        sample(g, x, n_past, n_past)
    with pytest.raises(VkBackendError, match=f"{(1 << 20) + 1} tokens; at most {1 << 20}"):
        sample(g, g.temp("wide", (1, (1 << 20) + 1)), settings, n_past)
