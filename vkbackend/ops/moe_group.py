"""Pairs of (row, chosen expert) sorted by expert and cut into tiles.

So a tiled product reads an expert's weights once a tile. Pair p is choice p % n_used of row p / n_used. A stage of
`moe_experts` for prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import I32, Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.moe_route import MAX_EXPERTS
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, spread

KERNEL = Kernel("moe_group", 128)


@dataclass(frozen=True)
class Attrs:
    n_expert: int
    tile: int


def moe_group(g: Graph, ids: Tensor, n_expert: int, tile: int) -> tuple[Tensor, Tensor]:
    """Sorts the choices ids i32 [n_rows, n_used] (each below n_expert) by expert, keeping their order otherwise.

    Returns pairs i32 [n_pairs] and tiles i32 [n_tiles, 3]: expert, first place in `pairs` and number of pairs (at most
    `tile`) of each tile; as many as any choice can need, those at the end are empty (0, 0, 0).
    """
    check(ids.ndim == 2 and ids.dtype == I32 and ids.is_contiguous, "moe_group", f"ids {ids.dtype} {ids.shape}")
    check(1 <= n_expert <= MAX_EXPERTS, "moe_group", f"{n_expert} experts; at most {MAX_EXPERTS} are supported")
    check(tile >= 1, "moe_group", f"tile is {tile}; at least 1 is needed")
    pairs = g.temp("moe_group: pairs", (ids.size,), I32)
    tiles = g.temp("moe_group: tiles", (tile_count(ids.size, n_expert, tile), 3), I32)
    g.add(OP, [ids], [pairs, tiles], Attrs(n_expert, tile))
    return pairs, tiles


def tile_count(n_pairs: int, n_expert: int, tile: int) -> int:
    """Tiles that are enough for any choice: each expert may leave one tile unfilled."""
    return n_pairs // tile + min(n_expert, n_pairs)


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    attrs, (pairs, tiles) = node.attrs, outputs
    flat = inputs[0].reshape(-1)
    pairs[...] = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=attrs.n_expert)
    ends = np.cumsum(counts)
    per_expert = -(-counts // attrs.tile)
    experts = np.repeat(np.arange(attrs.n_expert), per_expert)  # [tiles that are used]
    within = np.arange(len(experts)) - np.repeat(np.cumsum(per_expert) - per_expert, per_expert)
    first = (ends - counts)[experts] + within * attrs.tile
    tiles[...] = 0
    tiles[: len(experts)] = np.stack([experts, first, np.minimum(attrs.tile, ends[experts] - first)], axis=1)


def _lower(node: Node, limits: Limits) -> Lowering:
    pairs, tiles = node.outputs
    return [[group_dispatch(node.inputs[0], pairs, tiles, node.attrs.n_expert, node.attrs.tile, limits)]]


def group_dispatch(ids: Tensor, pairs: Tensor, tiles: Tensor, n_expert: int, tile: int, limits: Limits) -> Dispatch:
    """The dispatch that fills pairs and tiles: also a stage of other ops."""
    push = (At(ids), At(pairs), At(tiles), ids.size, tiles.shape[0], tile)
    binds = (Bind(ids, "r"), Bind(pairs, "w"), Bind(tiles, "w"))
    n_groups = -(-n_expert // KERNEL.local_size)
    return Dispatch(KERNEL, binds, push, spread(n_groups, limits.max_groups[0]), spec=(n_expert,))


def _cases() -> list[Case]:
    def case(n_rows: int, n_used: int, n_expert: int, tile: int, favoured: int = 0) -> Case:
        def build(b: CaseBuilder) -> None:
            ids = np.argsort(b.rng.random((n_rows, n_expert)), axis=1)[:, :n_used]
            if favoured:
                ids[:, 0] = n_expert - favoured
            for result in moe_group(b.graph, b.input(ids.astype(np.int32)), n_expert, tile):
                b.output(result)

        return Case(f"n_rows={n_rows} {n_used} of {n_expert} tile={tile} favoured={favoured}", build)

    out = [case(17, 3, 8, 16), case(100, 8, 256, 16), case(33, 10, 512, 32), case(200, 2, 130, 64, favoured=1)]
    return [*out, case(40, 1, 1, 16), case(20, 1, 300, 8, favoured=300), case(2, 2, 1000, 1)]


OP = Op("moe_group", _reference, _lower, lambda: [KERNEL], _cases)
