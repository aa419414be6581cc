"""Products for decode batches by dot products of bytes, where a device has an instruction for four of them.

`linear_dots` takes a quarter of the instructions of `linear_rows`, but wants x as 16-bit integers with a scale for each
16 columns. `row_bytes` makes them in a dispatch of its own; where x is the result of a product, that product makes
them on the way (`emitting`), which saves the level. Such an x has an error of at most 1 / 65,024 of the largest of its
16 columns; sums of 16 products are exact up to one rounding. Results do not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vkbackend.device.base import Limits
from vkbackend.graph import Tensor
from vkbackend.ops.op import At, Bind, Dispatch, Kernel, PushValue, counters, scratch, spread

LANES, TEAM = 128, 8  # invocations in a workgroup, in a team (include/lanes.glsl)
SWIGLU_LANES = 256  # so that a workgroup has 16 columns of the result
ENOUGH_TEAMS = 49152  # below this many teams, several share a row so that the device is filled
LARGE, WIDE, MEDIUM = 32768, 16384, 4096  # weight rows; these four from a sweep on an H200, see docs/performance.md
ROW_BYTES = {before: Kernel("row_bytes", LANES, before) for before in ((), ("NORM",), ("GROUPS",))}
SUBGROUPS = "SUBGROUP=1"  # the kernels here are asked for only where a device has them
BYTES, NIBBLES = 0, 1  # orders of columns (include/dots.glsl)
NIBBLE_FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
ORDERS = {"q8_0": BYTES} | dict.fromkeys(NIBBLE_FORMATS, NIBBLES)
ENOUGH_WEIGHTS = 12 << 20  # in products of fewer, making x bytes costs more than it saves


def suits(parts: Sequence[Tensor], limits: Limits) -> bool:
    """Whether products of one x with the matrices `parts` are better made this way (those in other formats are not).

    Depends on the matrices and the device only, never on the number of rows of x.
    """
    known = limits.features.integer_dot and limits.subgroup_shuffle and not limits.few_lanes
    return known and sum(w.shape[0] * w.shape[1] for w in parts if w.dtype in ORDERS) >= ENOUGH_WEIGHTS


# ---- x as bytes


def row_bytes(
    x: Tensor, norm: Tensor | None, squares: Tensor | None, eps: float, order: int, limits: Limits
) -> tuple[Tensor, Dispatch]:
    """x [n_rows, n_in] as bytes, and the dispatch that makes them; norm and squares scale it first, see `linear`."""
    n_rows, n_in = x.shape
    y = scratch("linear: x as bytes", (n_rows, -(-n_in // 16 * 11 // 4) * 4))
    binds = [Bind(x, "r"), Bind(y, "w")]
    extra = squares if norm is None else norm
    if extra is not None:
        binds.append(Bind(extra, "r"))
    group_size, n_parts = (1, 1) if squares is None else (n_in // squares.shape[1], squares.shape[2])
    place = 0 if extra is None else At(extra)
    push = (At(x), x.strides[0], At(y), y.strides[0], n_in, n_rows, place, float(eps), group_size)
    kernel = ROW_BYTES[() if extra is None else ("GROUPS",) if norm is None else ("NORM",)]
    groups = spread(-(-n_rows * n_in // (4 * LANES)), limits.max_groups[0])
    return y, Dispatch(kernel, tuple(binds), push, groups, (order, n_parts), follows=x)


def emitting(dispatch: Dispatch, y: Tensor) -> Dispatch:
    """`dispatch`, a product with the result y [n_rows, n_out], able to make y bytes as well (include/emit.glsl)."""

    def absorb(after: Dispatch) -> Dispatch | None:
        residual = "RESIDUAL" in dispatch.kernel.defines
        if after.kernel != ROW_BYTES[("NORM",) if residual else ()] or y.shape[1] % 16:
            return None
        order, to = after.spec[0], after.binds[1].tensor
        norm = after.binds[2].tensor if residual else None
        done = counters("linear: parts of a chunk", y.shape[1] // 16)
        binds = [*dispatch.binds, *([] if norm is None else [Bind(norm, "r")]), Bind(to, "w"), Bind(done, "rw")]
        push = (*dispatch.push, At(to), to.strides[0], At(done), 0 if norm is None else At(norm))
        defines = (*(d for d in dispatch.kernel.defines if d != SUBGROUPS), "EMIT", SUBGROUPS)
        kernel = replace(dispatch.kernel, defines=defines)
        return replace(
            dispatch, kernel=kernel, binds=tuple(binds), push=push, spec=(*dispatch.spec[:-1], order), absorb=None
        )

    return replace(dispatch, absorb=absorb)


# ---- products


def dots(
    x: Tensor,
    w: Tensor,
    places: tuple[PushValue, ...],
    y: Tensor,
    residual: Tensor | None,
    *,
    norm: bool,
    swiglu: bool,
    eps: float,
    lane_stride: int,
    n_bytes: int,
    limits: Limits,
) -> Dispatch:
    """The product of x, as bytes, with one matrix w [n_out, n_in], whose planes are at `places`."""
    n_out, n_in = w.shape
    n_tokens = x.shape[0]
    binds = [Bind(w, "r"), Bind(x, "r"), Bind(y, "w")]
    defines = [f"W_{w.dtype.upper()}", *(["NORM"] if norm else []), *(["SWIGLU"] if swiglu else [])]
    push: list[PushValue] = [*places, n_in, n_out, At(x), x.strides[0], At(y), y.strides[0], float(eps), 0, 0]
    if residual is not None:
        binds.append(Bind(residual, "r"))
        defines.append("RESIDUAL")
        push[-2:] = [At(residual), residual.strides[0]]
    lanes = SWIGLU_LANES if swiglu else LANES
    n_r, split, wide = _shape_of_work(n_out, n_in, n_tokens)
    groups = spread(-(-n_out * split // (lanes // TEAM * n_r)), limits.max_groups[0])
    spec = (n_tokens, n_r, split, int(wide), lane_stride, -(-n_in // (16 * lanes)), 0)
    kernel = Kernel("linear_dots", lanes, (*defines, SUBGROUPS))
    dispatch = Dispatch(kernel, tuple(binds), tuple(push), groups, spec, n_bytes=n_bytes)
    return emitting(dispatch, y) if swiglu or residual is not None else dispatch


def _shape_of_work(n_out: int, n_in: int, n_tokens: int) -> tuple[int, int, bool]:
    """(weight rows a team takes, teams that share them, whether a lane takes 32 columns at a time and not 16).

    The last two set the order of the sums, so they depend on the matrix only, never on the number of tokens.
    """
    chunks_per_lane = -(-n_in // (16 * TEAM))
    split = 1
    while n_out * split < ENOUGH_TEAMS and split < LANES // TEAM and chunks_per_lane > split:
        split *= 2
    n_r = 2 if n_out >= LARGE else 4 if n_out >= MEDIUM or n_tokens > 2 else 2
    while n_r * n_tokens > 32:  # sums held in registers
        n_r //= 2
    return n_r, split, n_out >= WIDE


def dots_kernels() -> list[Kernel]:
    """All that the functions above may ask for."""
    out = list(ROW_BYTES.values())
    for fmt in ORDERS:
        for before in ((), ("NORM",)):
            for after in ((), ("RESIDUAL",), ("RESIDUAL", "EMIT"), ("SWIGLU",), ("SWIGLU", "EMIT")):
                lanes = SWIGLU_LANES if "SWIGLU" in after else LANES
                out.append(Kernel("linear_dots", lanes, (f"W_{fmt.upper()}", *before, *after, SUBGROUPS)))
    return out
