"""Checkpoints, failures and clamping: the books and the device never part."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from synthetic import write_model

from vkbackend.device.kompute import KomputeDevice
from vkbackend.errors import ContextError, DeviceError
from vkbackend.model.loader import Model, load
from vkbackend.model.memory import SeqRm
from vkbackend.model.qwen35 import StepShape


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("state") / "tiny.gguf", seed=9)


@pytest.fixture(scope="module")
def model(kompute: KomputeDevice, path: Path) -> Model:
    return load(path, device=kompute)


def test_a_checkpoint_moves_between_contexts_of_other_sizes(model: Model, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 64, 21).tolist()
    source = model.context(n_ctx=64, n_rs_seq=4)
    source.decode(tokens[:16], logits="none")
    source.decode(tokens[16:20], logits="none")
    data = source.state_get(0)
    want = source.decode(tokens[20:]).logits
    for n_ctx, n_seq_max, n_rs_seq in ((32, 1, 0), (200, 3, 8)):
        target = model.context(n_ctx=n_ctx, n_seq_max=n_seq_max, n_rs_seq=n_rs_seq)
        target.state_set(n_seq_max - 1, data)
        assert target.rollback_depth(n_seq_max - 1) == 0
        got = target.decode(tokens[20:], seq=n_seq_max - 1).logits
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    with pytest.raises(ContextError, match="20 tokens, this context holds 16"):
        model.context(n_ctx=16).state_set(0, data)


def test_damaged_checkpoints_are_refused_and_change_nothing(model: Model, rng: np.random.Generator) -> None:
    ctx = model.context(n_ctx=64, n_rs_seq=2)
    ctx.decode(rng.integers(0, 64, 7).tolist(), logits="none")
    data = ctx.state_get(0)
    bad = [b"", data[:20], data[:-4], data + bytes(4), bytes(len(data)), data[:4] + b"\xff" * 4 + data[8:]]
    for at in [*range(0, 48), *rng.integers(48, len(data), 40)]:  # any flipped bit, of the header and the rest
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        bad.append(bytes(flipped))
    for damaged in bad:
        with pytest.raises(ContextError, match="state_set"):
            ctx.state_set(0, damaged)
        assert ctx.state_get(0) == data and ctx.rollback_depth(0) == 2


def test_a_device_that_fails_while_a_sequence_is_replaced_leaves_it_empty(
    model: Model, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = model.context(n_ctx=64, n_seq_max=2, n_rs_seq=2)
    tokens = rng.integers(0, 64, 8).tolist()
    ctx.decode(tokens[:7], logits="none")
    data = ctx.state_get(0)
    ways: dict[str, Callable[[], None]] = {
        "upload": lambda: ctx.state_set(1, data),
        "copy": lambda: ctx.seq_cp(0, 1),
    }
    for name, replace in ways.items():
        ctx.decode(tokens[:3], seq=1, logits="none")
        real, calls = getattr(ctx._device, name), iter(range(99))

        def second_fails(*args: Any, real: Any = real, calls: Any = calls) -> None:
            if next(calls) == 1:
                raise DeviceError("injected: device lost")
            real(*args)

        with monkeypatch.context() as patch, pytest.raises(DeviceError, match="injected"):
            patch.setattr(ctx._device, name, second_fails)
            replace()
        assert ctx.seq_pos_max(1) == -1 and ctx.state_get(0) == data
        replace()
        assert_same_bits(ctx.decode(tokens[7:], seq=1).logits, straight(model, tokens))
        assert ctx.seq_rm(1, 0)


def straight(model: Model, tokens: list[int]) -> NDArray[np.float32]:
    return model.context(n_ctx=64).decode(tokens).logits


def assert_same_bits(got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("error", [DeviceError("injected: device lost"), KeyboardInterrupt()], ids=["lost", "ctrl-c"])
@pytest.mark.parametrize("n_rs_seq", [0, 4])
def test_a_failed_decode_leaves_the_sequence_as_it_was_or_says_that_it_is_gone(
    model: Model, n_rs_seq: int, error: BaseException, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = model.context(n_ctx=64, n_seq_max=2, n_rs_seq=n_rs_seq)
    tokens = rng.integers(0, 64, 9).tolist()
    ctx.decode(tokens[:6], logits="none")
    ctx.decode(tokens[6:8])
    program: Any = next(reversed(ctx._programs.values()))
    real = program.run

    def lost(feeds: Any) -> None:
        real(feeds)
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)) as caught:
        patch.setattr(program, "run", lost)
        ctx.decode([5, 5])
    if isinstance(error, DeviceError):
        assert ("sequences [0]: cleared" in str(caught.value)) == (n_rs_seq == 0)
    if n_rs_seq:
        assert ctx.seq_pos_max(0) == 7 and ctx.rollback_depth(0) == 2  # two of four older states were overwritten
        assert_same_bits(ctx.decode(tokens[8:]).logits, straight(model, tokens))
    else:
        assert ctx.seq_pos_max(0) == -1
        assert_same_bits(ctx.decode(tokens).logits, straight(model, tokens))


def test_a_shape_that_can_not_be_compiled_changes_nothing(
    model: Model, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 40 goes as 32 and 8: what the first did is undone, or named when it can not be."""
    for n_past, message in ((0, "no memory$"), (5, r"sequences \[0\]: cleared")):
        ctx = model.context(n_ctx=64)
        tokens = rng.integers(0, 64, n_past + 40).tolist()
        if n_past:
            ctx.decode(tokens[:n_past], logits="none")
        real = ctx._program
        shapes: list[int] = []

        def failing(shape: StepShape, real: Any = real, shapes: Any = shapes) -> Any:
            shapes.append(shape.n_tokens)
            if shape.n_tokens == 8:
                raise DeviceError("no memory")
            return real(shape)

        with monkeypatch.context() as patch, pytest.raises(DeviceError, match=message):
            patch.setattr(ctx, "_program", failing)
            ctx.decode(tokens[n_past:])
        assert shapes == [32, 8] and ctx.seq_pos_max(0) == -1


def test_kinds_of_removal_and_clamping(
    model: Model, tmp_path: Path, kompute: KomputeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    assert model.context(n_ctx=16).seq_rm_kind is SeqRm.FULL
    assert model.context(n_ctx=16, n_rs_seq=2).seq_rm_kind is SeqRm.PART_BOUNDED
    attention = load(write_model(tmp_path / "attention.gguf", seed=1, interval=1), device=kompute)
    with caplog.at_level(logging.WARNING, "vkbackend"):
        ctx = attention.context(n_ctx=32, n_rs_seq=5)
    assert ctx.n_rs_seq == 0 and "clamped to 0" in caplog.text
    assert ctx.seq_rm_kind is SeqRm.PART
    ctx.decode(list(range(20)), logits="none")
    assert ctx.rollback_depth(0) == 20 and ctx.seq_rm(0, 3) and ctx.seq_pos_max(0) == 2
