"""Argmax over the last axis: the greedy token of every row of logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import I32, Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, counters, scratch, spread

KERNEL = Kernel("argmax", 128)
SPAN = 2048  # values one workgroup looks at


def argmax(g: Graph, x: Tensor, out: Tensor | None = None) -> Tensor:
    """Index of the largest value of every row of x [n_rows, n], i32 [n_rows].

    The lowest index wins ties and NaN never wins; a row of NaN only gives 0. `out`, a contiguous view of that shape,
    receives the result in place of a fresh tensor.
    """
    check(x.ndim == 2 and x.strides[1] == 1, "argmax", f"x must be rows of contiguous numbers, got shape {x.shape}")
    y = g.temp("argmax", (x.shape[0],), I32) if out is None else out
    fits = y.shape == (x.shape[0],) and y.dtype == I32 and y.is_contiguous
    check(fits, "argmax", f"out must be i32 ({x.shape[0]},), got {y.dtype} {y.shape}")
    g.add(OP, [x], [y])
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    x = inputs[0]
    filled = np.where(np.isnan(x), -np.inf, x)
    best = (filled == filled.max(axis=-1, keepdims=True)) & ~np.isnan(x)  # argmax of NaN as -inf could pick the NaN
    outputs[0][...] = np.argmax(best, axis=-1)


def _lower(node: Node, limits: Limits) -> Lowering:
    (x,), (y,) = node.inputs, node.outputs
    n_rows, n = x.shape
    n_spans = -(-n // SPAN)
    pairs = scratch("argmax pairs", (n_rows, n_spans, 2), I32)
    done = counters("argmax spans done", n_rows)
    push = (At(x), x.strides[0], n, SPAN, n_spans, At(pairs), At(done), At(y), n_rows)
    binds = (Bind(x, "r"), Bind(pairs, "rw"), Bind(done, "rw"), Bind(y, "w"))
    return [[Dispatch(KERNEL, binds, push, spread(n_rows * n_spans, limits.max_groups[0]))]]


def _cases() -> list[Case]:
    def case(n_rows: int, n: int, kind: str = "") -> Case:
        def build(b: CaseBuilder) -> None:
            x = b.normal(n_rows, n)
            if kind == "ties":
                x = np.round(x)
            if kind == "nan":
                x[:, :: max(2, n // 3)] = np.nan
            b.output(argmax(b.graph, b.input(x)))

        return Case(f"n_rows={n_rows} n={n} {kind}".rstrip(), build)

    sizes = ((1, 1), (3, 7), (16, 1024), (2, 4097), (1, 248320))
    return [case(r, n) for r, n in sizes] + [case(5, 3000, "ties"), case(4, 5000, "nan")]


OP = Op("argmax", _reference, _lower, lambda: [KERNEL], _cases)
