"""SwiGLU of separate gate and up rows: `y = silu(gate) * up` (Shazeer 2020).

`linear` does the same inside the product where gate and up rows can be interleaved; this op is for weights where they
can not, because the file keeps them in different quantisations.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.device.base import Limits
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, silu, spread

KERNEL = Kernel("swiglu", 128)


def swiglu(g: Graph, gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [n_rows, n], rows may be strided; returns [n_rows, n]."""
    check(gate.ndim == 2 and gate.shape == up.shape, "swiglu", f"gate {gate.shape} and up {up.shape} must be alike")
    for name, t in (("gate", gate), ("up", up)):
        check(t.strides[1] == 1 or t.shape[1] == 1, "swiglu", f"rows of {name} must be contiguous")
    y = g.temp("swiglu", gate.shape)
    g.add(OP, [gate, up], [y])
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    gate, up = inputs
    outputs[0][...] = silu(gate) * up


def _lower(node: Node, limits: Limits) -> Lowering:
    (gate, up), (y,) = node.inputs, node.outputs
    return [[swiglu_dispatch(gate, up, y, limits)]]


def swiglu_dispatch(gate: Tensor, up: Tensor, y: Tensor, limits: Limits) -> Dispatch:
    """The dispatch that fills y [n_rows, n]: also a stage of other ops."""
    n_rows, n = gate.shape
    push = (At(gate), gate.strides[0], At(up), up.strides[0], At(y), n, n_rows * n)
    binds = (Bind(gate, "r"), Bind(up, "r"), Bind(y, "w"))
    return Dispatch(KERNEL, binds, push, spread(-(-n_rows * n // KERNEL.local_size), limits.max_groups[0]))


def _cases() -> list[Case]:
    def case(n_rows: int, n: int, pad: int = 0, reach: float = 2.0) -> Case:
        def build(b: CaseBuilder) -> None:
            both = b.input(b.normal(n_rows, 2 * n + pad, scale=reach))
            b.output(swiglu(b.graph, both.narrow(1, 0, n), both.narrow(1, n + pad, n)))

        return Case(f"n_rows={n_rows} n={n} pad={pad} reach={reach:g}", build)

    return [case(1, 3584), case(3, 100, pad=7), case(16, 64), case(70, 129), case(2, 1), case(2, 300, reach=60.0)]


OP = Op("swiglu", _reference, _lower, lambda: [KERNEL], _cases)
