"""Routed SwiGLU experts with everything around them: y = x + sum of weighted experts + gated shared expert.

Router logits and the shared expert's own products are made before, by `linear`. Up to 16 rows: one dispatch finds each
row's experts and computes their gate and up products, a second one sums the down products; a row's result does not
depend on the number of rows. More rows (prompts) are sorted by expert and go through a tiled product. Source of the
maths: Qwen3 MoE, with the sigmoid gate of the shared expert of Qwen2 MoE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.linear import ENOUGH_TEAMS, FORMATS, LANES, MAX_ROWS, TEAMS, plane_places
from vkbackend.ops.moe_group import group_dispatch, tile_count
from vkbackend.ops.moe_route import check_router, route, route_dispatch
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, scratch, sigmoid, silu, spread
from vkbackend.ops.rms_norm import rms_norm_dispatch
from vkbackend.ops.swiglu import swiglu_dispatch

PIECE = {False: 16, True: 32}  # columns a lane takes at a time: of floats, of formats with blocks (HALVES)
COMBINE = Kernel("moe_combine", 128)
TILE_ROWS = 128  # weight rows of a workgroup of moe_tiles
SHARED_BESIDE = 8192  # bytes of shared memory left to other things when x is kept there


@dataclass(frozen=True)
class Attrs:
    """`n_gate` and `n_up` count the parts among the inputs; without up parts the gate parts hold both."""

    n_used: int
    n_ff: int
    n_gate: int
    n_up: int
    eps: float


def moe_experts(
    g: Graph,
    x: Tensor,
    norm: Tensor,
    logits: Tensor,
    shared: Tensor,
    shared_gate: Tensor,
    gate: Sequence[Tensor],
    down: Sequence[Tensor],
    *,
    n_used: int,
    n_ff: int,
    eps: float,
    up: Sequence[Tensor] = (),
) -> Tensor:
    """x + experts(rms(x, norm)) + sigmoid(shared_gate) * shared, [n_rows, n_embd], for rows x [n_rows, n_embd].

    logits [n_rows, n_expert]: the router's; the n_used largest of a row name its experts, their softmax weighs them.
    shared [n_rows, n_embd] and shared_gate [n_rows, 1]: output of the shared expert and its gate before the sigmoid.
    gate: parts [n * 2 n_ff, n_embd], for each expert n_ff gate rows and then n_ff up rows; or, with `up` of the same
    layout, [n * n_ff, n_embd]. down: parts [n * n_embd, n_ff]. Parts hold whole experts, in order.
    """
    op = "moe_experts"
    check(x.ndim == 2 and x.strides[1] == 1, op, f"x must be rows of contiguous numbers, got shape {x.shape}")
    n_rows, n_embd = x.shape
    check(norm.shape == (n_embd,), op, f"norm must have shape ({n_embd},), got {norm.shape}")
    check_router(logits, n_used, op)
    for name, t, shape in (("logits", logits, (n_rows, logits.shape[1])), ("shared", shared, (n_rows, n_embd))):
        check(t.shape == shape and t.strides[1] == 1, op, f"{name} must have shape {shape}, got {t.shape}")
    check(shared_gate.shape == (n_rows, 1), op, f"shared_gate must have shape ({n_rows}, 1), got {shared_gate.shape}")
    rows = n_ff if up else 2 * n_ff
    _check_parts("gate", gate, logits.shape[1], rows, n_embd)
    if up:
        _check_parts("up", up, logits.shape[1], rows, n_embd)
    _check_parts("down", down, logits.shape[1], n_embd, n_ff)
    y = g.temp(op, (n_rows, n_embd))
    inputs = [x, norm, logits, shared, shared_gate, *gate, *up, *down]
    g.add(OP, inputs, [y], Attrs(n_used, n_ff, len(gate), len(up), eps))
    return y


def _check_parts(name: str, parts: Sequence[Tensor], n_expert: int, rows: int, n_in: int) -> None:
    fits = all(w.ndim == 2 and w.shape[0] % rows == 0 and w.shape[1] == n_in for w in parts)
    check(
        fits and sum(w.shape[0] for w in parts) == n_expert * rows,
        "moe_experts",
        f"{name} has parts {[w.shape for w in parts]}; {n_expert} experts of {rows} rows, {n_in} columns, are needed",
    )


T = TypeVar("T")


@dataclass(frozen=True)
class _Operands(Generic[T]):
    """A node's inputs by name: tensors or arrays."""

    x: T
    norm: T
    logits: T
    shared: T
    shared_gate: T
    gate: Sequence[T]
    up: Sequence[T]
    down: Sequence[T]


def _operands(attrs: Attrs, values: Sequence[T]) -> _Operands[T]:
    x, norm, logits, shared, shared_gate, *parts = values
    cut = attrs.n_gate + attrs.n_up
    return _Operands(
        x, norm, logits, shared, shared_gate, parts[: attrs.n_gate], parts[attrs.n_gate : cut], parts[cut:]
    )


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    attrs, of = node.attrs, _operands(node.attrs, inputs)
    x, n_ff = of.x, attrs.n_ff
    normed = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + attrs.eps) * of.norm
    ids, weights = route(of.logits, attrs.n_used)  # [n_rows, n_used]
    y = x + sigmoid(of.shared_gate) * of.shared
    step = 1 if len(x) <= MAX_ROWS else len(x)  # row by row: then a row's bits do not depend on those beside it
    for expert in np.unique(ids):
        all_rows, all_slots = np.nonzero(ids == expert)  # a row chooses an expert once at most
        w_gate, w_down = _expert(of.gate, expert, n_ff if of.up else 2 * n_ff), _expert(of.down, expert, x.shape[1])
        w_up = _expert(of.up, expert, n_ff) if of.up else None
        for at in range(0, len(all_rows), step):
            rows, slots = all_rows[at : at + step], all_slots[at : at + step]
            gate = normed[rows] @ w_gate.T
            up = gate[:, n_ff:] if w_up is None else normed[rows] @ w_up.T
            inner = silu(gate[:, :n_ff]) * up
            y[rows] += weights[rows, slots, None] * (inner @ w_down.T)
    outputs[0][...] = y


def _expert(parts: Sequence[Array], expert: int, rows: int) -> Array:
    """The rows of one expert."""
    at = int(expert) * rows
    for part in parts:
        if at < part.shape[0]:
            return part[at : at + rows]
        at -= part.shape[0]
    raise AssertionError("the builder checked the number of experts")


def _lower(node: Node, limits: Limits) -> Lowering:
    attrs, of = node.attrs, _operands(node.attrs, node.inputs)
    x, y = of.x, node.outputs[0]
    for t in (x, of.norm):
        check(
            t.shape[-1] % 16 == 0 and t.offset % 4 == 0 and (t is of.norm or t.strides[0] % 4 == 0),
            "moe_experts",
            f"x {x.shape} must have a multiple of 16 columns, its rows must start at multiples of 4 words",
        )
    check(attrs.n_ff % 16 == 0, "moe_experts", f"n_ff is {attrs.n_ff}; a multiple of 16 is needed")
    return _rows(attrs, of, y, limits) if x.shape[0] <= MAX_ROWS else _prompt(attrs, of, y, limits)


def _first_experts(parts: Sequence[Tensor], rows: int) -> list[tuple[Tensor, int, int]]:
    """(part, its first expert, its number of experts)."""
    out, first = [], 0
    for part in parts:
        out.append((part, first, part.shape[0] // rows))
        first += part.shape[0] // rows
    return out


# ---- up to 16 rows


def _rows(attrs: Attrs, of: _Operands[Tensor], y: Tensor, limits: Limits) -> Lowering:
    shape = (of.x.shape[0], attrs.n_used)
    ids, weights = scratch("moe: experts", shape, "i32"), scratch("moe: weights", shape)
    inner = scratch("moe: inner", (ids.size, attrs.n_ff))
    if of.up:
        gate, up = scratch("moe: gate", inner.shape), scratch("moe: up", inner.shape)
        first = _up_rows(attrs, of, of.gate, gate, ids, weights, True, limits)
        first += _up_rows(attrs, of, of.up, up, ids, weights, False, limits)
        stages = [first, [swiglu_dispatch(gate, up, inner, limits)]]
    else:
        stages = [_up_rows(attrs, of, of.gate, inner, ids, weights, True, limits)]
    for part in _first_experts(of.down, of.x.shape[1]):
        stages.append([_down_rows(attrs, of, part, inner, ids, weights, y, limits)])
    return stages


def _up_rows(
    attrs: Attrs,
    of: _Operands[Tensor],
    parts: Sequence[Tensor],
    y: Tensor,
    ids: Tensor,
    weights: Tensor,
    writes_route: bool,
    limits: Limits,
) -> list[Dispatch]:
    """Products of each row's experts with its normed x, one dispatch a part; the first writes ids and weights."""
    x, swiglu = of.x, not of.up
    n_in, n_out = x.shape[1], attrs.n_ff * (2 if swiglu else 1)
    out = []
    for w, first, n_experts in _first_experts(parts, n_out):
        n_r, split, tile = _up_work(n_out * attrs.n_used, n_in, w.dtype, limits)
        n_blocks = -(-n_out * split // (TEAMS * n_r))
        push = (
            *plane_places(w), n_in, n_out, first, n_experts, At(x), x.strides[0], At(of.norm), float(attrs.eps),
            At(of.logits), of.logits.strides[0], At(y), At(ids), At(weights), ids.size, n_blocks,
            int(writes_route and first == 0),
        )  # fmt: skip
        binds = (
            Bind(w, "r"), Bind(x, "r"), Bind(of.norm, "r"), Bind(of.logits, "r"), Bind(y, "w"), Bind(ids, "w"),
            Bind(weights, "w"),
        )  # fmt: skip
        kernel = Kernel("moe_up_rows", 128, (f"W_{w.dtype.upper()}",))
        groups = spread(n_blocks * ids.size, limits.max_groups[0])
        spec = (n_r, split, tile, int(swiglu), of.logits.shape[1], attrs.n_used)
        out.append(Dispatch(kernel, binds, push, groups, spec))
    return out


def _up_work(n_rows: int, n_in: int, dtype: str, limits: Limits) -> tuple[int, int, int]:
    """(weight rows of a team, teams that share them, columns of x in shared memory or 0) for n_rows of a token."""
    if limits.few_lanes:
        return 4, 1, 0
    pieces_per_lane = -(-n_in // (PIECE[dtype not in ("f32", "f16", "bf16")] * LANES))
    split = 1
    while n_rows * split < ENOUGH_TEAMS and split < TEAMS and pieces_per_lane > split:
        split *= 2
    return 4, split, n_in if 4 * n_in + SHARED_BESIDE <= limits.max_shared_bytes else 0


def _down_rows(
    attrs: Attrs,
    of: _Operands[Tensor],
    part: tuple[Tensor, int, int],
    inner: Tensor,
    ids: Tensor,
    weights: Tensor,
    y: Tensor,
    limits: Limits,
) -> Dispatch:
    """The weighted sum of a row's experts in one part, added to x and the shared expert or to what y holds."""
    w, first, n_experts = part
    n_rows, n_embd = y.shape
    n_r, split = 4, 1
    while not limits.few_lanes and 2 * split <= min(attrs.n_used, TEAMS):
        split *= 2
    n_blocks = -(-n_embd * split // (TEAMS * n_r))
    push = (
        *plane_places(w), attrs.n_ff, n_embd, first, n_experts, At(inner), At(ids), At(weights), At(y), At(of.x),
        of.x.strides[0], At(of.shared), of.shared.strides[0], At(of.shared_gate), of.shared_gate.strides[0], n_rows,
        n_blocks,
    )  # fmt: skip
    binds = (
        Bind(w, "r"), Bind(inner, "r"), Bind(ids, "r"), Bind(weights, "r"), Bind(y, "rw"), Bind(of.x, "r"),
        Bind(of.shared, "r"), Bind(of.shared_gate, "r"),
    )  # fmt: skip
    kernel = Kernel("moe_down_rows", 128, (f"W_{w.dtype.upper()}",))
    groups = spread(n_blocks * n_rows, limits.max_groups[0])
    return Dispatch(kernel, binds, push, groups, (n_r, split, attrs.n_used, int(first == 0)))


# ---- prompts


def _prompt(attrs: Attrs, of: _Operands[Tensor], y: Tensor, limits: Limits) -> Lowering:
    n_rows, n_embd = y.shape
    n_expert, n_pairs = of.logits.shape[1], n_rows * attrs.n_used
    normed = scratch("moe: normed x", of.x.shape)
    shape = (n_rows, attrs.n_used)
    ids, weights = scratch("moe: experts", shape, "i32"), scratch("moe: weights", shape)
    x_lanes, n_x = _tile_lanes(n_pairs, n_expert)
    pairs = scratch("moe: pairs", (n_pairs,), "i32")
    tiles = scratch("moe: tiles", (tile_count(n_pairs, n_expert, x_lanes * n_x), 3), "i32")
    inner, result = scratch("moe: inner", (n_pairs, attrs.n_ff)), scratch("moe: result", (n_pairs, n_embd))

    def product(parts: Sequence[Tensor], x: Tensor, divisor: int, out: Tensor, swiglu: bool) -> list[Dispatch]:
        return _tiles(parts, x, divisor, out, pairs, tiles, swiglu, (x_lanes, n_x), limits)

    stages: Lowering = [
        [rms_norm_dispatch(of.x, of.norm, normed, attrs.eps, limits), route_dispatch(of.logits, ids, weights, limits)],
        [group_dispatch(ids, pairs, tiles, n_expert, x_lanes * n_x, limits)],
    ]
    if of.up:
        gate, up = scratch("moe: gate", inner.shape), scratch("moe: up", inner.shape)
        stages.append(
            product(of.gate, normed, attrs.n_used, gate, False) + product(of.up, normed, attrs.n_used, up, False)
        )
        stages.append([swiglu_dispatch(gate, up, inner, limits)])
    else:
        stages.append(product(of.gate, normed, attrs.n_used, inner, True))
    stages.append(product(of.down, inner, 1, result, False))
    stages.append([_combine(of, weights, result, y, limits)])
    return stages


def _tile_lanes(n_pairs: int, n_expert: int) -> tuple[int, int]:
    """Lanes along pairs and pairs of a lane: tiles of 16, 32 or 64 pairs, by how many an expert gets on average."""
    if n_pairs <= 16 * n_expert:
        return 4, 4
    return (8, 4) if n_pairs <= 64 * n_expert else (8, 8)


def _tiles(
    parts: Sequence[Tensor],
    x: Tensor,
    divisor: int,
    y: Tensor,
    pairs: Tensor,
    tiles: Tensor,
    swiglu: bool,
    lanes: tuple[int, int],
    limits: Limits,
) -> list[Dispatch]:
    """Row p of y: the expert of pair p applied to row p / divisor of x. One dispatch a part."""
    n_out = y.shape[1] * (2 if swiglu else 1)
    n_w_tiles = -(-n_out // TILE_ROWS)
    out = []
    for w, first, n_experts in _first_experts(parts, n_out):
        push = (
            *plane_places(w), x.shape[1], n_out, first, n_experts, At(x), x.strides[0], divisor, At(y), y.shape[1],
            At(pairs), At(tiles), tiles.shape[0], n_w_tiles,
        )  # fmt: skip
        binds = (Bind(w, "r"), Bind(x, "r"), Bind(y, "w"), Bind(pairs, "r"), Bind(tiles, "r"))
        kernel = Kernel("moe_tiles", 128, (f"W_{w.dtype.upper()}",))
        groups = spread(n_w_tiles * tiles.shape[0], limits.max_groups[0])
        out.append(Dispatch(kernel, binds, push, groups, (*lanes, int(swiglu))))
    return out


def _combine(of: _Operands[Tensor], weights: Tensor, result: Tensor, y: Tensor, limits: Limits) -> Dispatch:
    n_rows, n_embd = y.shape
    push = (
        At(of.x), of.x.strides[0], At(of.shared), of.shared.strides[0], At(of.shared_gate), of.shared_gate.strides[0],
        At(weights), weights.shape[1], At(result), At(y), n_embd, n_rows * n_embd,
    )  # fmt: skip
    binds = (
        Bind(of.x, "r"), Bind(of.shared, "r"), Bind(of.shared_gate, "r"), Bind(weights, "r"), Bind(result, "r"),
        Bind(y, "w"),
    )  # fmt: skip
    return Dispatch(COMBINE, binds, push, spread(-(-n_rows * n_embd // COMBINE.local_size), limits.max_groups[0]))


def _kernels() -> list[Kernel]:
    names = ("moe_up_rows", "moe_down_rows", "moe_tiles")
    return [COMBINE, *(Kernel(name, 128, (f"W_{fmt.upper()}",)) for fmt in FORMATS for name in names)]


def _cases() -> list[Case]:
    def case(
        n_rows: int,
        n_embd: int,
        n_ff: int,
        used: tuple[int, int],
        fmts: tuple[str, ...] = ("f16", "f16"),
        parts: tuple[int, ...] = (),
        pad: int = 0,
    ) -> Case:
        """used: experts of a row, of all. fmts: of gate with up and of down, or of gate, up, down."""
        n_used, n_expert = used

        def build(b: CaseBuilder) -> None:
            def experts(rows: int, cols: int, fmt: str) -> list[Tensor]:
                sizes = parts or (n_expert,)
                return [b.weight(b.normal(n * rows, cols, scale=cols**-0.5), fmt) for n in sizes]

            x = b.input(b.normal(n_rows, n_embd + pad)).narrow(1, pad, n_embd)
            logits = b.normal(n_rows, n_expert + 1)
            for i in range(len(parts)):  # no part is left out
                logits[0, sum(parts[:i])] += 10
            router = b.input(logits)
            *above, below = fmts
            gate = experts(n_ff if len(above) == 2 else 2 * n_ff, n_embd, above[0])
            up = experts(n_ff, n_embd, above[1]) if len(above) == 2 else []
            y = moe_experts(
                b.graph, x, b.input(b.uniform(0.5, 1.5, n_embd)), router.narrow(1, 0, n_expert),
                b.input(b.normal(n_rows, n_embd)), router.narrow(1, n_expert, 1), gate, experts(n_embd, n_ff, below),
                n_used=n_used, n_ff=n_ff, eps=1e-6, up=up,
            )  # fmt: skip
            b.output(y)

        what = f"{n_used} of {n_expert}x{n_ff} {','.join(fmts)}"
        return Case(f"n_rows={n_rows} n_embd={n_embd} {what} parts={parts or 1} pad={pad}", build)

    out: list[Case] = []
    pairs = list(zip(FORMATS[::2], FORMATS[1::2], strict=True))  # each format meets each kernel in one place
    for k, (one, two) in enumerate(pairs):
        n_embd, n_ff = (64, 96) if k < 4 else (256, 256)
        out += [case(2, n_embd, n_ff, (3, 5), (one, two)), case(20, n_embd, n_ff, (3, 5), (two, one))]
    out += [case(n, 64, 96, (3, 5), ("q8_0", "f32", "q4_0"), parts=(2, 3), pad=4) for n in (16, 17)]
    out += [case(n, 160, 32, (3, 6), ("q5_1", "q8_0"), parts=(1, 4, 1)) for n in (1, 33)]
    out += [case(1, 768, 64, (8, 16), ("q4_k", "q8_0")), case(16, 96, 48, (1, 1)), case(70, 96, 48, (6, 90))]
    return [*out, case(200, 64, 32, (5, 6)), case(120, 64, 64, (2, 3), ("q8_0", "q8_0"))]


OP = Op("moe_experts", _reference, _lower, _kernels, _cases)
