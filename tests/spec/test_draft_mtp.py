"""The MTP speculator: pairing of tokens and hidden rows, several sequences, and golden counts of acceptance."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from fixture_paths import fixture
from numpy.typing import NDArray

from vkbackend.errors import ContextError, ModelError
from vkbackend.model.batch import Batch
from vkbackend.model.context import DecodeOutput
from vkbackend.model.loader import Model, load
from vkbackend.model.mtp import MtpContext
from vkbackend.spec.draft_mtp import DraftMTP, MTPSpeculator
from vkbackend.spec.generate import generate
from vkbackend.spec.speculator import DraftRequest

N_EMBD = 4
Row = tuple[int, int, int, float]  # sequence, position, token, first number of the hidden row


class Recorder:
    """An MTP context that notes every row; its draft of token t is t + 1, its hidden row that of t plus 1/8."""

    def __init__(self, n_seq_max: int, n_ctx: int = 64) -> None:
        self.n_seq_max, self.n_ctx, self.submissions = n_seq_max, n_ctx, 0
        self.n_past = [0] * n_seq_max
        self.calls: list[list[Row]] = []

    def clear(self) -> None:
        self.n_past = [0] * self.n_seq_max

    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        self.n_past[seq] = min(self.n_past[seq], p0)
        return True

    def decode_batch(self, batch: Batch, greedy: bool, hidden: NDArray[np.float32]) -> DecodeOutput:
        assert batch.seq_ids is not None
        rows: list[Row] = []
        for i, (token, seq) in enumerate(zip(batch.tokens, batch.seq_ids, strict=True)):
            assert batch.pos is None or batch.pos[i] == self.n_past[seq]
            rows.append((seq, self.n_past[seq], token, float(hidden[i, 0])))
            self.n_past[seq] += 1
        self.calls.append(rows)
        argmax = np.array([t + 1 for t in batch.tokens], np.int32)
        return DecodeOutput(np.empty((0, 9), np.float32), hidden + np.float32(0.125), argmax)


def speculator(context: Recorder, n_max: int = 3, n_min: int = 0) -> MTPSpeculator:
    return MTPSpeculator(cast(MtpContext, context), N_EMBD, n_max, n_min)


def hidden_of(*values: float) -> NDArray[np.float32]:
    return np.repeat(np.array(values, np.float32)[:, None], N_EMBD, axis=1)  # [n_tokens, n_embd]


def test_every_token_pairs_with_the_row_before_it() -> None:
    context = Recorder(1)
    spec = speculator(context)
    spec.process(Batch([5, 6, 7], [0, 1, 2]), hidden_of(10, 11, 12))
    spec.process(Batch([8], [3]), hidden_of(13))
    assert context.calls == [[(0, 0, 5, 0.0), (0, 1, 6, 10.0), (0, 2, 7, 11.0)], [(0, 3, 8, 12.0)]]
    assert spec.pending_h[0, 0] == 13


def test_drafts_feed_their_own_rows_and_leave_no_trace() -> None:
    context = Recorder(1)
    spec = speculator(context, n_max=3)
    spec.process(Batch([5, 6], [0, 1]), hidden_of(10, 11))
    assert spec.draft([DraftRequest(0, 20, 2)]) == [[21, 22, 23]]
    assert context.calls[1:] == [[(0, 2, 20, 11.0)], [(0, 3, 21, 11.125)], [(0, 4, 22, 11.25)]]
    assert context.n_past == [2]
    assert spec.pending_h[0, 0] == 11


@pytest.mark.parametrize("n_accepted", [0, 1, 2, 3, 7])
def test_accept(n_accepted: int) -> None:
    context = Recorder(1)
    spec = speculator(context, n_max=3)
    spec.process(Batch([5, 6], [0, 1]), hidden_of(10, 11))
    spec.process(Batch([20, 21, 22, 23], [2, 3, 4, 5]), hidden_of(30, 31, 32, 33))
    spec.accept(0, n_accepted)
    assert spec.pending_h[0, 0] == 30 + min(n_accepted, 3)
    # The next step begins behind what was accepted: rejected entries of the block are gone.
    n_past = 3 + min(n_accepted, 3)
    spec.draft([DraftRequest(0, 40, n_past)])
    assert context.calls[-3] == [(0, n_past, 40, 30.0 + min(n_accepted, 3))]
    spec.process(Batch([40, 41], [n_past, n_past + 1]), hidden_of(50, 51))
    assert context.calls[-1] == [(0, n_past, 40, 30.0 + min(n_accepted, 3)), (0, n_past + 1, 41, 50.0)]


def test_sequences_side_by_side() -> None:
    context = Recorder(3, n_ctx=8)
    spec = speculator(context, n_max=3)
    spec.process(Batch([5, 9, 6, 7], None, [0, 2, 0, 2]), hidden_of(10, 20, 11, 21))
    assert context.calls == [[(0, 0, 5, 0.0), (2, 0, 9, 0.0), (0, 1, 6, 10.0), (2, 1, 7, 20.0)]]
    context.n_past = [2, 6, 2]
    drafts = spec.draft([DraftRequest(0, 30, 2), DraftRequest(1, 40, 6), DraftRequest(2, 50, 2)])
    assert drafts == [[31, 32, 33], [41], [51, 52, 53]]  # sequence 1 has room for one draft
    assert [[row[:2] for row in call] for call in context.calls[1:]] == [
        [(0, 2), (1, 6), (2, 2)],
        [(0, 3), (2, 3)],
        [(0, 4), (2, 4)],
    ]
    assert context.calls[1] == [(0, 2, 30, 11.0), (1, 6, 40, 0.0), (2, 2, 50, 21.0)]
    assert context.n_past == [2, 6, 2]


def test_fewer_than_n_min_is_none() -> None:
    context = Recorder(2, n_ctx=8)
    spec = speculator(context, n_max=3, n_min=2)
    context.n_past = [6, 5]
    assert spec.draft([DraftRequest(0, 1, 6), DraftRequest(1, 1, 5)]) == [[], [2, 3]]


def test_nothing_to_do() -> None:
    context = Recorder(1)
    spec = speculator(context)
    spec.process(Batch([]), None)  # embedding input
    assert spec.draft([]) == []
    assert context.calls == []


def test_missing_hidden_rows_and_wrong_use() -> None:
    spec = speculator(Recorder(1))
    assert spec.need_hidden
    with pytest.raises(ContextError, match=r"no hidden rows.*hidden="):
        spec.process(Batch([1, 2], [0, 1]), None)
    with pytest.raises(ContextError, match=r"\(1, 4\).*\(2, 4\)"):
        spec.process(Batch([1, 2], [0, 1]), hidden_of(1))
    with pytest.raises(ContextError, match="accept"):
        spec.accept(0, 0)


@pytest.mark.parametrize(
    "sizes", [{"n_max": 0}, {"n_max": 16}, {"n_min": -1}, {"n_max": 2, "n_min": 3}, {"n_max": 1.5}]
)
def test_bad_sizes(sizes: dict[str, Any]) -> None:
    with pytest.raises(ContextError, match="n_m"):
        DraftMTP(**sizes)


@pytest.fixture(scope="module")
def dense() -> Model:
    return load(fixture("gguf/dense-f32.gguf"), device="numpy")


@pytest.mark.parametrize("n_max", [1, 2, 3, 4])
@pytest.mark.parametrize("n_prompt", [5, 33])
def test_golden_counts(dense: Model, n_prompt: int, n_max: int) -> None:
    """Drafted, accepted and rounds of 64 greedy tokens, as an independent implementation counts them."""
    want = np.load(fixture("goldens/dense/ref.npz"))
    prompt = np.load(fixture("goldens/dense/hf.npz"))[f"prompt_{n_prompt}"].tolist()
    gen = generate(dense, prompt, 64, spec=DraftMTP(n_max), n_ctx=256, ignore_eos=True)
    assert gen.tokens == want[f"greedy_{n_prompt}"].tolist()
    assert [gen.stats.drafted, gen.stats.accepted, gen.stats.steps] == want[f"spec_{n_prompt}_{n_max}"].tolist()


def test_a_model_without_block(dense: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_mtp", None)
    with pytest.raises(ModelError, match="nextn_predict_layers"):
        generate(dense, [1, 2], 4, spec=DraftMTP())
