"""Causal grouped-query attention over the KV cache, with a sigmoid gate on its output.

Softmax attention (Vaswani et al. 2017). Few rows per sequence: split over the keys in chunks of a fixed size as in
flash decoding (Dao et al. 2023); a row's arithmetic depends on its position only, not on the batch it is in nor on
`kv_bound`. Prompts: tiles of rows by keys as in flash attention (Dao et al. 2022), which differ from it by rounding.
Models use this op for prompts; they decode with `rope_attention`, which is one dispatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, PushValue, check, scratch, sigmoid, spread

CHUNK = 128  # keys a workgroup handles, few rows
SPAN = 1024  # keys a workgroup handles, prompts; doubled until MAX_SPANS cover kv_bound
MAX_SPANS = 16  # bounds the memory for partial results
MAX_DIM = 256
MAX_TOKENS = 16  # longer batches are prompts
ATTENTION = Kernel("attention", 128)
TILES = Kernel("attention_tiles", 128)
COMBINE = Kernel("attention_combine", 128)


@dataclass(frozen=True)
class Attrs:
    n_tokens: int
    kv_bound: int


def attention(
    g: Graph, q: Tensor, gate: Tensor, k_cache: Tensor, v_cache: Tensor, step: Tensor, *, n_tokens: int, kv_bound: int
) -> Tensor:
    """Attention of q [n_rows, n_head, head_dim] over cache rows 0..position: [n_rows, n_head * head_dim].

    gate [n_rows, n_head, head_dim] (a view): the result is multiplied by sigmoid(gate). Caches
    [n_seq_max, n_ctx, n_head_kv, head_dim]. step i32 [2, n_seqs]: n_past and slot of each sequence. kv_bound: an upper
    bound of n_past + n_tokens, for sizing only.
    """
    op = "attention"
    n_rows, n_head, head_dim = q.shape
    check(q.is_contiguous, op, f"q must be contiguous, its strides are {q.strides}")
    check(k_cache.is_contiguous and v_cache.is_contiguous, op, "the caches must be contiguous")
    check(gate.shape == q.shape and gate.strides[2] == 1, op, f"gate {gate.shape} must have q's shape {q.shape}")
    check(k_cache.shape == v_cache.shape and k_cache.shape[3] == head_dim, op, f"caches {k_cache.shape}, q {q.shape}")
    check(n_head % k_cache.shape[2] == 0, op, f"{n_head} query heads are not a multiple of {k_cache.shape[2]} kv heads")
    check(
        head_dim % 4 == 0 and head_dim <= MAX_DIM,
        op,
        f"head_dim is {head_dim}; a multiple of 4 up to {MAX_DIM} is needed",
    )
    check(n_rows == n_tokens * step.shape[1], op, f"{n_rows} rows are not {step.shape[1]} sequences of {n_tokens}")
    check(
        n_tokens <= kv_bound <= k_cache.shape[1],
        op,
        f"kv_bound is {kv_bound}; allowed are {n_tokens}..{k_cache.shape[1]}",
    )
    y = g.temp("attention", (n_rows, n_head * head_dim))
    g.add(OP, [q, gate, k_cache, v_cache, step], [y], Attrs(n_tokens, kv_bound))
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    q, gate, k_cache, v_cache, step = inputs
    reference_attention(q, gate, k_cache, v_cache, step, node.attrs.n_tokens, outputs[0])


def reference_attention(
    q: Array, gate: Array, k_cache: Array, v_cache: Array, step: Array, n_tokens: int, out: Array
) -> None:
    """Fills out [n_rows, n_head * head_dim]; the inputs as for `attention`."""
    n_past, seq_ids = step
    n_rows, n_head, head_dim = q.shape
    n_kv = k_cache.shape[2]
    y = out.reshape(n_rows, n_head, head_dim)
    for s, past in enumerate(n_past):
        rows = slice(s * n_tokens, (s + 1) * n_tokens)
        k = k_cache[seq_ids[s], : past + n_tokens]
        v = v_cache[seq_ids[s], : past + n_tokens]
        grouped = q[rows].reshape(n_tokens, n_kv, n_head // n_kv, head_dim).transpose(1, 2, 0, 3)
        scores = grouped @ k.transpose(1, 2, 0)[:, None] * (head_dim**-0.5)  # [n_kv, group, n_tokens, n_keys]
        later = np.arange(past + n_tokens) > past + np.arange(n_tokens)[:, None]
        scores[:, :, later] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        mixed = p @ v.transpose(1, 0, 2)[:, None]  # [n_kv, group, n_tokens, head_dim]
        y[rows] = mixed.transpose(2, 0, 1, 3).reshape(n_tokens, n_head, head_dim) * sigmoid(gate[rows])


def _lower(node: Node, limits: Limits) -> Lowering:
    q, _, k_cache, v_cache, _ = node.inputs
    for t in (q, k_cache, v_cache):
        check(
            (t.offset + t.storage.base) % 4 == 0,
            "attention",
            f"'{t.storage.label}' starts at word {t.offset + t.storage.base}; 16-byte loads need a multiple of 4",
        )
    return _lower_tiles(node, limits) if node.attrs.n_tokens > MAX_TOKENS else _lower_chunks(node, limits)


def _lower_chunks(node: Node, limits: Limits) -> Lowering:
    """A workgroup per row, chunk of keys and few query heads."""
    n_rows, n_head, head_dim = node.inputs[0].shape
    n_kv = node.inputs[2].shape[2]
    n_chunks = -(-node.attrs.kv_bound // CHUNK)
    target = _target(node, n_chunks)
    most = 4 if n_rows * n_chunks > 64 else 2  # few workgroups: rather more of them than fewer loads
    heads = max(h for h in range(1, most + 1) if (n_head // n_kv) % h == 0)
    block = math.gcd(8 if limits.few_lanes else 16, head_dim // 4)
    groups = spread(n_rows * n_chunks * (n_head // heads), limits.max_groups[0])
    push = _push(node, target, n_rows, (n_chunks,))
    spec = (heads, int(n_chunks == 1), head_dim, block)
    stages: Lowering = [[Dispatch(ATTENTION, _binds(node, target), push, groups, spec)]]
    return stages if n_chunks == 1 else [*stages, [_combine(node, target, n_chunks, CHUNK, limits)]]


def _lower_tiles(node: Node, limits: Limits) -> Lowering:
    """A workgroup per tile of rows and heads, and span of keys."""
    n_rows, n_head, head_dim = node.inputs[0].shape
    n_tokens, n_kv = node.attrs.n_tokens, node.inputs[2].shape[2]
    n_seqs = n_rows // n_tokens
    span = SPAN
    while span * MAX_SPANS < node.attrs.kv_bound:
        span *= 2
    n_spans = -(-node.attrs.kv_bound // span)
    target = _target(node, n_spans)
    team_queries = 4 if n_rows * n_head >= 64 * 256 else 2  # few workgroups: rather more of them than fewer loads
    queries = team_queries * TILES.local_size // 8
    heads = math.gcd(n_head // n_kv, 16)
    quads = head_dim // 4
    dim_groups = min(32, max(8, 1 << (quads - 1).bit_length()))
    n_tiles = -(-n_tokens // (queries // heads))
    groups = spread(n_tiles * n_spans * n_seqs * (n_head // heads), limits.max_groups[0])
    push = _push(node, target, n_seqs, (n_spans, span))
    spec = (heads, int(n_spans == 1), head_dim, team_queries, dim_groups, -(-quads // dim_groups))
    stages: Lowering = [[Dispatch(TILES, _binds(node, target), push, groups, spec)]]
    return stages if n_spans == 1 else [*stages, [_combine(node, target, n_spans, span, limits)]]


def _target(node: Node, n_parts: int) -> Tensor:
    """Where the first kernel writes: the result, or for each part of the keys (maximum, sum, head_dim values)."""
    n_rows, n_head, head_dim = node.inputs[0].shape
    if n_parts == 1:
        return node.outputs[0]
    return scratch("attention partials", (n_rows, n_head, n_parts, head_dim + 2))


def _binds(node: Node, target: Tensor) -> tuple[Bind, ...]:
    q, gate, k_cache, v_cache, step = node.inputs
    return (*(Bind(t, "r") for t in (q, k_cache, v_cache, step, gate)), Bind(target, "w"))


def _push(node: Node, target: Tensor, count: int, parts: tuple[int, ...]) -> tuple[PushValue, ...]:
    q, gate, k_cache, v_cache, step = node.inputs
    return (
        At(q), At(k_cache), At(v_cache), At(step), step.strides[0], At(gate), gate.strides[0], gate.strides[1],
        At(target), count, node.attrs.n_tokens, q.shape[1], k_cache.shape[2], k_cache.shape[1], *parts,
        q.shape[2] ** -0.5,
    )  # fmt: skip


def _combine(node: Node, partials: Tensor, n_parts: int, part: int, limits: Limits) -> Dispatch:
    """Joins parts of `part` keys each."""
    q, gate, _, _, step = node.inputs
    y = node.outputs[0]
    n_rows, n_head, head_dim = q.shape
    push = (
        At(partials), At(step), At(gate), gate.strides[0], gate.strides[1], At(y),
        n_rows, node.attrs.n_tokens, n_head, head_dim, n_parts, part,
    )  # fmt: skip
    binds = (Bind(partials, "r"), Bind(step, "r"), Bind(gate, "r"), Bind(y, "w"))
    return Dispatch(COMBINE, binds, push, spread(n_rows * n_head, limits.max_groups[0]))


def _cases() -> list[Case]:
    def case(
        n_tokens: int, n_past: Sequence[int], heads: tuple[int, int], head_dim: int, n_ctx: int, kv_bound: int = 0
    ) -> Case:
        def build(b: CaseBuilder) -> None:
            n_head, n_kv = heads
            n_rows = n_tokens * len(n_past)
            slots = np.arange(len(n_past))[::-1].copy()
            cache = np.full((2, len(n_past), n_ctx, n_kv, head_dim), np.nan, np.float32)
            for slot, past in zip(slots, n_past, strict=True):
                cache[:, slot, : past + n_tokens] = b.normal(2, past + n_tokens, n_kv, head_dim)
            k_cache, v_cache = (b.state(c) for c in cache)
            qg = b.input(b.normal(n_rows, n_head, 2 * head_dim))
            q = b.input(b.normal(n_rows, n_head, head_dim, scale=2.0))
            step = b.input(np.stack([np.array(n_past), slots]))
            gate = qg.narrow(2, head_dim, head_dim)
            b.output(attention(b.graph, q, gate, k_cache, v_cache, step, n_tokens=n_tokens, kv_bound=kv_bound or n_ctx))

        label = (
            f"n_tokens={n_tokens} n_past={list(n_past)} heads={heads} head_dim={head_dim} kv_bound={kv_bound or n_ctx}"
        )
        return Case(label, build)

    return [
        case(1, [0], (4, 2), 64, 64),
        case(1, [127], (4, 4), 64, 128),
        case(1, [128], (4, 2), 128, 256),
        case(3, [300, 5], (8, 2), 128, 400),
        case(5, [0], (6, 1), 256, 600, 300),
        case(16, [250], (16, 1), 64, 512),
        case(17, [3], (4, 2), 64, 1000, 256),
        case(33, [100, 0], (2, 2), 128, 200),
        case(100, [60], (8, 1), 32, 160),
        case(1, [4000], (8, 2), 256, 4096),
        case(40, [0, 30], (12, 2), 256, 80),
        case(17, [2030, 1000], (8, 2), 256, 2060),
        case(70, [90], (3, 1), 100, 160),
        case(18, [500], (1, 1), 4, 520),
        case(17, [18000], (2, 2), 8, 20000),
        case(256, [40], (64, 4), 8, 300),
    ]


OP = Op("attention", _reference, _lower, lambda: [ATTENTION, TILES, COMBINE], _cases)
