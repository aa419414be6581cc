"""Matrix products: y = f(x) W^T, with what usually stands around them fused in.

Before the product: RMS norm of x. After it: a residual added, or SwiGLU over interleaved gate and up rows. Up to
16 rows of x go through `linear_rows` or, as `linear_dots.py` tells, `linear_dots`, whose results do not depend on the
number of rows; more rows (prompts) through the products of `linear_prompt.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.device.numpy_parts import Run, Workspace
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.linear_dots import ORDERS, SUBGROUPS, dots, dots_kernels, emitting, row_bytes, suits
from vkbackend.ops.linear_numpy import prepared_linear
from vkbackend.ops.linear_prompt import Part, product_bytes, prompt_kernels, prompt_stages
from vkbackend.ops.op import (
    Array,
    At,
    Bind,
    Dispatch,
    Kernel,
    Lowering,
    Op,
    PushValue,
    check,
    silu,
    spread,
)
from vkbackend.packing import plane_starts

MAX_ROWS = 16  # of x, for the batch-invariant kernel
ROWS_LANES = 128  # invocations in a workgroup of linear_rows
LANES, TEAMS = 8, ROWS_LANES // 8  # of these (include/lanes.glsl)
ENOUGH_TEAMS = 49152  # below this many teams, several share a row so that the device is filled
LARGE, MEDIUM = 32768, 4096  # weight rows; these three from a sweep on an H200, see docs/performance.md
FORMATS = (
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1",
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4",
)  # fmt: skip


@dataclass(frozen=True)
class Attrs:
    """Which optional inputs a node has, and the norms' epsilon."""

    norm: bool
    groups: bool
    residual: bool
    swiglu: bool
    eps: float


def linear(
    g: Graph,
    x: Tensor,
    parts: Sequence[Tensor],
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    group_squares: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """The products of x [n_rows, n_in] with every matrix of `parts` [rows_i, n_in], side by side: [n_rows, n_out].

    norm [n_in]: x is RMS-normalised and scaled by it first. group_squares [n_rows, n_groups, n_parts]: each group of
    n_in / n_groups columns of x is divided by sqrt(sum of its parts / group size + eps) first. residual
    [n_rows, n_out] is added to the result. swiglu: rows of each part are gate and up in turns (row 2i gate, row 2i + 1
    up), and the result is silu(gate) * up, [n_rows, n_out / 2]. Weights are f32 or any packed format.
    """
    check(len(parts) > 0, "linear", "no weights were given")
    check(x.ndim == 2 and x.strides[1] == 1, "linear", f"x must be rows of contiguous numbers, got shape {x.shape}")
    n_in = x.shape[1]
    for w in parts:
        check(w.ndim == 2 and w.shape[1] == n_in, "linear", f"weights {w.shape} do not fit x {x.shape}")
        check(not swiglu or w.shape[0] % 2 == 0, "linear", f"swiglu needs pairs of rows, got {w.shape[0]} rows")
    check(norm is None or norm.shape == (n_in,), "linear", f"norm must have shape ({n_in},)")
    check(residual is None or not swiglu, "linear", "residual and swiglu exclude each other")
    if group_squares is not None:
        check(norm is None, "linear", "norm and group_squares exclude each other")
        fits = group_squares.ndim == 3 and group_squares.shape[0] == x.shape[0] and n_in % group_squares.shape[1] == 0
        check(
            fits and n_in // group_squares.shape[1] % 16 == 0,
            "linear",
            f"group_squares {group_squares.shape}, x {x.shape}",
        )
    n_out = sum(w.shape[0] for w in parts)
    y = g.temp("linear", (x.shape[0], n_out // 2 if swiglu else n_out))
    inputs = [x]
    if norm is not None:
        inputs.append(norm)
    if group_squares is not None:
        inputs.append(group_squares)
    if residual is not None:
        check(
            residual.shape == y.shape and residual.strides[1] == 1,
            "linear",
            f"residual {residual.shape} is not {y.shape}",
        )
        inputs.append(residual)
    g.add(
        OP,
        [*inputs, *parts],
        [y],
        Attrs(norm is not None, group_squares is not None, residual is not None, swiglu, eps),
    )
    return y


T = TypeVar("T")


@dataclass(frozen=True)
class _Operands(Generic[T]):
    """A node's inputs by name: tensors or arrays."""

    x: T
    norm: T | None
    squares: T | None
    residual: T | None
    parts: Sequence[T]


def _operands(attrs: Attrs, values: Sequence[T]) -> _Operands[T]:
    rest = list(values)
    x = rest.pop(0)
    norm = rest.pop(0) if attrs.norm else None
    squares = rest.pop(0) if attrs.groups else None
    residual = rest.pop(0) if attrs.residual else None
    return _Operands(x, norm, squares, residual, rest)


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    attrs, of = node.attrs, _operands(node.attrs, inputs)
    x = of.x
    if of.norm is not None:
        x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + attrs.eps) * of.norm
    if of.squares is not None:
        groups = x.reshape(*of.squares.shape[:2], -1)
        mean = of.squares.sum(axis=-1, keepdims=True) / groups.shape[2]
        x = (groups / np.sqrt(mean + attrs.eps)).reshape(x.shape)
    at = 0
    for w in of.parts:
        product = x @ w.T
        if attrs.swiglu:
            product = silu(product[:, 0::2]) * product[:, 1::2]
        outputs[0][:, at : at + product.shape[1]] = product
        at += product.shape[1]
    if of.residual is not None:
        outputs[0][...] += of.residual


def _prepare(node: Node, inputs: Sequence[Array], outputs: Sequence[Array], work: Workspace) -> Run:
    attrs, of = node.attrs, _operands(node.attrs, inputs)
    return prepared_linear(
        of.x, of.parts, outputs[0], work,
        norm=of.norm, squares=of.squares, residual=of.residual, eps=attrs.eps, swiglu=attrs.swiglu,
    )  # fmt: skip


def _lower(node: Node, limits: Limits) -> Lowering:
    attrs, of = node.attrs, _operands(node.attrs, node.inputs)
    x, y = of.x, node.outputs[0]
    check(
        x.shape[1] % 16 == 0 and x.strides[0] % 4 == 0 and x.offset % 4 == 0,
        "linear",
        f"x {x.shape} must have a multiple of 16 columns, its rows must start at multiples of 4 words",
    )
    pieces: list[_Piece] = []
    at = 0
    for w in of.parts:
        width = w.shape[0] // 2 if attrs.swiglu else w.shape[0]
        pieces.append((w, y.narrow(1, at, width), of.residual and of.residual.narrow(1, at, width)))
        at += width
    if x.shape[0] <= MAX_ROWS:
        return _decode_stages(attrs, of, pieces, limits)
    return prompt_stages(
        x,
        [Part(w, plane_places(w), out, residual) for w, out, residual in pieces],
        norm=of.norm, squares=of.squares, eps=attrs.eps, swiglu=attrs.swiglu, limits=limits,
    )  # fmt: skip


_Piece = tuple[Tensor, Tensor, Tensor | None]  # one matrix, its columns of the result, of the residual


def _decode_stages(attrs: Attrs, of: _Operands[Tensor], pieces: Sequence[_Piece], limits: Limits) -> Lowering:
    """Matrices that suit `linear_dots` go there, with x made bytes first, once for each order of columns."""
    x = of.x
    as_dots = suits(of.parts, limits)
    first: dict[int, tuple[Tensor, Dispatch]] = {}
    last = []
    for w, y, residual in pieces:
        if w.dtype not in ORDERS or not as_dots:
            last.append(_rows(attrs, of, w, y, residual, limits))
            continue
        order = ORDERS[w.dtype]
        if order not in first:
            first[order] = row_bytes(x, of.norm, of.squares, attrs.eps, order, limits)
        last.append(
            dots(
                first[order][0], w, plane_places(w), y, residual,
                norm=of.norm is not None, swiglu=attrs.swiglu, eps=attrs.eps,
                lane_stride=_lane_stride(limits), n_bytes=product_bytes(x, w, y), limits=limits,
            )
        )  # fmt: skip
    return [[dispatch for _, dispatch in first.values()], last] if first else [last]


def plane_places(w: Tensor) -> tuple[PushValue, PushValue, PushValue]:
    """Push values for the first words of a weight matrix's planes (three, unused ones 0)."""
    starts = plane_starts(w.dtype, *w.shape)
    places = [At(w, start) for start in starts]
    return tuple([*places, 0, 0][:3])  # type: ignore[return-value]


def _rows(
    attrs: Attrs, of: _Operands[Tensor], w: Tensor, y: Tensor, residual: Tensor | None, limits: Limits
) -> Dispatch:
    x = of.x
    n_out, n_in = w.shape
    binds = [Bind(w, "r"), Bind(x, "r"), Bind(y, "w")]
    defines = [f"W_{w.dtype.upper()}"]
    push: list[PushValue] = [*plane_places(w), n_in, n_out, At(x), x.strides[0], At(y), y.strides[0]]
    extra = of.norm or of.squares
    if extra is not None:
        binds.append(Bind(extra, "r"))
        defines.append("NORM" if of.norm else "GROUPS")
    push += [0 if extra is None else At(extra), float(attrs.eps)]
    if residual is not None:
        binds.append(Bind(residual, "r"))
        defines.append("RESIDUAL")
        push += [At(residual), residual.strides[0]]
    else:
        push += [0, 0]
    push.append(1 if of.squares is None else n_in // of.squares.shape[1])
    if attrs.swiglu:
        defines.append("SWIGLU")
    kernel = Kernel("linear_rows", ROWS_LANES, tuple(defines))
    n_r, split, wide = _shape_of_work(n_out, n_in, x.shape[0], limits)
    groups = spread(-(-n_out * split // (TEAMS * n_r)), limits.max_groups[0])
    n_parts = 1 if of.squares is None else of.squares.shape[2]
    spec = (x.shape[0], n_r, split, int(wide), _lane_stride(limits), n_parts, 0)
    dispatch = Dispatch(kernel, tuple(binds), tuple(push), groups, spec, n_bytes=product_bytes(x, w, y))
    return dispatch if residual is None or of.norm is not None else emitting(dispatch, y)


def _shape_of_work(n_out: int, n_in: int, n_tokens: int, limits: Limits) -> tuple[int, int, bool]:
    """(weight rows a team takes, teams that share them, whether a lane takes 32 columns at a time and not 16).

    The last two set the order of the sums, so they depend on the matrix only, never on the number of tokens.
    """
    if limits.few_lanes:  # there is nothing to fill, sharing the loads of x is what counts
        return 4 if n_tokens <= 4 else 2, 1, False
    chunks_per_lane = -(-n_in // (16 * LANES))
    split = 1
    while n_out * split < ENOUGH_TEAMS and split < TEAMS and chunks_per_lane > split:
        split *= 2
    if n_tokens <= 2:
        n_r = 8 if n_out >= LARGE else 4 if n_out >= MEDIUM else 2
    else:
        n_r = 8 if n_out >= LARGE // 2 else 4
    while n_r * n_tokens > 32:  # sums held in registers
        n_r //= 2
    return n_r, split, n_out >= LARGE


def _lane_stride(limits: Limits) -> int:
    """How far the lanes of a team are apart: all of them in any subgroup, and more than 4 brings no more."""
    return max(1, min(limits.min_subgroup_size // LANES, 4))


def _kernels() -> list[Kernel]:
    out = [*prompt_kernels(FORMATS), *dots_kernels()]
    for fmt in FORMATS:
        for before in ((), ("NORM",), ("GROUPS",)):
            for after in ((), ("RESIDUAL",), ("RESIDUAL", "EMIT", SUBGROUPS), ("SWIGLU",)):
                if before != ("NORM",) or "EMIT" not in after:
                    out.append(Kernel("linear_rows", ROWS_LANES, (f"W_{fmt.upper()}", *before, *after)))
    return out


def _cases() -> list[Case]:
    def case(
        n: int, n_in: int, rows: Sequence[int], fmts: Sequence[str], before: str = "", after: str = "", pad: int = 0
    ) -> Case:
        def build(b: CaseBuilder) -> None:
            x = b.input(b.normal(n, n_in + pad)).narrow(1, pad, n_in)
            parts = [b.weight(b.normal(r, n_in, scale=n_in**-0.5), f) for r, f in zip(rows, fmts, strict=True)]
            w_norm = b.input(b.uniform(0.5, 1.5, n_in)) if before == "norm" else None
            squares = b.input(b.uniform(1, 50, n, n_in // 32, 3)) if before == "groups" else None
            residual = b.input(b.normal(n, sum(rows))) if after == "residual" else None
            b.output(
                linear(
                    b.graph,
                    x,
                    parts,
                    norm=w_norm,
                    eps=1e-6,
                    group_squares=squares,
                    residual=residual,
                    swiglu=after == "swiglu",
                )
            )

        what = ",".join(f"{r}x{n_in} {f}" for r, f in zip(rows, fmts, strict=True))
        return Case(f"n={n} {what} {before} {after}".rstrip(), build)

    plain = FORMATS[:4]
    out = [case(n, 128, [70], [fmt]) for n in (1, 3, 16, 17, 33) for fmt in plain]
    out += [case(n, 512, [70], [fmt]) for n in (2, 40) for fmt in FORMATS[4:]]
    out += [case(1, 256, [34], [fmt], "norm", "swiglu") for fmt in ("q4_k", "q6_k", "q4_0")]
    out += [case(16, 768, [30, 9], ["q4_k", "q6_k"], "groups", "residual"), case(17, 160, [34], ["q5_1"], "", "swiglu")]
    out += [case(3, 96, [33, 20], ["q4_1", "q5_0"], "norm", "residual"), case(1, 4096, [66], ["q4_k"])]
    out += [case(n, 256, [64, 6], ["q8_0", "f32"], "norm") for n in (1, 2, 4, 7, 16, 40)]
    out += [case(n, 512, [96], [fmt], "norm", "swiglu") for n in (1, 5, 70) for fmt in plain]
    out += [case(n, 96, [33, 130], ["f16", "q8_0"], "groups", "residual", pad=4) for n in (1, 16, 100)]
    out += [case(1, 3584, [1024], ["q8_0"], "", "residual"), case(512, 64, [200], ["q8_0"])]
    return out


OP = Op("linear", _reference, _lower, _kernels, _cases, _prepare)
