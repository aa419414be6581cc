"""The arithmetic of drawing tokens, against whole numbers of Python and against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vkbackend.draw import LOG2_E, ONE, Floats, Ints, draw, philox, random_bits, settings_words, weights
from vkbackend.spec.sampling import Sampling, distribution

MASK = 0xFFFFFFFF


def by_counting(logits: Floats, words: Ints, position: int) -> int:
    """Token by token, over the whole row, sorted."""
    scale, furthest = words[[2, 5]].view(np.float32)
    top_k, top_p = (int(w) for w in words[[3, 4]].view(np.uint32))
    best = logits.max()
    with np.errstate(over="ignore"):
        away = best - logits
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    if top_p:
        plain = [int(w) for w in weights(away, LOG2_E)]
        least, run, kept = top_p * sum(plain[i] for i in order), 0, 0
        while run << 32 < least:
            run += plain[order[kept]]
            kept += 1
        order = order[:kept]
    order = [i for i in order if away[i] <= furthest]
    tempered = [int(w) for w in weights(away, scale)]
    rest = random_bits(words[:2].view(np.uint32), position) * sum(tempered[i] for i in order) >> 64
    for token in order:
        if rest < tempered[token]:
            return token
        rest -= tempered[token]
    raise AssertionError


SETTINGS: dict[str, Any] = {
    "temperature": st.sampled_from([1e-9, 0.3, 1.0, 2.5, 1e9]),
    "top_k": st.sampled_from([0, 1, 5, 70, 1 << 40]),
    "top_p": st.sampled_from([1.0, 0.95, 0.5, 1e-6, 1e-20]),
    "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
}


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**70), n=st.integers(1, 60), coarse=st.booleans(), given=st.fixed_dictionaries(SETTINGS))
def test_against_counting(seed: int, n: int, coarse: bool, given: dict[str, Any]) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(n) * 3).astype(np.float32)
    if coarse:
        logits = np.round(logits)
        logits[rng.random(n) < 0.2] = -np.inf
        logits[0] = -0.0
    words = settings_words(seed, **given)
    for position in rng.integers(0, 1 << 31, 5):
        assert draw(logits, words, int(position)) == by_counting(logits, words, int(position))


@pytest.mark.parametrize(
    "given",
    [{}, {"top_k": 3000}, {"top_k": 2000}, {"top_p": 0.9}, {"top_p": 0.2}, {"min_p": 0.5}, {"min_p": 1e-5},
     {"top_k": 3000, "top_p": 0.99, "min_p": 1e-5}],
)  # fmt: skip
@pytest.mark.parametrize("scale", [0.0, 0.2, 3.0])
def test_rows_that_are_longer_than_the_first_look(
    given: dict[str, Any], scale: float, rng: np.random.Generator
) -> None:
    logits = (rng.standard_normal(4000) * scale).astype(np.float32)
    words = settings_words(int(rng.integers(1 << 62)), 1.0, **given)
    for position in range(4):
        assert draw(logits, words, position) == by_counting(logits, words, position)


@pytest.mark.parametrize("scale", [1.0, 0.5, 3.0])
def test_weights_are_powers(scale: float, rng: np.random.Generator) -> None:
    away = np.concatenate([[0.0], rng.uniform(0, 40, 10_000), [np.inf]]).astype(np.float32)
    got = weights(away, np.float32(scale) * LOG2_E).astype(np.float64) / 2**ONE
    want = np.exp(-away.astype(np.float64) * scale)
    assert got[0] == 1 and got[-1] == 0
    # float32's rounding of the power, up to 44 (2^-19 of 1), and of the result (2^-22); and the last bit of 2^-43.
    np.testing.assert_allclose(got, want, rtol=44 * 2.0**-24 + 2.0**-22, atol=2.0**-ONE)


def test_draws_follow_the_float64_distribution() -> None:
    """Chi-square with 22 degrees of freedom and a fixed seed; chance exceeds 70 once in a million seeds."""
    seed, n = 20261203, 20_000
    print(f"seed {seed}")
    logits = np.random.default_rng(seed).normal(0, 1.2, 40).astype(np.float32)
    s = Sampling(0.9, top_k=25, top_p=0.97, min_p=0.02, seed=seed)
    p = distribution(s, logits)
    words = settings_words(seed, s.temperature, s.top_k, s.top_p, s.min_p)
    counts = np.bincount([draw(logits, words, i) for i in range(n)], minlength=40)
    kept = p > 0
    assert kept.sum() == 23 and not counts[~kept].any()
    assert float(np.sum((counts[kept] - n * p[kept]) ** 2 / (n * p[kept]))) < 70


def test_philox_known_answers() -> None:
    """The test vectors that come with the generator's publication."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((MASK,) * 4, (MASK,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_random_bits_are_uniform_and_uncorrelated() -> None:
    """Every bit of neighbouring seeds and positions is set half of the time, and differs from its neighbours'."""
    keys = [np.array([seed, 0], np.uint32) for seed in range(32)]
    bits = np.array([[random_bits(key, i) for i in range(256)] for key in keys], np.uint64)
    flags = (bits[..., None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    for values in (flags, flags[:, 1:] ^ flags[:, :-1], flags[1:] ^ flags[:-1], flags[..., 1:] ^ flags[..., :-1]):
        assert np.all(abs(values.mean((0, 1)) - 0.5) < 0.03)  # 5 sigma


@pytest.mark.parametrize("bad", [[1, np.nan, 2], [np.nan], [-np.inf, -np.inf], [1, np.inf]])
def test_unusable_rows(bad: list[float]) -> None:
    assert draw(np.array(bad, np.float32), settings_words(1, 1.0), 0) == -1


def test_seeds_of_any_size() -> None:
    assert settings_words(5 + (3 << 64), 1.0).tolist() == settings_words(5, 1.0).tolist()
    assert settings_words(5 + (3 << 32), 1.0).tolist() != settings_words(5, 1.0).tolist()
