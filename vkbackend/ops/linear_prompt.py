"""Products of weights with more rows than a decode batch has (prompts): which kernel, and cut into which tiles.

Three ways, all with float32's precision: `linear_tiled` for CPU drivers, `linear_blocks` for GPUs, and
`linear_matrix` where a GPU has cooperative matrices (the direct device). Results may differ in the last bits from
those of decode batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vkbackend.device.base import Limits, MatrixShape
from vkbackend.graph import Tensor
from vkbackend.ops.op import At, Bind, Dispatch, Kernel, Lowering, PushValue, counters, scratch, spread
from vkbackend.ops.rms_norm import rms_norm_dispatch
from vkbackend.packing import plane_words

SCALE_GROUPS = Kernel("scale_groups", 128)
SPLIT_LANES = 256  # invocations in a workgroup of split_halves
SPLIT_HALVES = {before: Kernel("split_halves", SPLIT_LANES, before) for before in ((), ("NORM",), ("GROUPS",))}
TILED_LANES = 64  # invocations in a workgroup of linear_tiled
ENOUGH_TILES = 256  # workgroups of linear_blocks below which tiles are cut smaller
MATRIX = MatrixShape(16, 16, 16, "f16", "f16", "f32", "f32")
MATRIX_LANES = 256  # invocations in a workgroup of linear_matrix: 8 subgroups of 32
# Tiles of 16 x 16 of a subgroup (a workgroup is 2 x 4 of those): how long a workgroup takes compared with the first.
# This and the next two are from measurements on an H200, see docs/performance.md.
MATRIX_TILES = {(4, 2): 1.0, (4, 1): 0.62, (2, 1): 0.36}
AT_ONCE = 132  # workgroups
PART_COST = 0.06  # of one more part of the columns
MAX_PARTS, MIN_STEPS = 4, 8  # of the columns; of 32 columns of a part
MAX_PARTIALS = 1 << 24  # numbers, all parts together
NOT_EXACT = ("f32", "bf16")  # formats whose values are not small integers or f16


@dataclass(frozen=True, eq=False)
class Part:
    """One matrix of a product [n_out, n_in], the places of its planes, its columns of the result, of the residual."""

    w: Tensor
    places: tuple[PushValue, ...]
    y: Tensor
    residual: Tensor | None


def prompt_stages(
    x: Tensor,
    parts: Sequence[Part],
    *,
    norm: Tensor | None,
    squares: Tensor | None,
    eps: float,
    swiglu: bool,
    limits: Limits,
) -> Lowering:
    """The stages of f(x) W^T for x [n_rows, n_in]; what f is, and the other arguments: see `linear`."""
    on_matrices = [p for p in parts if _has_matrices(limits) and p.w.dtype not in NOT_EXACT and x.shape[1] % 32 == 0]
    others = [p for p in parts if p not in on_matrices]
    first, last = [], []
    if on_matrices:
        halves = scratch("linear: x in halves", (x.shape[0] * (x.shape[1] // 16 * 17 + 1),))
        first.append(_split_halves(x, norm, squares, halves, eps, limits))
        last += [_matrix(x, halves, part, swiglu, limits) for part in on_matrices]
    if others:
        before = x
        if norm is not None:
            x = scratch("linear: normed x", x.shape)
            first.append(rms_norm_dispatch(before, norm, x, eps, limits))
        if squares is not None:
            x = scratch("linear: scaled x", x.shape)
            first.append(_scale_groups(before, squares, x, eps, limits))
        last += [_tiled(x, part, swiglu, limits) for part in others]
    return [first, last] if first else [last]


def prompt_kernels(formats: Sequence[str]) -> list[Kernel]:
    """All that `prompt_stages` may ask for."""
    out = [SCALE_GROUPS, *SPLIT_HALVES.values()]
    for fmt in formats:
        for after in ((), ("RESIDUAL",), ("SWIGLU",)):
            defines = (f"W_{fmt.upper()}", *after)
            out += [Kernel("linear_tiled", TILED_LANES, defines), Kernel("linear_blocks", 128, defines)]
            if fmt not in NOT_EXACT:
                out.append(Kernel("linear_matrix", MATRIX_LANES, defines))
    return out


# ---- what is done to x first


def _scale_groups(x: Tensor, squares: Tensor, y: Tensor, eps: float, limits: Limits) -> Dispatch:
    n_rows, n_groups, n_parts = squares.shape
    push = (At(x), x.strides[0], At(squares), At(y), x.shape[1], n_rows, n_groups, n_parts, float(eps))
    binds = (Bind(x, "r"), Bind(squares, "r"), Bind(y, "w"))
    return Dispatch(SCALE_GROUPS, binds, push, spread(n_rows, limits.max_groups[0]))


def _split_halves(
    x: Tensor, norm: Tensor | None, squares: Tensor | None, y: Tensor, eps: float, limits: Limits
) -> Dispatch:
    n_rows, n_in = x.shape
    binds = [Bind(x, "r"), Bind(y, "w")]
    extra = squares if norm is None else norm
    if extra is not None:
        binds.append(Bind(extra, "r"))
    groups = (n_in, 0) if squares is None else (n_in // squares.shape[1], squares.shape[2])
    push = (At(x), x.strides[0], At(y), n_in, n_rows, 0 if extra is None else At(extra), float(eps), *groups)
    kernel = SPLIT_HALVES[() if extra is None else ("GROUPS",) if norm is None else ("NORM",)]
    spec = (-(-n_in // (4 * SPLIT_LANES)),)
    return Dispatch(kernel, tuple(binds), push, spread(n_rows, limits.max_groups[0]), spec)


# ---- products


def product_bytes(x: Tensor, w: Tensor, y: Tensor) -> int:
    """Weights, x and y once."""
    return 4 * (sum(plane_words(w.dtype, *w.shape)) + x.size + y.size)


def _after(part: Part, swiglu: bool) -> tuple[tuple[str, ...], tuple[Bind, ...], tuple[PushValue, PushValue]]:
    """What follows the sums: defines, bindings, push values."""
    if part.residual is not None:
        return ("RESIDUAL",), (Bind(part.residual, "r"),), (At(part.residual), part.residual.strides[0])
    return ("SWIGLU",) if swiglu else (), (), (0, 0)


def _has_matrices(limits: Limits) -> bool:
    """Only where every subgroup has 32 invocations: the kernel counts on it."""
    features = limits.features
    known = MATRIX in features.matrix_shapes and features.float16 and features.memory_model
    return known and limits.subgroup_shuffle and features.subgroup_sizes == (32, 32)


def _matrix(x: Tensor, halves: Tensor, part: Part, swiglu: bool, limits: Limits) -> Dispatch:
    n_rows, (n_out, n_in) = x.shape[0], part.w.shape
    (m_tiles, n_tiles), k_parts = _matrix_tiles(n_out, n_rows, n_in, limits)
    n_w_tiles, n_x_tiles = -(-n_out // (32 * m_tiles)), -(-n_rows // (64 * n_tiles))
    partials = done = halves  # bound, and not used without parts
    access = "r"
    if k_parts > 1:
        size = 32 * m_tiles * 64 * n_tiles
        partials = scratch("linear: sums of parts of the columns", (n_w_tiles * n_x_tiles * k_parts, size))
        done = counters("linear: parts of the columns done", n_w_tiles * n_x_tiles)
        access = "rw"
    defines, binds, after = _after(part, swiglu)
    push = (
        *part.places, n_in, n_out, At(halves), At(part.y), part.y.strides[0], n_rows, *after, n_w_tiles,
        At(partials), At(done),
    )  # fmt: skip
    kernel = Kernel("linear_matrix", MATRIX_LANES, (f"W_{part.w.dtype.upper()}", *defines))
    groups = spread(n_w_tiles * n_x_tiles * k_parts, limits.max_groups[0])
    all_binds = (
        Bind(part.w, "r"), Bind(halves, "r"), Bind(part.y, "w"), Bind(partials, access), Bind(done, access), *binds,
    )  # fmt: skip
    spec = (m_tiles, n_tiles, k_parts)
    return Dispatch(kernel, all_binds, push, groups, spec, n_bytes=product_bytes(x, part.w, part.y))


def _matrix_tiles(n_out: int, n_rows: int, n_in: int, limits: Limits) -> tuple[tuple[int, int], int]:
    """Tiles of a subgroup and parts of the columns: what takes the fewest rounds of workgroups that run at once."""
    if limits.max_shared_bytes < 48 << 10:
        return min(MATRIX_TILES), 1
    best = (float("inf"), (0, 0), 0)
    for (m_tiles, n_tiles), cost in MATRIX_TILES.items():
        n_groups = -(-n_out // (32 * m_tiles)) * -(-n_rows // (64 * n_tiles))
        for parts in range(1, MAX_PARTS + 1):
            too_many = n_groups * parts * 2048 * m_tiles * n_tiles > MAX_PARTIALS or n_in // 32 < parts * MIN_STEPS
            if parts == 1 or not too_many:
                time = -(-n_groups * parts // AT_ONCE) / parts * (1 + PART_COST * (parts - 1)) * cost
                best = min(best, (time, (m_tiles, n_tiles), parts))
    return best[1:]


def _tiled(x: Tensor, part: Part, swiglu: bool, limits: Limits) -> Dispatch:
    n_rows, (n_out, n_in) = x.shape[0], part.w.shape
    defines, binds, after = _after(part, swiglu)
    tiles = _cpu_tiles if limits.few_lanes else _gpu_tiles
    name, local_size, spec, tile_w, tile_x = tiles(n_out, n_rows)
    n_w_tiles, n_x_tiles = -(-n_out // tile_w), -(-n_rows // tile_x)
    push = (
        *part.places, n_in, n_out, At(x), x.strides[0], At(part.y), part.y.strides[0], n_rows, *after, n_w_tiles,
    )  # fmt: skip
    kernel = Kernel(name, local_size, (f"W_{part.w.dtype.upper()}", *defines))
    groups = spread(n_w_tiles * n_x_tiles, limits.max_groups[0])
    all_binds = (Bind(part.w, "r"), Bind(x, "r"), Bind(part.y, "w"), *binds)
    return Dispatch(kernel, all_binds, push, groups, spec, n_bytes=product_bytes(x, part.w, part.y))


_Tiles = tuple[str, int, tuple[int, int], int, int]  # kernel, local size, specialisation, tile along weights, along x


def _cpu_tiles(n_out: int, n_rows: int) -> _Tiles:
    """CPU drivers read shared memory lane by lane: weights stay in registers, only x is shared."""
    n_w, n_x = 8, 4
    while n_w > 2 and n_out <= TILED_LANES * n_w // 2:
        n_w //= 2
    return "linear_tiled", TILED_LANES, (n_w, n_x), TILED_LANES * n_w, n_x


def _gpu_tiles(n_out: int, n_rows: int) -> _Tiles:
    """The largest tile that still leaves enough workgroups."""
    for n_w, n_x in ((8, 8), (8, 4), (4, 4)):
        tile_w, tile_x = 16 * n_w, 8 * n_x
        if -(-n_out // tile_w) * -(-n_rows // tile_x) >= ENOUGH_TILES:
            break
    return "linear_blocks", 128, (n_w, n_x), tile_w, tile_x
