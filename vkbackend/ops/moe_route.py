"""Which experts a row goes to: the largest router logits, and their softmax weights made to sum to 1.

Softmax over all experts, the `n_used` largest, divided by their sum (Qwen3 MoE). As the sum over all experts cancels,
kernels take the softmax over the chosen logits only. Equal logits: the lower expert comes first; NaN counts as -inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import I32, Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, spread

KERNEL = Kernel("moe_route", 128)
MAX_EXPERTS = 1024  # logits that a workgroup keeps in shared memory
MAX_USED = 128  # one invocation each


def moe_route(g: Graph, logits: Tensor, n_used: int) -> tuple[Tensor, Tensor]:
    """The n_used best experts of every row of logits [n_rows, n_expert] (rows may be strided), best first.

    Returns their numbers i32 [n_rows, n_used] and weights [n_rows, n_used], which sum to 1 in each row.
    """
    check_router(logits, n_used, "moe_route")
    shape = (logits.shape[0], n_used)
    ids, weights = g.temp("moe_route: experts", shape, I32), g.temp("moe_route: weights", shape)
    g.add(OP, [logits], [ids, weights])
    return ids, weights


def check_router(logits: Tensor, n_used: int, op: str) -> None:
    """Raises `VkBackendError` where logits [n_rows, n_expert] and n_used do not fit the kernels."""
    check(logits.ndim == 2 and logits.strides[1] == 1, op, f"logits must be contiguous rows, got shape {logits.shape}")
    n_expert = logits.shape[1]
    check(n_expert <= MAX_EXPERTS, op, f"{n_expert} experts; at most {MAX_EXPERTS} are supported")
    most = min(n_expert, MAX_USED)
    check(1 <= n_used <= most, op, f"n_used is {n_used}; 1 .. {most} experts of a row are allowed")


def route(logits: Array, n_used: int) -> tuple[Array, Array]:
    """The reference: (experts, weights), each [n_rows, n_used]."""
    finite = np.where(np.isnan(logits), -np.inf, logits)
    ids = np.argsort(-finite, axis=-1, kind="stable")[:, :n_used]
    with np.errstate(invalid="ignore"):  # rows that are not finite get weights that are not
        e = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
        weights = np.take_along_axis(e / np.sum(e, axis=-1, keepdims=True), ids, axis=-1)
        return ids, weights / np.sum(weights, axis=-1, keepdims=True)


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    ids, weights = outputs
    ids[...], weights[...] = route(inputs[0], ids.shape[1])


def _lower(node: Node, limits: Limits) -> Lowering:
    ids, weights = node.outputs
    return [[route_dispatch(node.inputs[0], ids, weights, limits)]]


def route_dispatch(logits: Tensor, ids: Tensor, weights: Tensor, limits: Limits) -> Dispatch:
    """The dispatch that fills ids and weights [n_rows, n_used]: also a stage of other ops."""
    n_rows, n_used = ids.shape
    push = (At(logits), logits.strides[0], At(ids), At(weights), n_rows)
    binds = (Bind(logits, "r"), Bind(ids, "w"), Bind(weights, "w"))
    return Dispatch(KERNEL, binds, push, spread(n_rows, limits.max_groups[0]), spec=(logits.shape[1], n_used))


def _cases() -> list[Case]:
    def case(n_rows: int, n_expert: int, n_used: int, kind: str = "", pad: int = 0) -> Case:
        def build(b: CaseBuilder) -> None:
            logits = b.normal(n_rows, n_expert + pad, scale=3.0)
            if kind == "ties":
                logits = np.round(logits)
            if kind == "wide":
                logits *= 40
            for result in moe_route(b.graph, b.input(logits).narrow(1, 0, n_expert), n_used):
                b.output(result)

        return Case(f"n_rows={n_rows} {n_used} of {n_expert} {kind}".rstrip(), build)

    out = [case(1, 8, 3, pad=1), case(16, 256, 8, pad=1), case(5, 512, 10), case(40, 60, 4, pad=3), case(2, 1, 1)]
    return [*out, case(9, 128, 8, "ties"), case(3, 7, 7, "wide"), case(3, 1000, 128, "ties")]


OP = Op("moe_route", _reference, _lower, lambda: [KERNEL], _cases)
