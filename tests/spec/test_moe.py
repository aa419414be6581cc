"""Speculation with experts in trunk and MTP block: the same tokens as plain decoding.

Greedy text of qwen35moe and, through direct Vulkan, sampled text of qwen3next; with VKBACKEND_FULL=1 both of both.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gguf_content import read_content, write_content
from packed import as_qwen3next
from synthetic import Heads, write_model

import vkbackend as vkb
from vkbackend.model.loader import load
from vkbackend.spec.generate import Session

WHERE = [
    ("perfect", "numpy_device", False),
    ("random", "numpy_device", False),
    ("random", "kompute", False),
    ("random", "kompute", True),
    ("random", "vulkan", False),
    ("random", "vulkan", True),
]


@pytest.mark.parametrize(
    ("head", "device_name", "bursts", "arch", "temperature"),
    [
        (*where, arch, temperature)
        for where in WHERE
        for arch in ("qwen35moe", "qwen3next")
        for temperature in (0.0, 1.0)
        if os.environ.get("VKBACKEND_FULL")
        or (arch, temperature) == (("qwen3next", 1.0) if where[1] == "vulkan" else ("qwen35moe", 0.0))
    ],
)
def test_speculation_changes_no_token(
    head: str, device_name: str, bursts: bool, arch: str, temperature: float, tmp_path: Path, seed: int,
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    device = request.getfixturevalue(device_name)
    monkeypatch.setattr(type(device) if device_name == "numpy_device" else device, "max_burst", 4 if bursts else 1)
    path = write_model(tmp_path / "moe.gguf", 3, head=head, experts=(3, 8), heads=Heads(n_k_heads=2, n_v_heads=4))
    if arch == "qwen3next":
        path = write_content(as_qwen3next(read_content(path)), tmp_path / "next.gguf")
    model = load(path, device=device)
    sessions = {n: Session(model, vkb.DraftMTP(n) if n else None, n_ctx=128) for n in (0, 1, 4)}
    assert (sessions[4].burst is not None) == bursts
    sampling = vkb.Sampling(temperature, seed=seed)
    for first in (0, 30):
        results = {n: s.stream([first, 7, 9], 24, sampling, ignore_eos=True).result() for n, s in sessions.items()}
        for n in (1, 4):
            assert results[n].tokens == results[0].tokens, (first, n)
            if head == "perfect" and not temperature:
                assert results[n].stats.accepted == results[n].stats.drafted
