"""The gated-delta-net mixer of one layer, between its input and output projections, in one kernel.

Gated delta networks (Yang, Kautz, Hatamizadeh 2024): causal depthwise conv + SiLU over q, k, v; L2-normalised q and k;
decay g = softplus(alpha + dt) * a and step size beta = sigmoid; the delta rule on a state S [dv, dk] per v head;
RMS norm of each head's output times silu(z). The state after every token goes straight into the recurrent ring. A head
is spread over workgroups, so the norm over it is left to the product that follows (`linear`, group_squares).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.device.numpy_parts import Run, Workspace
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.delta_net_blocks import FINISH, PREPARE, SCAN, block_stages, n_by_blocks, tokens_of
from vkbackend.ops.delta_net_numpy import prepared_mixer
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, sigmoid, silu, spread

MIXER = Kernel("delta_net_mixer", 128)  # two state rows a team
MIXER_WIDE = Kernel("delta_net_mixer", 256)  # one; the same bits
RING_WRITE = Kernel("conv_ring_write", 128)
HEAD_SIZES = (16, 32, 64, 128)
ROWS = 32  # state rows of a workgroup
KERNEL_MAX = 4  # conv taps the kernel has registers for
SHORT = 16  # batches up to this many tokens write the conv ring in the mixer itself


def conv_ring_columns(n_rs_seq: int, kernel: int) -> int:
    """Columns of the conv ring: a window at every rollback distance, and room so that a short batch's new columns
    never fall on columns that another workgroup of the same dispatch still reads."""
    return n_rs_seq + kernel - 1 + SHORT


@dataclass(frozen=True)
class Attrs:
    n_tokens: int
    n_k_heads: int
    eps: float
    grouped: bool


def delta_net_mixer(
    g: Graph,
    qkv: Tensor,
    z: Tensor,
    alpha: Tensor,
    beta: Tensor,
    conv_w: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    norm_w: Tensor,
    conv_ring: Tensor,
    state_ring: Tensor,
    step: Tensor,
    *,
    n_tokens: int,
    n_k_heads: int,
    eps: float,
    grouped: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mixes n_tokens tokens of each sequence; updates the rings in place.

    Returns y [n_rows, n_v_heads * dv] = o * norm_w * silu(z), and squares [n_rows, n_v_heads, n_parts]: sums of o^2
    over parts of each head. The mixer's result is y / sqrt(mean over the head of o^2 + eps).

    qkv [n_rows, 2 * n_k_heads * dk + n_v_heads * dv], z [n_rows, n_v_heads * dv], alpha, beta [n_rows, n_v_heads]:
    column views of one projection. conv_w [conv_dim, kernel], dt_bias, a [n_v_heads], norm_w [dv]: views of one buffer.
    conv_ring [n_seq_max, C, conv_dim], state_ring [n_seq_max, R, n_v_heads, dv, dk]. step i32 [2, n_seqs].
    The state after position p goes to slot p mod R, the raw column of p to column p mod C. v head h uses k head
    h % n_k_heads, or h // (n_v_heads / n_k_heads) when grouped.
    """
    inputs = [qkv, z, alpha, beta, conv_w, dt_bias, a, norm_w, conv_ring, state_ring, step]
    _check(inputs, n_tokens, n_k_heads)
    n_rows, (n_v_heads, dv) = qkv.shape[0], state_ring.shape[2:4]
    y = g.temp("delta_net_mixer", (n_rows, n_v_heads * dv))
    squares = g.temp("delta_net_mixer squares", (n_rows, n_v_heads, -(-dv // ROWS)))
    g.add(OP, inputs, [y, squares, conv_ring, state_ring], Attrs(n_tokens, n_k_heads, eps, grouped))
    return y, squares


def _check(inputs: Sequence[Tensor], n_tokens: int, n_k_heads: int) -> None:
    qkv, z, alpha, beta, conv_w, dt_bias, a, norm_w, conv_ring, state_ring, step = inputs
    op = "delta_net_mixer"
    axes = (qkv.ndim, conv_w.ndim, conv_ring.ndim, state_ring.ndim, step.ndim)
    check(axes == (2, 2, 3, 5, 2), op, f"qkv, conv_w, rings and step have {axes} axes; (2, 2, 3, 5, 2) are needed")
    n_slots, n_v_heads, dv, dk = state_ring.shape[1:]
    check(dk in HEAD_SIZES, op, f"head size {dk} is not supported; supported are {HEAD_SIZES}")
    check(n_v_heads % n_k_heads == 0, op, f"{n_v_heads} v heads are not a multiple of {n_k_heads} k heads")
    n_rows, conv_dim = qkv.shape
    wanted = 2 * n_k_heads * dk + n_v_heads * dv
    check(conv_dim == wanted, op, f"qkv has {conv_dim} columns; 2 x {n_k_heads} x {dk} + {n_v_heads} x {dv} = {wanted}")
    check(step.shape[0] == 2, op, f"step {step.shape} must be (2, n_seqs)")
    check(n_rows == n_tokens * step.shape[1], op, f"{n_rows} rows are not {step.shape[1]} sequences of {n_tokens}")
    for name, t, n in (("z", z, n_v_heads * dv), ("alpha", alpha, n_v_heads), ("beta", beta, n_v_heads)):
        check(t.shape == (n_rows, n), op, f"{name} must have shape {(n_rows, n)}, got {t.shape}")
    parts = (qkv, z, alpha, beta)
    together = len({(t.storage, t.strides[0]) for t in parts}) == 1 and all(t.strides[1] == 1 for t in parts)
    check(together, op, "qkv, z, alpha, beta must be columns of one projection")
    taps = conv_w.shape[1]
    check(conv_w.shape[0] == conv_dim, op, f"conv_w {conv_w.shape} must be ({conv_dim}, taps)")
    check(1 <= taps <= KERNEL_MAX, op, f"conv kernel of {taps} taps; 1..{KERNEL_MAX} are supported")
    for name, t, n in (("dt_bias", dt_bias, n_v_heads), ("a", a, n_v_heads), ("norm_w", norm_w, dv)):
        check(t.shape == (n,), op, f"{name} must have shape ({n},), got {t.shape}")
    params = (conv_w, dt_bias, a, norm_w)
    check(all(t.is_contiguous for t in params), op, "conv_w, dt_bias, a, norm_w must be contiguous")
    buffers = {id(t.storage.buffer or t.storage) for t in params}
    check(len(buffers) == 1, op, "conv_w, dt_bias, a, norm_w must lie in one buffer")
    columns = conv_ring_columns(n_slots - 1, taps)
    n_seq_max, n_columns, ring_dim = conv_ring.shape
    fits = n_seq_max == state_ring.shape[0] and n_columns >= columns and ring_dim == conv_dim
    wants = f"({state_ring.shape[0]}, {columns} or more, {conv_dim})"
    check(fits, op, f"conv ring {conv_ring.shape} must be {wants}")
    check(conv_ring.is_contiguous and state_ring.is_contiguous, op, "the rings must be contiguous")
    at = state_ring.storage.base + state_ring.offset
    check(at % 4 == 0, op, f"the state ring starts at word {at}; it must start at a multiple of 4")


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    qkv, z, alpha, beta, conv_w, dt_bias, a, norm_w, _, _, (n_past, slots) = inputs
    y, squares, conv_ring, state_ring = outputs
    at: Attrs = node.attrs
    n_slots, n_v_heads, dv, dk = state_ring.shape[1:]
    heads = np.arange(n_v_heads)
    k_head = heads // (n_v_heads // at.n_k_heads) if at.grouped else heads % at.n_k_heads
    key_dim = at.n_k_heads * dk
    for s, (past, slot) in enumerate(zip(n_past, slots, strict=True)):
        rows = slice(s * at.n_tokens, (s + 1) * at.n_tokens)
        mixed = _conv_silu(qkv[rows], conv_w, conv_ring[slot], int(past))
        q = _l2(mixed[:, :key_dim].reshape(-1, at.n_k_heads, dk), at.eps)[:, k_head] * dk**-0.5
        k = _l2(mixed[:, key_dim : 2 * key_dim].reshape(-1, at.n_k_heads, dk), at.eps)[:, k_head]
        v = mixed[:, 2 * key_dim :].reshape(-1, n_v_heads, dv)
        decay = np.exp(np.logaddexp(0, alpha[rows] + dt_bias) * a)  # [n_tokens, n_v_heads]
        rate = sigmoid(beta[rows])
        ring = state_ring[slot]
        state = ring[(past - 1) % n_slots].copy() if past else np.zeros_like(ring[0])
        o = np.empty_like(v)
        for t in range(at.n_tokens):
            state *= decay[t, :, None, None]
            delta = rate[t, :, None] * (v[t] - (state @ k[t, :, :, None])[..., 0])
            state += delta[:, :, None] * k[t, :, None, :]
            o[t] = (state @ q[t, :, :, None])[..., 0]
            if t >= at.n_tokens - n_slots:
                ring[(past + t) % n_slots] = state
        for part in range(squares.shape[2]):
            squares[rows, :, part] = np.sum(np.square(o[:, :, part * ROWS : (part + 1) * ROWS]), axis=-1)
        y[rows] = (o * norm_w * silu(z[rows].reshape(o.shape))).reshape(at.n_tokens, -1)


def _conv_silu(x: Array, w: Array, ring: Array, past: int) -> Array:
    """SiLU of the causal conv of x [n_tokens, conv_dim]; reads the older columns from the ring, writes the new ones."""
    n_tokens, n_columns, before = len(x), len(ring), w.shape[1] - 1
    window = np.zeros((before + n_tokens, x.shape[1]), x.dtype)
    older = np.arange(max(past - before, 0), past)  # positions
    window[before - len(older) : before] = ring[older % n_columns]
    window[before:] = x
    out = sum(window[j : j + n_tokens] * w[:, j] for j in range(before + 1))
    kept = np.arange(max(n_tokens - n_columns, 0), n_tokens)
    ring[(past + kept) % n_columns] = x[kept]
    return silu(np.asarray(out))


def _l2(x: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True) + eps))


def _prepare(node: Node, inputs: Sequence[Array], outputs: Sequence[Array], work: Workspace) -> Run:
    at: Attrs = node.attrs
    return prepared_mixer(
        inputs, outputs, work,
        n_tokens=at.n_tokens, n_k_heads=at.n_k_heads, part=ROWS, eps=at.eps, grouped=at.grouped,
    )  # fmt: skip


def _lower(node: Node, limits: Limits) -> Lowering:
    state_ring = node.inputs[9]
    n_tokens = node.attrs.n_tokens
    if n_tokens <= SHORT:
        return [[_token_by_token(node, 0, limits)]]
    # A long batch may overwrite conv columns that its first tokens need: only after those have been read.
    n_done = n_by_blocks(n_tokens, state_ring.shape[1], limits)
    if not n_done:
        return [[_token_by_token(node, 0, limits)], [_conv_ring_write(node, limits)]]
    stages = block_stages(node, n_done, limits)
    stages[1].append(_conv_ring_write(node, limits))
    if n_done < n_tokens:
        stages[-1].append(_token_by_token(node, n_done, limits))
    return stages


def _token_by_token(node: Node, first: int, limits: Limits) -> Dispatch:
    """Mixes tokens first..n_tokens-1 of each sequence."""
    qkv, z, alpha, beta, conv_w, dt_bias, a, norm_w, conv_ring, state_ring, step = node.inputs
    y, squares, at = *node.outputs[:2], node.attrs
    n_slots, n_v_heads, dv, dk = state_ring.shape[1:]
    n_seqs, n_columns = step.shape[1], conv_ring.shape[1]
    short = at.n_tokens <= SHORT
    push = (
        At(qkv), At(z), At(alpha), At(beta), qkv.strides[0], At(conv_w), At(dt_bias), At(a), At(norm_w),
        At(step), step.strides[0], At(conv_ring), n_columns, At(state_ring), n_slots, At(y), At(squares),
        at.n_tokens, n_seqs, at.n_k_heads, n_v_heads, dv, squares.shape[2], float(at.eps),
        int(at.grouped) | 2 * int(short), first,
    )  # fmt: skip
    y_rows, squares_rows = (tokens_of(t, n_seqs, first, at.n_tokens) for t in (y, squares))
    binds = (
        Bind(qkv, "r"), Bind(conv_w, "r"), Bind(step, "r"), Bind(conv_ring, "rw" if short else "r"),
        Bind(state_ring, "rw"), Bind(y_rows, "w"),
    )  # fmt: skip
    also = (*(Bind(t, "r") for t in (z, alpha, beta, dt_bias, a, norm_w)), Bind(squares_rows, "w"))
    groups = spread(n_seqs * n_v_heads * squares.shape[2], limits.max_groups[0])
    kernel = MIXER if limits.few_lanes or limits.max_invocations < MIXER_WIDE.local_size else MIXER_WIDE
    return Dispatch(kernel, binds, push, groups, spec=(dk, conv_w.shape[1]), also=also)


def _conv_ring_write(node: Node, limits: Limits) -> Dispatch:
    """Keeps the last raw columns of a long batch."""
    qkv, conv_ring, step = node.inputs[0], node.inputs[8], node.inputs[10]
    n_tokens, n_columns, n_seqs = node.attrs.n_tokens, conv_ring.shape[1], step.shape[1]
    n_kept = min(n_tokens, n_columns)
    push = (
        At(qkv), qkv.strides[0], At(step), step.strides[0], At(conv_ring), n_columns, qkv.shape[1],
        n_tokens, n_kept, n_seqs,
    )  # fmt: skip
    binds = (Bind(qkv, "r"), Bind(step, "r"), Bind(conv_ring, "w"))
    return Dispatch(RING_WRITE, binds, push, spread(n_seqs * n_kept, limits.max_groups[0]))


def _cases() -> list[Case]:
    def case(
        n_tokens: int,
        n_past: Sequence[int],
        heads: tuple[int, int],
        size: tuple[int, int],
        n_rs: int,
        grouped: bool = False,
    ) -> Case:
        def build(b: CaseBuilder) -> None:
            (n_k, n_v), (dk, dv), kernel = heads, size, 4
            n_rows, conv_dim = n_tokens * len(n_past), 2 * n_k * dk + n_v * dv
            widths = (conv_dim, n_v * dv, n_v, n_v)
            x = b.input(b.normal(n_rows, sum(widths)))
            starts = np.cumsum((0, *widths))
            qkv, z, alpha, beta = (x.narrow(1, int(at), n) for at, n in zip(starts, widths, strict=False))
            parts = (
                b.normal(conv_dim * kernel, scale=0.5),
                b.uniform(-2, 2, n_v),
                -b.uniform(0.01, 4, n_v),
                b.uniform(0.5, 1.5, dv),
            )
            params = b.input(np.concatenate(parts))
            ends = np.cumsum([len(part) for part in parts])
            conv_w, dt_bias, a, norm_w = (
                params.narrow(0, int(end) - len(part), len(part)) for end, part in zip(ends, parts, strict=True)
            )
            slots = np.arange(len(n_past))[::-1] + 1
            rings = []
            for shape in ((conv_ring_columns(n_rs, kernel), conv_dim), (1 + n_rs, n_v, dv, dk)):
                ring = b.normal(len(n_past) + 1, *shape, scale=0.3)
                ring[0] = np.nan  # a sequence that is not in the batch
                for slot, past in zip(slots, n_past, strict=True):
                    if past == 0:
                        ring[slot] = np.nan
                rings.append(b.state(ring))
            step = b.input(np.stack([np.array(n_past), slots]))
            conv_w = conv_w.reshape(conv_dim, kernel)
            y, squares = delta_net_mixer(
                b.graph, qkv, z, alpha, beta, conv_w, dt_bias, a, norm_w, rings[0], rings[1], step,
                n_tokens=n_tokens, n_k_heads=n_k, eps=1e-6, grouped=grouped,
            )  # fmt: skip
            b.output(y)
            b.output(squares)

        label = f"n_tokens={n_tokens} n_past={list(n_past)} heads={heads} sizes={size} n_rs_seq={n_rs}"
        return Case(label + (" grouped" if grouped else ""), build)

    return [
        case(1, [0], (2, 4), (32, 32), 0),
        case(1, [5], (2, 4), (128, 128), 0),
        case(1, [1], (4, 4), (16, 16), 3),
        case(4, [9, 0], (2, 6), (64, 64), 3),
        case(3, [2], (1, 3), (32, 64), 8, True),
        case(16, [100, 7], (2, 4), (128, 128), 4),
        case(17, [3], (2, 4), (32, 32), 2),
        case(64, [0, 50], (2, 2), (64, 32), 5),
        case(70, [11], (2, 4), (128, 128), 0, True),
        case(33, [40, 0, 2], (1, 4), (16, 40), 1, True),
        case(65, [0], (2, 2), (64, 100), 8),
        case(512, [0], (16, 16), (128, 128), 0),
    ]


OP = Op(
    "delta_net_mixer",
    _reference,
    _lower,
    lambda: [MIXER, MIXER_WIDE, PREPARE, SCAN, FINISH, RING_WRITE],
    _cases,
    _prepare,
)
