"""What the NumPy fallback's own forms of ops share: scratch arrays, and functions that write into arrays given to them.

An op with such a form has `Op.prepare`; its `reference` stays the definition, which the tests compare it with. After
a product has streamed the weights through the caches every call and every new array costs several times what it costs
alone, so these forms make few calls and no arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan, sqrt

import numpy as np

from vkbackend.device.base import Array

Run = Callable[[], None]


class Workspace:
    """float32 scratch arrays by name and shape, for all nodes of a program: they run one after the other."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, tuple[int, ...]], Array] = {}

    def array(self, name: str, *shape: int) -> Array:
        """Scratch with undefined contents; whoever asks for the same name and shape gets the same memory."""
        key = (name, shape)
        if key not in self._arrays:
            self._arrays[key] = np.empty(shape, np.float32)
        return self._arrays[key]


def sigmoid_to(x: Array, out: Array) -> None:
    """out = 1 / (1 + exp(-x)); exp may overflow to infinity, which gives 0."""
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, 1, out=out)
    np.reciprocal(out, out=out)


def silu_to(x: Array, out: Array) -> None:
    """out = x / (1 + exp(-x)), x and out apart."""
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, 1, out=out)
    np.divide(x, out, out=out)


def rms_rows_to(x: Array, eps: float, w: Array, out: Array) -> None:
    """out = rows of x / sqrt(mean(x^2) + eps) * w, for a few rows [n_rows, n]."""
    n = x.shape[1]
    for row, to in zip(x, out, strict=True):
        mean = float(np.dot(row, row)) / n + eps
        np.multiply(row, 1 / sqrt(mean) if mean > 0 else nan, out=to)  # zeros without eps: 0 / 0
        np.multiply(to, w, out=to)
