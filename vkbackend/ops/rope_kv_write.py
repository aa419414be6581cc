"""Per-head RMS norm and RoPE of q and k, and the write of k and v to their caches: all before attention, at once.

RoPE (Su et al. 2021) in NeoX pairing: dim j turns with dim j + n_rot/2 by position * freq_base^(-2j / n_rot). For
text the interleaved M-RoPE sections of these models reduce to this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkbackend.device.base import Limits
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, spread

KERNEL = Kernel("rope_kv_write", 128)


@dataclass(frozen=True)
class Attrs:
    n_tokens: int
    eps: float


def rope_table(n_rot: int, freq_base: float) -> NDArray[np.int32]:
    """Frequencies as 64-bit fractions of a turn per position: int32 bit patterns [n_rot / 2, (high, low)].

    Fixed point, because position * frequency in float32 is off by radians at long contexts, and wraps exactly here.
    """
    words = []
    for j in range(n_rot // 2):
        turns = freq_base ** (-2 * j / n_rot) / (2 * math.pi)
        fraction = round(turns * 2.0**64)
        words.append((fraction >> 32 & 0xFFFFFFFF, fraction & 0xFFFFFFFF))
    return np.array(words, np.uint32).view(np.int32).reshape(-1, 2)


def rope_kv_write(
    g: Graph,
    qg: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: Tensor,
    *,
    n_tokens: int,
    eps: float,
) -> Tensor:
    """Returns q ready for attention, [n_rows, n_head, head_dim]; k and v go to row `position` of their caches.

    qg [n_rows, n_head, 2 * head_dim]: per head q, then its gate (left alone). k, v [n_rows, n_head_kv, head_dim].
    All three are views of one projection. q_norm, k_norm [head_dim]. table: `rope_table`. Caches
    [n_seq_max, n_ctx, n_head_kv, head_dim]. step i32 [2, n_seqs]: n_past and slot of each sequence; row
    s * n_tokens + t has position n_past[s] + t.
    """
    inputs = [qg, k, v, q_norm, k_norm, table, k_cache, v_cache, step]
    check_projection("rope_kv_write", inputs, n_tokens)
    n_rows, n_head, two_dim = qg.shape
    q = g.temp("q", (n_rows, n_head, two_dim // 2))
    g.add(OP, inputs, [q, k_cache, v_cache], Attrs(n_tokens, eps))
    return q


def check_projection(op: str, inputs: Sequence[Tensor], n_tokens: int) -> None:
    """Raises `VkBackendError` in the name of `op` when shapes and strides of a projection do not fit its caches.

    inputs: those of `rope_kv_write`, in its order.
    """
    qg, k, v, q_norm, k_norm, table, k_cache, v_cache, step = inputs
    n_rows, _, two_dim = qg.shape
    head_dim = two_dim // 2
    check(
        k.shape == v.shape and k.shape[0] == n_rows and k.shape[2] == head_dim,
        op,
        f"k {k.shape}, v {v.shape}, qg {qg.shape}",
    )
    check(qg.storage is k.storage and k.storage is v.storage, op, "qg, k and v must be views of one projection")
    for name, t in (("qg", qg), ("k", k), ("v", v)):
        dense = t.strides[2] == 1 and (t.shape[1] == 1 or t.strides[1] == t.shape[2])
        check(dense, op, f"the heads of a row of {name} must lie one after the other, its strides are {t.strides}")
    check(q_norm.shape == k_norm.shape == (head_dim,), op, f"norms must have shape ({head_dim},)")
    check(q_norm.storage.buffer is k_norm.storage.buffer, op, "q_norm and k_norm must lie in one buffer")
    check(0 < 2 * table.shape[0] <= head_dim, op, f"{2 * table.shape[0]} rotated dims do not fit a head of {head_dim}")
    check(
        k_cache.shape == v_cache.shape and k_cache.shape[2:] == k.shape[1:],
        op,
        f"caches {k_cache.shape} do not fit k {k.shape}",
    )
    check(k_cache.is_contiguous and v_cache.is_contiguous, op, "the caches must be contiguous")
    check(n_rows == n_tokens * step.shape[1], op, f"{n_rows} rows are not {step.shape[1]} sequences of {n_tokens}")


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    q, k_cache, v_cache = outputs
    q[...] = reference_rope(inputs, k_cache, v_cache, node.attrs.n_tokens, node.attrs.eps)


def cos_sin(positions: Array, table: Array) -> tuple[Array, Array]:
    """Of the angles at integer positions [n], each float64 [n, 1, half], by the turns of `rope_table`."""
    words = table.view(np.uint32).astype(np.uint64)
    fractions = words[:, 0] << np.uint64(32) | words[:, 1]
    turns = positions[:, None, None].astype(np.uint64) * fractions  # wraps at 2^64: one turn
    angles = turns.astype(np.float64) * (2 * np.pi / 2.0**64)
    return np.cos(angles), np.sin(angles)


def reference_rope(inputs: Sequence[Array], k_cache: Array, v_cache: Array, n_tokens: int, eps: float) -> Array:
    """Writes the caches and returns q; the inputs in the builder's order."""
    qg, k, v, q_norm, k_norm, table, _, _, (n_past, seq_ids) = inputs
    head_dim, half = qg.shape[2] // 2, table.shape[0]
    positions = (n_past[:, None] + np.arange(n_tokens)).reshape(-1)
    sequences = np.repeat(seq_ids, n_tokens)
    cos, sin = (f.astype(qg.dtype) for f in cos_sin(positions, table))

    def turned(x: Array, w: Array) -> Array:
        x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps) * w
        a, b = x[..., :half], x[..., half : 2 * half]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], axis=-1)

    k_cache[sequences, positions] = turned(k, k_norm)
    v_cache[sequences, positions] = v
    return turned(qg[..., :head_dim], q_norm)


def _lower(node: Node, limits: Limits) -> Lowering:
    qg, k, v, q_norm, k_norm, table, k_cache, v_cache, step = node.inputs
    q = node.outputs[0]
    n_rows, n_head, head_dim = q.shape
    push = (
        At(qg), qg.strides[0], At(k), k.strides[0], At(v), v.strides[0],
        At(q_norm), At(k_norm), At(table), At(step), step.strides[0], At(q), At(k_cache), At(v_cache),
        n_rows, node.attrs.n_tokens, n_head, k.shape[1], table.shape[0], k_cache.shape[1],
        float(node.attrs.eps),
    )  # fmt: skip
    binds = (
        Bind(qg, "r"), Bind(q_norm, "r"), Bind(table, "r"), Bind(step, "r"),
        Bind(q, "w"), Bind(k_cache, "w"), Bind(v_cache, "w"),
    )  # fmt: skip
    also = (Bind(k, "r"), Bind(v, "r"), Bind(k_norm, "r"))
    groups = spread(n_rows * (n_head + k.shape[1]), limits.max_groups[0])
    return [[Dispatch(KERNEL, binds, push, groups, spec=(head_dim,), also=also)]]


def _cases() -> list[Case]:
    def case(
        n_tokens: int, n_past: Sequence[int], heads: tuple[int, int], head_dim: int, n_rot: int, n_ctx: int
    ) -> Case:
        def build(b: CaseBuilder) -> None:
            n_head, n_kv = heads
            n_rows = n_tokens * len(n_past)
            x = b.input(b.normal(n_rows, (2 * n_head + 2 * n_kv) * head_dim))
            w, kv = 2 * n_head * head_dim, n_kv * head_dim
            norms = b.input(b.uniform(0.5, 1.5, 2, head_dim))
            k_cache, v_cache = (b.state(None, (len(n_past) + 1, n_ctx, n_kv, head_dim)) for _ in range(2))
            q = rope_kv_write(
                b.graph,
                x.narrow(1, 0, w).reshape(n_rows, n_head, 2 * head_dim),
                x.narrow(1, w, kv).reshape(n_rows, n_kv, head_dim),
                x.narrow(1, w + kv, kv).reshape(n_rows, n_kv, head_dim),
                norms.narrow(0, 0, 1).reshape(head_dim),
                norms.narrow(0, 1, 1).reshape(head_dim),
                b.input(rope_table(n_rot, 1e7)),
                k_cache,
                v_cache,
                b.input(np.stack([n_past, np.arange(len(n_past))[::-1] + 1])),
                n_tokens=n_tokens,
                eps=1e-6,
            )
            b.output(q)

        label = f"n_tokens={n_tokens} n_past={list(n_past)} heads={heads} head_dim={head_dim} n_rot={n_rot}"
        return Case(label, build)

    return [
        case(1, [0], (4, 2), 64, 16, 8),
        case(3, [5, 0], (4, 1), 128, 32, 16),
        case(16, [7], (8, 2), 256, 64, 32),
        case(40, [2, 9, 30], (6, 1), 64, 64, 100),
        case(2, [100_000], (2, 1), 32, 32, 100_100),
        case(1, [262_140], (1, 1), 16, 16, 262_144),
    ]


OP = Op("rope_kv_write", _reference, _lower, lambda: [KERNEL], _cases)
