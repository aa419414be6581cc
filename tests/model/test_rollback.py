"""Rollback, copies and checkpoints against a context that decodes the same tokens from scratch.

Random programs over two sequences. In batches of at most 16 rows the logits must be the same bits; once a longer batch
(a prompt) is part of a sequence, they must agree within 1e-4. Device memory starts out as NaN or as garbage.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import write_model

from vkbackend.device.kompute import KomputeDevice
from vkbackend.model.batch import Batch
from vkbackend.model.context import Context
from vkbackend.model.loader import Model, load

EXAMPLES = int(os.environ.get("VKBACKEND_EXAMPLES", "25"))
N_CTX = 160


@pytest.fixture(scope="module")
def model(kompute: KomputeDevice, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path: Path = tmp_path_factory.mktemp("rollback") / "tiny.gguf"
    return load(write_model(path, seed=5), device=kompute, n_ubatch=64)


def poison(ctx: Context, word: int) -> None:
    """Fills all device memory of a context."""
    tensors = [t for c in ctx.memory.kv for t in (c.k, c.v)] + [t for r in ctx.memory.rings for t in (r.conv, r.state)]
    for buffer in {id(t.storage.buffer): t.storage.buffer for t in tensors}.values():
        assert buffer is not None
        ctx._device.fill(buffer, 0, buffer.n_words, word)


@dataclass
class Sequence:
    """What a sequence must hold: its tokens, and whether all of them were decoded in batches of at most 16 rows."""

    tokens: list[int] = field(default_factory=list)
    exact: bool = True


SIZES = st.sampled_from([1, 1, 2, 3, 5, 16])
COMMANDS = st.one_of(
    st.tuples(st.just("decode"), st.integers(0, 1), SIZES),
    st.tuples(st.just("decode"), st.integers(0, 1), SIZES),
    st.tuples(st.just("both"), SIZES.filter(lambda n: n <= 5), SIZES.filter(lambda n: n <= 5)),
    st.tuples(st.just("prompt"), st.integers(0, 1), st.sampled_from([17, 40])),
    st.tuples(st.just("rollback"), st.integers(0, 1), st.integers(0, 10)),
    st.tuples(st.just("rollback"), st.integers(0, 1), st.integers(1, 3)),
    st.tuples(st.just("copy"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("save"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("restore"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("keep"), st.integers(0, 1), st.just(0)),
)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    commands=st.lists(COMMANDS, min_size=4, max_size=12),
    n_rs_seq=st.integers(0, 8),
    word=st.sampled_from([0x7FC00000, 0x3E3E3E3E]),
    seed=st.integers(0, 1 << 30),
)
def test_any_history_equals_decoding_from_scratch(
    model: Model, commands: list[tuple[str, int, int]], n_rs_seq: int, word: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ctx = model.context(n_ctx=N_CTX, n_seq_max=3, n_rs_seq=n_rs_seq)
    poison(ctx, word)
    want = [Sequence(), Sequence()]
    saved: tuple[bytes, Sequence] | None = None
    for what, a, b in commands:
        if what == "decode" or what == "prompt":
            decode(ctx, want, {a: b}, rng)
        elif what == "both":
            decode(ctx, want, {0: a, 1: b}, rng)
        elif what == "rollback":
            roll_back(ctx, want, a, b)
        elif what == "copy":
            ctx.seq_cp(a, 1 - a)
            want[1 - a] = Sequence(list(want[a].tokens), want[a].exact)
        elif what == "save":
            saved = ctx.state_get(a), Sequence(list(want[a].tokens), want[a].exact)
        elif what == "restore" and saved is not None:
            ctx.state_set(a, saved[0])
            want[a] = Sequence(list(saved[1].tokens), saved[1].exact)
        elif what == "keep":
            ctx.seq_keep(a)  # clears the others
            want[1 - a] = Sequence()
        for seq in (0, 1):
            check(model, ctx, want[seq], seq, rng)


def decode(ctx: Context, want: list[Sequence], counts: dict[int, int], rng: np.random.Generator) -> None:
    """Decodes new random tokens of one or both sequences, rows interleaved."""
    if any(len(want[s].tokens) + n > N_CTX - 1 for s, n in counts.items()):
        return
    rows = [s for s, n in counts.items() for _ in range(n)]
    rng.shuffle(rows)
    tokens = rng.integers(0, 64, len(rows)).tolist()
    ctx.decode_batch(Batch(tokens, None, rows, [False] * len(rows)))
    for token, s in zip(tokens, rows, strict=True):
        want[s].tokens.append(token)
        want[s].exact = want[s].exact and len(rows) <= 16


def roll_back(ctx: Context, want: list[Sequence], seq: int, distance: int) -> None:
    """Removes the last tokens; what the context says it can do and what it does must agree, and a refusal is free."""
    n = len(want[seq].tokens)
    depth = ctx.rollback_depth(seq)
    assert depth <= min(ctx.n_rs_seq, n)
    target = max(0, n - distance)
    possible = distance <= depth or target == 0
    assert ctx.seq_rm(seq, target) == possible
    if possible:
        want[seq].tokens = want[seq].tokens[:target]
        if target == 0:
            want[seq].exact = True
    assert ctx.seq_pos_max(seq) == len(want[seq].tokens) - 1


def check(model: Model, ctx: Context, want: Sequence, seq: int, rng: np.random.Generator) -> None:
    """One probe token behind the sequence must see what it would see after decoding everything from scratch.

    The probe goes behind a copy in a third sequence, so that it costs the sequence under test no depth.
    """
    probe = int(rng.integers(0, 64))
    ctx.seq_cp(seq, 2)
    got = ctx.decode([probe], seq=2).logits[0]
    reference = model.context(n_ctx=N_CTX)
    tokens = [*want.tokens, probe]
    for at in range(0, len(tokens), 16):
        out = reference.decode(tokens[at : at + 16])
    if want.exact:
        np.testing.assert_array_equal(got.view(np.uint32), out.logits[0].view(np.uint32))
    else:
        assert np.abs(got - out.logits[0]).max() <= 1e-4 * max(1.0, float(np.abs(got).max()))


def test_every_depth_of_every_ring(model: Model, rng: np.random.Generator) -> None:
    """Rollback by 1 .. n_rs_seq after single tokens, batches and prompts; one more is refused and changes nothing."""
    for n_rs_seq in range(9):
        for history in ([1] * 12, [5, 16], [17, 1], [40]):
            ctx = model.context(n_ctx=N_CTX, n_rs_seq=n_rs_seq)
            poison(ctx, 0x7FC00000)
            tokens = rng.integers(0, 64, sum(history)).tolist()
            at = 0
            for n in history:
                ctx.decode(tokens[at : at + n], logits="none")
                at += n
            assert ctx.rollback_depth(0) == min(n_rs_seq, len(tokens))
            data = ctx.state_get(0)
            assert not ctx.seq_rm(0, len(tokens) - n_rs_seq - 1)
            assert ctx.seq_pos_max(0) == len(tokens) - 1 and ctx.state_get(0) == data
            if n_rs_seq:
                assert ctx.seq_rm(0, len(tokens) - n_rs_seq)
                tail = tokens[len(tokens) - n_rs_seq :]
                again = ctx.decode(tail).logits
                straight = model.context(n_ctx=N_CTX)
                at = 0
                for n in history[:-1]:
                    straight.decode(tokens[at : at + n], logits="none")
                    at += n
                rest = tokens[at:]
                if len(rest) <= 16:
                    np.testing.assert_array_equal(again.view(np.uint32), straight.decode(rest).logits.view(np.uint32))
                else:
                    assert np.abs(again - straight.decode(rest).logits).max() <= 1e-3
