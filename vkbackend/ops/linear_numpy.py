"""`linear` as the NumPy fallback runs it: BLAS products that write to where the result belongs.

Reading the weights is nearly all of a decode step's time. A few rows go through matrix-vector products, in turns while
a block of the weights is in the cache. Up to 8 rows that is faster than BLAS's matrix products (at 16 it takes 1.5
times as long), and a row's result does not depend on the rows beside it, as on the other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from vkbackend.device.base import Array
from vkbackend.device.numpy_parts import Run, Workspace, rms_rows_to, silu_to

FEW_ROWS = 16  # of x, as many as other devices promise this for; more go through one matrix product
BLOCK_WORDS = 1 << 20  # weights that several rows share in the cache; a block is one BLAS call per row


def prepared_linear(
    x: Array,
    parts: Sequence[Array],
    y: Array,
    work: Workspace,
    *,
    norm: Array | None,
    squares: Array | None,
    residual: Array | None,
    eps: float,
    swiglu: bool,
) -> Run:
    """Operands as in `linear`; y [n_rows, n_out] is filled by each call of what is returned."""
    feed, steps = _before(x, norm, squares, eps, work)
    at = 0
    for w in parts:
        width = w.shape[0] // 2 if swiglu else w.shape[0]
        out = y[:, at : at + width]
        at += width
        if swiglu:
            both = work.array("linear: gate and up", x.shape[0], 2 * width)
            steps += _products(feed, w, both)
            steps.append(partial(_swiglu, both[:, 0::2], both[:, 1::2], work.array("linear: silu", *out.shape), out))
        else:
            steps += _products(feed, w, out)
    if residual is not None:
        steps.append(partial(np.add, y, residual, out=y))

    def run() -> None:
        for step in steps:
            step()

    return run


def _before(
    x: Array, norm: Array | None, squares: Array | None, eps: float, work: Workspace
) -> tuple[Array, list[Run]]:
    """What is multiplied with the weights, and the steps that make it."""
    if norm is not None:
        feed = work.array("linear: x", *x.shape)
        return feed, [partial(rms_rows_to, x, eps, norm, feed)]
    if squares is not None:
        feed = work.array("linear: x", *x.shape)
        n_rows, n_groups, _ = squares.shape
        rms = work.array("linear: rms of groups", n_rows, n_groups, 1)
        grouped = x.reshape(n_rows, n_groups, -1)
        return feed, [partial(_divide_groups, grouped, squares, eps, rms, feed.reshape(grouped.shape))]
    return x, []


def _divide_groups(groups: Array, squares: Array, eps: float, rms: Array, out: Array) -> None:
    np.add.reduce(squares, axis=-1, keepdims=True, out=rms)
    np.divide(rms, groups.shape[2], out=rms)
    np.add(rms, eps, out=rms)
    np.sqrt(rms, out=rms)
    np.divide(groups, rms, out=out)


def _products(x: Array, w: Array, out: Array) -> list[Run]:
    """The steps that fill out [n_rows, n_out] with x w^T."""
    if x.shape[0] > FEW_ROWS:
        return [partial(np.matmul, x, w.T, out=out)]
    rows = max(1, BLOCK_WORDS // w.shape[1])
    return [
        partial(np.dot, w[first : first + rows], row, out=to[first : first + rows])
        for first in range(0, w.shape[0], rows)
        for row, to in zip(x, out, strict=True)
    ]


def _swiglu(gate: Array, up: Array, silu: Array, out: Array) -> None:
    silu_to(gate, silu)
    np.multiply(silu, up, out=out)
