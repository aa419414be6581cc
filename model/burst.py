"""Several steps in one submission: token ids, verification and ring slots never leave the device.

Submitting and waiting is what a small step costs most, so a burst records a number of consecutive rounds in one
graph. A plain round is a decode and the choice of a token (argmax, or a draw: ops/sample.py) that the next round
embeds. A speculative round, with n drafts, is

1. the MTP block over the last round's targets (until then its rows were made from drafts); the row of the last
   accepted token gives draft 1; then n - 1 single steps of the block;
2. the trunk over the last token and the drafts, and a choice after each of them (drafts themselves are greedy);
3. `accept_drafts`, which sets the next round's positions: that alone rolls the trunk back.

The host reads a few integers per round and keeps the books. Rounds beyond an EOS are simply not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vkbackend.device.base import Device, Program
from vkbackend.device.pace import Pace
from vkbackend.draw import N_WORDS, Ints
from vkbackend.errors import ContextError, DeviceError
from vkbackend.graph import I32, Graph, Tensor, bound
from vkbackend.model.context import Context, kv_bucket
from vkbackend.model.memory import Memory, SequenceState
from vkbackend.model.mtp import MtpContext, MtpKeys, mtp_rows
from vkbackend.model.qwen35 import StepShape, Trunk, head_logits, trunk_rows
from vkbackend.ops.accept_drafts import accept_drafts
from vkbackend.ops.argmax import argmax
from vkbackend.ops.later_steps import later_steps
from vkbackend.ops.rms_norm import rms_norm
from vkbackend.ops.sample import sample
from vkbackend.ops.select_row import select_row

Floats = NDArray[np.float32]


class Burst(Protocol):
    """Rounds of decoding of sequence 0."""

    @property
    def tokens_per_round(self) -> int:
        """The most tokens a round can yield."""
        ...

    def begin(self, last: int, pending_h: Floats | None, sampling: Ints | None = None) -> None:
        """Starts from the contexts as they are: `last` is the newest token, not decoded yet.

        pending_h float32 [n_embd]: the hidden row of the token before it (speculative bursts). sampling: the words of
        `draw.settings_words`, None for greedy decoding.
        """
        ...

    def rounds(self, most: int) -> int:
        """How many rounds, a power of two times smaller than `most`, one submission may hold on this device."""
        ...

    def fits(self, n_rounds: int) -> bool:
        """Whether that many rounds stay inside the context, whatever is accepted."""
        ...

    def run(self, n_rounds: int) -> list[list[int]]:
        """Runs rounds in one submission; the tokens each one chose, at least one a round.

        Sampled ones are -1 where logits were not usable; what comes after that has no meaning.
        """
        ...


class PlainBurst:
    """One token a round."""

    tokens_per_round = 1

    def __init__(self, device: Device, trunk: Trunk, context: Context) -> None:
        self._device, self._trunk, self._context = device, trunk, context
        self._programs: dict[tuple[int, int, bool], Program] = {}
        self._pace = Pace()
        self._last = 0
        self._sampling: Ints | None = None

    def begin(self, last: int, pending_h: Floats | None, sampling: Ints | None = None) -> None:
        self._last, self._sampling = last, sampling

    def rounds(self, most: int) -> int:
        return _paced(self._pace, self._context, 1).most(most)

    def fits(self, n_rounds: int) -> bool:
        return self._context.seq_pos_max(0) + 1 + n_rounds <= self._context.n_ctx

    def run(self, n_rounds: int) -> list[list[int]]:
        memory = self._context.memory
        n_past = _check_room(self, memory, n_rounds)
        key = (n_rounds, kv_bucket(n_past + n_rounds, self._context.n_ctx), self._sampling is not None)
        if key not in self._programs:
            self._programs[key] = self._device.compile(build_plain_burst(self._trunk, memory, *key))
        memory.advance(0, n_rounds)
        self._context.submissions += 1
        feeds = {"tokens": np.array([self._last], np.int32), "step": np.array([[n_past], [0]], np.int32)}
        if self._sampling is not None:
            feeds["sampling"] = self._sampling
        try:
            with _timed(self._pace, n_rounds):
                chosen = self._programs[key].run(feeds)["chosen"]
        except DeviceError as error:
            memory.seqs[0] = SequenceState()
            raise DeviceError(f"{error}; the failed burst may have overwritten sequence 0: cleared") from error
        self._last = int(chosen[-1])
        return [[int(token)] for token in chosen]


def build_plain_burst(trunk: Trunk, memory: Memory, n_rounds: int, kv_bound: int, sampled: bool = False) -> Graph:
    """Inputs: tokens i32 [1], step i32 [2, 1], and sampling i32 [N_WORDS] if sampled. Output: chosen i32 [n_rounds]."""
    g = Graph()
    sampling = g.input("sampling", (N_WORDS,), I32) if sampled else None
    tokens = g.input("tokens", (1,), I32)
    steps = later_steps(g, g.input("step", (2, 1), I32), n_rounds)
    chosen = g.temp("chosen", (n_rounds,), I32)
    shape = StepShape(1, 1, kv_bound)
    for i in range(n_rounds):
        x = trunk_rows(g, trunk, memory, tokens, _step(steps, i), shape)
        tokens = chosen.narrow(0, i, 1)
        _choose(g, head_logits(g, trunk.hp, trunk.loader, trunk.head, x), sampling, _step(steps, i), tokens)
    g.output("chosen", chosen)
    return g


@dataclass(frozen=True)
class DraftState:
    """What lives on the device between two rounds of n drafts (see `accept_drafts`); hidden [n + 1, n_embd]."""

    tokens: Tensor
    targets: Tensor
    steps: Tensor
    accepted: Tensor
    hidden: Tensor


class DraftBurst:
    """A round drafts n tokens with the MTP block and verifies them."""

    def __init__(
        self, device: Device, trunk: Trunk, mtp: MtpKeys, context: Context, mtp_context: MtpContext, n_drafts: int
    ) -> None:
        self.forced_acceptance: float | None = (
            None  # for measurements: drafts stand with this chance, whatever they are
        )
        self._rng = np.random.default_rng(0)
        self.tokens_per_round = n_drafts + 1
        self._device, self._trunk, self._mtp = device, trunk, mtp
        self._context, self._mtp_context = context, mtp_context
        self._n = n_drafts
        self._programs: dict[tuple[int, int, bool, bool], Program] = {}
        self._pace = Pace()
        self._sampling: Ints | None = None
        n, n_embd = n_drafts, trunk.hp.n_embd
        self._integers = device.allocate(4 * (n + 1) + 1, I32, "draft state")
        self._rows = device.allocate((n + 1) * n_embd, label="draft hidden rows")
        self._state = DraftState(
            tokens=bound("tokens", self._integers, 0, (n + 1,), I32),
            targets=bound("targets", self._integers, n + 1, (n + 1,), I32),
            steps=bound("steps", self._integers, 2 * (n + 1), (n + 1, 2, 1), I32),
            accepted=bound("accepted", self._integers, 4 * (n + 1), (1,), I32),
            hidden=bound("hidden", self._rows, 0, (n + 1, n_embd)),
        )

    def begin(self, last: int, pending_h: Floats | None, sampling: Ints | None = None) -> None:
        if pending_h is None:
            raise ContextError("a speculative burst needs the hidden row of the token before the last one")
        self._sampling = sampling
        n, n_past = self._n, self._context.seq_pos_max(0) + 1
        # As after a round that accepted nothing and whose first target was the last token.
        tokens = [last] + [0] * n
        steps = [[n_past + (i if i < n else 0), 0] for i in range(n + 1)]
        integers = np.array([*tokens, *tokens, *np.array(steps).reshape(-1), 0], np.int32)
        hidden = np.zeros((n + 1, self._trunk.hp.n_embd), np.float32)
        hidden[0] = pending_h
        self._device.upload(self._integers, 0, integers)
        self._device.upload(self._rows, 0, hidden)

    def rounds(self, most: int) -> int:
        return _paced(self._pace, self._context, self.tokens_per_round).most(most)

    def fits(self, n_rounds: int) -> bool:
        # The block's catch-up writes a whole round beyond the last token.
        return self._context.seq_pos_max(0) + 1 + (n_rounds + 1) * (self._n + 1) <= self._context.n_ctx

    def run(self, n_rounds: int) -> list[list[int]]:
        memory, mtp_memory = self._context.memory, self._mtp_context.memory
        n_past = _check_room(self, memory, n_rounds)
        feeds = {}
        if self.forced_acceptance is not None:
            feeds["forced"] = self._force(n_rounds)
        if self._sampling is not None:
            feeds["sampling"] = self._sampling
        kv_bound = kv_bucket(n_past + (n_rounds + 1) * (self._n + 1), self._context.n_ctx)
        key = (n_rounds, kv_bound, "forced" in feeds, "sampling" in feeds)
        if key not in self._programs:
            graph = build_draft_burst(self._trunk, self._mtp, memory, mtp_memory, self._state, *key)
            self._programs[key] = self._device.compile(graph)
        self._context.submissions += 1
        try:
            with _timed(self._pace, n_rounds):
                log = self._programs[key].run(feeds)["log"]
        except DeviceError as error:
            memory.seqs[0], mtp_memory.seqs[0] = SequenceState(), SequenceState()
            raise DeviceError(f"{error}; the failed burst may have overwritten sequence 0: cleared") from error
        rounds = []
        for accepted, *targets in log.tolist():
            memory.advance(0, self._n + 1)
            n_past += accepted + 1
            if not memory.seq_rm(0, n_past, -1):
                raise ContextError(f"a round of {self._n} drafts could not be rolled back to {n_past} tokens")
            rounds.append(targets[: accepted + 1])
        # The block has seen everything up to the last round's first row.
        mtp_memory.seqs[0] = SequenceState(n_past - len(rounds[-1]) + 1)
        return rounds

    def _force(self, n_rounds: int) -> NDArray[np.int32]:
        """How many drafts each round accepts when each stands with the forced chance, given those before it did."""
        stand = self._rng.random((n_rounds, self._n)) < (self.forced_acceptance or 0.0)
        counts: NDArray[np.int32] = np.cumprod(stand, axis=1).sum(axis=1).astype(np.int32)
        return counts


def build_draft_burst(
    trunk: Trunk,
    keys: MtpKeys,
    memory: Memory,
    mtp_memory: Memory,
    state: DraftState,
    n_rounds: int,
    kv_bound: int,
    force: bool = False,
    sampled: bool = False,
) -> Graph:
    """Everything is in the state. Output: log i32 [n_rounds, n + 2]: accepted drafts, targets.

    `force` adds an input forced i32 [n_rounds], the number of drafts to accept in each round; `sampled` an input
    sampling i32 [N_WORDS].
    """
    g = Graph()
    forced = g.input("forced", (n_rounds,), I32) if force else None
    sampling = g.input("sampling", (N_WORDS,), I32) if sampled else None
    loader, hp = trunk.loader, trunk.hp
    n = state.tokens.shape[0] - 1
    log = g.temp("log", (n_rounds, n + 2), I32)
    one, many = StepShape(1, 1, kv_bound), StepShape(n + 1, 1, kv_bound)
    for i in range(n_rounds):
        x = mtp_rows(g, loader, keys, mtp_memory, state.targets, state.hidden, _step(state.steps, 0), many)
        x = select_row(g, x, state.accepted)
        for draft in range(1, n + 1):
            token = state.tokens.narrow(0, draft, 1)
            argmax(g, head_logits(g, keys.hp, loader, keys.head, x), out=token)
            if draft < n:
                h = rms_norm(g, x, loader.tensor(keys.head.norm, hp.n_embd), hp.rms_eps)
                x = mtp_rows(g, loader, keys, mtp_memory, token, h, _step(state.steps, draft), one)
        x = trunk_rows(g, trunk, memory, state.tokens, _step(state.steps, n), many)
        rms_norm(g, x, loader.tensor(trunk.head.norm, hp.n_embd), hp.rms_eps, out=state.hidden)
        _choose(g, head_logits(g, hp, loader, trunk.head, x), sampling, _step(state.steps, n), state.targets)
        row = log.narrow(0, i, 1).reshape(n + 2)
        stand = forced.narrow(0, i, 1) if forced is not None else None
        accept_drafts(g, state.tokens, state.targets, state.steps, state.accepted, row, stand)
    g.output("log", log)
    return g


def _choose(g: Graph, logits: Tensor, sampling: Tensor | None, step: Tensor, out: Tensor) -> None:
    """The tokens that follow the rows of a decode with these step values (n_past, slot) of one sequence."""
    if sampling is None:
        argmax(g, logits, out=out)
    else:
        sample(g, logits, sampling, step.narrow(0, 0, 1).reshape(1), out=out)


def _step(steps: Tensor, i: int) -> Tensor:
    return steps.narrow(0, i, 1).reshape(2, steps.shape[2])


def _paced(pace: Pace, context: Context, n_steps: int) -> Pace:
    """The pace of a burst. Before its first run a round is taken for n of the context's last run (the prompt's end)."""
    return pace if pace.seconds else Pace(n_steps * context.last_run_s)


@contextmanager
def _timed(pace: Pace, n_rounds: int) -> Iterator[None]:
    start = perf_counter()
    yield
    pace.note(n_rounds, perf_counter() - start)


def _check_room(burst: Burst, memory: Memory, n_rounds: int) -> int:
    n_past = memory.seqs[0].n_past
    if n_rounds < 1 or not burst.fits(n_rounds):
        raise ContextError(
            f"a burst of {n_rounds} rounds of up to {burst.tokens_per_round} tokens does not fit: {n_past} of "
            f"{memory.shape.n_ctx} tokens are there; make the context larger (n_ctx)"
        )
    return n_past
