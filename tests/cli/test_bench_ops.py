"""`bench --ops`: its times are the trace's, its bytes the model's, and devices without timestamps are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import Run
from fixture_paths import fixture

from vkbackend.cli.bench_ops import copy_bandwidth
from vkbackend.device.kompute import KomputeDevice
from vkbackend.model.gguf import open_gguf
from vkbackend.model.profile import LevelTime
from vkbackend.trace import trace_events


def test_table_json_and_trace_agree(kompute: KomputeDevice, tmp_path: Path, run: Run) -> None:
    model, trace = fixture("gguf/dense-q8_0.gguf"), tmp_path / "trace.json"
    words = ["bench", "-m", model, "--device", "kompute:0", "--ops", "-p", "20", "-r", "2"]
    status, out, _ = run(*words, "--json", "--trace", trace)
    got = json.loads(out)
    assert status == 0
    assert got["copy_bytes_per_s"] > 1e6 and list(got["steps"]) == ["decode, 1 token", "prompt, 20 tokens"]

    events = json.loads(trace.read_text())["traceEvents"]
    for row, (name, levels) in enumerate(got["steps"].items()):
        mine = [e for e in events if e["tid"] == row]
        assert mine[0]["args"] == {"name": name}
        assert [e["dur"] for e in mine[1:]] == [1e6 * level["seconds"] for level in levels]
        end = 0.0
        for event, level in zip(mine[1:], levels, strict=True):
            assert event["ts"] == pytest.approx(end) and event["name"] == " + ".join(level["ops"])
            end = event["ts"] + event["dur"]

    # A decode step moves every matrix once, but the embedding table; q8_0 takes 34 bytes for 32 columns.
    decode = got["steps"]["decode, 1 token"]
    matrices = [t for name, t in open_gguf(model).tensors.items() if len(t.shape) == 2 and _is_product(name)]
    least = sum(t.shape[0] * t.shape[1] * 34 // 32 for t in matrices)
    assert least <= sum(level["n_bytes"] for level in decode) <= 1.3 * least
    assert {"linear", "argmax"} <= {op for level in decode for op in level["ops"]}

    status, table, _ = run(*words)
    assert status == 0 and "linear_rows" in table and "OF COPY" in table
    lines = table.splitlines()
    assert lines[0].startswith("kompute:0 (") and lines[1].startswith("kompute:0, decode, 1 token: ")
    assert lines[2].split()[:3] == ["OP", "WEIGHTS", "KERNELS"]
    end = lines.index("")
    assert lines[end + 1].startswith("kompute:0, prompt, 20 tokens: ")
    # Rows are told apart by what they name.
    for part in (lines[3:end], lines[end + 3 :]):
        named = [tuple(re.split(" {2,}", line)[:3]) for line in part]
        assert len(set(named)) == len(named) > 5
        assert {("linear", "ffn_down"), ("embed_rows", "token_embd")} <= {name[:2] for name in named}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("dense-q8_0", {"token_embd", "attn_q", "attn_output", "attn_qkv", "ssm_out", "ffn_gate", "ffn_down"}),
        ("moe-q8_0", {"token_embd", "ffn_gate_exps", "ffn_down_exps"}),
    ],
)
def test_a_level_names_the_matrices_it_reads(kompute: KomputeDevice, run: Run, model: str, names: set[str]) -> None:
    words = ["bench", "-m", fixture(f"gguf/{model}.gguf"), "--device", "kompute:0", "--ops", "-p", "20", "-r", "1"]
    for levels in json.loads(run(*words, "--json")[1])["steps"].values():
        found = {name.split(".")[-2] for level in levels for name in level["weights"]}
        assert names <= found and all(len(level["weights"]) <= 2 for level in levels)


def _is_product(name: str) -> bool:
    return "conv1d" not in name and not name.startswith(("token_embd", "blk.8."))  # block 8 is the MTP block


def test_a_trace_shows_rates_only_where_bytes_are_counted() -> None:
    levels = [LevelTime(("linear", "add"), ("a", "b"), 2e-6, 6000, ("x", "y")), LevelTime(("argmax",), ("c",), 1e-6, 0)]
    _, first, second = trace_events({"step": levels})
    assert first["name"] == "linear + add" and first["args"]["GB/s"] == 3.0 and first["args"]["bytes"] == 6000
    assert first["args"]["weights"] == "x, y" and "weights" not in second["args"]
    assert second["ts"] == 2.0 and second["dur"] == 1.0 and "GB/s" not in second["args"]


def test_copy_bandwidth_is_a_speed(kompute: KomputeDevice) -> None:
    assert 1e6 < copy_bandwidth(kompute) < 1e14


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "numpy", "--ops"], "numpy: has no timestamps; use a Vulkan device"),
        (["--device", "numpy", "--trace", "t.json"], "--trace is of single ops"),
    ],
)
def test_refusals(words: list[str], message: str, run: Run) -> None:
    status, out, err = run("bench", "-m", fixture("gguf/dense-q8_0.gguf"), "-p", 4, "-r", 1, *words)
    assert status != 0 and message in err and out == ""
