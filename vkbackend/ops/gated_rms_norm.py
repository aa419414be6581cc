"""Gated RMS norm of every head: `y = x / sqrt(mean(x^2) + eps) * w * silu(z)` over the last axis.

The output gate of a gated-delta-net layer (Yang, Kautz, Hatamizadeh 2024). The op by itself; the model spreads it over
`delta_net_mixer` and the product that follows (`linear`, group_squares).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, silu, spread

KERNEL = Kernel("gated_rms_norm", 128)
TEAMS = 16  # heads of a workgroup: a team of 8 lanes each (include/lanes.glsl)


@dataclass(frozen=True)
class Attrs:
    eps: float


def gated_rms_norm(g: Graph, x: Tensor, z: Tensor, w: Tensor, eps: float) -> Tensor:
    """Normalises every head of x [n_rows, n_heads, head_dim], scales it by w [head_dim] and gates it by z (x's shape).

    Returns a contiguous tensor of x's shape. Rows and heads of x and z may be strided, their last axes are contiguous.
    """
    op = "gated_rms_norm"
    check(x.ndim == 3, op, f"x must be (n_rows, n_heads, head_dim), got shape {x.shape}")
    check(z.shape == x.shape, op, f"z must have x's shape {x.shape}, got {z.shape}")
    for name, t in (("x", x), ("z", z)):
        check(t.strides[2] == 1 or t.shape[2] == 1, op, f"{name}'s last axis has stride {t.strides[2]}; 1 is needed")
    check(w.shape == x.shape[2:] and w.is_contiguous, op, f"w must have shape {x.shape[2:]}, got {w.shape}")
    y = g.temp(op, x.shape)
    g.add(OP, [x, z, w], [y], Attrs(eps))
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    x, z, w = inputs
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    outputs[0][...] = x / np.sqrt(mean + node.attrs.eps) * w * silu(z)


def _lower(node: Node, limits: Limits) -> Lowering:
    (x, z, w), (y,) = node.inputs, node.outputs
    n_rows, n_heads, head_dim = x.shape
    push = (
        At(x), x.strides[0], x.strides[1], At(z), z.strides[0], z.strides[1], At(w), At(y),
        n_rows * n_heads, n_heads, head_dim, float(node.attrs.eps),
    )  # fmt: skip
    binds = (Bind(x, "r"), Bind(z, "r"), Bind(w, "r"), Bind(y, "w"))
    return [[Dispatch(KERNEL, binds, push, spread(-(-n_rows * n_heads // TEAMS), limits.max_groups[0]))]]


def _cases() -> list[Case]:
    def case(n_rows: int, n_heads: int, head_dim: int, pad: int = 0, reach: float = 1.0) -> Case:
        def build(b: CaseBuilder) -> None:
            width = n_heads * head_dim
            x = b.input(b.normal(n_rows, n_heads, head_dim))
            z = b.input(b.normal(n_rows, width + pad, scale=reach)).narrow(1, pad, width)
            w = b.input(b.uniform(0.5, 1.5, head_dim))
            b.output(gated_rms_norm(b.graph, x, z.reshape(*x.shape), w, 1e-6))

        return Case(f"n_rows={n_rows} n_heads={n_heads} head_dim={head_dim} pad={pad} reach={reach:g}", build)

    return [
        case(1, 16, 128), case(3, 5, 64, pad=7), case(17, 2, 32), case(2, 3, 100, pad=1),
        case(5, 1, 1), case(70, 4, 16, pad=4), case(2, 4, 128, reach=60.0),
    ]  # fmt: skip


OP = Op("gated_rms_norm", _reference, _lower, lambda: [KERNEL], _cases)
