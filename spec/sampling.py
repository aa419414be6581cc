"""Sampling: from a row of logits to a probability distribution, and from there to a token.

The filters run in llama.cpp's default order: repeat penalty, top-k, top-p, min-p, temperature. So top-p and min-p
look at the distribution before the temperature is applied.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkbackend.draw import FIRST_LOOK, Ints, draw, greatest, settings_words, top_k
from vkbackend.errors import ContextError, VkBackendError

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy.

    temperature: 0 takes the most probable token (the lowest id among equals); else logits are divided by it.
    top_k: keep the k most probable tokens, 0 keeps all. top_p: keep the fewest most probable tokens whose
    probabilities sum to at least top_p. min_p: drop tokens less probable than min_p times the most probable.
    repeat_penalty: logits of tokens among the last `repeat_last_n` are divided by it (multiplied when negative).
    seed: of the random numbers (modulo 2^64); None takes one from the operating system.
    Raises `ContextError` naming the field, the number and the allowed range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None
    repeat_last_n: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "seed" and self.seed is None:
                continue
            _check_number(field.name, getattr(self, field.name), whole=field.name in _WHOLE)
        _check_range("temperature", self.temperature, self.temperature >= 0, "0 or more")
        _check_range("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check_range("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 up to 1 (1: off)")
        _check_range("min_p", self.min_p, 0 <= self.min_p <= 1, "0 (off) to 1")
        _check_range("repeat_penalty", self.repeat_penalty, self.repeat_penalty > 0, "above 0 (1: off)")
        _check_range("repeat_last_n", self.repeat_last_n, self.repeat_last_n >= 0, "0 (off) or more")
        if self.seed is not None:
            _check_range("seed", self.seed, self.seed >= 0, "0 or more, or None")

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the plain argmax of the logits, so that the device can make it."""
        return self.temperature == 0 and not self.looks_back

    @property
    def looks_back(self) -> bool:
        """Whether the choice depends on the tokens before it, so that only the host can make it."""
        return self.repeat_penalty != 1 and self.repeat_last_n > 0


_WHOLE = {"top_k", "seed", "repeat_last_n"}


def _check_number(name: str, value: object, whole: bool) -> None:
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds) or not _is_finite(value):
        raise ContextError(f"sampling: {name} is {value!r}; a finite {'whole ' if whole else ''}number is needed")


def _is_finite(value: Any) -> bool:
    """Whether a number is one in float64, or whole, however large."""
    return isinstance(value, int | np.integer) or math.isfinite(value)


def _check_range(name: str, value: float, ok: bool, allowed: str) -> None:
    if not ok:
        raise ContextError(f"sampling: {name} is {value}; allowed is {allowed}")


def distribution(sampling: Sampling, logits: Floats, history: Sequence[int] = ()) -> Doubles:
    """The probabilities from which the next token is drawn.

    logits: float [n_vocab]. history: the tokens so far, oldest first (for the repeat penalty). Returns float64
    [n_vocab] that sums to 1; with temperature 0 all of it lies on one token. Raises `VkBackendError` when the
    logits hold NaN or infinity where a number is needed.
    """
    adjusted = _penalise(sampling, np.asarray(logits, np.float64), history)
    best = _best(adjusted)
    result = np.zeros(len(adjusted))  # [n_vocab]
    if sampling.temperature == 0:
        result[best] = 1.0
        return result
    keep = _top_p(sampling.top_p, adjusted, top_k(sampling.top_k, adjusted))
    if sampling.min_p > 0:
        keep = keep[adjusted[keep] >= adjusted[best] + np.log(sampling.min_p)]
    weights = np.exp((adjusted[keep] - adjusted[best]) / sampling.temperature)
    result[keep] = weights / weights.sum()
    return result


def _best(logits: NDArray[Any]) -> int:
    """The greatest logit's token. Raises `VkBackendError` when that is not a number, or any logit NaN."""
    best = int(np.argmax(logits))  # NaN comes first, so it is found here
    if not np.isfinite(logits[best]):
        raise VkBackendError(
            f"the model returned {logits[best]} as logit of token {best}, a finite number is needed: its output is not "
            "usable; the file may be damaged, or the driver at fault (see: vkbackend test-ops)"
        )
    return best


def _penalise(sampling: Sampling, logits: Doubles, history: Sequence[int]) -> Doubles:
    if sampling.repeat_penalty == 1 or sampling.repeat_last_n == 0 or not len(history):
        return logits
    out = logits.copy()
    seen = np.unique(np.asarray(history[-sampling.repeat_last_n :], np.intp))
    out[seen] = np.where(out[seen] > 0, out[seen] / sampling.repeat_penalty, out[seen] * sampling.repeat_penalty)
    return out


def _top_p(p: float, logits: Doubles, keep: NDArray[np.intp]) -> NDArray[np.intp]:
    """The fewest most probable of `keep` that together have at least p; at least one."""
    if p >= 1:
        return keep
    values = logits[keep]
    weights = np.exp(values - values.max())
    total = weights.sum()
    # A whole vocabulary is dear to sort, and its first few hundred tokens nearly always hold p already.
    for n in (FIRST_LOOK, len(keep)):
        order = greatest(values, n)
        cumulative = np.cumsum(weights[order])
        if cumulative[-1] >= p * total or n >= len(keep):
            break
    n_kept = int(np.searchsorted(cumulative, p * total)) + 1
    return keep[np.sort(order[:n_kept])]


class Sampler:
    """Draws tokens: each with the random number that belongs to the seed and to the token's position in the text.

    So the same seed gives the same text with and without speculation, and wherever tokens are drawn: the device draws
    the very same ones (vkbackend/draw.py).
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._next = 0
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        s = sampling
        self._words = settings_words(int(seed), s.temperature, s.top_k, s.top_p, s.min_p) if s.temperature else None

    @property
    def device_words(self) -> Ints | None:
        """The settings as the device takes them; None where it can not draw (`looks_back`) or the choice is greedy."""
        return None if self.sampling.looks_back else self._words

    def sample(self, logits: Floats, history: Sequence[int] = (), position: int | None = None) -> int:
        """A token drawn from `distribution(sampling, logits, history)`, but for float32 rounding of the probabilities.

        position: how many tokens of the text stand before it; default: one more than last time, from 0.
        """
        position = self._next if position is None else position
        self._next = position + 1
        adjusted = _penalise(self.sampling, np.asarray(logits, np.float64), history)
        if self._words is None:
            return _best(adjusted)
        with np.errstate(over="ignore"):
            rounded = adjusted.astype(np.float32)
        token = draw(rounded, self._words, position)
        return _best(rounded) if token < 0 else token
