"""The scheduler on random graphs of made-up ops: order, memory, and a simulated run of the plan.

A made-up dispatch writes, to every word of what it writes, a hash of all words it reads. So if anything is read too
early, too late or from memory that something else has taken, the numbers differ from those of a run in program order.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vkbackend.device.base import ALIGN, Limits
from vkbackend.device.null import NullBuffer
from vkbackend.errors import VkBackendError
from vkbackend.graph import Graph, Role, Tensor, bound, overlaps
from vkbackend.launch import ARENA, INPUTS, OUTPUTS, Launch
from vkbackend.ops.op import At, Bind, Dispatch, Kernel, Lowering, Op, counters, scratch
from vkbackend.schedule import Plan, plan

SEEDS = st.integers(0, 2**32 - 1)
Place = tuple[Any, int]  # (storage, buffer or region; word)


def unused(*_: Any) -> Any:
    raise AssertionError("a scheduler test runs no reference")


OP = Op("made_up", unused, lambda node, limits: node.attrs, list, list)


@dataclass
class Maker:
    """Makes graphs of dispatches and remembers them in program order, each with its stage."""

    rng: random.Random
    graph: Graph = field(default_factory=Graph)
    made: list[tuple[int, Dispatch]] = field(default_factory=list)
    readable: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # bound ones among the readable
    n_stages: int = 0

    def node(self, *stages: list[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
        """One op; every dispatch is given as (what it reads, what it writes)."""
        lowering: Lowering = []
        for stage in stages:
            self.n_stages += 1
            lowering.append([])
            for reads, writes in stage:
                dispatch = self.dispatch(reads, writes)
                self.made.append((self.n_stages, dispatch))
                lowering[-1].append(dispatch)
        self.graph.add(OP, [], [], lowering)

    def dispatch(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Dispatch:
        binds = [Bind(t, "r") for t in reads]
        for t in writes:  # fresh temporaries hold nothing to read
            old = any(home(t) == home(r) for r in self.readable)
            binds.append(Bind(t, "rw" if old and self.rng.random() < 0.5 else "w"))
        self.rng.shuffle(binds)
        also: list[Bind] = []
        for bind in binds[1:]:  # seen through the binding of another view of the same memory
            if self.rng.random() < 0.5 and any(home(b.tensor) == home(bind.tensor) for b in binds if b is not bind):
                binds.remove(bind)
                also.append(bind)
        push = tuple(At(b.tensor) for b in (*binds, *also))
        return Dispatch(Kernel(f"k{len(self.made)}"), tuple(binds), push, (1, 1, 1), also=tuple(also))

    # ---- random parts

    def view(self, t: Tensor) -> Tensor:
        for _ in range(self.rng.randrange(3)):
            axis = self.rng.randrange(t.ndim)
            start = self.rng.randrange(t.shape[axis])
            t = t.narrow(axis, start, self.rng.randint(1, t.shape[axis] - start))
        if self.rng.random() < 0.2:
            t = t.permute(*reversed(range(t.ndim)))
        if self.rng.random() < 0.2 and t.is_contiguous:
            t = t.reshape(t.size)
        return t

    def reads(self, apart_from: Sequence[Tensor] = ()) -> list[Tensor]:
        views = [self.view(self.rng.choice(self.readable)) for _ in range(self.rng.randrange(4))]
        return [v for v in views if not any(touched(v) & touched(w) for w in apart_from)]

    def matrix(self) -> Tensor:
        return self.graph.temp("temp", (self.rng.randint(1, 6), self.rng.randint(1, 40)))

    def columns(self, t: Tensor) -> list[Tensor]:
        cuts = sorted({0, t.shape[1], *(self.rng.randint(0, t.shape[1]) for _ in range(2))})
        return [t.narrow(1, a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)]

    def step(self) -> None:
        kind = self.rng.randrange(6)
        t = self.matrix()
        if kind == 0:
            self.node([(self.reads(), [t])])
        elif kind == 1:  # side by side in one stage
            self.node([(self.reads(), [c]) for c in self.columns(t)])
        elif kind == 2:  # side by side in several nodes
            for c in self.columns(t):
                self.node([(self.reads(), [c])])
        elif kind == 3:
            between = scratch("scratch", (self.rng.randint(1, 100),))
            self.node([(self.reads(), [between])], [([between, *self.reads()], [t])])
        elif kind == 4:  # in place
            self.node([(self.reads(), [self.view(self.rng.choice(self.readable[1:]))])])
            return
        else:  # parts of persistent memory in one stage
            parts = self.columns(self.rng.choice(self.kept))
            self.node([(self.reads(apart_from=parts), [c]) for c in parts])
            return
        self.readable.append(t)


def random_program(seed: int) -> Maker:
    rng = random.Random(seed)
    m = Maker(rng)
    buffers = [NullBuffer(300), NullBuffer(300)]
    for _ in range(4):  # regions of two buffers, on top of each other more often than not
        shape = (rng.randint(1, 5), rng.randint(1, 20))
        m.kept.append(bound("state", rng.choice(buffers), rng.randrange(200), shape))
    m.readable = [m.graph.input("x", (rng.randint(1, 5), rng.randint(1, 20))), *m.kept]
    for _ in range(rng.randint(1, 14)):
        m.step()
    results = [t for t in m.readable if t.storage.role is Role.TEMP]
    for i, t in enumerate(rng.sample(results, min(2, len(results)))):
        m.graph.output(f"out{i}", m.view(t))
    return m


def home(t: Tensor) -> Any:
    """What the words of a view are words of: its storage, or the buffer that storages share."""
    return t.storage.buffer if t.storage.role is Role.BOUND else t.storage


def words_of(t: Tensor, start: int) -> list[int]:
    """Every word of a view whose offset is at word `start`, in row-major order."""
    places = np.full(t.shape, start)
    for axis, (n, stride) in enumerate(zip(t.shape, t.strides, strict=True)):
        places += (np.arange(n) * stride).reshape(-1, *[1] * (t.ndim - axis - 1))
    return [int(w) for w in places.reshape(-1)]


def touched(t: Tensor) -> set[Place]:
    return {(home(t), w) for w in words_of(t, t.storage.base + t.offset)}


def conflict(a: Dispatch, b: Dispatch) -> bool:
    """Word by word: one writes what the other touches."""
    for x in (*a.binds, *a.also):
        for y in (*b.binds, *b.also):
            if "w" in x.access + y.access and touched(x.tensor) & touched(y.tensor):
                return True
    return False


def made_plan(m: Maker) -> tuple[Plan, dict[str, tuple[int, Launch]]]:
    """The plan, and (level, launch) of every dispatch by its kernel's name."""
    result = plan(m.graph, Limits())
    where = {launch.kernel.name: (i, launch) for i, level in enumerate(result.levels) for launch in level}
    assert len(where) == sum(len(level) for level in result.levels) == len(m.made)
    return result, where


@given(SEEDS)
@settings(deadline=None, max_examples=60)
def test_conflicting_dispatches_run_in_order_and_no_level_is_wasted(seed: int) -> None:
    m = random_program(seed)
    _, where = made_plan(m)
    for j, (stage, later) in enumerate(m.made):
        level = where[later.kernel.name][0]
        before = [(where[d.kernel.name][0], d) for s, d in m.made[:j] if s != stage]
        assert all(n < level for n, d in before if conflict(d, later))
        if level:  # something one level earlier may conflict: nothing waits without a reason
            assert any(n == level - 1 and may_conflict(d, later) for n, d in before)


def may_conflict(a: Dispatch, b: Dispatch) -> bool:
    pairs = [(x, y) for x in (*a.binds, *a.also) for y in (*b.binds, *b.also)]
    return any(
        "w" in x.access + y.access and home(x.tensor) == home(y.tensor) and overlaps(x.tensor, y.tensor)
        for x, y in pairs
    )


@given(SEEDS)
@settings(deadline=None, max_examples=60)
def test_temporaries_share_words_only_when_their_levels_do_not_meet(seed: int) -> None:
    m = random_program(seed)
    result, where = made_plan(m)
    lives: dict[Hashable, tuple[range, list[int]]] = {}
    for _, dispatch in m.made:
        level, launch = where[dispatch.kernel.name]
        for bind, at in zip((*dispatch.binds, *dispatch.also), launch.push, strict=True):
            storage = bind.tensor.storage
            if storage.role is Role.TEMP:
                start = at - bind.tensor.offset
                words, levels = lives.setdefault(storage, (range(start, start + storage.n_words), []))
                assert words.start == start and start % ALIGN == 0 and words.stop <= result.n_words[ARENA]
                levels.append(level)
    rest = list(lives.values())
    while rest:
        words, levels = rest.pop()
        for other, other_levels in rest:
            if words.start < other.stop and other.start < words.stop:
                assert max(levels) < min(other_levels) or max(other_levels) < min(levels)


@given(SEEDS)
@settings(deadline=None, max_examples=100)
def test_a_run_in_level_order_is_a_run_in_program_order(seed: int) -> None:
    m = random_program(seed)
    result, where = made_plan(m)

    logical: dict[Place, int] = {}
    x = m.graph.inputs["x"]
    for w in range(x.size):
        logical[home(x), w] = w
    seen = {}
    for _, dispatch in m.made:
        places = [
            (b, [(home(b.tensor), w) for w in words_of(b.tensor, b.tensor.storage.base + b.tensor.offset)])
            for b in (*dispatch.binds, *dispatch.also)
        ]
        seen[dispatch.kernel.name] = run_dispatch(dispatch.kernel.name, places, logical)

    placed: dict[Place, int] = {}
    offset, _ = result.inputs["x"]
    for w in range(x.size):
        placed[INPUTS, offset + w] = w
    by_name = {d.kernel.name: d for _, d in m.made}
    for level in result.levels:
        for launch in m.rng.sample(level, len(level)):  # no order inside a level
            dispatch = by_name[launch.kernel.name]
            region = {home(b.tensor): place for b, place in zip(dispatch.binds, launch.buffers, strict=True)}
            places = [
                (b, [(region[home(b.tensor)], w) for w in words_of(b.tensor, at)])
                for b, at in zip((*dispatch.binds, *dispatch.also), launch.push, strict=True)
            ]
            assert run_dispatch(launch.kernel.name, places, placed) == seen[launch.kernel.name]

    for name, t in m.graph.outputs.items():
        at, _ = result.outputs[name]
        want = [logical.get((home(t), w)) for w in words_of(t, t.offset)]
        assert [placed.get((OUTPUTS, w)) for w in words_of(t, at)] == want and None not in want
    for t in m.kept:
        for place in touched(t):
            assert placed.get(place) == logical.get(place)


def run_dispatch(name: str, places: list[tuple[Bind, list[Place]]], memory: dict[Place, int]) -> int:
    """Reads and writes the words of one dispatch; returns a hash of what it read."""
    read = hash(tuple(memory.get(p, -1) for b, ps in places if "r" in b.access for p in ps))
    for i, (bind, ps) in enumerate(places):
        if "w" in bind.access:
            for j, p in enumerate(ps):
                memory[p] = hash((name, read, i, j))
    return read


@given(SEEDS)
@settings(deadline=None)
def test_views_that_share_a_word_overlap(seed: int) -> None:
    rng = random.Random(seed)
    m = Maker(rng)
    if rng.random() < 0.5:
        pair = [m.graph.temp("t", (rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 5)))] * 2
    else:
        buffer = NullBuffer(300)
        pitch = rng.randint(1, 12)
        widths = [rng.choice([pitch, rng.randint(1, 12)]) for _ in range(2)]
        pair = [bound("s", buffer, rng.randrange(40), (rng.randint(1, 5), w)) for w in widths]
    a, b = (m.view(t) for t in pair)
    assert overlaps(a, b) == overlaps(b, a)
    if touched(a) & touched(b):
        assert overlaps(a, b)


@pytest.mark.parametrize("one_stage", [True, False])
def test_column_slices_of_one_matrix_stay_in_one_level(one_stage: bool) -> None:
    m = Maker(random.Random(0))
    x, t = m.graph.input("x", (5, 8)), m.graph.temp("t", (5, 20))
    slices = [t.narrow(1, 0, 7), t.narrow(1, 7, 12), t.narrow(1, 19, 1)]
    if one_stage:
        m.node([([x], [s]) for s in slices])
    else:
        for s in slices:
            m.node([([x], [s])])
    m.node([([t], [m.graph.temp("y", (5, 20))])])
    assert [len(level) for level in made_plan(m)[0].levels] == [3, 1]


def test_storages_that_are_bound_to_one_buffer_wait_for_each_other_where_they_overlap() -> None:
    buffer = NullBuffer(100)
    m = Maker(random.Random(0))
    lower, upper, across = (bound("s", buffer, at, (10,)) for at in (0, 10, 5))
    for t in (lower, upper, across):
        m.node([([], [t])])
    m.node([([lower], [bound("other", NullBuffer(10), 0, (10,))])])
    levels = [sorted(launch.kernel.name for launch in level) for level in made_plan(m)[0].levels]
    assert levels == [["k0", "k1"], ["k2"], ["k3"]]


def test_readers_share_a_level_and_a_writer_waits_for_all_of_them() -> None:
    m = Maker(random.Random(0))
    t = m.graph.temp("t", (4,))
    m.node([([], [t])])
    for _ in range(3):
        m.node([([t], [m.graph.temp("y", (4,))])])
    m.node([([], [t])])
    assert [len(level) for level in made_plan(m)[0].levels] == [1, 3, 1]


def test_a_chain_needs_two_arena_slots_only() -> None:
    m = Maker(random.Random(0))
    t = m.graph.input("x", (1000,))
    for _ in range(20):
        y = m.graph.temp("y", (1000,))
        m.node([([t], [y])])
        t = y
    assert made_plan(m)[0].n_words == {ARENA: 2 * 1024, INPUTS: 1024, OUTPUTS: 0}


def test_push_words() -> None:
    m = Maker(random.Random(0))
    t = m.graph.temp("t", (4, 8))
    other = m.graph.temp("first in the arena", (64,))
    view = t.narrow(0, 2, 1)
    push = (7, -1, 1.5, At(view), At(view, plus=3))
    dispatch = Dispatch(Kernel("k0"), (Bind(t, "w"), Bind(other, "w")), push, (2, 3, 4), spec=(5, 6))
    m.graph.add(OP, [], [], [[dispatch]])
    (launch,) = plan(m.graph, Limits()).levels[0]
    start = 64 if launch.push[3] >= 64 else 0  # which of the two comes first is the scheduler's choice
    assert launch.push == (7, 0xFFFFFFFF, 0x3FC00000, start + 16, start + 19)
    assert (launch.label, launch.groups, launch.spec, launch.buffers) == ("made_up", (2, 3, 4), (5, 6), (ARENA, ARENA))


def test_an_output_that_no_node_writes_has_a_place_and_a_stray_tensor_has_none() -> None:
    m = Maker(random.Random(0))
    m.graph.output("y", m.graph.temp("y", (3,)))
    assert plan(m.graph, Limits()).n_words[OUTPUTS] == ALIGN
    stray = Graph().input("stray", (3,))  # an input of another graph
    m.node([([stray], [m.graph.temp("z", (3,))])])
    with pytest.raises(VkBackendError, match="'stray' is used but belongs to no node"):
        plan(m.graph, Limits())


def test_two_names_for_one_result_take_one_place() -> None:
    m = Maker(random.Random(0))
    y = m.graph.temp("y", (4, ALIGN))
    m.node([([], [y])])
    m.graph.output("all", y)
    m.graph.output("a row", y.narrow(0, 2, 1))
    result = made_plan(m)[0]
    assert result.n_words == {ARENA: 0, INPUTS: 0, OUTPUTS: 4 * ALIGN}
    assert result.outputs["a row"][0] == result.outputs["all"][0] + 2 * ALIGN


def test_an_empty_graph() -> None:
    assert plan(Graph(), Limits()).n_words == {ARENA: 0, INPUTS: 0, OUTPUTS: 0}


def test_counters_lie_behind_the_inputs_and_share_words_between_levels() -> None:
    """Zero before and after a dispatch: one level's counters serve the next, those of one level lie apart."""
    m = Maker(random.Random(0))
    x, y, z, w = m.graph.input("x", (3,)), *(m.graph.temp(name, (3,)) for name in "yzw")
    done = [counters("done", n) for n in (3, ALIGN + 1, 3)]
    m.node([([x], [y, done[0]])], [([y], [z, done[1]])])
    m.node([([x], [w, done[2]])])  # in the first level as well
    result, where = made_plan(m)
    places = []
    for (_, dispatch), t in zip(m.made, done, strict=True):
        level, launch = where[dispatch.kernel.name]
        at = [b.tensor for b in dispatch.binds].index(t)
        assert launch.buffers[at] == INPUTS
        places.append((level, launch.push[at]))
    start = result.inputs["x"][0] + ALIGN
    assert [level for level, _ in places] == [0, 1, 0]
    assert places[1][1] == start and sorted([places[0][1], places[2][1]])[0] >= start
    assert places[0][1] != places[2][1]
    assert result.counters == range(start, result.n_words[INPUTS]) and len(result.counters) == 2 * ALIGN
