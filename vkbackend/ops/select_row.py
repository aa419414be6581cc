"""One row of a matrix, chosen on the device."""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.device.base import Limits
from vkbackend.graph import I32, Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check

KERNEL = Kernel("select_row", 128)


def select_row(g: Graph, x: Tensor, index: Tensor) -> Tensor:
    """Row index[0] of x [n_rows, n] as [1, n]. index i32 [1]; outside 0..n_rows - 1 it means the nearest row."""
    check(x.ndim == 2 and x.strides[1] == 1, "select_row", f"x must be rows of contiguous numbers, got shape {x.shape}")
    check(index.shape == (1,) and index.dtype == I32, "select_row", f"index must be i32 [1], got {index.shape}")
    y = g.temp("select_row", (1, x.shape[1]))
    g.add(OP, [x, index], [y])
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    x, index = inputs
    outputs[0][0] = x[min(max(int(index[0]), 0), len(x) - 1)]


def _lower(node: Node, limits: Limits) -> Lowering:
    (x, index), (y,) = node.inputs, node.outputs
    push = (At(x), x.strides[0], x.shape[0], At(index), At(y), x.shape[1])
    return [[Dispatch(KERNEL, (Bind(x, "r"), Bind(index, "r"), Bind(y, "w")), push, (1, 1, 1))]]


def _cases() -> list[Case]:
    def case(n_rows: int, n: int, index: int) -> Case:
        def build(b: CaseBuilder) -> None:
            b.output(select_row(b.graph, b.input(b.normal(n_rows, n)), b.input(b.rng.integers(index, index + 1, 1))))

        return Case(f"n_rows={n_rows} n={n} index={index}", build)

    return [case(1, 5, 0), case(4, 512, 3), case(6, 1000, 2), case(3, 64, 7)]


OP = Op("select_row", _reference, _lower, lambda: [KERNEL], _cases)
