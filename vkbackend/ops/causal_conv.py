"""Depthwise causal convolution over time, then SiLU: `y[t, c] = silu(sum over j of w[c, j] * x[t + j + 1 - taps, c])`.

The columns before a batch come from a ring that is indexed by position, and the batch leaves its own there: the first
step of a gated-delta-net layer by itself. The model runs it inside `delta_net_mixer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, silu, spread

KERNEL = Kernel("causal_conv", 128)
MAX_TAPS = 16  # columns that a kernel invocation holds


@dataclass(frozen=True)
class Attrs:
    n_tokens: int


def causal_conv(g: Graph, x: Tensor, w: Tensor, ring: Tensor, step: Tensor, *, n_tokens: int) -> Tensor:
    """Convolves n_tokens tokens of each sequence; returns [n_rows, conv_dim] and updates the ring in place.

    x [n_rows, conv_dim], rows may be strided; row = s * n_tokens + t. w [conv_dim, taps], newest tap last. ring
    [n_seq_max, C, conv_dim], C >= taps - 1: the column of position p is column p mod C. step i32 [2, n_seqs]: n_past
    and ring slot of each sequence (slots are all different). Columns of positions below 0 are zeros, whatever the ring
    holds.
    """
    op = "causal_conv"
    check(x.ndim == 2 and x.strides[1] == 1, op, f"x must be rows of contiguous numbers, got shape {x.shape}")
    n_rows, conv_dim = x.shape
    check(w.ndim == 2 and w.shape[0] == conv_dim and w.is_contiguous, op, f"w {w.shape} must be ({conv_dim}, taps)")
    taps = w.shape[1]
    check(1 <= taps <= MAX_TAPS, op, f"{taps} taps; 1..{MAX_TAPS} are supported")
    fits = ring.ndim == 3 and ring.shape[2] == conv_dim and ring.is_contiguous
    check(fits, op, f"ring {ring.shape} must be contiguous (n_seq_max, C, {conv_dim})")
    check(ring.shape[1] >= taps - 1, op, f"ring of {ring.shape[1]} columns; {taps} taps need at least {taps - 1}")
    check(step.ndim == 2 and step.shape[0] == 2, op, f"step {step.shape} must be (2, n_seqs)")
    check(n_rows == n_tokens * step.shape[1], op, f"{n_rows} rows are not {step.shape[1]} sequences of {n_tokens}")
    y = g.temp(op, (n_rows, conv_dim))
    g.add(OP, [x, w, ring, step], [y, ring], Attrs(n_tokens))
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    x, w, _, step = inputs
    y, ring = outputs
    n_tokens: int = node.attrs.n_tokens
    n_columns, before = ring.shape[1], w.shape[1] - 1
    for s, (past, slot) in enumerate(zip(*step.tolist(), strict=True)):
        rows = slice(s * n_tokens, (s + 1) * n_tokens)
        window = np.zeros((before + n_tokens, x.shape[1]), x.dtype)
        older = np.arange(max(past - before, 0), past)  # positions
        window[before - len(older) : before] = ring[slot, older % n_columns]
        window[before:] = x[rows]
        y[rows] = silu(np.asarray(sum(window[j : j + n_tokens] * w[:, j] for j in range(before + 1))))
        kept = np.arange(max(n_tokens - n_columns, 0), n_tokens)
        ring[slot, (past + kept) % n_columns] = x[rows][kept]


def _lower(node: Node, limits: Limits) -> Lowering:
    (x, w, ring, step), (y, _), n_tokens = node.inputs, node.outputs, node.attrs.n_tokens
    conv_dim, taps = w.shape
    n_seqs, n_spans = step.shape[1], -(-conv_dim // KERNEL.local_size)
    push = (
        At(x), x.strides[0], At(w), At(ring), ring.shape[1], At(step), step.strides[0], At(y),
        conv_dim, n_tokens, n_seqs, n_spans,
    )  # fmt: skip
    binds = (Bind(x, "r"), Bind(w, "r"), Bind(step, "r"), Bind(ring, "rw"), Bind(y, "w"))
    return [[Dispatch(KERNEL, binds, push, spread(n_seqs * n_spans, limits.max_groups[0]), spec=(taps,))]]


def _cases() -> list[Case]:
    def case(n_tokens: int, n_past: Sequence[int], conv_dim: int, taps: int, n_columns: int, pad: int = 0) -> Case:
        def build(b: CaseBuilder) -> None:
            x = b.input(b.normal(n_tokens * len(n_past), conv_dim + pad)).narrow(1, pad, conv_dim)
            w = b.input(b.normal(conv_dim, taps, scale=0.5))
            slots = np.arange(len(n_past))[::-1] + 1  # slot 0: a sequence that is not in the batch
            ring = b.normal(len(n_past) + 1, n_columns, conv_dim)
            ring[0] = np.nan
            ring[slots[np.array(n_past) == 0]] = np.nan  # nothing may be read before the first token
            step = b.input(np.stack([np.array(n_past), slots]))
            b.output(causal_conv(b.graph, x, w, b.state(ring), step, n_tokens=n_tokens))

        return Case(f"n_tokens={n_tokens} n_past={list(n_past)} conv_dim={conv_dim} taps={taps} C={n_columns}", build)

    return [
        case(1, [0], 256, 4, 3),
        case(1, [7], 100, 4, 19, pad=5),
        case(3, [2, 0, 50], 384, 4, 6),
        case(5, [1], 130, 2, 1),
        case(16, [33, 1], 128, 4, 22),
        case(70, [10], 129, 4, 3, pad=3),
        case(4, [6], 64, 1, 2),
        case(9, [0, 4], 33, 7, 8),
    ]


OP = Op("causal_conv", _reference, _lower, lambda: [KERNEL], _cases)
