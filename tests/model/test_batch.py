"""Batches: what is refused, and how they are cut."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkbackend.errors import ContextError
from vkbackend.model.batch import DECODE_ROWS, Batch, check_batch, split
from vkbackend.model.context import single_sequence


def check(batch: Batch, n_past: tuple[int, ...] = (5, 0, 9)) -> tuple[list[int], list[int], list[bool]]:
    rows = check_batch(batch, n_past, n_ctx=12, n_vocab=100)
    return rows.tokens.tolist(), rows.seq_ids.tolist(), rows.want_logits.tolist()


def test_defaults_continue_sequence_0_and_want_the_last_row() -> None:
    assert check(Batch([7, 8, 9])) == ([7, 8, 9], [0, 0, 0], [False, False, True])


def test_several_sequences_mixed() -> None:
    batch = Batch([1, 2, 3, 4, 5], pos=[0, 5, 1, 6, 9], seq_ids=[1, 0, 1, 0, 2])
    assert check(batch) == ([1, 2, 3, 4, 5], [1, 0, 1, 0, 2], [False, False, True, True, True])
    wanted = Batch([1, 2, 3], seq_ids=[1, 0, 1], want_logits=[True, False, False])
    assert check(wanted)[2] == [True, False, False]


def test_a_sequence_may_be_filled_to_the_last_place() -> None:
    assert len(check(Batch(list(range(7))))[0]) == 7
    assert len(check(Batch([1], seq_ids=[2], pos=[9]))[0]) == 1


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch([]), "the batch is empty"),
        (Batch("hi"), r"tokens is 'hi'; a list or array of token ids is needed.*encode"),  # type: ignore[arg-type]
        (Batch(b"hi"), "tokens is of type bytes, length 2; a list or array"),
        (Batch(5), "tokens is 5; a list or array"),  # type: ignore[arg-type]
        (Batch(np.array(5)), r"tokens is array\(5\)"),  # type: ignore[arg-type]
        (Batch({5: 1}), "tokens is of type dict, length 1"),  # type: ignore[arg-type]
        (Batch([1, 100]), r"row 1 has token id 100; allowed are 0\.\.99"),
        (Batch([-1]), r"row 0 has token id -1; allowed are 0\.\.99"),
        (Batch([1, 2], seq_ids=[0, 3]), r"row 1 has sequence 3; allowed are 0\.\.2"),
        (Batch([1, 2], seq_ids=[-1, 0]), r"row 0 has sequence -1"),
        (Batch([1, 2], seq_ids=[0]), r"seq_ids must be 2 integers, got int64 of shape \(1,\)"),
        (Batch([1.5]), "tokens must be 1 integers, got float64"),  # type: ignore[list-item]
        (Batch([1], pos=[[5]]), r"pos must be 1 integers.*\(1, 1\)"),  # type: ignore[list-item]
        (Batch([1, 2], pos=[5, 7]), "row 1 has position 7, sequence 0 continues at 6"),
        (Batch([1, 2], pos=[4, 5]), "row 0 has position 4, sequence 0 continues at 5"),
        (Batch([1, 2], pos=[0, 0], seq_ids=[1, 1]), "row 1 has position 0, sequence 1 continues at 1"),
        (Batch([1, 2], pos=[6, 5]), "row 0 has position 6, sequence 0 continues at 5"),
        (Batch([1, 2], want_logits=[True]), "want_logits has 1 entries for 2 tokens"),
        (Batch(list(range(8))), "sequence 0 would have 13 tokens, the context holds 12"),
        (Batch([1, 2, 3, 4], seq_ids=[2, 2, 2, 2]), "sequence 2 would have 13 tokens"),
    ],
)
def test_bad_batches_are_refused(batch: Batch, message: str) -> None:
    with pytest.raises(ContextError, match=message):
        check(batch)


@pytest.mark.parametrize("tokens", ["hi", 5, None, np.array(5)])
def test_what_is_no_list_of_tokens(tokens: Any) -> None:
    with pytest.raises(ContextError, match=r"decode: tokens is .*; a list or array of token ids is needed"):
        single_sequence(tokens, 0, None, "last")


@given(st.integers(0, 2**32 - 1))
def test_ubatches_cover_the_batch_in_order(seed: int) -> None:
    rng = random.Random(seed)
    n_seqs, n_ubatch = rng.choice([1, 1, 2, 5, 40]), rng.choice([1, 3, 16, 64, 512])
    seq_ids = np.array([rng.randrange(n_seqs) for _ in range(rng.randint(1, rng.choice([16, 200, 1500])))], np.int32)
    seen: dict[int, list[int]] = {s: [] for s in range(n_seqs)}
    for u in split(seq_ids, n_ubatch):
        assert len(set(u.seqs)) == len(u.seqs) and 1 <= len(u.rows) == u.n_tokens * len(u.seqs) <= n_ubatch
        if len(u.rows) > DECODE_ROWS:
            assert u.n_tokens & (u.n_tokens - 1) == 0
        assert len(u.seqs) <= DECODE_ROWS  # so that single tokens of many sequences stay batch-invariant
        for i, s in enumerate(u.seqs):
            rows = u.rows[i * u.n_tokens : (i + 1) * u.n_tokens]
            assert (seq_ids[rows] == s).all()
            seen[s] += rows.tolist()
    assert all(rows == np.flatnonzero(seq_ids == s).tolist() for s, rows in seen.items())


@given(n=st.integers(1, 3000), n_ubatch=st.sampled_from([16, 64, 512]))
def test_one_sequence_needs_few_shapes(n: int, n_ubatch: int) -> None:
    sizes = [u.n_tokens for u in split(np.zeros(n, np.int32), n_ubatch)]
    assert len(sizes) <= n // n_ubatch + 6  # what is over: 256, 128, 64, 32, and at most two short ones
    if n <= DECODE_ROWS:
        assert sizes == [n]
    assert len({s for s in sizes if s > DECODE_ROWS}) <= n_ubatch.bit_length()
    assert sizes == sorted(sizes, reverse=True)


def test_decoding_several_sequences_takes_one_ubatch() -> None:
    seq_ids = np.repeat(np.arange(4, dtype=np.int32), 4)
    for order in (seq_ids, seq_ids.reshape(4, 4).T.reshape(-1)):
        (only,) = split(order, 512)
        assert only.n_tokens == 4 and Counter(only.seqs) == Counter(range(4))
