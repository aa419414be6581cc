"""RMS norm: y = x / sqrt(mean(x^2) + eps) * w over the last axis (Zhang and Sennrich 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, spread

KERNEL = Kernel("rms_norm", local_size=128)


@dataclass(frozen=True)
class Attrs:
    eps: float


def rms_norm(g: Graph, x: Tensor, w: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalises every row of x [n_rows, n] (rows may be strided) and scales it by w [n]; returns [n_rows, n].

    `out`, a view of that shape, receives the result in place of a fresh tensor.
    """
    check(x.ndim == 2 and x.strides[1] == 1, "rms_norm", f"x must be rows of contiguous numbers, got shape {x.shape}")
    check(w.shape == (x.shape[1],), "rms_norm", f"w must have shape ({x.shape[1]},) to match x, got {w.shape}")
    y = g.temp("rms_norm", x.shape) if out is None else out
    check(y.shape == x.shape and y.strides[1] == 1, "rms_norm", f"out must have x's shape {x.shape}, got {y.shape}")
    g.add(OP, [x, w], [y], Attrs(eps))
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    x, w = inputs
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    outputs[0][...] = x / np.sqrt(mean + node.attrs.eps) * w


def _lower(node: Node, limits: Limits) -> Lowering:
    (x, w), (y,) = node.inputs, node.outputs
    return [[rms_norm_dispatch(x, w, y, node.attrs.eps, limits)]]


def rms_norm_dispatch(x: Tensor, w: Tensor, y: Tensor, eps: float, limits: Limits) -> Dispatch:
    """The dispatch that writes the normalised rows of x [n_rows, n] to y: also a stage of other ops."""
    n_rows, n = x.shape
    push = (At(x), x.strides[0], At(w), At(y), y.strides[0], n, n_rows, float(eps))
    binds = (Bind(x, "r"), Bind(w, "r"), Bind(y, "w"))
    return Dispatch(KERNEL, binds, push, spread(n_rows, limits.max_groups[0]))


def _cases() -> list[Case]:
    def case(n_rows: int, n: int, pad: int = 0) -> Case:
        def build(b: CaseBuilder) -> None:
            x = b.input(b.normal(n_rows, n + pad)).narrow(1, pad, n)
            w = b.input(b.uniform(0.5, 1.5, n))
            b.output(rms_norm(b.graph, x, w, 1e-6))

        return Case(f"n_rows={n_rows} n={n} pad={pad}", build)

    return [case(1, 1024), case(3, 128), case(5, 100, pad=7), case(1, 1), case(70, 513)]


OP = Op("rms_norm", _reference, _lower, lambda: [KERNEL], _cases)
