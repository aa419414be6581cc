"""From a graph to an ordered, placed list of dispatches: levels by hazards, memory by liveness.

1. Every node is lowered to stages of dispatches (`ops/op.py`), some of which are joined (`fusion.py`).
2. Each dispatch gets a level: one more than the highest level it conflicts with. A conflict is an overlap of
   byte ranges of the same storage where at least one side writes; dispatches of one stage never conflict.
   Barriers are needed between levels only.
3. Temporaries are packed into one arena: two storages may share words when the level ranges in which they live
   do not meet. As lifetimes are counted in levels, sharing can not create a new hazard. Counters lie behind the
   inputs, packed in the same way: programs zero them together with writing the inputs.

The result is plain data (`Plan`); devices turn it into their own commands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vkbackend.device.base import ALIGN, Limits
from vkbackend.errors import VkBackendError
from vkbackend.fusion import Step, fuse
from vkbackend.graph import Graph, Role, Storage, Tensor, overlaps
from vkbackend.launch import ARENA, INPUTS, OUTPUTS, Launch, Place
from vkbackend.ops.op import At, Bind, Dispatch, push_word


@dataclass(frozen=True)
class Plan:
    """Levels of launches (a barrier between two levels), the sizes of the program's own regions in words, the
    word offset of every input and output in its region, and the words of the inputs that are counters."""

    levels: list[list[Launch]]
    n_words: dict[str, int]
    inputs: dict[str, tuple[int, Tensor]]
    outputs: dict[str, tuple[int, Tensor]]
    counters: range


@dataclass
class _Access:
    level: int
    stage: int
    bind: Bind


@dataclass
class _Item:
    label: str
    dispatch: Dispatch
    level: int


@dataclass
class _Life:
    storage: Storage
    first: int
    last: int
    reads: list[_Access] = field(default_factory=list)
    writes: list[_Access] = field(default_factory=list)

    def level_after(self, bind: Bind, stage: int, level: int) -> int:
        """The lowest level from `level` on at which this access conflicts with no earlier one."""
        earlier = [*self.reads, *self.writes] if "w" in bind.access else self.writes
        for access in earlier:
            if access.level >= level and access.stage != stage and overlaps(access.bind.tensor, bind.tensor):
                level = access.level + 1
        return level


def plan(graph: Graph, limits: Limits) -> Plan:
    """Schedules a graph for a dispatching device."""
    items, lives = _levels(graph, limits)
    place = _Placement(graph, lives)
    n_levels = 1 + max((i.level for i in items), default=-1)
    by_level: list[list[_Item]] = [[] for _ in range(n_levels)]
    for item in items:
        by_level[item.level].append(item)
    return Plan(
        levels=[[_launch(item, place) for item in level] for level in by_level],
        n_words=place.n_words,
        inputs={name: (place.of(t)[1], t) for name, t in graph.inputs.items()},
        outputs={name: (place.of(t)[1], t) for name, t in graph.outputs.items()},
        counters=place.counters,
    )


def _levels(graph: Graph, limits: Limits) -> tuple[list[_Item], dict[object, _Life]]:
    items: list[_Item] = []
    lives: dict[object, _Life] = {}
    stages = [(node, stage) for node in graph.nodes for stage in node.op.lower(node, limits)]
    steps = [Step(node.op.name, i, dispatch) for i, (node, stage) in enumerate(stages) for dispatch in stage]
    for step in fuse(steps):
        binds = (*step.dispatch.binds, *step.dispatch.also)
        level = 0
        for bind in binds:
            if (life := lives.get(_key(bind.tensor.storage))) is not None:
                level = life.level_after(bind, step.stage, level)
        items.append(_Item(step.label, step.dispatch, level))
        for bind in binds:
            storage = bind.tensor.storage
            life = lives.setdefault(_key(storage), _Life(storage, level, level))
            life.first, life.last = min(life.first, level), max(life.last, level)
            (life.writes if "w" in bind.access else life.reads).append(_Access(level, step.stage, bind))
    return items, lives


def _key(storage: Storage) -> object:
    # Two BOUND storages over one buffer are told apart by their words, not by their identity.
    return id(storage.buffer) if storage.role is Role.BOUND else id(storage)


class _Placement:
    """Where every storage of one graph lives."""

    def __init__(self, graph: Graph, lives: dict[object, _Life]) -> None:
        self.n_words = {ARENA: 0, INPUTS: 0, OUTPUTS: 0}
        self._where: dict[int, tuple[str, int]] = {}
        for tensor in graph.inputs.values():
            self._append(INPUTS, tensor.storage)
        for tensor in graph.outputs.values():
            if id(tensor.storage) not in self._where:
                self._append(OUTPUTS, tensor.storage)
        self._pack(ARENA, (life for life in lives.values() if life.storage.role is Role.TEMP))
        first = self.n_words[INPUTS]
        self._pack(INPUTS, (life for life in lives.values() if life.storage.role is Role.COUNTER))
        self.counters = range(first, self.n_words[INPUTS])

    def of(self, tensor: Tensor) -> tuple[Place, int]:
        """The buffer or region a tensor is in, and its first word there."""
        storage = tensor.storage
        if storage.role is Role.BOUND:
            assert storage.buffer is not None
            return storage.buffer, storage.base + tensor.offset
        if id(storage) not in self._where:
            raise VkBackendError(f"schedule: '{storage.label}' is used but belongs to no node of this graph")
        region, start = self._where[id(storage)]
        return region, start + tensor.offset

    def reserve(self, region: str, n_words: int) -> int:
        """The first of n more words of a region."""
        start = self.n_words[region]
        self.n_words[region] += _aligned(n_words)
        return start

    def _append(self, region: str, storage: Storage) -> None:
        self._where[id(storage)] = (region, self.reserve(region, storage.n_words))

    def _pack(self, region: str, lives: Iterable[_Life]) -> None:
        """First fit by size: large storages first, each at the lowest place free during its whole life."""
        base = self.n_words[region]
        placed: list[tuple[int, int, _Life]] = []
        for life in sorted(lives, key=lambda x: (-x.storage.n_words, x.first)):
            size = _aligned(life.storage.n_words)
            busy = sorted((s, e) for s, e, other in placed if other.first <= life.last and life.first <= other.last)
            start = base
            for s, e in busy:
                if start + size <= s:
                    break
                start = max(start, e)
            placed.append((start, start + size, life))
            self._where[id(life.storage)] = (region, start)
            self.n_words[region] = max(self.n_words[region], start + size)


def _aligned(n_words: int) -> int:
    return -(-n_words // ALIGN) * ALIGN


def _launch(item: _Item, place: _Placement) -> Launch:
    d = item.dispatch
    return Launch(
        label=item.label,
        kernel=d.kernel,
        buffers=tuple(place.of(b.tensor)[0] for b in d.binds),
        push=tuple(place.of(v.tensor)[1] + v.plus if isinstance(v, At) else push_word(v) for v in d.push),
        groups=d.groups,
        spec=d.spec,
        n_bytes=d.n_bytes,
    )
