"""Sampling against a plain float64 reference written with full sorts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vkbackend.errors import ContextError, VkBackendError
from vkbackend.spec.sampling import Sampler, Sampling, distribution


def by_sorting(s: Sampling, logits: NDArray[np.float32], history: list[int]) -> NDArray[np.float64]:
    """The chain of filters, token by token."""
    values = [float(x) for x in logits]
    for token in set(history[-s.repeat_last_n :] if s.repeat_last_n else []):
        values[token] = values[token] / s.repeat_penalty if values[token] > 0 else values[token] * s.repeat_penalty
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    p = np.zeros(len(values))
    if s.temperature == 0:
        p[order[0]] = 1
        return p
    if s.top_k:
        order = order[: s.top_k]
    if s.top_p < 1:
        weights = [math.exp(values[i] - values[order[0]]) for i in order]
        total, run, n = sum(weights), 0.0, 0
        while run < s.top_p * total * (1 - 1e-12):
            run += weights[n]
            n += 1
        order = order[:n]
    if s.min_p > 0:
        order = [i for i in order if values[i] >= values[order[0]] + math.log(s.min_p)]
    for i in order:
        p[i] = math.exp((values[i] - values[order[0]]) / s.temperature)
    p /= p.sum()
    return p


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 60),
    s=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        top_k=st.integers(0, 70),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        repeat_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        repeat_last_n=st.sampled_from([0, 1, 64]),
    ),
)
def test_distribution(seed: int, n: int, s: Sampling) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(n) * 3).astype(np.float32)
    history = rng.integers(0, n, rng.integers(0, 5)).tolist()
    got = distribution(s, logits, history)
    assert got.dtype == np.float64
    assert got.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(got, by_sorting(s, logits, history), rtol=1e-9, atol=0)


def test_ties_go_to_the_lowest_ids(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 3, 40).astype(np.float32)
    greedy = distribution(Sampling(), logits)
    assert np.argmax(greedy) == np.flatnonzero(logits == logits.max())[0]
    kept = np.flatnonzero(distribution(Sampling(1.0, top_k=7), logits))
    assert kept.tolist() == sorted(sorted(range(40), key=lambda i: (-logits[i], i))[:7])


@pytest.mark.parametrize("scale", [0.0, 0.01, 4.0])  # flat ones need more candidates than top-p sorts at first
def test_top_p_of_a_large_vocabulary(seed: int, scale: float) -> None:
    logits = (np.random.default_rng(seed).standard_normal(20_000) * scale).astype(np.float32)
    for top_p in (0.5, 0.99):
        s = Sampling(1.0, top_p=top_p)
        np.testing.assert_allclose(distribution(s, logits), by_sorting(s, logits, []), rtol=1e-9)


def test_impossible_tokens_stay_impossible(seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal(30).astype(np.float32)
    logits[::3] = -np.inf
    p = distribution(Sampling(1.0, top_p=0.999, min_p=1e-6, repeat_penalty=1.2), logits, [0, 1, 3])
    assert np.all(p[::3] == 0)
    assert np.all(np.isfinite(p))


def test_draws_follow_the_distribution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(12).astype(np.float32)
    s = Sampling(0.9, top_k=9, seed=int(rng.integers(1 << 31)))
    p, sampler, n = distribution(s, logits), Sampler(s), 20_000
    counts = np.bincount([sampler.sample(logits) for _ in range(n)], minlength=12)
    assert np.all(counts[p == 0] == 0)
    chi2 = float(np.sum((counts[p > 0] - n * p[p > 0]) ** 2 / (n * p[p > 0])))
    assert chi2 < 40  # 8 degrees of freedom: passed by chance in all but 3 of a million runs


@pytest.mark.parametrize("number", [0, (1 << 64) - 1])
def test_the_last_random_numbers_draw_possible_tokens(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkbackend.draw.random_bits", lambda key, position: number)
    logits = np.array([-np.inf, -np.inf, 1, 2, 0, -np.inf, -np.inf], np.float32)
    assert Sampler(Sampling(1.0)).sample(logits) == (3 if number == 0 else 4)  # the most and the least probable


def test_a_token_belongs_to_its_position(seed: int) -> None:
    """Whatever was drawn before, and in whatever order."""
    logits = np.random.default_rng(seed).standard_normal((30, 100)).astype(np.float32)
    sampler = Sampler(Sampling(1.0, seed=seed))
    counted = [sampler.sample(row) for row in logits]
    assert counted == [sampler.sample(row, position=i) for i, row in reversed(list(enumerate(logits)))][::-1]
    assert [sampler.sample(logits[0], position=i) for i in range(30)] != 30 * [counted[0]]


def test_penalised_logits_beyond_float32() -> None:
    logits = np.array([3e38, 1.0], np.float32)
    with pytest.raises(VkBackendError, match="returned inf as logit of token 0"):
        Sampler(Sampling(1.0, repeat_penalty=0.5)).sample(logits, [0])


@pytest.mark.parametrize(
    ("s", "draws"),
    [(Sampling(1.0), True), (Sampling(), False), (Sampling(1.0, repeat_penalty=1.1), False),
     (Sampling(1.0, repeat_penalty=1.1, repeat_last_n=0), True)],
)  # fmt: skip
def test_what_the_device_can_draw(s: Sampling, draws: bool) -> None:
    assert (Sampler(s).device_words is not None) == draws


def test_same_seed_same_tokens_and_own_generator(seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal((50, 100)).astype(np.float32)
    one, two = (Sampler(Sampling(1.0, seed=5)) for _ in range(2))
    other = Sampler(Sampling(1.0, seed=6))
    np.random.seed(1)
    first = [one.sample(row) for row in logits]
    np.random.seed(2)
    assert first == [two.sample(row) for row in logits]
    assert first != [other.sample(row) for row in logits]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_unusable_logits(bad: float) -> None:
    logits = np.zeros(8, np.float32)
    logits[5] = bad
    for s in (Sampling(), Sampling(1.0, top_p=0.9)):
        with pytest.raises(VkBackendError, match="token 5"):
            distribution(s, logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", "hot"), ("top_k", -1), ("top_k", 2.5),
        ("top_p", 0.0), ("top_p", 1.01), ("min_p", -0.01), ("min_p", 1.5), ("repeat_penalty", 0.0),
        ("repeat_penalty", math.inf), ("seed", -(10**400)), ("seed", -1), ("seed", 1.5),
        ("repeat_last_n", -1), ("top_k", True),
    ],
)  # fmt: skip
def test_bad_settings(field: str, value: object) -> None:
    with pytest.raises(ContextError) as caught:
        Sampling(**{field: value})  # type: ignore[arg-type]
    assert field in str(caught.value)
    assert (repr(value) if isinstance(value, str) else str(value)) in str(caught.value)


def test_whole_numbers_of_any_size() -> None:
    logits, huge = np.arange(8, dtype=np.float32), 2**400
    assert Sampler(Sampling(1.0, top_k=huge, seed=huge)).sample(logits) == Sampler(Sampling(1.0, seed=0)).sample(logits)


@pytest.mark.parametrize(
    ("s", "expected"),
    [(Sampling(), True), (Sampling(0.1), False), (Sampling(repeat_penalty=1.1), False), (Sampling(top_k=5), True)],
)
def test_is_argmax(s: Sampling, expected: bool) -> None:
    assert s.is_argmax is expected
