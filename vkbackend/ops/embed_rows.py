"""Embedding: rows of a (packed) table by token id."""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.device.base import Limits
from vkbackend.graph import I32, Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.linear import FORMATS, plane_places
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, PushValue, check, spread
from vkbackend.packing import format_named


def embed_rows(g: Graph, tokens: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Rows `tokens` [n_rows] i32 of the table whose consecutive row ranges are `parts`: [n_rows, n_embd].

    Ids must lie inside the table: contexts check them before anything runs (the kernel writes nothing for others).
    """
    check(tokens.ndim == 1 and tokens.dtype == I32, "embed_rows", f"tokens must be i32 [n_rows], got {tokens.shape}")
    check(len(parts) > 0, "embed_rows", "no table was given")
    n_embd = parts[0].shape[1]
    check(all(p.shape[1] == n_embd for p in parts), "embed_rows", "the table's parts differ in their columns")
    y = g.temp("embed_rows", (tokens.shape[0], n_embd))
    g.add(OP, [tokens, *parts], [y])
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    tokens, at = inputs[0], 0
    for part in inputs[1:]:
        inside = (tokens >= at) & (tokens < at + part.shape[0])
        outputs[0][inside] = part[tokens[inside] - at]
        at += part.shape[0]


def _kernel(dtype: str) -> Kernel:
    return Kernel("embed_rows", 64, (f"W_{dtype.upper()}",))


def _lower(node: Node, limits: Limits) -> Lowering:
    tokens, y = node.inputs[0], node.outputs[0]
    n_rows, n_embd = y.shape
    check(n_embd % 16 == 0, "embed_rows", f"n_embd is {n_embd}; a multiple of 16 is needed on this device")
    stage, first = [], 0
    for part in node.inputs[1:]:
        push: tuple[PushValue, ...] = (
            *plane_places(part), n_embd, first, part.shape[0], At(tokens), n_rows, At(y), y.strides[0],
        )  # fmt: skip
        binds = (Bind(part, "r"), Bind(tokens, "r"), Bind(y, "w"))
        stage.append(Dispatch(_kernel(part.dtype), binds, push, spread(n_rows, limits.max_groups[0])))
        first += part.shape[0]
    return [stage]


def _cases() -> list[Case]:
    def case(n: int, rows: Sequence[int], n_embd: int, fmt: str, scale: float = 1.0) -> Case:
        def build(b: CaseBuilder) -> None:
            parts = [b.weight(b.normal(r, n_embd, scale=scale), fmt) for r in rows]
            tokens = b.input(b.rng.integers(0, sum(rows), n))
            b.output(embed_rows(b.graph, tokens, parts))

        return Case(f"n={n} rows={'+'.join(map(str, rows))} n_embd={n_embd} {fmt}", build)

    sizes = ((1, [10]), (5, [7, 9]), (40, [100, 1, 30]))
    out = [case(n, rows, 128, fmt) for fmt in FORMATS[:4] for n, rows in sizes]
    # An odd number of blocks, and values so small that the blocks' f16 factors are subnormal, as in real files.
    return out + [case(5, [7, 9], 96 if format_named(fmt).block == 32 else 768, fmt, 1e-4) for fmt in FORMATS[4:]]


OP = Op("embed_rows", _reference, _lower, lambda: [_kernel(f) for f in FORMATS], _cases)
