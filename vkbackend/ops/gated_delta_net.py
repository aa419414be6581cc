"""The gated delta rule with K snapshot slots, on ready-made q, k, v, gates: the op by itself.

Gated delta networks (Yang, Kautz, Hatamizadeh 2024); with one decay per k channel, Kimi delta attention (2025). Per v
head with a state S [S, S] (row = output channel):
`S *= exp(g); delta = beta * (v - S k); S += outer(delta, k); o = S q / sqrt(S)`.
The model runs the same rule inside `delta_net_mixer`, which writes its snapshots straight into the recurrent ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, spread

HEAD_SIZES = (16, 32, 64, 128)
PLAIN = Kernel("gated_delta_net", 128)
KDA = Kernel("gated_delta_net", 128, ("KDA",))


@dataclass(frozen=True)
class Attrs:
    """K: snapshot slots."""

    snapshots: int


def gated_delta_net(
    graph: Graph, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs the rule over n_tokens tokens; returns (attention, snapshots), two views of one flat buffer.

    q, k [n_seqs_qk, n_tokens, n_heads_qk, S], any strides with contiguous last dim. v [n_seqs, n_tokens, n_heads, S].
    g [n_seqs, n_tokens, n_heads, 1 or S]. beta [n_seqs, n_tokens, n_heads, 1]. state [n_seqs, K, n_heads, S, S]:
    slot 0 is read, the others only give the shape. v head h uses q/k head h % n_heads_qk, sequence s uses q/k sequence
    s // (n_seqs / n_seqs_qk).
    attention [n_seqs, n_tokens, n_heads, S]; snapshots [K, n_seqs, n_heads, S, S]: the state after token t is in slot
    t - (n_tokens - K) where that is in [0, K); with n_tokens < K the earlier slots are left as they were.
    """
    op = "gated_delta_net"
    check(
        all(len(t.shape) == 4 for t in (q, k, v, g, beta)) and len(state.shape) == 5,
        op,
        "q, k, v, g and beta need 4 axes and state 5",
    )
    n_seqs, n_tokens, n_heads, size = v.shape
    n_seqs_qk, n_heads_qk = q.shape[0], q.shape[2]
    check(size in HEAD_SIZES, op, f"head size {size} is not supported; supported are {HEAD_SIZES}")
    check(q.shape == k.shape == (n_seqs_qk, n_tokens, n_heads_qk, size), op, f"q {q.shape}, k {k.shape}, v {v.shape}")
    check(n_heads % n_heads_qk == 0, op, f"{n_heads} v heads are not a multiple of {n_heads_qk} q/k heads")
    check(n_seqs % n_seqs_qk == 0, op, f"{n_seqs} sequences are not a multiple of {n_seqs_qk} q/k sequences")
    check(
        g.shape[:3] == v.shape[:3] and g.shape[3] in (1, size),
        op,
        f"g {g.shape} must be {v.shape[:3]} + (1 or {size},)",
    )
    check(beta.shape == (*v.shape[:3], 1), op, f"beta {beta.shape} must be {(*v.shape[:3], 1)}")
    snapshots = state.shape[1]
    want = (n_seqs, snapshots, n_heads, size, size)
    check(state.shape == want and state.is_contiguous, op, f"state {state.shape} must be contiguous {want}")
    for name, t in (("q", q), ("k", k), ("v", v), ("g", g)):
        check(t.strides[3] == 1 or t.shape[3] == 1, op, f"the last axis of {name} must be contiguous")
    n_attention, n_state = v.size, snapshots * n_seqs * n_heads * size * size
    out = graph.temp(op, (n_attention + n_state,))
    graph.add(OP, [q, k, v, g, beta, state], [out], Attrs(snapshots))
    attention = out.narrow(0, 0, n_attention).reshape(*v.shape)
    return attention, out.narrow(0, n_attention, n_state).reshape(snapshots, n_seqs, n_heads, size, size)


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    q, k, v, g, beta, state = inputs
    n_seqs, n_tokens, n_heads, size = v.shape
    slots: int = node.attrs.snapshots
    heads = np.arange(n_heads) % q.shape[2]
    seqs = np.arange(n_seqs) // (n_seqs // q.shape[0])
    q, k = (x[seqs][:, :, heads] for x in (q, k))
    attention = outputs[0][: v.size].reshape(v.shape)
    snapshots = outputs[0][v.size :].reshape(slots, n_seqs, n_heads, size, size)
    s = state[:, 0].copy()  # [n_seqs, n_heads, S, S]
    for t in range(n_tokens):
        s *= np.exp(g[:, t, :, None, :])
        delta = beta[:, t] * (v[:, t] - (s @ k[:, t, :, :, None])[..., 0])
        s += delta[..., :, None] * k[:, t, :, None, :]
        attention[:, t] = (s @ q[:, t, :, :, None])[..., 0] * size**-0.5
        slot = t - (n_tokens - slots)
        if 0 <= slot < slots:
            snapshots[slot] = s


def _lower(node: Node, limits: Limits) -> Lowering:
    q, k, v, g, beta, state = node.inputs
    out = node.outputs[0]
    n_seqs, n_tokens, n_heads, size = v.shape
    places = [x for t in (q, k, v, g, beta) for x in (At(t), *t.strides[:3])]
    push = (
        *places, At(state), state.strides[0], At(out),
        n_seqs, q.shape[0], n_tokens, n_heads, q.shape[2], node.attrs.snapshots,
    )  # fmt: skip
    binds = (*(Bind(t, "r") for t in (q, k, v, g, beta, state)), Bind(out, "w"))
    kernel = KDA if g.shape[3] > 1 else PLAIN
    return [[Dispatch(kernel, binds, push, spread(n_seqs * n_heads, limits.max_groups[0]), spec=(size,))]]


def _cases() -> list[Case]:
    def case(
        heads: int,
        size: int,
        n_tokens: int,
        n_seqs: int,
        v_repeat: int,
        permuted: bool,
        kda: bool,
        slots: int,
        share: int = 1,
    ) -> Case:
        def build(b: CaseBuilder) -> None:
            n_heads, n_seqs_qk = heads * v_repeat, n_seqs // share

            def vectors(n_seqs: int, n_heads: int, normed: bool) -> Tensor:
                x = b.normal(n_seqs, n_heads, n_tokens, size)
                if normed:
                    x /= np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True))
                if permuted:
                    return b.input(x).permute(0, 2, 1, 3)
                return b.input(np.ascontiguousarray(x.transpose(0, 2, 1, 3)))

            q, k = (vectors(n_seqs_qk, heads, True) for _ in range(2))
            v = vectors(n_seqs, n_heads, False)
            g = b.input(
                b.uniform(-20, -1e-4, n_seqs, n_tokens, n_heads, size if kda else 1) * b.uniform(0, 1, 1, 1, 1, 1) ** 3
            )
            beta = b.input(b.uniform(0, 1, n_seqs, n_tokens, n_heads, 1))
            state = b.normal(n_seqs, slots, n_heads, size, size)
            state[:, 1:] = np.nan  # only slot 0 may be read
            attention, snapshots = gated_delta_net(b.graph, q, k, v, g, beta, b.input(state))
            b.output(attention)
            b.output(snapshots)

        label = f"heads={heads} S={size} n_tokens={n_tokens} n_seqs={n_seqs} v_repeat={v_repeat}"
        label += f"{' permuted' if permuted else ''}{' kda' if kda else ''} K={slots}"
        return Case(label + (f" qk_seqs={n_seqs // share}" if share > 1 else ""), build)

    table = [case(4, 16, 1, 1, 1, False, False, 1)]
    table += [case(4, 32, n, 1, 1, permuted, True, 1) for n in (1, 2, 3, 4) for permuted in (False, True)]
    table += [
        case(8, 32, 4, 2, 2, False, True, 1),
        case(4, 64, 33, 1, 1, False, True, 1),
        case(4, 64, 100, 1, 1, False, True, 1),
        case(4, 16, 2, 1, 1, False, False, 2),
        case(4, 32, 4, 1, 1, False, False, 4),
        case(4, 64, 4, 2, 1, False, False, 4),
        case(8, 128, 4, 1, 1, False, False, 4),
        case(4, 64, 4, 2, 1, False, True, 4),
        case(8, 32, 4, 2, 2, False, True, 4),
        case(4, 32, 8, 1, 1, False, False, 3),
        case(4, 64, 16, 2, 1, False, False, 4),
        case(4, 32, 2, 1, 1, False, False, 4),
        case(8, 128, 1, 2, 2, True, False, 3),
        case(2, 64, 5, 4, 3, True, True, 2, share=2),
    ]
    return table


OP = Op("gated_delta_net", _reference, _lower, lambda: [PLAIN, KDA], _cases)
