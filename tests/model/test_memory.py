"""Rollback, copies and saved states: random programs on a memory that holds a stamp of its own for every token.

Stamps are written where a model would write states (slot p mod R), conv columns (p mod C) and keys (row p). Before
every decode all that a model would read must carry the stamps of the sequence's tokens, so bookkeeping that promises a
state which is gone, or finds another one, shows.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vkbackend.device.null import NullDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import ContextError, DeviceError
from vkbackend.graph import Tensor
from vkbackend.model.memory import Memory, MemoryShape, SeqRm

N_CTX, N_SEQ, TAPS = 40, 3, 4
Array = NDArray[Any]


def make_shape(n_rs_seq: int, n_recurrent: int = 2, n_attention: int = 1) -> MemoryShape:
    return MemoryShape(
        n_attention, n_recurrent, N_SEQ, N_CTX, n_rs_seq, n_head_kv=1, head_dim=2, n_v_heads=1, head_v_dim=1,
        head_k_dim=2, conv_dim=3, conv_kernel=TAPS,
    )  # fmt: skip


def array(t: Tensor) -> Array:
    """The live NumPy view of a memory tensor."""
    buffer: Any = t.storage.buffer
    return np.asarray(buffer.data[t.storage.base : t.storage.base + t.size].reshape(t.shape))


class Stamped:
    """A memory, and the tokens (stamps) of its sequences."""

    def __init__(self, n_rs_seq: int, n_recurrent: int = 2) -> None:
        self.memory = Memory(NumpyDevice(), make_shape(n_rs_seq, n_recurrent))
        self.states = [array(r.state) for r in self.memory.rings]
        self.convs = [array(r.conv) for r in self.memory.rings]
        self.keys = [array(t) for c in self.memory.kv for t in (c.k, c.v)]
        for a in (*self.states, *self.convs, *self.keys):
            a[...] = np.nan
        self.tokens: list[list[int]] = [[] for _ in range(N_SEQ)]
        self.next = 1

    def decode(self, seq: int, n: int) -> None:
        """n tokens in one batch: reads what a model reads, leaves what a model leaves."""
        self.check_readable(seq)
        tokens, past = self.tokens[seq], len(self.tokens[seq])
        tokens += range(self.next, self.next + n)
        self.next += n
        for i, (state, conv) in enumerate(zip(self.states, self.convs, strict=True)):
            for p in range(past, past + n):
                if p >= past + n - state.shape[1]:
                    state[seq, p % state.shape[1]] = tokens[p] * 10 + i
                if p >= past + n - conv.shape[1]:
                    conv[seq, p % conv.shape[1]] = tokens[p] * 10 + i
        for i, key in enumerate(self.keys):
            key[seq, past : past + n] = np.array(tokens[past:]).reshape(n, 1, 1) * 10 + i
        self.memory.advance(seq, n)

    def check_readable(self, seq: int) -> None:
        tokens = self.tokens[seq]
        n = len(tokens)
        assert self.memory.seqs[seq].n_past == n
        for i, (state, conv) in enumerate(zip(self.states, self.convs, strict=True)):
            assert n == 0 or (state[seq, (n - 1) % state.shape[1]] == tokens[-1] * 10 + i).all()
            for p in range(max(0, n - TAPS + 1), n):
                assert (conv[seq, p % conv.shape[1]] == tokens[p] * 10 + i).all()
        for i, key in enumerate(self.keys):
            assert (key[seq, :n] == np.array(tokens).reshape(n, 1, 1) * 10 + i).all()

    def true_depth(self, seq: int) -> int:
        """How many tokens can go from the end one by one, by looking at the stamps."""
        tokens, k = self.tokens[seq], 0
        if not self.states:
            return len(tokens)
        while k < min(self.memory.shape.n_rs_seq, len(tokens)):
            left = len(tokens) - (k + 1)
            state = self.states[0]
            if left and not (state[seq, (left - 1) % state.shape[1]] == tokens[left - 1] * 10).all():
                break
            k += 1
        return k

    def check_depth(self, seq: int) -> None:
        """`rollback_depth` is the truth, and `seq_rm` takes exactly the tails that it allows, and the whole."""
        n, depth = len(self.tokens[seq]), self.memory.rollback_depth(seq)
        assert depth == self.true_depth(seq)
        for p0 in range(n + 2):
            for p1 in (-1, n, n + 5):
                before = copy.deepcopy(self.memory.seqs)
                done = self.memory.seq_rm(seq, p0, p1)
                assert done == (p0 == 0 or n - p0 <= depth), f"removing [{p0}, {p1}) of {n}, depth {depth}"
                assert self.memory.seqs[seq].n_past == (min(p0, n) if done else n)
                if not done:
                    assert self.memory.seqs == before
                self.memory.seqs = before

    def step(self, rng: random.Random) -> None:
        seq, other = rng.randrange(N_SEQ), rng.randrange(N_SEQ)
        tokens, n = self.tokens[seq], len(self.tokens[seq])
        kind = rng.choice(["decode", "decode", "decode", "roll back", "roll back", "copy", "clear", "save", "middle"])
        if kind == "decode" and n < N_CTX:
            self.decode(seq, rng.randint(1, min(N_CTX - n, rng.choice([1, 3, 20]))))
        elif kind == "roll back":
            k = rng.randint(0, self.memory.rollback_depth(seq))
            assert self.memory.seq_rm(seq, n - k, -1)
            del tokens[n - k :]
        elif kind == "copy":
            self.memory.copy(seq, other)
            self.tokens[other] = list(tokens)
        elif kind == "clear":
            assert self.memory.seq_rm(seq, 0, rng.choice([-1, n, n + 1]))
            tokens.clear()
        elif kind == "save":
            saved = self.memory.save(seq)
            if other != seq:
                for a in (*self.states, *self.convs, *self.keys):
                    a[other] = np.nan  # nothing of it may matter any more
            self.memory.restore(other, saved)
            self.tokens[other] = list(tokens)
            if other == seq:  # older states are still there, but nobody promises them
                for state in self.states:
                    for slot in range(state.shape[1]):
                        if n == 0 or slot != (n - 1) % state.shape[1]:
                            state[seq, slot] = np.nan
        elif kind == "middle" and n >= 2:
            p1 = rng.randint(1, n - 1)
            assert not self.memory.seq_rm(seq, rng.randint(0, p1 - 1), p1)
            assert self.memory.seq_rm(seq, p1, p1) and self.memory.seq_rm(seq, p1, p1 - 1 or 0)


@pytest.mark.parametrize("n_rs_seq", range(9))
@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25)
def test_random_programs(n_rs_seq: int, seed: int) -> None:
    rng = random.Random(seed)
    m = Stamped(n_rs_seq)
    for _ in range(rng.randint(1, 25)):
        m.step(rng)
        for seq in range(N_SEQ):
            m.check_readable(seq)
            m.check_depth(seq)


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25)
def test_attention_only_rolls_back_as_far_as_asked(seed: int) -> None:
    rng = random.Random(seed)
    m = Stamped(0, n_recurrent=0)
    for _ in range(20):
        m.step(rng)
        for seq in range(N_SEQ):
            m.check_readable(seq)
            m.check_depth(seq)


def test_kinds_of_removal() -> None:
    def kind(n_rs_seq: int, n_recurrent: int) -> SeqRm:
        return Memory(NullDevice(), make_shape(n_rs_seq, n_recurrent)).kind

    assert [kind(0, 0), kind(0, 2), kind(3, 2)] == [SeqRm.PART, SeqRm.FULL, SeqRm.PART_BOUNDED]


def test_a_state_fits_contexts_with_other_numbers_of_snapshots() -> None:
    source, target = Stamped(5), Stamped(0)
    source.decode(1, 17)
    assert source.memory.seq_rm(1, 14, -1)
    del source.tokens[1][14:]
    target.decode(2, 30)  # another sequence's tokens, of which nothing is left
    target.memory.restore(2, source.memory.save(1))
    target.tokens[2], target.next = list(source.tokens[1]), 1000
    target.check_readable(2)
    target.check_depth(2)
    target.decode(2, 3)


def test_an_empty_state_can_be_saved() -> None:
    m = Stamped(2)
    m.decode(0, 5)
    m.memory.restore(0, m.memory.save(1))
    m.tokens[0].clear()
    m.check_readable(0)
    m.check_depth(0)


def test_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    m = Stamped(2)
    m.decode(0, 9)
    saved = m.memory.save(0)
    m.decode(1, 4)
    other_model = Memory(NumpyDevice(), make_shape(2, n_recurrent=1))
    longer = Memory(NumpyDevice(), MemoryShape(1, 2, 1, N_CTX + 9, 2, 1, 2, 1, 1, 2, 3, TAPS))
    longer.advance(0, N_CTX + 1)
    for data, message in (
        (b"", "0 bytes are too few"),
        (saved[:40], "40 bytes are too few"),
        (b"x" + saved[1:], "not saved by a context of this model's shape"),
        (other_model.save(0), "not saved by a context of this model's shape"),
        (longer.save(0), f"has {N_CTX + 1} tokens, this context holds {N_CTX}"),
        (saved[:-4], f"{len(saved) - 4} bytes given, a state of 9 tokens has {len(saved)}"),
        (saved + b"1234", f"{len(saved) + 4} bytes given"),
    ):
        before = copy.deepcopy(m.memory.seqs)
        with pytest.raises(ContextError, match=message):
            m.memory.restore(1, data)
        assert m.memory.seqs == before
        m.check_readable(1)
        m.check_depth(1)


def test_memories_are_packed_into_few_buffers_within_the_limits() -> None:
    device = NullDevice()
    memory = Memory(device, make_shape(3))
    tensors = [t for c in memory.kv for t in (c.k, c.v)] + [t for r in memory.rings for t in (r.conv, r.state)]
    assert len(device.buffers) == 1 and all(t.storage.base % 64 == 0 for t in tensors)
    spans = sorted((t.storage.base, t.storage.base + t.size) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))

    # Of 4 KiB a buffer: several of them, none too large, and no tensor across two.
    small = NullDevice(replace(device.info.limits, max_storage_range=4096))
    memory = Memory(small, make_shape(8, n_recurrent=9, n_attention=7))
    tensors = [t for c in memory.kv for t in (c.k, c.v)] + [t for r in memory.rings for t in (r.conv, r.state)]
    assert len(small.buffers) > 2 and all(4 * b.n_words <= 4096 for b in small.buffers)
    for buffer in small.buffers:
        inside = sorted((t.storage.base, t.storage.base + t.size) for t in tensors if t.storage.buffer is buffer)
        assert inside and inside[-1][1] <= buffer.n_words
        assert all(end <= start for (_, end), (start, _) in zip(inside, inside[1:], strict=False))
    assert sum(t.storage.buffer in small.buffers for t in tensors) == 2 * 7 + 2 * 9

    with pytest.raises(DeviceError, match="context memory"):
        Memory(device, MemoryShape(1, 0, 1, 1 << 20, 0, 8, 128))  # one cache is more than can be bound
