"""The sum of two tensors: a residual connection by itself (`linear` adds residuals inside the product)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, spread

KERNEL = Kernel("add", 128)


def add(g: Graph, a: Tensor, b: Tensor) -> Tensor:
    """a + b for a, b [n_rows, n], rows may be strided; returns [n_rows, n]."""
    check(a.ndim == 2 and a.shape == b.shape, "add", f"a {a.shape} and b {b.shape} must be matrices of one shape")
    for name, t in (("a", a), ("b", b)):
        check(t.strides[1] == 1 or t.shape[1] == 1, "add", f"rows of {name} must be contiguous")
    y = g.temp("add", a.shape)
    g.add(OP, [a, b], [y])
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    np.add(inputs[0], inputs[1], out=outputs[0])


def _lower(node: Node, limits: Limits) -> Lowering:
    (a, b), (y,) = node.inputs, node.outputs
    n_rows, n = a.shape
    push = (At(a), a.strides[0], At(b), b.strides[0], At(y), n, n_rows * n)
    binds = (Bind(a, "r"), Bind(b, "r"), Bind(y, "w"))
    return [[Dispatch(KERNEL, binds, push, spread(-(-n_rows * n // KERNEL.local_size), limits.max_groups[0]))]]


def _cases() -> list[Case]:
    def case(n_rows: int, n: int, pad: int = 0) -> Case:
        def build(b: CaseBuilder) -> None:
            left = b.input(b.normal(n_rows, n + pad)).narrow(1, pad, n)
            b.output(add(b.graph, left, b.input(b.normal(n_rows, n))))

        return Case(f"n_rows={n_rows} n={n} pad={pad}", build)

    def twice(b: CaseBuilder) -> None:
        x = b.input(b.normal(3, 50))
        b.output(add(b.graph, x, x))

    return [case(1, 1024), case(3, 100, pad=7), case(70, 129), case(2, 1), Case("a tensor to itself", twice)]


OP = Op("add", _reference, _lower, lambda: [KERNEL], _cases)
