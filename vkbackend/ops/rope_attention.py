"""All of a decode step's attention between its two products in one dispatch: norms, RoPE, cache write, attention, gate.

The maths of `rope_kv_write` and `attention`, which prompts still go through. The keys are cut into chunks of 32 and,
as in flash decoding (Dao et al. 2023), into parts that different workgroups take; the one that finishes last joins
them. Chunks and parts follow from a row's position alone, so a row's bits depend neither on the batch it is in, nor on
`kv_bound`, nor on who finishes last. Rows of the batch see each other's keys and values from the projection, with the
very bits that go to the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.device.numpy_parts import Run, Workspace
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.attention import attention, reference_attention
from vkbackend.ops.attention_numpy import prepared_attention
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, counters, scratch, spread
from vkbackend.ops.rope_kv_write import check_projection, reference_rope, rope_kv_write, rope_table

CHUNK = 32  # keys a workgroup scores at a time: small, so that many workgroups share a short context
MAX_PARTS = 64  # of a row; from 2048 keys on a part is 2, 4, 8 ... chunks: bounds the memory for partial results
MAX_TOKENS = 16  # longer batches are prompts
MAX_DIM = 256
KERNEL = Kernel("rope_attention", 128)


@dataclass(frozen=True)
class Attrs:
    n_tokens: int
    kv_bound: int
    eps: float


def rope_attention(
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
    kv_bound: int,
    eps: float,
) -> Tensor:
    """Gated causal attention of a projection's rows, [n_rows, n_head * head_dim]; their k and v go to the caches.

    qg [n_rows, n_head, 2 * head_dim]: per head q, then its gate. k, v [n_rows, n_head_kv, head_dim]. All three are
    views of one projection. q_norm, k_norm [head_dim]. table: `rope_table`. Caches [n_seq_max, n_ctx, n_head_kv,
    head_dim]. step i32 [2, n_seqs]: n_past and slot of each sequence; row s * n_tokens + t has position
    n_past[s] + t. kv_bound: an upper bound of n_past + n_tokens, for sizing only. More than 16 tokens a sequence
    become the two ops `rope_kv_write` and `attention`.
    """
    op = "rope_attention"
    n_rows, n_head, two_dim = qg.shape
    head_dim = two_dim // 2
    if n_tokens > MAX_TOKENS:
        q = rope_kv_write(g, qg, k, v, q_norm, k_norm, table, k_cache, v_cache, step, n_tokens=n_tokens, eps=eps)
        gate = qg.narrow(2, head_dim, head_dim)
        return attention(g, q, gate, k_cache, v_cache, step, n_tokens=n_tokens, kv_bound=kv_bound)
    inputs = [qg, k, v, q_norm, k_norm, table, k_cache, v_cache, step]
    check_projection(op, inputs, n_tokens)
    check(n_head % k.shape[1] == 0, op, f"{n_head} query heads are not a multiple of {k.shape[1]} kv heads")
    dims = f"head_dim is {head_dim}; a multiple of 4 up to {MAX_DIM} is needed"
    check(head_dim % 4 == 0 and head_dim <= MAX_DIM, op, dims)
    bounds = f"kv_bound is {kv_bound}; allowed are {n_tokens}..{k_cache.shape[1]}"
    check(n_tokens <= kv_bound <= k_cache.shape[1], op, bounds)
    y = g.temp(op, (n_rows, n_head * head_dim))
    g.add(OP, inputs, [y, k_cache, v_cache], Attrs(n_tokens, kv_bound, eps))
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    qg, step = inputs[0], inputs[8]
    y, k_cache, v_cache = outputs
    head_dim = qg.shape[2] // 2
    q = reference_rope(inputs, k_cache, v_cache, node.attrs.n_tokens, node.attrs.eps)
    reference_attention(q, qg[..., head_dim:], k_cache, v_cache, step, node.attrs.n_tokens, y)


def _prepare(node: Node, inputs: Sequence[Array], outputs: Sequence[Array], work: Workspace) -> Run:
    return prepared_attention(inputs, outputs, work, node.attrs.n_tokens, node.attrs.eps)


def _lower(node: Node, limits: Limits) -> Lowering:
    qg, k, v, q_norm, k_norm, table, k_cache, v_cache, step = node.inputs
    y = node.outputs[0]
    n_rows, n_head, two_dim = qg.shape
    head_dim, n_kv = two_dim // 2, k.shape[1]
    for t in (qg, k, v, q_norm, k_norm, k_cache, v_cache):
        start, row = t.offset + t.storage.base, t.strides[0] if t.ndim > 1 else 0
        wanted = f"'{t.storage.label}' starts at word {start}, its rows {row} apart; 16-byte loads need multiples of 4"
        check(start % 4 == 0 and row % 4 == 0, "rope_attention", wanted)
    n_parts = min(MAX_PARTS, -(-node.attrs.kv_bound // CHUNK))
    most = 4 if n_rows * n_parts > 64 else 2  # few workgroups: rather more of them than fewer loads
    fits = [h for h in range(1, most + 1) if h == 1 or shared_need(h, head_dim) <= limits.max_shared_bytes]
    heads = max(h for h in fits if (n_head // n_kv) % h == 0)
    partials = scratch("attention partials", (n_rows, n_head, n_parts, head_dim + 4))
    done = counters("attention parts done", n_rows * (n_head // heads))
    push = (
        At(qg), qg.strides[0], At(k), k.strides[0], At(v), v.strides[0],
        At(q_norm), At(k_norm), At(table), At(step), step.strides[0],
        At(k_cache), At(v_cache), At(partials), At(done), At(y),
        n_rows, node.attrs.n_tokens, n_head, n_kv, k_cache.shape[1], n_parts, MAX_PARTS,
        head_dim**-0.5, float(node.attrs.eps),
    )  # fmt: skip
    binds = (
        Bind(qg, "r"), Bind(q_norm, "r"), Bind(table, "r"), Bind(step, "r"), Bind(k_cache, "rw"), Bind(v_cache, "rw"),
        Bind(partials, "rw"), Bind(done, "rw"), Bind(y, "w"),
    )  # fmt: skip
    also = (Bind(k, "r"), Bind(v, "r"), Bind(k_norm, "r"))
    groups = spread(n_rows * n_parts * (n_head // heads), limits.max_groups[0])
    return [[Dispatch(KERNEL, binds, push, groups, (heads, head_dim, table.shape[0]), also)]]


def shared_need(heads: int, head_dim: int) -> int:
    """Bytes of workgroup memory, at most: queries and keys or sums, scores of lanes and keys, weights, lanes.glsl's."""
    return max((heads + 8) * (head_dim // 4 + 1), heads * 128) * 16 + heads * CHUNK * (8 + 2) * 4 + 1024


def _cases() -> list[Case]:
    def case(
        n_tokens: int,
        n_past: Sequence[int],
        heads: tuple[int, int],
        head_dim: int,
        n_rot: int,
        n_ctx: int,
        kv_bound: int = 0,
    ) -> Case:
        def build(b: CaseBuilder) -> None:
            n_head, n_kv = heads
            n_rows, n_seqs = n_tokens * len(n_past), len(n_past)
            x = b.input(b.normal(n_rows, (2 * n_head + 2 * n_kv) * head_dim))
            w, kv = 2 * n_head * head_dim, n_kv * head_dim
            norms = b.input(b.uniform(0.5, 1.5, 2, head_dim))
            slots = np.arange(n_seqs)[::-1] + 1
            caches = np.full((2, n_seqs + 1, n_ctx, n_kv, head_dim), np.nan, np.float32)
            for slot, past in zip(slots, n_past, strict=True):
                caches[:, slot, :past] = b.normal(2, past, n_kv, head_dim)
            y = rope_attention(
                b.graph,
                x.narrow(1, 0, w).reshape(n_rows, n_head, 2 * head_dim),
                x.narrow(1, w, kv).reshape(n_rows, n_kv, head_dim),
                x.narrow(1, w + kv, kv).reshape(n_rows, n_kv, head_dim),
                norms.narrow(0, 0, 1).reshape(head_dim),
                norms.narrow(0, 1, 1).reshape(head_dim),
                b.input(rope_table(n_rot, 1e7)),
                b.state(caches[0]),
                b.state(caches[1]),
                b.input(np.stack([np.array(n_past), slots])),
                n_tokens=n_tokens,
                kv_bound=kv_bound or n_ctx,
                eps=1e-6,
            )
            b.output(y)

        bound = f"kv_bound={kv_bound or n_ctx}"
        label = f"n_tokens={n_tokens} n_past={list(n_past)} heads={heads} head_dim={head_dim} n_rot={n_rot} {bound}"
        return Case(label, build)

    return [
        case(1, [0], (4, 2), 64, 16, 64),
        case(1, [127], (4, 4), 64, 16, 128),
        case(1, [128], (4, 2), 128, 32, 256),
        case(3, [300, 5], (8, 2), 128, 32, 400),
        case(4, [126], (8, 2), 256, 64, 600, 300),
        case(16, [250], (16, 1), 64, 64, 512),
        case(16, [0], (6, 1), 256, 64, 20),
        case(9, [120, 1, 127], (3, 1), 100, 20, 140),
        case(2, [40], (1, 1), 4, 4, 50),
        case(5, [8190], (2, 1), 8, 4, 8300),
        case(1, [20_000], (2, 2), 16, 16, 20_100),
        case(16, [CHUNK * MAX_PARTS - 9], (4, 2), 64, 16, CHUNK * MAX_PARTS + 20),  # parts of one chunk and of two
        case(3, [CHUNK - 1, CHUNK, 0], (4, 2), 64, 16, 3 * CHUNK),
        case(20, [30], (4, 2), 64, 16, 60),
    ]


OP = Op("rope_attention", _reference, _lower, lambda: [KERNEL], _cases, _prepare)
