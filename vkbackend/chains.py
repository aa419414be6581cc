"""Chains: consecutive levels that run inside one dispatch, whose workgroups wait for each other between two of them.

Such a wait costs a fraction of a level (docs/performance.md), but Vulkan promises nobody that a workgroup which others
wait for has begun. So there are chains only on devices that say how many workgroups surely run side by side
(`Limits.resident_groups`), a chain has as many, waiting is bounded, and each chain writes a status that the host reads.

A level joins a chain when each of its dispatches has a `Link` (ops/op.py) and all fit one kernel and set of buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vkbackend.graph import Tensor
from vkbackend.launch import ARENA, INPUTS, OUTPUTS, Launch, Place
from vkbackend.ops.op import At, Dispatch, Kernel, Link, PushValue, push_word

MAX_LINKS = 24  # entries of a table: MAX_PRODUCTS in linear_chain.comp
WAIT, SECOND_FORMAT = 16, 32  # flags of an entry, beside the op's own
RIGHT = 1  # status of a chain that came to its end
STATUS_AT = 3  # the push constant that says where it is

Where = Callable[[Tensor], tuple[Place, int]]


@dataclass(frozen=True)
class Chain:
    """Levels [start, stop) as one dispatch: kernel, formats in the kernel's order, buffers of weights and constants."""

    start: int
    stop: int
    kernel: Kernel
    formats: tuple[str, ...]
    weights: Place
    constants: Place
    levels: list[list[Link]]
    n_bytes: int


def find_chains(levels: Sequence[Sequence[Dispatch]], where: Where) -> list[Chain]:
    """The longest chains of two levels or more, from the front."""
    found: list[Chain] = []
    run: Chain | None = None
    for i, level in enumerate(levels):
        single = _of_level(i, level, where)
        joined = _joined(run, single) if run is not None and single is not None else None
        if joined is None and run is not None and run.stop - run.start > 1:
            found.append(run)
        run = joined or single
    if run is not None and run.stop - run.start > 1:
        found.append(run)
    return found


def _of_level(index: int, level: Sequence[Dispatch], where: Where) -> Chain | None:
    links = [d.link for d in level if d.link is not None]
    if not links or len(links) < len(level):
        return None
    if any(where(t)[0] != ARENA for link in links for t in link.values):
        return None
    places = {id(where(link.weights)[0]): where(link.weights)[0] for link in links}
    constants = {id(where(t)[0]): where(t)[0] for link in links for t in link.constants}
    formats = tuple(sorted({link.fmt for link in links}))
    if len(places) > 1 or len(constants) > 1 or formats not in links[0].kernels:
        return None
    (weights,) = places.values()
    return Chain(
        index, index + 1, links[0].kernels[formats], formats, weights, next(iter(constants.values()), weights), [links],
        sum(d.n_bytes for d in level),
    )  # fmt: skip


def _joined(a: Chain, b: Chain) -> Chain | None:
    """Chain a with the level after it; None when they do not fit into one dispatch."""
    formats = tuple(sorted({*a.formats, *b.formats}))
    first = a.levels[0][0]
    kernel = first.kernels.get(formats)
    own = [c.constants for c in (a, b) if any(link.constants for level in c.levels for link in level)]
    fits = (
        kernel is not None
        and first.spec == b.levels[0][0].spec
        and a.weights is b.weights
        and all(c is own[0] for c in own)
        and sum(map(len, a.levels)) + len(b.levels[0]) <= MAX_LINKS
    )
    if not fits or kernel is None:
        return None
    constants = own[0] if own else a.weights
    return Chain(a.start, b.stop, kernel, formats, a.weights, constants, [*a.levels, *b.levels], a.n_bytes + b.n_bytes)


def chain_words(chains: Sequence[Chain], where: Where) -> tuple[list[int], list[int]]:
    """What the host writes before every run: a counter for each chain, then the tables. And where each table begins."""
    words, starts = [0] * len(chains), []
    for chain in chains:
        starts.append(len(words))
        for n, level in enumerate(chain.levels):
            for i, link in enumerate(level):
                flags = link.flags | (WAIT if n > 0 and i == 0 else 0)
                flags |= SECOND_FORMAT if link.fmt != chain.formats[0] else 0
                words += [*(_word(v, where) for v in link.words), flags]
    return words, starts


def chain_launch(chain: Chain, groups: int, table_at: int, counter_at: int, status_at: int) -> Launch:
    """The dispatch of a chain. Push constants: linear_chain.comp."""
    links = [link for level in chain.levels for link in level]
    return Launch(
        label=f"{chain.stop - chain.start} levels",
        kernel=chain.kernel,
        buffers=(chain.weights, ARENA, chain.constants, INPUTS, OUTPUTS),
        push=(table_at, len(links), counter_at, status_at),
        groups=(groups, 1, 1),
        spec=links[0].spec,
        n_bytes=chain.n_bytes,
    )


def trial(launch: Launch) -> Launch:
    """The same kernel with nothing to do but to wait once: shows whether a device runs its workgroups side by side."""
    table_at, _, counter_at, status_at = launch.push
    return Launch(
        f"trial of {launch.kernel.name}", launch.kernel, launch.buffers,
        (table_at, 0, counter_at, status_at), launch.groups, launch.spec,
    )  # fmt: skip


def _word(value: PushValue, where: Where) -> int:
    return where(value.tensor)[1] + value.plus if isinstance(value, At) else push_word(value)
