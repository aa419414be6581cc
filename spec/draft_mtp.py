"""The `draft-mtp` speculator: drafts with the model's own multi-token-prediction block.

The block sees a token together with the trunk's hidden row of the token BEFORE it. So every token that the trunk
decodes is decoded once more by the block (`process`), each paired with the hidden row of its predecessor; what the
next token will pair with waits in `pending_h`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vkbackend.errors import ContextError
from vkbackend.model.batch import DECODE_ROWS, Batch
from vkbackend.spec.speculator import DraftRequest

if TYPE_CHECKING:
    from vkbackend.model.context import DecodeOutput
    from vkbackend.model.loader import Model
    from vkbackend.model.mtp import MtpContext

Floats = NDArray[np.float32]
MOST_DRAFTS = DECODE_ROWS - 1


@dataclass(frozen=True)
class DraftMTP:
    """Settings of the MTP speculator, for `generate(spec=...)`.

    n_max: most tokens drafted in one step, 1 to 15: a verification decodes one row more, and up to 16 rows give
    bit for bit what single rows give. n_min: with fewer drafted, none are used. hidden: the kind of hidden row that
    the block was trained with. Raises `ContextError` for bad numbers.
    """

    n_max: int = 3
    n_min: int = 0
    hidden: str = "post_norm"

    def __post_init__(self) -> None:
        for name, value, least, most in (("n_max", self.n_max, 1, MOST_DRAFTS), ("n_min", self.n_min, 0, self.n_max)):
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not whole or not least <= value <= most:
                raise ContextError(f"draft-mtp: {name} is {value!r}; allowed is a whole number from {least} to {most}")

    def start(self, model: Model, n_ctx: int, n_seq_max: int = 1) -> MTPSpeculator:
        """A speculator with a context of its own. Raises `ModelError` when the model has no MTP block."""
        context = model.mtp_context(n_ctx=n_ctx, n_seq_max=n_seq_max, hidden=self.hidden)
        return MTPSpeculator(context, model.hparams.n_embd, self.n_max, self.n_min)


class MTPSpeculator:
    """Drafts for several sequences side by side. Made by `DraftMTP.start`."""

    need_hidden = True  # the trunk must return a hidden row of every token that it decodes

    def __init__(self, context: MtpContext, n_embd: int, n_max: int = 3, n_min: int = 0) -> None:
        self.context = context
        self.n_max = n_max
        self.n_min = n_min
        self._n_embd = n_embd
        self.clear()

    def clear(self) -> None:
        """Forgets every sequence."""
        self.context.clear()
        n = self.context.n_seq_max
        self.pending_h: Floats = np.zeros((n, self._n_embd), np.float32)  # [n_seqs, n_embd] pairs with the next token
        self.verify_h: list[Floats] = [np.zeros((0, self._n_embd), np.float32) for _ in range(n)]  # [rows, n_embd]

    @property
    def submissions(self) -> int:
        """Programs run so far."""
        return self.context.submissions

    def process(self, batch: Batch, hidden: Floats | None) -> None:
        """Follows a decode of the trunk: the same tokens at the same positions, through the block.

        hidden: float32 [n_tokens, n_embd], the hidden rows that this decode returned, in batch order. A batch
        without tokens (embedding input) is skipped. What the block holds at or after a position of the batch is
        replaced: drafts that were verified, say.
        """
        n = len(batch.tokens)
        if n == 0:
            return
        if hidden is None or hidden.shape != (n, self._n_embd):
            got = "no hidden rows" if hidden is None else f"hidden rows of shape {hidden.shape}"
            raise ContextError(
                f"draft-mtp: a batch of {n} tokens came with {got}; {(n, self._n_embd)} is needed, so give the trunk's "
                'context hidden="post_norm"'
            )
        seq_ids = np.zeros(n, np.intp) if batch.seq_ids is None else np.asarray(batch.seq_ids, np.intp)
        before: Floats = np.empty_like(hidden)  # [n_tokens, n_embd]
        rows_of = {int(s): np.flatnonzero(seq_ids == s) for s in np.unique(seq_ids)}
        for seq, rows in rows_of.items():
            before[rows[0]] = self.pending_h[seq]
            before[rows[1:]] = hidden[rows[:-1]]
            if batch.pos is not None:
                self._cut(seq, int(batch.pos[rows[0]]))
        self._decode(batch.tokens, batch.pos, seq_ids.tolist(), before, want=False)
        for seq, rows in rows_of.items():
            self.verify_h[seq] = hidden[rows]
            self.pending_h[seq] = hidden[rows[-1]]

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Greedy drafts for each request, at most n_max, none where fewer than n_min fit.

        Every round decodes one token of each sequence that still drafts; a sequence drops out when it has enough
        or its context is full. The block's memory is as before afterwards.
        """
        drafts: list[list[int]] = [[] for _ in requests]
        last = [r.id_last for r in requests]
        h = np.stack([self.pending_h[r.seq] for r in requests]) if requests else self.pending_h[:0]  # [n, n_embd]
        for r in requests:
            self._cut(r.seq, r.n_past)
        active = list(range(len(requests)))
        for n in range(self.n_max):
            # A draft at position p is verified by the trunk at p, which must lie inside the context.
            active = [i for i in active if requests[i].n_past + n + 1 < self.context.n_ctx]
            if not active:
                break
            pos = [requests[i].n_past + n for i in active]
            out = self._decode([last[i] for i in active], pos, [requests[i].seq for i in active], h[active], want=True)
            assert out.hidden is not None
            h[active] = out.hidden
            for i, token in zip(active, out.argmax.tolist(), strict=True):
                drafts[i].append(token)
                last[i] = token
        for r in requests:
            self._cut(r.seq, r.n_past)
        return [d if len(d) >= self.n_min else [] for d in drafts]

    def accept(self, seq: int, n_accepted: int) -> None:
        """Notes that the first n_accepted drafts of the last batch of a sequence stand; call it for 0 as well."""
        rows = self.verify_h[seq]
        if len(rows) == 0 or n_accepted < 0:
            raise ContextError(
                f"draft-mtp: accept({seq}, {n_accepted}) needs a processed batch of that sequence and "
                "a count of 0 or more"
            )
        self.pending_h[seq] = rows[min(n_accepted, len(rows) - 1)]

    def _cut(self, seq: int, n_past: int) -> None:
        self.context.seq_rm(seq, n_past, -1)  # plain attention: any tail can go

    def _decode(
        self, tokens: Sequence[int], pos: Sequence[int] | None, seq_ids: Sequence[int], h: Floats, want: bool
    ) -> DecodeOutput:
        return self.context.decode_batch(Batch(tokens, pos, seq_ids, [want] * len(tokens)), greedy=want, hidden=h)
