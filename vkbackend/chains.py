"""Chains: consecutive levels that run inside one dispatch, whose workgroups wait for each other between two of them.

Such a wait costs a fraction of a level (docs/performance.md), but Vulkan promises nobody that a workgroup which others
wait for has begun. So there are chains only on devices that say how many workgroups surely run side by side
(`Limits.resident_groups`), a chain has as many, waiting is bounded, and each chain writes a status that the host reads.

A level joins a chain when each of its dispatches has a `Link` (ops/op.py) and all fit one kernel and set of buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vkbackend.device.base import Words
from vkbackend.graph import Tensor
from vkbackend.launch import ARENA, INPUTS, OUTPUTS, Launch, Place
from vkbackend.ops.op import MAX_LINKS, At, Dispatch, Kernel, Link, PushValue, push_word

WAIT, SECOND_FORMAT = 16, 32  # flags of an entry, beside the op's own

Where = Callable[[Tensor], tuple[Place, int]]


@dataclass(frozen=True)
class Chain:
    """Consecutive levels as one dispatch: the first one's number, their links, the buffers of weights and constants."""

    start: int
    levels: list[list[Link]]
    weights: Place
    constants: Place | None
    n_bytes: int

    @property
    def links(self) -> list[Link]:
        return [link for level in self.levels for link in level]

    @property
    def formats(self) -> tuple[str, ...]:
        """In the order of the kernel's two."""
        return tuple(sorted({link.fmt for link in self.links}))

    @property
    def kernel(self) -> Kernel | None:
        """None: there is none for these formats."""
        return self.levels[0][0].kernels.get(self.formats)


@dataclass(frozen=True)
class PlacedChains:
    """The chains of a plan. Before every run the host writes `words` into the inputs from word `at` on, the first of
    them replaced by a number that no other run has; afterwards the words `status` of the outputs must hold it."""

    launches: list[Launch]
    at: int
    words: Words
    status: range


def find_chains(levels: Sequence[Sequence[Dispatch]], where: Where) -> list[Chain]:
    """The longest chains of two levels or more, from the front."""
    found: list[Chain] = []
    for i, level in enumerate(levels):
        single = _of_level(i, level, where)
        before = found[-1] if found and found[-1].start + len(found[-1].levels) == i else None
        joined = _joined(before, single) if before is not None and single is not None else None
        if joined is not None:
            found[-1] = joined
        elif single is not None:
            found.append(single)
    return [chain for chain in found if len(chain.levels) > 1]


def _of_level(index: int, level: Sequence[Dispatch], where: Where) -> Chain | None:
    links = [d.link for d in level if d.link is not None]
    if not links or len(links) < len(level) or any(where(t)[0] != ARENA for link in links for t in link.values):
        return None
    weights = {where(link.weights)[0] for link in links}
    constants = {where(t)[0] for link in links for t in link.constants}
    if len(weights) > 1 or len(constants) > 1:
        return None
    chain = Chain(index, [links], weights.pop(), constants.pop() if constants else None, sum(d.n_bytes for d in level))
    return chain if chain.kernel is not None else None


def _joined(a: Chain, b: Chain) -> Chain | None:
    """Chain a with the level after it; None when they do not fit into one dispatch."""
    constants = b.constants if a.constants is None else a.constants
    chain = Chain(a.start, [*a.levels, *b.levels], a.weights, constants, a.n_bytes + b.n_bytes)
    fits = (
        a.weights == b.weights
        and b.constants in (None, constants)
        and a.links[0].spec == b.links[0].spec
        and len(chain.links) <= MAX_LINKS
        and chain.kernel is not None
    )
    return chain if fits else None


def place_chains(
    chains: Sequence[Chain], where: Where, groups: int, reserve: Callable[[str, int], int]
) -> PlacedChains:
    """Launches of `groups` workgroups. The words are the number of the run, a counter for each chain, the tables."""
    words, tables = [0] * (1 + len(chains)) if chains else [], []
    for chain in chains:
        tables.append(len(words))
        for n, level in enumerate(chain.levels):
            for i, link in enumerate(level):
                flags = link.flags | (WAIT if n > 0 and i == 0 else 0)
                flags |= SECOND_FORMAT if link.fmt != chain.formats[0] else 0
                words += [*(_word(v, where) for v in link.words), flags]
    at, status = reserve(INPUTS, len(words)), reserve(OUTPUTS, len(chains))
    launches = [
        _launch(chain, groups, (at + table, len(chain.links), at + 1 + i, status + i, at))
        for i, (chain, table) in enumerate(zip(chains, tables, strict=True))
    ]
    return PlacedChains(launches, at, np.array(words, np.uint32), range(status, status + len(chains)))


def _launch(chain: Chain, groups: int, push: tuple[int, ...]) -> Launch:
    assert chain.kernel is not None  # find_chains makes no other
    return Launch(
        label=f"chain of {len(chain.levels)} levels",
        kernel=chain.kernel,
        buffers=(chain.weights, ARENA, chain.weights if chain.constants is None else chain.constants, INPUTS, OUTPUTS),
        push=push,  # linear_chain.comp
        groups=(groups, 1, 1),
        spec=chain.links[0].spec,
        n_bytes=chain.n_bytes,
    )


def trial(launch: Launch) -> Launch:
    """The same kernel with nothing to do but to wait once: shows whether a device runs its workgroups side by side."""
    table_at, _, *rest = launch.push
    return replace(launch, label=f"trial of a {launch.label}", push=(table_at, 0, *rest))


def _word(value: PushValue, where: Where) -> int:
    return where(value.tensor)[1] + value.plus if isinstance(value, At) else push_word(value)
