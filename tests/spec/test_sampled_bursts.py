"""Sampled text in bursts: the tokens of stepwise decoding, with and without drafts, however bursts are cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from synthetic import write_model

import vkbackend as vkb
from vkbackend.device.base import Device
from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import VkBackendError
from vkbackend.model.loader import Model, load
from vkbackend.spec.generate import Session

SAMPLINGS = [
    vkb.Sampling(1.0, seed=1),
    vkb.Sampling(0.8, top_k=20, top_p=0.9, min_p=0.02, seed=1),
    vkb.Sampling(1.5, top_p=0.7, seed=1 << 40),
]


@pytest.fixture(params=["numpy", "kompute", "vulkan"])
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = NumpyDevice() if request.param == "numpy" else request.getfixturevalue(request.param)
    return found


def set_bursts(device: Device, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(device) if isinstance(device, NumpyDevice) else device, "max_burst", most)


def texts(model: Model, sampling: vkb.Sampling, n_max: Sequence[int], n: int = 24) -> list[vkb.Generation]:
    sessions = [Session(model, vkb.DraftMTP(i) if i else None, n_ctx=64) for i in n_max]
    return [s.stream([3, 1, 4], n, sampling, ignore_eos=True).result() for s in sessions]


@pytest.mark.parametrize("head", ["perfect", "random"])
def test_the_same_text(head: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write_model(tmp_path / "tiny.gguf", seed=3, head=head), device=device)
    for sampling in SAMPLINGS:
        set_bursts(device, 1, monkeypatch)
        (stepwise,) = texts(model, sampling, [0])
        assert len(set(stepwise.tokens)) > 5
        for most in (2, 8):
            set_bursts(device, most, monkeypatch)
            for n_max, got in zip((0, 1, 4), texts(model, sampling, (0, 1, 4)), strict=True):
                assert got.tokens == stepwise.tokens, (sampling, most, n_max)
                assert got.stats.submissions < got.stats.steps + 2
                assert got.stats.burst_s > 0
    if head == "perfect":
        assert got.stats.accepted > 0


def test_settings_change_and_programs_stay(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One session, many texts: greedy ones in between, other seeds, and each text as in a session of its own."""
    set_bursts(device, 4, monkeypatch)
    model = load(write_model(tmp_path / "tiny.gguf", seed=5, head="perfect"), device=device)
    for spec in (None, vkb.DraftMTP(2)):
        session = Session(model, spec, n_ctx=64)
        n_programs = 0
        for sampling in (*SAMPLINGS, vkb.Sampling(), vkb.Sampling(1.0, seed=2), *SAMPLINGS):
            text = session.stream([7], 16, sampling, ignore_eos=True).result()
            assert text.tokens == vkb.generate(model, [7], 16, sampling, spec, n_ctx=64, ignore_eos=True).tokens
            programs = len(session.burst._programs)  # type: ignore[union-attr]
            assert not n_programs or programs <= 2 * n_programs  # one more for each size, of the greedy kind
            n_programs = n_programs or programs


def test_the_context_runs_full(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tokens, for which no burst fits, are drawn by the host: the same ones."""
    model = load(write_model(tmp_path / "tiny.gguf", seed=9), device=device)
    set_bursts(device, 1, monkeypatch)
    (stepwise,) = texts(model, SAMPLINGS[0], [0], 100)
    assert len(stepwise.tokens) == 62 and stepwise.stop_reason == "length"
    set_bursts(device, 8, monkeypatch)
    for got in texts(model, SAMPLINGS[0], (0, 2, 5), 100):
        assert got.tokens == stepwise.tokens


def test_a_repeat_penalty_goes_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_bursts(NumpyDevice(), 4, monkeypatch)
    model = load(write_model(tmp_path / "tiny.gguf", seed=3), device=NumpyDevice())
    penalised = vkb.Sampling(1.0, repeat_penalty=1.3, seed=4)
    plain, fast = texts(model, penalised, [0, 3])
    assert plain.tokens == fast.tokens and plain.stats.burst_s == 0
    assert texts(model, vkb.Sampling(1.0, repeat_penalty=1.3, repeat_last_n=0, seed=4), [0])[0].stats.burst_s > 0


@pytest.mark.parametrize("n_max", [0, 2])
def test_unusable_logits(n_max: int, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token whose embedding is not a number comes up: what was drawn before is there, and the session goes on."""
    model = load(write_model(tmp_path / "tiny.gguf", seed=3, head="perfect"), device=device)
    set_bursts(device, 1, monkeypatch)
    (good,) = texts(model, SAMPLINGS[0], [0])
    last = next(i for i, token in enumerate(good.tokens) if i > 4 and token not in good.tokens[:i])
    table = tmp_path / "broken.gguf"
    write_model(table, seed=3, head="perfect")
    break_embedding(table, good.tokens[last])
    broken = load(table, device=device)
    for most in (1, 8):
        set_bursts(device, most, monkeypatch)
        session = Session(broken, vkb.DraftMTP(n_max) if n_max else None, n_ctx=64)
        stream = session.stream([3, 1, 4], 24, SAMPLINGS[0], ignore_eos=True)
        with pytest.raises(VkBackendError, match="its output is not usable"):
            stream.result()
        assert stream.tokens == good.tokens[: last + 1]
        assert session.stream([3, 1, 4], last, SAMPLINGS[0], ignore_eos=True).result().tokens == good.tokens[:last]


def break_embedding(path: Path, token: int) -> None:
    """Makes one row of the table NaN, in the file."""
    import gguf

    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    row = np.full(tensor.shape[0], np.nan, np.float32)
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset) + token * row.nbytes)
        file.write(row.tobytes())
