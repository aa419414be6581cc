"""Verification of drafted tokens: how speculation stays exact.

The trunk has decoded [id_last, d1 .. dn] in one batch, so row i holds the true distribution p of the token that d(i+1)
guesses. Drafts are greedy (their own distribution q is 1 at d), for which speculative sampling (Leviathan et al. 2023;
Chen et al. 2023) says: accept d with probability min(1, p(d) / q(d)) = p(d), else draw from the residual, which
is p without d, scaled to sum to 1.

Drawing x from p and comparing does exactly that with one random number: x equals d with probability p(d), and given
that it does not, x is distributed as the residual. And as a token's random number belongs to its position (`Sampler`),
a seed gives the same text with speculation as without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vkbackend.spec.sampling import Sampler

Choose = Callable[[int, Sequence[int]], int]  # (row, history) -> the token that follows


def verify(drafts: Sequence[int], history: Sequence[int], choose: Choose) -> list[int]:
    """The tokens that one verification yields: the accepted drafts, then one more.

    That one is the first mismatch's own token, or the bonus token after a fully accepted run. So the result has
    1 to len(drafts) + 1 tokens, and all but the last are drafts.
    """
    out: list[int] = []
    for row in range(len(drafts) + 1):
        token = choose(row, [*history, *out])
        out.append(token)
        if row == len(drafts) or token != drafts[row]:
            break
    return out


def choose_sampled(logits: NDArray[np.float32], sampler: Sampler, first: int | None = None) -> Choose:
    """Tokens drawn by a sampler from logits [n_drafts + 1, n_vocab]; `first`: the position of row 0's token.

    Without it positions are counted by the sampler.
    """
    return lambda row, history: sampler.sample(logits[row], history, None if first is None else first + row)


def choose_greedy(argmax: NDArray[np.int32]) -> Choose:
    """The greedy tokens [n_drafts + 1] as the device found them."""
    return lambda row, history: int(argmax[row])
