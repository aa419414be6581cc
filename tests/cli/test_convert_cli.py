"""`vkbackend convert` on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hf_checkpoint import tiny, write_checkpoint

import vkbackend as vkb
from vkbackend.cli import convert, main
from vkbackend.model.convert import TYPES


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_checkpoint(tmp_path / "Tiny-1B", *tiny(rng))


def test_types() -> None:
    assert tuple(TYPES) == convert.TYPES


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ([], "Tiny-1B-F32.gguf"),
        (["--type", "q8_0"], "Tiny-1B-Q8_0.gguf"),
        (["--outtype", "bf16", "--mtp"], "mtp-Tiny-1B-BF16.gguf"),
        (["-o", "x.gguf", "--no-mtp"], "x.gguf"),
    ],
)
def test_the_path_is_printed(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], path: str) -> None:
    assert main(["convert", str(folder), *arguments]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (path + "\n", "") and (folder.parent / path).is_file()


def test_a_converted_file_runs_with_its_separate_block(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["-o", "both.gguf"], ["-o", "trunk.gguf", "--no-mtp"], ["-o", "mtp-trunk.gguf", "--mtp"]):
        assert main(["convert", str(folder), *arguments]) == 0
    texts = [
        vkb.generate(vkb.load(main_file, device="numpy", draft=draft), [1, 2, 3], max_tokens=12, spec=spec).tokens
        for main_file, draft, spec in (
            ("both.gguf", None, None),
            ("both.gguf", None, vkb.DraftMTP(n_max=3)),
            ("trunk.gguf", "mtp-trunk.gguf", vkb.DraftMTP(n_max=3)),
        )
    ]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 12


@pytest.mark.parametrize("arguments", [["--mtp", "--no-mtp"], ["--type", "q4_0"], []])
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["convert", *([] if not arguments else ["folder", *arguments])]) == 2
    assert capsys.readouterr().out == ""


def test_failures_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert main(["convert", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("vkbackend convert: ") and "'LlamaForCausalLM'; Qwen3_5ForCausalLM" in err
