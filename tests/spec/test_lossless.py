"""Speculation changes no token: by text, by draft quality, wherever a text ends, stepwise and in bursts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import write_model

import vkbackend as vkb
from vkbackend.cli.common import demo_model
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.model.loader import Model, load
from vkbackend.spec.generate import Session

FULL = bool(os.environ.get("VKBACKEND_FULL"))  # the whole of what was promised, about an hour on two cores
PROMPTS = [
    "It is a truth universally acknowledged, that",
    "And it came to pass in those days, that",
    'class Stack:\n    """A simple stack."""\n\n    def __init__(self):\n',
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n",
    "She was not a woman of many words; for,",
    "In the beginning",
    "for i in range(10):\n    print(",
    "The LORD said unto Moses,",
    "    def test_empty(self):\n        ",
    "Mr. Darcy",
    "SELECT",
    "@property\ndef name(self):\n",
    "My dear sister,",
    "Returns a list of",
    "try:\n    import json\nexcept ImportError:\n",
    "Chapter 1\n",
    "if __name__ == '__main__':\n",
    "Behold,",
    "x",
]


@pytest.fixture(scope="module")
def demo_kompute(kompute: KomputeDevice) -> Model:
    return load(demo_model(), device=kompute)


@pytest.mark.parametrize("n_max", range(1, 7))
def test_numpy(demo: Model, n_max: int) -> None:
    prompts, n = (PROMPTS, 256) if FULL else (PROMPTS[n_max - 1 :: 10], 32)
    for prompt in prompts:
        plain = vkb.generate(demo, prompt, n, ignore_eos=True)
        speculative = vkb.generate(demo, prompt, n, spec=vkb.DraftMTP(n_max), ignore_eos=True)
        assert speculative.tokens == plain.tokens, prompt
        assert speculative.stats.steps < plain.stats.steps


@pytest.mark.skipif("VKBACKEND_DEVICE" not in os.environ, reason="VKBACKEND_DEVICE names no device to run the whole on")
@pytest.mark.parametrize("bursts", [False, True], ids=["stepwise", "bursts"])
def test_given_device(bursts: bool) -> None:
    """20 prompts, 256 tokens, n_max 1..6 on the device that the environment names: for real GPUs."""
    model = load(demo_model(), device=os.environ["VKBACKEND_DEVICE"])
    sessions = {n: Session(model, vkb.DraftMTP(n) if n else None, n_ctx=512) for n in range(7)}
    for session in sessions.values():
        session.burst = session.burst if bursts else None
    for prompt in PROMPTS:
        texts = {n: s.stream(prompt, 256, ignore_eos=True).result().tokens for n, s in sessions.items()}
        for n in range(1, 7):
            assert texts[n] == texts[0], (prompt, n)
    model.close()


@pytest.mark.parametrize("bursts", [False, True], ids=["stepwise", "bursts"])
def test_lavapipe(demo_kompute: Model, bursts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_kompute.device, "max_burst", 4 if bursts else 1)
    sessions = {n: Session(demo_kompute, vkb.DraftMTP(n) if n else None, n_ctx=128) for n in (0, 1, 3, 6)}
    for prompt in PROMPTS[: 2 if bursts else 5]:
        texts = {n: s.stream(prompt, 48, ignore_eos=True).result() for n, s in sessions.items()}
        for n in (1, 3, 6):
            assert texts[n].tokens == texts[0].tokens, (prompt, n)
        if bursts:
            assert texts[3].stats.submissions < texts[3].stats.steps


@pytest.mark.parametrize("where", ["numpy", "kompute", "bursts"])
@pytest.mark.parametrize(("head", "low", "high"), [("perfect", 1.0, 1.0), ("random", 0.0, 0.15)])
def test_draft_quality_changes_only_the_number_of_steps(
    head: str,
    low: float,
    high: float,
    where: str,
    kompute: KomputeDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = NumpyDevice() if where == "numpy" else kompute
    monkeypatch.setattr(type(device) if where == "numpy" else device, "max_burst", 4 if where == "bursts" else 1)
    model = load(write_model(tmp_path / "tiny.gguf", seed=3, head=head), device=device)
    drafted = accepted = 0
    for first in range(0, 60, 15):
        plain = vkb.generate(model, [first, 7], 40, n_ctx=128)
        speculative = vkb.generate(model, [first, 7], 40, spec=vkb.DraftMTP(3), n_ctx=128)
        assert speculative.tokens == plain.tokens
        drafted += speculative.stats.drafted
        accepted += speculative.stats.accepted
    # A text that repeats itself lets a random head hit by luck now and then.
    assert low <= accepted / drafted <= high


@pytest.mark.parametrize("bursts", [1, 4])
def test_an_eos_at_any_position(
    bursts: int, kompute: KomputeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token of a text is made the end of it in turn: inside, at the edges of, and after accepted runs."""
    monkeypatch.setattr(kompute, "max_burst", bursts)
    model = load(write_model(tmp_path / "tiny.gguf", seed=11, head="perfect"), device=kompute)
    text = vkb.generate(model, [5], 14, n_ctx=64).tokens
    for eos in dict.fromkeys(text):
        monkeypatch.setattr(model.tokenizer, "eos_ids", frozenset({eos}))
        for n_max in (1, 3, 6):
            out = vkb.generate(model, [5], 14, spec=vkb.DraftMTP(n_max), n_ctx=64)
            assert out.stop_reason == "eos" and out.tokens == text[: text.index(eos)], (eos, n_max)


def test_sampled_text_follows_the_distribution(tmp_path: Path, seed: int) -> None:
    """10 tokens, temperature 1: what comes second, with and without drafts, over many seeds."""
    model = load(write_model(tmp_path / "ten.gguf", seed=2, n_vocab=10, sharp=1.5), device=NumpyDevice())
    rng = np.random.default_rng(seed)
    counts: dict[bool, Any] = {True: np.zeros((10, 10)), False: np.zeros((10, 10))}
    sessions = {True: Session(model, vkb.DraftMTP(2), n_ctx=32), False: Session(model, None, n_ctx=32)}
    for _ in range(500):
        for drafts, session in sessions.items():
            sampling = vkb.Sampling(temperature=1.0, seed=int(rng.integers(1 << 31)))
            first, second = session.stream([1, 2, 3], 2, sampling, ignore_eos=True).result().tokens
            counts[drafts][first, second] += 1
    both = counts[True] + counts[False]
    expected = both / 2
    cells = expected >= 4
    off = [((counts[drafts] - expected)[cells] ** 2 / expected[cells]).sum() for drafts in (True, False)]
    chi2 = float(sum(off))
    freedom = int(cells.sum()) - 1
    # Wilson and Hilferty's normal approximation of chi-squared; 5 sigma.
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 5, (chi2, freedom)
