"""100,000 verifications of sampled text on a vocabulary of 10: the tokens follow p, with drafts as without."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vkbackend.spec.sampling import Sampler, Sampling, distribution
from vkbackend.spec.verify import choose_sampled, verify

N_SAMPLES, N_VOCAB = 100_000, 10
CRITICAL = 52.0  # chi-squared with 9 degrees of freedom exceeds this with probability 5e-8

Rule = Callable[[list[int], Sampler], list[int]]


def chi_squared(counts: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    expected = p * counts.sum()
    return float(np.sum((counts - expected) ** 2 / expected))


def second_tokens(logits: NDArray[np.float32], drafts: list[int], seed: int, rule: Rule) -> NDArray[np.int64]:
    """How often each token came first after verification of the drafts."""
    sampler = Sampler(Sampling(temperature=0.9, seed=seed))
    counts = np.zeros(N_VOCAB, np.int64)
    for _ in range(N_SAMPLES):
        counts[rule(drafts, sampler)[0]] += 1
    return counts


def test_tokens_follow_p(rng: np.random.Generator) -> None:
    logits = rng.normal(0, 1.2, (2, N_VOCAB)).astype(np.float32)
    p = distribution(Sampling(temperature=0.9), logits[0])
    likely, unlikely = int(np.argmax(p)), int(np.argmin(p))

    def exact(drafts: list[int], sampler: Sampler) -> list[int]:
        return verify(drafts, [], choose_sampled(logits, sampler))

    def too_eager(drafts: list[int], sampler: Sampler) -> list[int]:
        """A wrong rule: a draft that is likely enough stands without a draw."""
        return drafts[:1] if drafts and p[drafts[0]] > 0.05 else exact(drafts, sampler)

    for drafts in ([], [likely], [unlikely]):
        counts = second_tokens(logits, drafts, int(rng.integers(1 << 31)), exact)
        assert chi_squared(counts, p) < CRITICAL, (drafts, counts)
    # The test can fail: the wrong rule is far outside.
    assert chi_squared(second_tokens(logits, [likely], 1, too_eager), p) > 10 * CRITICAL
