"""L2 norm of every head: `y = x / sqrt(sum(x^2) + eps)` over the last axis, as gated delta nets do to q and k.

(Yang, Kautz, Hatamizadeh 2024.) The op by itself; the model runs it inside `delta_net_mixer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, spread

KERNEL = Kernel("l2_norm", 128)
TEAMS = 16  # heads of a workgroup: a team of 8 lanes each (include/lanes.glsl)


@dataclass(frozen=True)
class Attrs:
    eps: float


def l2_norm(g: Graph, x: Tensor, eps: float) -> Tensor:
    """Scales every head of x [n_rows, n_heads, head_dim] to length 1; returns a contiguous tensor of that shape.

    Rows and heads may be strided, the last axis must be contiguous.
    """
    check(x.ndim == 3, "l2_norm", f"x must be (n_rows, n_heads, head_dim), got shape {x.shape}")
    check(x.strides[2] == 1 or x.shape[2] == 1, "l2_norm", f"x's last axis has stride {x.strides[2]}; 1 is needed")
    y = g.temp("l2_norm", x.shape)
    g.add(OP, [x], [y], Attrs(eps))
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    (x,) = inputs
    outputs[0][...] = x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True) + node.attrs.eps)


def _lower(node: Node, limits: Limits) -> Lowering:
    (x,), (y,) = node.inputs, node.outputs
    n_rows, n_heads, head_dim = x.shape
    push = (
        At(x), x.strides[0], x.strides[1], At(y),
        n_rows * n_heads, n_heads, head_dim, float(node.attrs.eps),
    )  # fmt: skip
    groups = spread(-(-n_rows * n_heads // TEAMS), limits.max_groups[0])
    return [[Dispatch(KERNEL, (Bind(x, "r"), Bind(y, "w")), push, groups)]]


def _cases() -> list[Case]:
    def case(n_rows: int, n_heads: int, head_dim: int, pad: int = 0) -> Case:
        def build(b: CaseBuilder) -> None:
            width = n_heads * head_dim
            x = b.input(b.normal(n_rows, width + pad)).narrow(1, pad, width)
            b.output(l2_norm(b.graph, x.reshape(n_rows, n_heads, head_dim), 1e-6))

        return Case(f"n_rows={n_rows} n_heads={n_heads} head_dim={head_dim} pad={pad}", build)

    def tiny(b: CaseBuilder) -> None:
        x = b.normal(4, 3, 32)
        x[1, 2] *= 1e-4  # eps decides here
        x[2, 0] = 0
        b.output(l2_norm(b.graph, b.input(x), 1e-6))

    sizes = ((1, 16, 128, 0), (3, 5, 64, 7), (17, 2, 32, 0), (2, 3, 100, 1), (5, 1, 1, 0), (70, 4, 16, 4))
    return [case(*size) for size in sizes] + [Case("vectors of almost no length", tiny)]


OP = Op("l2_norm", _reference, _lower, lambda: [KERNEL], _cases)
