"""Rollback, copies and checkpoints against a context that decodes the same tokens from scratch.

Random programs over two sequences. In batches of at most 16 rows the logits must be the same bits; once a longer batch
(a prompt) is part of a sequence, they must agree within 1e-4. How far back a sequence can go is predicted by a model of
the ring of its own. Device memory starts out as NaN or as garbage.

VKBACKEND_EXAMPLES sets the number of random programs, VKBACKEND_FULL=1 takes batches of every size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from synthetic import write_model

from vkbackend.device.base import Program
from vkbackend.device.kompute import KomputeDevice
from vkbackend.errors import DeviceError
from vkbackend.model.batch import Batch
from vkbackend.model.context import Context
from vkbackend.model.loader import Model, load
from vkbackend.model.qwen35 import StepShape

EXAMPLES = int(os.environ.get("VKBACKEND_EXAMPLES", "40"))
FULL = bool(os.environ.get("VKBACKEND_FULL"))
N_CTX, N_VOCAB = 200, 64
NAN, GARBAGE = 0x7FC00000, 0x3E3E3E3E

Floats = NDArray[np.float32]


@dataclass
class Sequence:
    """What a sequence must hold, and how far back it must be able to go."""

    tokens: list[int] = field(default_factory=list)
    exact: bool = True  # every token came in a batch of at most 16 rows
    slots: dict[int, int] = field(default_factory=dict)  # ring slot -> position whose state it holds

    def copy(self) -> Sequence:
        return Sequence(list(self.tokens), self.exact, dict(self.slots))

    def write(self, first: int, n: int, n_slots: int) -> None:
        """States of n positions were written."""
        self.slots |= {p % n_slots: p for p in range(first, first + n)}

    def depth(self, n_slots: int) -> int:
        """How many tokens can go from the end one by one: the state before the first token is always there."""
        n = len(self.tokens)
        for d in range(1, n_slots):
            left = n - d - 1  # the position whose state would be needed
            if left < -1 or (left >= 0 and self.slots.get(left % n_slots) != left):
                return d - 1
        return n_slots - 1


@dataclass(frozen=True)
class Lab:
    """Contexts that the examples share (making one costs more than an example), and a reference."""

    context: Callable[[int], Context]  # n_rs_seq -> a context of 3 sequences
    straight: Callable[[list[int]], Floats]  # logits [n_tokens, n_vocab] of tokens decoded from scratch, 16 at a time


@pytest.fixture(scope="module")
def model(kompute: KomputeDevice, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path: Path = tmp_path_factory.mktemp("rollback") / "tiny.gguf"
    return load(write_model(path, seed=5), device=kompute, n_ubatch=64)


@pytest.fixture(scope="module")
def moe_lab(kompute: KomputeDevice, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    path: Path = tmp_path_factory.mktemp("rollback") / "moe.gguf"
    return make_lab(load(write_model(path, seed=8, experts=(3, 8)), device=kompute))


@pytest.fixture(scope="module")
def lab(model: Model) -> Lab:
    return make_lab(model)


def make_lab(model: Model) -> Lab:
    reference = model.context(n_ctx=N_CTX)

    def straight(tokens: list[int]) -> Floats:
        reference.clear()
        poison(reference, NAN)
        parts = [reference.decode(tokens[at : at + 16], logits="all").logits for at in range(0, len(tokens), 16)]
        return np.concatenate(parts)

    return Lab(cache(lambda n_rs_seq: model.context(n_ctx=N_CTX, n_seq_max=3, n_rs_seq=n_rs_seq)), straight)


def poison(ctx: Context, word: int) -> None:
    """Fills all device memory of a context."""
    tensors = [t for c in ctx.memory.kv for t in (c.k, c.v)] + [t for r in ctx.memory.rings for t in (r.conv, r.state)]
    for buffer in {id(t.storage.buffer): t.storage.buffer for t in tensors}.values():
        assert buffer is not None
        ctx._device.fill(buffer, 0, buffer.n_words, word)


def fresh(lab: Lab, n_rs_seq: int, word: int) -> Context:
    ctx = lab.context(n_rs_seq)
    ctx.clear()
    poison(ctx, word)
    return ctx


def assert_same_bits(got: Floats, want: Floats) -> None:
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def assert_agrees(got: Floats, want: Floats, exact: bool) -> None:
    if exact:
        assert_same_bits(got, want)
    else:
        assert np.abs(got - want).max() <= 1e-4 * max(1.0, float(np.abs(want).max()))


# ---- random programs

SEQ = st.integers(0, 1)
SIZES = st.integers(1, 16) if FULL else st.sampled_from([1, 1, 2, 3, 5, 9, 16])
PROMPTS = st.integers(17, 70) if FULL else st.sampled_from([17, 40, 70])
ANY = st.one_of(SIZES, PROMPTS)
DECODE = st.tuples(st.just("decode"), SEQ, SIZES)
ROLLBACK = st.tuples(st.just("rollback"), SEQ, st.integers(1, 10))
COMMANDS = st.one_of(
    DECODE,
    DECODE,
    st.tuples(st.just("both"), st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.just("decode"), SEQ, PROMPTS),
    ROLLBACK,
    ROLLBACK,
    st.tuples(st.sampled_from(["copy", "save", "restore", "save", "restore", "keep"]), SEQ, st.just(0)),
    st.tuples(st.just("failure"), SEQ, ANY),
    st.tuples(st.just("clear"), st.just(0), st.just(0)),
)


RARELY = settings(
    max_examples=max(1, EXAMPLES // 5),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
OFTEN = settings(RARELY, max_examples=EXAMPLES)
RINGS, WORDS, SEEDS = st.integers(0, 8), st.sampled_from([NAN, GARBAGE]), st.integers(0, 1 << 30)


@OFTEN
@given(commands=st.lists(COMMANDS, min_size=4, max_size=14), n_rs_seq=RINGS, word=WORDS, seed=SEEDS)
def test_any_history_equals_decoding_from_scratch(
    lab: Lab, commands: list[tuple[str, int, int]], n_rs_seq: int, word: int, seed: int
) -> None:
    check_history(lab, commands, n_rs_seq, word, seed)


# Without prompts: their kernels round otherwise, and where two experts nearly tie that decides which one a row goes to.
SMALL = COMMANDS.filter(lambda c: c[0] not in ("decode", "failure") or c[2] <= 16)


@RARELY
@given(commands=st.lists(SMALL, min_size=4, max_size=12), n_rs_seq=RINGS, word=WORDS, seed=SEEDS)
def test_any_history_of_a_moe_model(
    moe_lab: Lab, commands: list[tuple[str, int, int]], n_rs_seq: int, word: int, seed: int
) -> None:
    check_history(moe_lab, commands, n_rs_seq, word, seed)


def check_history(lab: Lab, commands: list[tuple[str, int, int]], n_rs_seq: int, word: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ctx = fresh(lab, n_rs_seq, word)
    want = [Sequence(), Sequence()]
    saved: tuple[bytes, Sequence] | None = None
    probe = int(rng.integers(0, N_VOCAB))
    known: dict[tuple[int, ...], Floats] = {}  # by tokens: logits of them all and of the probe behind them
    for what, a, b in commands:
        rows: dict[int, Floats] = {}
        if what == "decode":
            rows = decode(ctx, want, {a: b}, rng)
        elif what == "both":
            rows = decode(ctx, want, {0: a, 1: b}, rng)
        elif what == "rollback":
            roll_back(ctx, want[a], a, b)
        elif what == "copy":
            ctx.seq_cp(a, 1 - a)
            want[1 - a] = want[a].copy()
        elif what == "save":
            saved = ctx.state_get(a), want[a].copy()
        elif what == "restore" and saved is not None:
            ctx.state_set(a, saved[0])
            want[a] = saved[1].copy()
            want[a].slots = {}  # older states are not part of a checkpoint
            want[a].write(len(want[a].tokens) - 1, min(1, len(want[a].tokens)), 1 + n_rs_seq)
        elif what == "keep":
            ctx.seq_keep(a)  # clears the others
            want[1 - a] = Sequence()
        elif what == "failure":
            fail(ctx, want, a, b, rng)
        elif what == "clear":
            ctx.clear()
            want = [Sequence(), Sequence()]
        for seq in (0, 1):
            tokens = want[seq].tokens
            assert ctx.seq_pos_max(seq) == len(tokens) - 1 and ctx.seq_pos_min(seq) == (0 if tokens else -1)
            assert ctx.rollback_depth(seq) == want[seq].depth(1 + n_rs_seq)
            if tuple(tokens) not in known:
                known[tuple(tokens)] = lab.straight([*tokens, probe])
            reference = known[tuple(tokens)]
            # The probe goes behind a copy, so that it costs the sequence under test no depth.
            ctx.seq_cp(seq, 2)
            assert_agrees(ctx.decode([probe], seq=2).logits, reference[-1:], want[seq].exact)
            if seq in rows:
                assert_agrees(rows[seq], reference[len(tokens) - len(rows[seq]) : -1], want[seq].exact)


def decode(ctx: Context, want: list[Sequence], counts: dict[int, int], rng: np.random.Generator) -> dict[int, Floats]:
    """Decodes new random tokens of one or both sequences, rows interleaved; their logits by sequence."""
    if any(len(want[s].tokens) + n > N_CTX - 1 for s, n in counts.items()):
        return {}
    seq_ids = np.array([s for s, n in counts.items() for _ in range(n)])
    rng.shuffle(seq_ids)
    tokens = rng.integers(0, N_VOCAB, len(seq_ids))
    out = ctx.decode_batch(Batch(tokens.tolist(), None, seq_ids.tolist(), [True] * len(seq_ids)))
    for s, n in counts.items():
        want[s].write(len(want[s].tokens), n, 1 + ctx.n_rs_seq)
        want[s].tokens += tokens[seq_ids == s].tolist()
        want[s].exact = want[s].exact and len(seq_ids) <= 16
    return {s: out.logits[seq_ids == s] for s in counts}


def roll_back(ctx: Context, want: Sequence, seq: int, distance: int) -> None:
    """Removes the last tokens; what the context says it can do and what it does must agree, and a refusal is free."""
    n = len(want.tokens)
    target = max(0, n - distance)
    possible = distance <= ctx.rollback_depth(seq) or target == 0
    assert ctx.seq_rm(seq, target) == possible
    if possible:
        want.tokens = want.tokens[:target]
        want.exact = want.exact or target == 0
    if len(want.tokens) > 1:
        assert not ctx.seq_rm(seq, 0, 1)  # a middle can not go


@dataclass
class Failing:
    """A program that does all its work, after which the device is said to be lost."""

    program: Program
    log: list[int]
    last: int  # the run that fails

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        out = self.program.run(feeds)
        self.log.append(len(feeds["tokens"]))
        if len(self.log) == self.last:
            raise DeviceError("injected: device lost")
        return out


def fail(ctx: Context, want: list[Sequence], seq: int, n: int, rng: np.random.Generator) -> None:
    """A decode fails after it wrote to the memory: the sequence is as before, or is empty and the error says so."""
    old = want[seq]
    n_past = len(old.tokens)
    if n_past + n > N_CTX - 1:
        return
    log: list[int] = []
    real, last = ctx._program, int(rng.integers(1, 3)) if n > 16 else 1

    def program(shape: StepShape) -> Failing:
        return Failing(real(shape), log, last)

    with patch.object(ctx, "_program", program), pytest.raises(DeviceError, match="injected") as caught:
        ctx.decode(rng.integers(0, N_VOCAB, n).tolist(), seq=seq, logits="none")
    old.write(n_past, sum(log), 1 + ctx.n_rs_seq)
    after = Sequence([*old.tokens, *[0] * sum(log)], slots=old.slots)
    kept = n_past == 0 or sum(log) <= after.depth(1 + ctx.n_rs_seq)
    assert (f"sequences [{seq}]: cleared" in str(caught.value)) == (not kept)
    if not kept or n_past == 0:
        want[seq] = Sequence()


# ---- single questions


@pytest.mark.parametrize("n_rs_seq", range(9))
@pytest.mark.parametrize("history", [[1] * 12, [5, 16], [17, 1], [40]], ids=str)
def test_every_depth_of_every_ring(lab: Lab, n_rs_seq: int, history: list[int], rng: np.random.Generator) -> None:
    """Rollback by 1 .. n_rs_seq after single tokens, batches and prompts; one more is refused and changes nothing."""
    tokens = rng.integers(0, N_VOCAB, sum(history)).tolist()
    n, want = len(tokens), lab.straight(tokens)
    ctx = fresh(lab, n_rs_seq, NAN)
    at = 0
    for size in history:
        ctx.decode(tokens[at : at + size], logits="none")
        at += size
    assert ctx.rollback_depth(0) == n_rs_seq
    data = ctx.state_get(0)
    assert not ctx.seq_rm(0, n - n_rs_seq - 1)
    assert ctx.seq_pos_max(0) == n - 1 and ctx.rollback_depth(0) == n_rs_seq and ctx.state_get(0) == data
    for distance in range(1, n_rs_seq + 1):
        ctx.seq_cp(0, 1)
        assert ctx.seq_rm(1, n - distance)
        assert ctx.rollback_depth(1) == n_rs_seq - distance
        again = ctx.decode(tokens[n - distance :], seq=1, logits="all").logits
        assert_agrees(again, want[n - distance :], max(history) <= 16)


def test_what_attention_is_told_of_the_length_does_not_show(model: Model, rng: np.random.Generator) -> None:
    """Past 256 and 512 tokens, with other bounds, context sizes and neighbours: the same bits."""
    tokens = rng.integers(0, N_VOCAB, 540).tolist()
    short = rng.integers(0, N_VOCAB, 60).tolist()
    reference = model.context(n_ctx=540)
    want = np.concatenate([reference.decode(tokens[i : i + 16], logits="all").logits for i in range(0, 540, 16)])
    reference.clear()
    want_short = np.concatenate([reference.decode([t]).logits for t in short])
    ctx = model.context(n_ctx=2048, n_seq_max=2, n_rs_seq=7)
    poison(ctx, NAN)
    at = beside = 0
    sizes = [16] * 15 + [1] * 12 + [7, 1, 2] + [16] * 14 + [5, 1, 1, 1, 7, 8, 3, 2, 1, 1]
    for n in sizes:
        detour = rng.integers(0, N_VOCAB, 7).tolist()
        ctx.decode(detour, logits="none")
        assert ctx.seq_rm(0, at)
        m = n if n <= 7 and beside + n <= 60 else 0  # side by side with a short sequence
        rows = [*tokens[at : at + n], *short[beside : beside + m]]
        out = ctx.decode_batch(Batch(rows, None, [0] * n + [1] * m, [True] * (n + m)))
        assert_same_bits(out.logits[:n], want[at : at + n])
        if m:
            assert_same_bits(out.logits[n:], want_short[beside : beside + m])
        at, beside = at + n, beside + m
    assert at > 512 and beside > 20
