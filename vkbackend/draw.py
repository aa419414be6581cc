"""Drawing a token from a row of logits with arithmetic that gives the same token everywhere.

The host (NumPy) and the shader (shaders/sample.comp) follow the same steps, so that a seed's text does not depend on
where its tokens are drawn, nor on what else is computed with them:

- A probability is an integer weight, 2^43 for the most probable token. It comes from float32 subtractions and products
  that every device rounds alike (`weights`), and sums of integers do not depend on their order. What is below 2^-43 of
  the most probable token (by 30 and more natural logits) counts as impossible: less than 1e-7 of the whole.
- Tokens stand in one order: greatest logit first, among equals the lowest id. All filters keep a beginning of it.
- The random number is a function of the seed and the position of the token that is drawn (`random_bits`), and of
  nothing that was drawn before.

The float64 definition of the distribution is `vkbackend.spec.sampling.distribution`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Weights = NDArray[np.uint64]

# Places in the words that hold the settings of a text: the seed's low and high half, log2(e) / temperature, top-k (0:
# off), top-p as a fraction of 2^32 (0: off), -log(min-p) (infinity: off).
SEED, SCALE, TOP_K, TOP_P, MIN_P = 0, 2, 3, 4, 5
N_WORDS = 6

ONE = 43  # weights are fractions of 2^ONE
MOST_TOKENS = 1 << 20  # that many times 2^ONE stays below 2^63
LOG2_E = np.float32(1.4426950408889634)
# 2^-f on [0, 1] is 1 + f * (_POWERS[0] + f * (_POWERS[1] + ...)), within 2e-7 of itself.
_POWERS = np.array(
    [-0.69314706, 0.2402243, -0.05549051, 0.0095787225, -0.0012743612, 0.000108899236],
    np.float32,
)
FIRST_LOOK = 2048  # tokens that are sorted first: a whole vocabulary is dear to sort, and rarely needed


def settings_words(seed: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Ints:
    """Settings (see `Sampling`; temperature above 0) as the words i32 [N_WORDS] that draws take.

    Seeds that differ by a multiple of 2^64 are the same.
    """
    words = np.zeros(N_WORDS, np.uint32)
    words[SEED : SEED + 2] = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    # Within bounds that keep the shader's products from infinity and from denormal numbers.
    words[SCALE] = _bits(min(max(float(LOG2_E) / temperature, 1e-30), 1e30))
    words[TOP_K] = min(top_k, (1 << 31) - 1)
    words[TOP_P] = 0 if top_p >= 1 else min(max(round(top_p * 2.0**32), 1), (1 << 32) - 1)
    words[MIN_P] = _bits(-math.log(min_p) if min_p > 0 else math.inf)
    return words.view(np.int32)


def draw(logits: Floats, words: Ints, position: int) -> int:
    """The token at `position` of a text with these settings; -1 where the logits hold NaN, or no greatest number.

    logits: float32 [n_vocab], at most MOST_TOKENS. position: how many tokens stand before it.
    """
    best = np.max(logits)
    if not np.isfinite(best):
        return -1
    settings = words.view(np.uint32)
    with np.errstate(over="ignore"):  # a distance beyond float32 is infinite
        away = best - logits
    for n in (FIRST_LOOK, len(logits)):
        token = _draw_among(greatest(logits, n), away, settings, position)
        if token >= 0:
            break
    return token


def _draw_among(order: NDArray[np.intp], away: Floats, settings: NDArray[np.uint32], position: int) -> int:
    """The token if it and where the filters cut are among the first tokens `order` of the row, else -1."""
    scale, furthest = settings[[SCALE, MIN_P]].view(np.float32)
    top_k, top_p = int(settings[TOP_K]), int(settings[TOP_P])
    n, n_kept = len(order), len(away)
    if 0 < top_k < n_kept:
        if n < top_k:
            return -1
        n_kept = top_k
    if top_p:
        cumulative = np.cumsum(weights(away[order[:n_kept]], LOG2_E))
        total = int(cumulative[-1]) if n_kept <= n else total_weight(away, LOG2_E)
        least = -(-total * top_p >> 32)
        n_kept = min(n_kept, 1 + int(np.searchsorted(cumulative, np.uint64(least))))
    if furthest < np.inf:
        n_kept = min(n_kept, int(np.count_nonzero(away <= furthest)))
    cumulative = np.cumsum(weights(away[order[:n_kept]], scale))
    if n_kept == len(away) > n:
        total = total_weight(away, scale)
    elif n_kept <= n:
        total = int(cumulative[-1])
    else:
        return -1
    drawn = random_bits(settings[SEED : SEED + 2], position) * total >> 64
    place = int(np.searchsorted(cumulative, np.uint64(drawn), side="right"))
    return int(order[place]) if place < len(cumulative) else -1


def weights(away: Floats, scale: np.float32) -> Weights:
    """2^(ONE - scale * away), rounded down, with the shader's very steps: uint64, of distances from the best logit."""
    powers = np.minimum(away * scale, np.float32(ONE + 1))
    whole = np.floor(powers)
    part = powers - whole
    value = np.full_like(part, _POWERS[-1])
    for factor in _POWERS[-2::-1]:
        value = value * part + factor
    value = value * part + np.float32(1)
    fixed = (value * np.float32(1 << 24)).astype(np.uint64) << np.uint64(ONE - 24)
    shifted: Weights = fixed >> whole.astype(np.uint64)
    return np.where(powers < ONE + 1, shifted, np.uint64(0))


def total_weight(away: Floats, scale: np.float32) -> int:
    return int(weights(away, scale).sum())


def greatest(values: NDArray[Any], n: int) -> NDArray[np.intp]:
    """Indices of the n greatest values, greatest first; equal ones by index."""
    chosen = top_k(n, values)
    return chosen[np.argsort(-values[chosen], kind="stable")]


def top_k(k: int, values: NDArray[Any]) -> NDArray[np.intp]:
    """Indices of the k greatest values (all when k is 0), in order; the lowest indices win ties."""
    n = len(values)
    if k == 0 or k >= n:
        return np.arange(n)
    least = np.partition(values, n - k)[n - k]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: k - len(above)]
    return np.sort(np.concatenate([above, equal]))


def random_bits(key: NDArray[np.uint32], position: int) -> int:
    """64 random bits of a seed (its two halves) and a position: Philox-4x32-10 (Salmon et al. 2011)."""
    a, b, _, _ = philox((position & 0xFFFFFFFF, 0, 0, 0), (int(key[0]), int(key[1])))
    return b << 32 | a


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The block of four 32-bit words that a counter and a key stand for."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ k0, q & 0xFFFFFFFF, p >> 32 ^ d ^ k1, p & 0xFFFFFFFF
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return a, b, c, d


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))
