"""Products of decoding as parts of a chain (chains.py): which there are kernels for, and what their tables hold.

`linear_chain.comp` gives the bits of `linear_rows.comp`: the same columns to the same lanes, summed in the same order.
"""

from __future__ import annotations

from vkbackend.device.base import Limits
from vkbackend.graph import Tensor
from vkbackend.ops.op import At, Kernel, Link, PushValue

CHAIN_LANES, LANES = 512, 8  # invocations in a workgroup; of a team
ROWS_OF_TEAM, MAX_TOKENS = 4, 4
MAX_OUT = 65536  # weight rows: where one product takes long, a level of its own costs little
MAX_SCALES = 512  # of groups of columns, for all rows of x
MAX_SHARED = 49152  # bytes: more would keep a workgroup from running beside others on some GPUs
NORM, GROUPS, RESIDUAL, SWIGLU = 1, 2, 4, 8  # flags of an entry
PAIRS = (("q4_k", "q6_k"), ("q5_k", "q6_k"), ("q4_k", "q5_k"), ("f32", "q8_0"))  # as files mix them


def chain_kernels(formats: tuple[str, ...]) -> dict[tuple[str, ...], Kernel]:
    """Kernels by the formats, in alphabetical order, that their weights have."""
    single: dict[tuple[str, ...], Kernel] = {
        (f,): Kernel("linear_chain", CHAIN_LANES, (f"W_{f.upper()}",)) for f in formats
    }
    pairs: dict[tuple[str, ...], Kernel] = {
        (a, b): Kernel("linear_chain", CHAIN_LANES, (f"W_{a.upper()}", "TWO_FORMATS", f"W2_{b.upper()}"))
        for a, b in PAIRS
    }
    return single | pairs


def x_quads(n_tokens: int, limits: Limits) -> int:
    """Quads of x for which there is workgroup memory beside the table, the sums and what stands in for subgroups."""
    teams = CHAIN_LANES // LANES
    taken = 4 * (18 * 24 + teams * (ROWS_OF_TEAM + 1) * n_tokens + teams + CHAIN_LANES + MAX_SCALES + 1)
    return max(0, min(limits.max_shared_bytes, MAX_SHARED) - taken) // 16


def product_link(
    kernels: dict[tuple[str, ...], Kernel],
    w: Tensor,
    planes: tuple[PushValue, PushValue, PushValue],
    x: Tensor,
    y: Tensor,
    *,
    norm: Tensor | None,
    squares: Tensor | None,
    residual: Tensor | None,
    eps: float,
    swiglu: bool,
    split: int,
    limits: Limits,
) -> Link | None:
    """How a product joins a chain; None where it can not."""
    n_tokens, (n_out, n_in) = x.shape[0], w.shape
    quads_of_step = n_tokens * 4 * LANES * split
    quads = x_quads(n_tokens, limits)
    n_groups = 1 if squares is None else squares.shape[1]
    fits = n_tokens <= MAX_TOKENS and n_out <= MAX_OUT and quads >= quads_of_step and n_tokens * n_groups <= MAX_SCALES
    small = 4 * w.storage.n_words <= limits.chain_bytes
    if not (limits.resident_groups and small and fits and limits.max_invocations >= CHAIN_LANES):
        return None
    flags = NORM * (norm is not None) + GROUPS * (squares is not None) + RESIDUAL * (residual is not None)
    before = norm if squares is None else squares
    words: list[PushValue] = [*planes, n_in, n_out, At(x), x.strides[0], At(y), y.strides[0]]
    words += [0 if before is None else At(before), float(eps)]
    words += [0, 0] if residual is None else [At(residual), residual.strides[0]]
    words += [1, 0] if squares is None else [n_in // n_groups, squares.shape[2]]
    return Link(
        kernels=kernels,
        fmt=w.dtype,
        weights=w,
        constants=() if norm is None else (norm,),
        values=tuple(t for t in (x, y, squares, residual) if t is not None),
        words=(*words, split, quads // quads_of_step),
        flags=flags + SWIGLU * swiglu,
        spec=(n_tokens, quads, MAX_SCALES),
    )
