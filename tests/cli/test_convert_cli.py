"""`vkbackend convert` on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hf_checkpoint import tiny, write_checkpoint

import vkbackend as vkb
from vkbackend.cli import convert, main
from vkbackend.model.convert import TYPES
from vkbackend.spec.model_files import choose_main, file_type, find_draft, has_block


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
        (["--type", "f16", "--no-mtp"], "Tiny-1B-no-mtp-F16.gguf"),
        (["-o", "x.gguf", "--no-mtp"], "x.gguf"),
        (["-o", "models"], "models/Tiny-1B-F32.gguf"),
        (["-o", "models/"], "models/Tiny-1B-F32.gguf"),
        (["-o", "new/Tiny.v2"], "new/Tiny.v2/Tiny-1B-F32.gguf"),
        (["-o", "new/sub/x.GGUF", "--mtp"], "new/sub/mtp-x.GGUF"),
    ],
)
def test_the_path_is_printed(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], path: str) -> None:
    assert main(["convert", str(folder), *arguments]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (path + "\n", "") and (folder.parent / path).is_file()


def test_the_trunk_alone_is_a_file_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--no-mtp"], ["--mtp"]):
        assert main(["convert", str(folder), "--type", "q8_0", *arguments]) == 0
    whole, trunk, block = capsys.readouterr().out.split()
    assert [has_block(Path(p)) for p in (whole, trunk, block)] == [True, False, True]
    # Whoever looks for a model in that folder or a repository like it takes the whole one; the trunk is a model too.
    assert choose_main([trunk, block, whole], "Q8_0") == choose_main([trunk, block, whole]) == whole
    assert choose_main([trunk, block]) == trunk and file_type(trunk) == "q8_0"
    assert find_draft(folder.parent / trunk) == folder.parent / block


def test_a_file_is_replaced_only_by_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder.parent / "Tiny-1B-F32.gguf"
    path.write_bytes(b"mine")
    assert main(["convert", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == (
        "vkbackend convert: Tiny-1B-F32.gguf: is there already; give another name with -o, or replace it with --force\n"
    )
    assert path.read_bytes() == b"mine"
    assert main(["convert", str(folder), "--force"]) == 0
    assert path.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("arguments", [[], ["--force"], ["--force", "-o", "x.gguf", "--mtp"]])
def test_a_folder_is_not_replaced_and_nothing_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("vkbackend.model.convert.write._write_tensors", None)  # refused before
    path = folder.parent / ("mtp-x.gguf" if "--mtp" in arguments else "Tiny-1B-F32.gguf")
    path.mkdir()
    assert main(["convert", str(folder), *arguments]) == 1
    out, err = capsys.readouterr()
    told = f"{path.name}: is a folder, which no file replaces; give another name with -o"
    assert (out, err) == ("", f"vkbackend convert: {told}\n")
    assert sorted(p.name for p in folder.parent.iterdir()) == sorted([folder.name, path.name])


@pytest.mark.parametrize("out", ["x.txt", "x.txt/models", "x.txt/x.gguf"])
def test_a_file_is_no_folder(folder: Path, capsys: pytest.CaptureFixture[str], out: str) -> None:
    (folder.parent / "x.txt").write_bytes(b"mine")
    assert main(["convert", str(folder), "-o", out]) == 1
    err = capsys.readouterr().err
    assert "x.txt" in err and err.endswith("-o takes a folder, or the name of a .gguf file\n")
    assert (folder.parent / "x.txt").read_bytes() == b"mine"


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
