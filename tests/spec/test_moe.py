"""Speculation with a qwen35moe, whose MTP block has experts too: the same tokens as plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import write_model

import vkbackend as vkb
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.model.loader import load
from vkbackend.spec.generate import Session


@pytest.mark.parametrize(
    ("head", "where"), [("perfect", "numpy"), ("random", "numpy"), ("random", "kompute"), ("random", "bursts")]
)
def test_speculation_changes_no_token(
    head: str, where: str, kompute: KomputeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = NumpyDevice() if where == "numpy" else kompute
    monkeypatch.setattr(type(device) if where == "numpy" else device, "max_burst", 4 if where == "bursts" else 1)
    model = load(write_model(tmp_path / "moe.gguf", seed=3, head=head, experts=(3, 8)), device=device)
    sessions = {n: Session(model, vkb.DraftMTP(n) if n else None, n_ctx=128) for n in (0, 1, 4)}
    assert (sessions[4].burst is not None) == (where == "bursts")
    for first in (0, 30):
        results = {n: s.stream([first, 7, 9], 24, ignore_eos=True).result() for n, s in sessions.items()}
        for n in (1, 4):
            assert results[n].tokens == results[0].tokens, (first, n)
            if head == "perfect":
                assert results[n].stats.accepted == results[n].stats.drafted
