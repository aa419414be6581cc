"""The two gates of a gated-delta-net head: log decay `g = softplus(alpha + dt_bias) * a` and step size `sigmoid(beta)`.

(Yang, Kautz, Hatamizadeh 2024; the decay is Mamba 2's, Dao and Gu 2024.) `a` is negative, so exp(g) is in (0, 1).
The op by itself; the model runs it inside `delta_net_mixer`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, sigmoid, spread

KERNEL = Kernel("delta_gates", 128)


def delta_gates(g: Graph, alpha: Tensor, beta: Tensor, dt_bias: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (log decay, step size), each [n_rows, n_heads].

    alpha, beta [n_rows, n_heads], raw projections, rows may be strided. dt_bias, a [n_heads].
    """
    op = "delta_gates"
    check(alpha.ndim == 2 and alpha.shape == beta.shape, op, f"alpha {alpha.shape} and beta {beta.shape} must be alike")
    for name, t in (("alpha", alpha), ("beta", beta)):
        check(t.strides[1] == 1 or t.shape[1] == 1, op, f"rows of {name} must be contiguous")
    n_heads = alpha.shape[1]
    for name, t in (("dt_bias", dt_bias), ("a", a)):
        check(t.shape == (n_heads,) and t.is_contiguous, op, f"{name} must have shape ({n_heads},), got {t.shape}")
    decay, rate = g.temp("delta_gates decay", alpha.shape), g.temp("delta_gates rate", alpha.shape)
    g.add(OP, [alpha, beta, dt_bias, a], [decay, rate])
    return decay, rate


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    alpha, beta, dt_bias, a = inputs
    outputs[0][...] = np.logaddexp(0, alpha + dt_bias) * a
    outputs[1][...] = sigmoid(beta)


def _lower(node: Node, limits: Limits) -> Lowering:
    (alpha, beta, dt_bias, a), (decay, rate) = node.inputs, node.outputs
    n_rows, n_heads = alpha.shape
    push = (
        At(alpha), alpha.strides[0], At(beta), beta.strides[0], At(dt_bias), At(a), At(decay), At(rate),
        n_heads, n_rows * n_heads,
    )  # fmt: skip
    binds = (*(Bind(t, "r") for t in node.inputs), Bind(decay, "w"), Bind(rate, "w"))
    groups = spread(-(-n_rows * n_heads // KERNEL.local_size), limits.max_groups[0])
    return [[Dispatch(KERNEL, binds, push, groups)]]


def _cases() -> list[Case]:
    def case(n_rows: int, n_heads: int, reach: float = 4.0) -> Case:
        def build(b: CaseBuilder) -> None:
            x = b.input(b.uniform(-reach, reach, n_rows, 2 * n_heads + 1))
            alpha, beta = x.narrow(1, 1, n_heads), x.narrow(1, 1 + n_heads, n_heads)
            dt_bias, a = b.input(b.uniform(-2, 2, n_heads)), b.input(-b.uniform(0.01, 4, n_heads))
            for result in delta_gates(b.graph, alpha, beta, dt_bias, a):
                b.output(result)

        return Case(f"n_rows={n_rows} n_heads={n_heads} reach={reach:g}", build)

    return [case(1, 16), case(3, 48), case(70, 4), case(5, 1), case(2, 33, 200.0)]


OP = Op("delta_gates", _reference, _lower, lambda: [KERNEL], _cases)
