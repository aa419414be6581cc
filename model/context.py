"""Contexts: sequences of tokens decoded by one graph builder over one memory.

`Context` serves the trunk; `MtpContext` (mtp.py) the multi-token-prediction block, whose rows carry a hidden
row beside each token id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from vkbackend.device.base import Device, Program
from vkbackend.device.pace import Pace, is_watched
from vkbackend.errors import ContextError, DeviceError
from vkbackend.graph import Graph
from vkbackend.model.batch import Batch, Rows, UBatch, check_batch, check_tokens, split
from vkbackend.model.memory import Memory, SeqRm, SequenceState
from vkbackend.model.qwen35 import StepShape

MAX_PROGRAMS = 64  # recorded shapes kept per context
SMALLEST_KV_BOUND = 256
MEASURED_RUNS = 3  # of a small batch, before the first long prompt
FEWEST_ROWS = 32  # of a prompt in one submission, however slow the device
LOGITS_WORDS = 16 << 20  # most logits (rows * n_vocab) that one ubatch returns

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class DecodeOutput:
    """`logits` float32 [n_wanted_rows, n_vocab]; `hidden` float32 [n_tokens, n_embd] or None; in batch order.

    `argmax` int32 [n_wanted_rows] takes the place of `logits` where only the greedy tokens were asked for.
    """

    logits: Floats
    hidden: Floats | None
    argmax: NDArray[np.int32]


class Context:
    """Decodes tokens of up to n_seq_max sequences and remembers them.

    Made by `model.context(...)`. `n_rs_seq` is how many tokens can be rolled back on a recurrent model; `hidden` is
    the kind of hidden row that every decode returns (None, "pre_norm", "post_norm").
    """

    def __init__(
        self,
        device: Device,
        memory: Memory,
        build: Callable[[StepShape], Graph],
        n_vocab: int,
        n_embd: int,
        n_ubatch: int,
        hidden: str | None,
        pace: Pace | None = None,
    ) -> None:
        self.hidden = hidden
        self.n_ubatch = n_ubatch
        self.submissions = 0  # programs run so far: one a decode step
        self._device = device
        self._memory = memory
        self._build = build
        self._n_vocab = n_vocab
        self._n_embd = n_embd
        self._programs: OrderedDict[StepShape, Program] = OrderedDict()
        self._pace = pace or Pace()  # of rows of prompts, shared by the contexts of a model
        self.last_run_s = 0.0  # what the last submission took

    # ---- decoding

    def decode(
        self, tokens: Sequence[int], seq: int = 0, pos: int | None = None, logits: str = "last", greedy: bool = False
    ) -> DecodeOutput:
        """Decodes tokens of one sequence, from position `pos` (default: where it ends).

        `logits`: "last", "all" or "none" rows. `greedy`: return token ids (argmax) instead of logits.
        Raises `ContextError` before anything runs when ids, positions or capacity do not fit.
        """
        return self.decode_batch(single_sequence(tokens, seq, pos, logits), greedy)

    def decode_batch(self, batch: Batch, greedy: bool = False) -> DecodeOutput:
        """Decodes rows of several sequences.

        After an error every sequence is as it was. Only where a run failed on the device after it may have overwritten
        more states than can be rolled back, the sequence is empty, and the `DeviceError` names it.
        """
        return self._run(self._check(batch), greedy, {})

    def _check(self, batch: Batch) -> Rows:
        n_past = [s.n_past for s in self._memory.seqs]
        return check_batch(batch, n_past, self.n_ctx, self._n_vocab)

    def _run(self, rows: Rows, greedy: bool, extra: dict[str, Floats]) -> DecodeOutput:
        wanted = np.cumsum(rows.want_logits) - 1  # row -> place among the wanted rows
        n_wanted = int(rows.want_logits.sum())
        logits = np.empty((0 if greedy else n_wanted, self._n_vocab), np.float32)
        argmax = np.empty(n_wanted if greedy else 0, np.int32)
        hidden = np.empty((len(rows.tokens), self._n_embd), np.float32) if self.hidden else None
        n_ubatch = self.n_ubatch if extra else self._most_rows(len(rows.tokens))
        n_ubatch = min(n_ubatch, max(16, LOGITS_WORDS // self._n_vocab)) if n_wanted > 16 else n_ubatch
        before = [SequenceState(s.n_past, s.first_state) for s in self._memory.seqs]
        try:
            for ubatch in split(rows.seq_ids, n_ubatch):
                kind = _logits_kind(ubatch, rows.want_logits)
                results = self._step(ubatch, rows, kind, greedy, extra)
                computed = _logits_rows(ubatch, kind)
                keep = rows.want_logits[computed]
                places = wanted[computed[keep]]
                if kind != "none" and greedy:
                    argmax[places] = results["argmax"][keep]
                elif kind != "none":
                    logits[places] = results["logits"][keep]
                if hidden is not None:
                    hidden[ubatch.rows] = results["hidden"]
        except BaseException as error:  # an interrupt as well
            lost = self._undo(before)
            if lost and isinstance(error, DeviceError):
                raise DeviceError(f"{error}; the failed run may have overwritten sequences {lost}: cleared") from error
            raise
        return DecodeOutput(logits, hidden, argmax)

    def _step(
        self, ubatch: UBatch, rows: Rows, kind: str, greedy: bool, extra: dict[str, Floats]
    ) -> dict[str, NDArray[np.float32]]:
        n_past = [self._memory.seqs[s].n_past for s in ubatch.seqs]
        bound = kv_bucket(max(n_past) + ubatch.n_tokens, self.n_ctx)
        shape = StepShape(ubatch.n_tokens, len(ubatch.seqs), bound, kind, self.hidden, greedy and kind != "none")
        program = self._program(shape)
        feeds = {
            "tokens": rows.tokens[ubatch.rows],
            "step": np.array([n_past, ubatch.seqs], np.int32),
            **{name: values[ubatch.rows] for name, values in extra.items()},
        }
        for seq in ubatch.seqs:  # from here on slots may be overwritten, also by a run that fails
            self._memory.advance(seq, ubatch.n_tokens)
        self.submissions += 1
        start = perf_counter()
        results = program.run(feeds)
        self.last_run_s = perf_counter() - start
        n_rows = len(ubatch.rows)
        if n_rows >= FEWEST_ROWS and self.last_run_s > n_rows * self._pace.seconds:
            # Only ever slower, or how a prompt is cut (and with it its last bits) would change from text to text.
            self._pace.note(n_rows, self.last_run_s)
        return results

    def _most_rows(self, n_rows: int) -> int:
        """Rows of a long batch for one submission: n_ubatch, or fewer on a GPU that is too slow for so many."""
        if not is_watched(self._device.info) or n_rows <= 2 * FEWEST_ROWS or self.n_ubatch <= FEWEST_ROWS:
            return self.n_ubatch
        if self._pace.seconds == 0:
            self._measure()
        return max(FEWEST_ROWS, self._pace.most(self.n_ubatch))

    def _measure(self) -> None:
        """Runs batches for their time only: a small one, then larger ones as long as the pace allows more.

        A small batch alone would not do: on a large card 32 rows take hardly less time than 256. An empty sequence does
        not care what lies in its memory.
        """
        seq = next((i for i, s in enumerate(self._memory.seqs) if s.n_past == 0), None)
        n_rows, n_before, most = FEWEST_ROWS, 0, min(self.n_ubatch, self.n_ctx)
        while seq is not None and n_before < n_rows <= most:
            self._pace.note(n_rows, self._fastest(n_rows, seq))
            allowed = self._pace.most(self.n_ubatch)
            n_before, n_rows = n_rows, n_rows if allowed == self.n_ubatch else min(allowed, most)

    def _fastest(self, n_rows: int, seq: int) -> float:
        """Seconds of the fastest of a few runs: idle cards need some work to wake up."""
        program = self._program(StepShape(n_rows, 1, kv_bucket(n_rows, self.n_ctx), "none", self.hidden))
        feeds = {"tokens": np.zeros(n_rows, np.int32), "step": np.array([[0], [seq]], np.int32)}
        times = []
        for _ in range(MEASURED_RUNS):
            start = perf_counter()
            program.run(feeds)
            times.append(perf_counter() - start)
        return min(times)

    def graph(self, shape: StepShape) -> Graph:
        """The graph of a step on this context's memory, for measurements: a run of it changes what sequences hold."""
        return self._build(shape)

    def _program(self, shape: StepShape) -> Program:
        if shape in self._programs:
            self._programs.move_to_end(shape)
            return self._programs[shape]
        program = self._device.compile(self._build(shape))
        self._programs[shape] = program
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)
        return program

    def _undo(self, before: list[SequenceState]) -> list[int]:
        """After a failed run: back to the lengths before it where the ring still holds them, else cleared."""
        lost = []
        for seq, old in enumerate(before):
            now = self._memory.seqs[seq]
            if now.n_past != old.n_past and not self._memory.seq_rm(seq, old.n_past, -1):
                self._memory.seqs[seq] = SequenceState()
                lost.append(seq)
        return lost

    # ---- sequences

    @property
    def memory(self) -> Memory:
        """The device memory and its books; for graph builders, not for users."""
        return self._memory

    @property
    def n_ctx(self) -> int:
        """Tokens that each sequence can hold."""
        return self._memory.shape.n_ctx

    @property
    def n_seq_max(self) -> int:
        return self._memory.shape.n_seq_max

    @property
    def n_rs_seq(self) -> int:
        """Older recurrent states kept per sequence."""
        return self._memory.shape.n_rs_seq

    @property
    def seq_rm_kind(self) -> SeqRm:
        return self._memory.kind

    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Removes positions [p0, p1) of a sequence (-1: to the end). False, and nothing changed, if it can not."""
        return self._memory.seq_rm(self._seq(seq), p0, p1)

    def rollback_depth(self, seq: int) -> int:
        """How many tokens can be removed from the end of a sequence now: every 1..depth succeeds."""
        return self._memory.rollback_depth(self._seq(seq))

    def seq_pos_min(self, seq: int) -> int:
        """First position of a sequence: 0, or -1 when it is empty."""
        return 0 if self._memory.seqs[self._seq(seq)].n_past else -1

    def seq_pos_max(self, seq: int) -> int:
        """Last position of a sequence, -1 when it is empty."""
        return self._memory.seqs[self._seq(seq)].n_past - 1

    def seq_cp(self, src: int, dst: int) -> None:
        """Makes sequence dst an independent copy of src."""
        self._memory.copy(self._seq(src), self._seq(dst))

    def seq_keep(self, seq: int) -> None:
        """Clears every sequence but one."""
        self._seq(seq)
        for other in range(self.n_seq_max):
            if other != seq:
                self._memory.seqs[other] = SequenceState()

    def clear(self) -> None:
        """Empties every sequence."""
        for seq in range(self.n_seq_max):
            self._memory.seqs[seq] = SequenceState()

    def state_get(self, seq: int) -> bytes:
        """A checkpoint of a sequence, for `state_set` on any context over the same model."""
        return self._memory.save(self._seq(seq))

    def state_set(self, seq: int, data: bytes) -> None:
        """Restores a checkpoint. Raises `ContextError`, changing nothing, when the bytes do not fit."""
        self._memory.restore(self._seq(seq), data)

    def _seq(self, seq: int) -> int:
        if not 0 <= seq < self.n_seq_max:
            raise ContextError(f"sequence {seq} does not exist; this context has 0..{self.n_seq_max - 1} (n_seq_max)")
        return seq


def kv_bucket(n: int, n_ctx: int) -> int:
    """A bound on the positions attention looks at, for n positions: powers of two, so that few shapes are recorded."""
    return min(n_ctx, max(SMALLEST_KV_BOUND, 1 << (n - 1).bit_length()))


def single_sequence(tokens: Sequence[int], seq: int, pos: int | None, logits: str) -> Batch:
    """The batch of one sequence's tokens from position `pos` (None: continue), wanting "last", "all" or "none"."""
    check_tokens(tokens)
    n = len(tokens)
    if logits not in ("last", "all", "none"):
        raise ContextError(f"decode: logits is {logits!r}; allowed are 'last', 'all' and 'none'")
    want = None if logits == "last" else [logits == "all"] * n
    positions = None if pos is None else list(range(pos, pos + n))
    return Batch(tokens, positions, [seq] * n, want)


def _logits_kind(ubatch: UBatch, want: NDArray[np.bool_]) -> str:
    flags = want[ubatch.rows].reshape(len(ubatch.seqs), ubatch.n_tokens)
    if not flags.any():
        return "none"
    return "all" if flags[:, :-1].any() else "last"


def _logits_rows(ubatch: UBatch, kind: str) -> NDArray[np.intp]:
    """Batch rows of which a ubatch returns logits, in its own order."""
    if kind == "all":
        return ubatch.rows
    return ubatch.rows.reshape(len(ubatch.seqs), ubatch.n_tokens)[:, -1] if kind == "last" else ubatch.rows[:0]
