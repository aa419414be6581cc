"""Verification: the longest matching prefix, and the exact distribution of plain sampling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkbackend.spec.sampling import Sampler, Sampling, distribution
from vkbackend.spec.verify import choose_greedy, choose_sampled, verify


def test_greedy_prefix(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        n = int(rng.integers(0, 8))
        truth = rng.integers(0, 3, n + 1).astype(np.int32)
        drafts = rng.integers(0, 3, n).tolist()
        matching = 0
        while matching < n and drafts[matching] == truth[matching]:
            matching += 1
        assert verify(drafts, [], choose_greedy(truth)) == [*drafts[:matching], int(truth[matching])]


def test_temperature_zero_is_greedy(seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal((5, 20)).astype(np.float32)
    best = np.argmax(logits, 1).astype(np.int32)
    for drafts in (best[:4].tolist(), [*best[:2].tolist(), (best[2] + 1) % 20, best[3]], []):
        sampled = verify(drafts, [], choose_sampled(logits, Sampler(Sampling())))
        assert sampled == verify(drafts, [], choose_greedy(best))


def test_sampled_tokens_follow_the_true_distribution(seed: int) -> None:
    """Accepted with probability p(d), drawn from the residual on rejection, and so distributed as without drafts."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((3, 6)) * 1.5).astype(np.float32)
    settings = Sampling(0.8, top_k=5, seed=int(rng.integers(1 << 31)))
    p = [distribution(settings, row) for row in logits]
    drafts = [int(np.argmax(p[0])), int(np.argsort(p[1])[-2])]
    sampler, n = Sampler(settings), 30_000
    runs = [verify(drafts, [], choose_sampled(logits, sampler)) for _ in range(n)]

    first = np.bincount([r[0] for r in runs], minlength=6)
    assert_follows(first, p[0])
    accepted = [r for r in runs if len(r) > 1]
    assert all(r[0] == drafts[0] for r in accepted)
    assert_follows(np.array([len(accepted), n - len(accepted)]), np.array([p[0][drafts[0]], 1 - p[0][drafts[0]]]))
    rejected = np.bincount([r[0] for r in runs if len(r) == 1], minlength=6)
    assert_follows(rejected, residual(p[0], drafts[0]))
    assert_follows(np.bincount([r[1] for r in accepted], minlength=6), p[1])
    assert_follows(np.bincount([r[2] for r in accepted if len(r) == 3], minlength=6), p[2])


def test_random_numbers_are_spent_as_without_drafts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((40, 10)).astype(np.float32)
    settings = Sampling(1.0, repeat_penalty=1.4, seed=seed)
    plain_sampler, plain = Sampler(settings), list[int]()
    for row in logits:
        plain.append(plain_sampler.sample(row, plain))
    sampler, got = Sampler(settings), list[int]()
    while len(got) < 36:
        drafts = rng.integers(0, 10, 3).tolist()
        if rng.random() < 0.5:
            drafts = plain[len(got) : len(got) + 3]
        got += verify(drafts, got, choose_sampled(logits[len(got) :], sampler))
    assert got == plain[: len(got)]


def residual(p: NDArray[np.float64], draft: int) -> NDArray[np.float64]:
    rest = p.copy()
    rest[draft] = 0
    rest /= rest.sum()
    return rest


def assert_follows(counts: NDArray[np.int64], p: NDArray[np.float64]) -> None:
    """A chi-square test whose bound a right sampler exceeds about once in a million runs."""
    n, possible = counts.sum(), p > 0
    assert n > 500
    assert np.all(counts[~possible] == 0)
    chi2 = float(np.sum((counts[possible] - n * p[possible]) ** 2 / (n * p[possible])))
    freedom = int(possible.sum()) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 20
