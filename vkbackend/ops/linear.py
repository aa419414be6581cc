"""Matrix products: y = f(x) W^T, with what usually stands around them fused in.

Before the product: RMS norm of x. After it: a residual added, or SwiGLU over interleaved gate and up rows. Up to
16 rows of x go through `linear_rows`, whose results do not depend on the number of rows; more rows (prompts)
through a tiled product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
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
    scratch,
    silu,
    spread,
)
from vkbackend.ops.rms_norm import rms_norm_dispatch
from vkbackend.packing import plane_starts

MAX_ROWS = 16  # of x, for the batch-invariant kernel
TILE_W, TILE_X = 64, 32
FORMATS = ("f32", "f16", "bf16", "q8_0")


@dataclass(frozen=True)
class Attrs:
    """Which optional inputs a node has, and the norm's epsilon."""

    norm: bool
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
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """The products of x [n_rows, n_in] with every matrix of `parts` [rows_i, n_in], side by side: [n_rows, n_out].

    norm [n_in]: x is RMS-normalised and scaled by it first. residual [n_rows, n_out] is added to the result.
    swiglu: rows of each part are gate and up in turns (row 2i gate, row 2i + 1 up), and the result is
    silu(gate) * up, [n_rows, n_out / 2]. Weights are f32 or any packed format.
    """
    check(len(parts) > 0, "linear", "no weights were given")
    check(x.ndim == 2 and x.strides[1] == 1, "linear", f"x must be rows of contiguous numbers, got shape {x.shape}")
    n_in = x.shape[1]
    for w in parts:
        check(w.ndim == 2 and w.shape[1] == n_in, "linear", f"weights {w.shape} do not fit x {x.shape}")
        check(not swiglu or w.shape[0] % 2 == 0, "linear", f"swiglu needs pairs of rows, got {w.shape[0]} rows")
    check(norm is None or norm.shape == (n_in,), "linear", f"norm must have shape ({n_in},)")
    check(residual is None or not swiglu, "linear", "residual and swiglu exclude each other")
    n_out = sum(w.shape[0] for w in parts)
    y = g.temp("linear", (x.shape[0], n_out // 2 if swiglu else n_out))
    inputs = [x]
    if norm is not None:
        inputs.append(norm)
    if residual is not None:
        check(
            residual.shape == y.shape and residual.strides[1] == 1,
            "linear",
            f"residual {residual.shape} is not {y.shape}",
        )
        inputs.append(residual)
    g.add(OP, [*inputs, *parts], [y], Attrs(norm is not None, residual is not None, swiglu, eps))
    return y


def _take(node: Node, values: Sequence[object]) -> tuple[object, object, object, Sequence[object]]:
    """(x, norm or None, residual or None, parts) of a node's input tensors or arrays."""
    rest = list(values)
    x = rest.pop(0)
    norm = rest.pop(0) if node.attrs.norm else None
    residual = rest.pop(0) if node.attrs.residual else None
    return x, norm, residual, rest


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    x, norm, residual, parts = _take(node, inputs)
    assert isinstance(x, np.ndarray)
    if isinstance(norm, np.ndarray):
        x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + node.attrs.eps) * norm
    at = 0
    for w in parts:
        assert isinstance(w, np.ndarray)
        product = x @ w.T
        if node.attrs.swiglu:
            product = silu(product[:, 0::2]) * product[:, 1::2]
        outputs[0][:, at : at + product.shape[1]] = product
        at += product.shape[1]
    if isinstance(residual, np.ndarray):
        outputs[0][...] += residual


def _lower(node: Node, limits: Limits) -> Lowering:
    x, norm, residual, parts = _take(node, node.inputs)
    assert isinstance(x, Tensor)
    check(
        x.shape[1] % 16 == 0 and x.strides[0] % 4 == 0 and x.offset % 4 == 0,
        "linear",
        f"x {x.shape} must have a multiple of 16 columns, its rows must start at multiples of 4 words",
    )
    y = node.outputs[0]
    pairs = []
    at = 0
    for w in parts:
        assert isinstance(w, Tensor)
        width = w.shape[0] // 2 if node.attrs.swiglu else w.shape[0]
        pairs.append((w, y.narrow(1, at, width), None if residual is None else residual.narrow(1, at, width)))  # type: ignore[attr-defined]
        at += width
    if x.shape[0] <= MAX_ROWS:
        return [[_rows(node.attrs, x, norm, w, out, res, limits) for w, out, res in pairs]]  # type: ignore[arg-type]
    stages: Lowering = []
    if isinstance(norm, Tensor):
        normed = scratch("linear: normed x", x.shape)
        stages.append([rms_norm_dispatch(x, norm, normed, node.attrs.eps, limits)])
        x = normed
    stages.append([_tiled(node.attrs, x, w, out, res, limits) for w, out, res in pairs])
    return stages


def plane_places(w: Tensor) -> tuple[PushValue, PushValue, PushValue]:
    """Push values for the first words of a weight matrix's planes (three, unused ones 0)."""
    starts = plane_starts(w.dtype, *w.shape)
    places = [At(w, start) for start in starts]
    return tuple([*places, 0, 0][:3])  # type: ignore[return-value]


def _rows(
    attrs: Attrs, x: Tensor, norm: Tensor | None, w: Tensor, y: Tensor, residual: Tensor | None, limits: Limits
) -> Dispatch:
    n_out, n_in = w.shape
    binds = [Bind(w, "r"), Bind(x, "r"), Bind(y, "w")]
    defines = [f"W_{w.dtype.upper()}"]
    push: list[PushValue] = [*plane_places(w), n_in, n_out, At(x), x.strides[0], At(y), y.strides[0]]
    if norm is not None:
        binds.append(Bind(norm, "r"))
        defines.append("NORM")
    push += [0 if norm is None else At(norm), float(attrs.eps)]
    if residual is not None:
        binds.append(Bind(residual, "r"))
        defines.append("RESIDUAL")
        push += [At(residual), residual.strides[0]]
    else:
        push += [0, 0]
    if attrs.swiglu:
        defines.append("SWIGLU")
    kernel = Kernel("linear_rows", 128, tuple(defines))
    n_r = _weight_rows_per_team(n_out, attrs.swiglu, limits)
    ahead = 1 if limits.team_lanes <= 8 or n_r > 2 else min(4, max(1, n_in // (16 * limits.team_lanes)))
    teams = max(1, kernel.local_size // limits.team_lanes)
    groups = spread(-(-n_out // (teams * n_r)), limits.max_groups[0])
    return Dispatch(kernel, tuple(binds), tuple(push), groups, spec=(x.shape[0], n_r, ahead))


def _weight_rows_per_team(n_out: int, swiglu: bool, limits: Limits) -> int:
    """Rows of weights a team takes: more share each load of x, fewer spread small matrices over the device."""
    if limits.team_lanes <= 8 or n_out >= 16384:  # CPU drivers: loads are what costs
        return 4
    return 2 if swiglu else 1


def _tiled(attrs: Attrs, x: Tensor, w: Tensor, y: Tensor, residual: Tensor | None, limits: Limits) -> Dispatch:
    n_out, n_in = w.shape
    n_w_tiles, n_x_tiles = -(-n_out // TILE_W), -(-x.shape[0] // TILE_X)
    binds = [Bind(w, "r"), Bind(x, "r"), Bind(y, "w")]
    defines = [f"W_{w.dtype.upper()}"]
    push: list[PushValue] = [*plane_places(w), n_in, n_out, At(x), x.strides[0], At(y), y.strides[0], x.shape[0]]
    if residual is not None:
        binds.append(Bind(residual, "r"))
        defines.append("RESIDUAL")
        push += [At(residual), residual.strides[0]]
    else:
        push += [0, 0]
    if attrs.swiglu:
        defines.append("SWIGLU")
    kernel = Kernel("linear_tiled", 128, tuple(defines))
    groups = spread(n_w_tiles * n_x_tiles, limits.max_groups[0])
    return Dispatch(kernel, tuple(binds), (*push, n_w_tiles), groups)


def _kernels() -> list[Kernel]:
    out = []
    for fmt in FORMATS:
        for after in ((), ("RESIDUAL",), ("SWIGLU",)):
            out.append(Kernel("linear_tiled", 128, (f"W_{fmt.upper()}", *after)))
            for before in ((), ("NORM",)):
                out.append(Kernel("linear_rows", 128, (f"W_{fmt.upper()}", *before, *after)))
    return out


def _cases() -> list[Case]:
    def case(
        n: int, n_in: int, rows: Sequence[int], fmts: Sequence[str], norm: bool = False, after: str = "", pad: int = 0
    ) -> Case:
        def build(b: CaseBuilder) -> None:
            x = b.input(b.normal(n, n_in + pad)).narrow(1, pad, n_in)
            parts = [b.weight(b.normal(r, n_in, scale=n_in**-0.5), f) for r, f in zip(rows, fmts, strict=True)]
            w_norm = b.input(b.uniform(0.5, 1.5, n_in)) if norm else None
            residual = b.input(b.normal(n, sum(rows))) if after == "residual" else None
            b.output(linear(b.graph, x, parts, norm=w_norm, eps=1e-6, residual=residual, swiglu=after == "swiglu"))

        what = ",".join(f"{r}x{n_in} {f}" for r, f in zip(rows, fmts, strict=True))
        return Case(f"n={n} {what}{' norm' if norm else ''} {after}".rstrip(), build)

    out = [case(n, 128, [70], [fmt]) for n in (1, 3, 16, 17, 33) for fmt in FORMATS]
    out += [case(n, 256, [64, 6], ["q8_0", "f32"], True) for n in (1, 2, 4, 7, 16, 40)]
    out += [case(n, 512, [96], [fmt], True, "swiglu") for n in (1, 5, 70) for fmt in FORMATS]
    out += [case(n, 96, [33, 130], ["f16", "q8_0"], False, "residual", pad=4) for n in (1, 16, 100)]
    out += [case(1, 3584, [1024], ["q8_0"], False, "residual"), case(512, 64, [200], ["q8_0"])]
    return out


OP = Op("linear", _reference, _lower, _kernels, _cases)
