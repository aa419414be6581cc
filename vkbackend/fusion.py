"""Joins dispatches: work on a fresh result is done where the result is made, and a level is saved.

A dispatch that only rearranges one tensor says so (`Dispatch.follows`); one that makes a tensor may be able to do such
work as well (`Dispatch.absorb`). Here the two are brought together, across the nodes of a graph, before anything is
placed: neither op knows of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vkbackend.graph import Tensor, overlaps
from vkbackend.ops.op import Dispatch


@dataclass
class Step:
    """One dispatch of a lowered graph: its op's name and the stage it belongs to."""

    label: str
    stage: int
    dispatch: Dispatch


def fuse(steps: Sequence[Step]) -> list[Step]:
    """The same work in the same order, with every dispatch that its tensor's maker can absorb gone into that."""
    out: list[Step] = []
    for step in steps:
        follows = step.dispatch.follows
        maker = None if follows is None else _maker(out, follows, step.dispatch)
        absorb = None if maker is None else maker.dispatch.absorb
        joined = None if absorb is None else absorb(step.dispatch)
        if maker is None or joined is None:
            out.append(step)
        else:
            maker.dispatch = joined
    return out


def _maker(earlier: Sequence[Step], tensor: Tensor, after: Dispatch) -> Step | None:
    """The step that wrote exactly `tensor`, if nothing else that `after` reads or writes was touched from there on.

    From there on means the whole of that step's stage: its dispatches run side by side, so one of them that stands
    before the maker may still run after it.
    """
    others = [b for b in (*after.binds, *after.also) if b.tensor is not tensor]
    maker: Step | None = None
    for step in reversed(earlier):
        if maker is not None and step.stage != maker.stage:
            break
        binds = (*step.dispatch.binds, *step.dispatch.also)
        writes = [b.tensor for b in binds if "w" in b.access]
        if any(_shares(w, b.tensor) for w in writes for b in others):
            return None
        if any("w" in b.access and _shares(b.tensor, c.tensor) for b in others for c in binds):
            return None
        if any(_shares(w, tensor) for w in writes):
            if maker is not None or not any(_same(w, tensor) for w in writes):
                return None
            maker = step
    return maker


def _shares(a: Tensor, b: Tensor) -> bool:
    same = a.storage is b.storage or (a.storage.buffer is not None and a.storage.buffer is b.storage.buffer)
    return same and overlaps(a, b)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.storage is b.storage and (a.offset, a.shape, a.strides) == (b.offset, b.shape, b.strides)
