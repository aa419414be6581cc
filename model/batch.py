"""Batches of tokens over several sequences, and how they are cut into the shapes that graphs are recorded for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set, Sized
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkbackend.errors import ContextError, shown

DECODE_ROWS = 16  # batches up to this many rows use the batch-invariant kernels


@dataclass(frozen=True)
class Batch:
    """Rows to decode: token ids, positions, sequences, and which rows' logits are wanted; all of one length.

    Positions of one sequence must continue it without gaps. `pos` None: continue each sequence. `seq_ids` None: all
    sequence 0. `want_logits` None: the last row of each sequence.
    """

    tokens: Sequence[int]
    pos: Sequence[int] | None = None
    seq_ids: Sequence[int] | None = None
    want_logits: Sequence[bool] | None = None


@dataclass(frozen=True)
class Rows:
    """A checked batch, as arrays of length n_rows."""

    tokens: NDArray[np.int32]
    seq_ids: NDArray[np.int32]
    want_logits: NDArray[np.bool_]


@dataclass(frozen=True)
class UBatch:
    """Equal counts of tokens of some sequences. `rows` [n_seqs * n_tokens] index the batch, sequence by sequence."""

    n_tokens: int
    seqs: tuple[int, ...]
    rows: NDArray[np.intp]


def check_batch(batch: Batch, n_past: Sequence[int], n_ctx: int, n_vocab: int) -> Rows:
    """Checks a batch against the sequences' lengths. Raises `ContextError` naming the row, number and range."""
    check_tokens(batch.tokens)
    n = len(batch.tokens)
    if n == 0:
        raise ContextError("decode: the batch is empty; give at least one token")
    seq_ids = np.zeros(n, np.int64) if batch.seq_ids is None else _ints("seq_ids", batch.seq_ids, n)
    tokens = _ints("tokens", batch.tokens, n)
    _check_range("token id", tokens, n_vocab)
    _check_range("sequence", seq_ids, len(n_past))
    want = np.zeros(n, np.bool_)
    if batch.want_logits is not None:
        if len(batch.want_logits) != n:
            raise ContextError(f"decode: want_logits has {len(batch.want_logits)} entries for {n} tokens")
        want[:] = np.asarray(batch.want_logits, np.bool_)
    pos = None if batch.pos is None else _ints("pos", batch.pos, n)
    for seq in np.unique(seq_ids):
        rows = np.flatnonzero(seq_ids == seq)
        start = n_past[seq]
        if batch.want_logits is None:
            want[rows[-1]] = True
        expected = start + np.arange(len(rows))
        if pos is not None and not np.array_equal(pos[rows], expected):
            bad = int(np.flatnonzero(pos[rows] != expected)[0])
            raise ContextError(
                f"decode: row {int(rows[bad])} has position {int(pos[rows][bad])}, sequence {int(seq)} continues at "
                f"{int(expected[bad])}; remove or add tokens first (seq_rm)"
            )
        if start + len(rows) > n_ctx:
            raise ContextError(
                f"decode: sequence {int(seq)} would have {start + len(rows)} tokens, the context holds {n_ctx}; "
                "make the context larger (n_ctx) or the prompt shorter"
            )
    return Rows(tokens.astype(np.int32), seq_ids.astype(np.int32), want)


def check_tokens(tokens: object) -> None:
    """Raises `ContextError` for what is no sequence of token ids at all: a text, or a single id."""
    alone = not isinstance(tokens, Sized) or getattr(tokens, "ndim", 1) == 0
    if alone or isinstance(tokens, str | bytes | Mapping | Set):
        raise ContextError(
            f"decode: tokens is {shown(tokens)}; a list or array of token ids is needed, as "
            "model.tokenizer.encode(text) gives"
        )


def split(seq_ids: NDArray[np.int32], n_ubatch: int) -> list[UBatch]:
    """Cuts a batch into ubatches of equal token counts per sequence, keeping each sequence's order.

    Up to 16 rows go as they are. Longer runs are cut to powers of two, so that few shapes are ever recorded.
    """
    left = {int(s): np.flatnonzero(seq_ids == s) for s in dict.fromkeys(seq_ids.tolist())}
    out: list[UBatch] = []
    while left:
        seqs = tuple(left)[: max(1, min(n_ubatch, DECODE_ROWS) if len(left) > 1 else 1)]
        most = min(len(left[s]) for s in seqs)
        n = min(most, max(1, n_ubatch // len(seqs)))
        if n * len(seqs) > DECODE_ROWS:
            n = 1 << (n.bit_length() - 1)
        out.append(UBatch(n, seqs, np.concatenate([left[s][:n] for s in seqs])))
        left = {s: rows[n:] if s in seqs else rows for s, rows in left.items()}
        left = {s: rows for s, rows in left.items() if len(rows)}
    return out


def _ints(name: str, values: Sequence[int], n: int) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise ContextError(f"decode: {name} must be {n} integers, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def _check_range(what: str, values: NDArray[np.int64], n: int) -> None:
    bad = np.flatnonzero((values < 0) | (values >= n))
    if len(bad):
        raise ContextError(f"decode: row {int(bad[0])} has {what} {int(values[bad[0]])}; allowed are 0..{n - 1}")
