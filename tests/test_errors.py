"""docs/errors.md lists every error that the source makes, and nothing else; commands it names are tried here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from error_sites import ROOT, error_sites, key_of

from vkbackend.cli import main

PAGE = ROOT / "docs" / "errors.md"


def rows() -> dict[tuple[str, str], str]:
    """(file, key of the text) of every row -> what provokes it."""
    found, file = {}, ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            file = line[3:]
        if match := re.fullmatch(r"\| \w+Error \| `([^`]+)` \| (.+) \|", line):
            assert (file, key_of(match[1])) not in found, f"{file}: {match[1]} is there twice"
            found[file, key_of(match[1])] = match[2]
    return found


def test_every_error_has_a_row() -> None:
    listed, missing = rows(), []
    for site in error_sites():
        file = site.where.partition(":")[0]
        if (file, site.key) not in listed:
            missing.append(f"{site.where}: docs/errors.md, section {file}: | {site.kind} | `{site.text}` | how? |")
    assert not missing, "\n".join(missing)


def test_every_row_has_an_error() -> None:
    made = {(s.where.partition(":")[0], s.key) for s in error_sites()}
    assert not [row for row in rows() if row not in made]
    assert len(made) > 200  # the source was found


# Commands of the table that need no device and no network, and the text that they are to end with.
COMMANDS = [
    ("bench --demo -r 0", 2, "-r is 0; at least 1 is needed"),
    ("test-ops --seed -1", 2, "--seed is -1; 0 or more is needed"),
    ("test-ops --op nonsense", 2, "there is no such op; there are "),
    ("generate --demo -p x --spec-type ngram-mod", 2, "--spec-type ngram-mod is not available yet"),
    ("generate --demo -p x --spec-type nonsense", 2, "--spec-type 'nonsense' is unknown"),
    ("generate --demo -p x -c 0", 2, "-c is 0; at least 1 is needed"),
    ("generate --demo --chat --prompt-ids 1,2", 2, "--chat needs a text prompt"),
    ("generate --demo --prompt-ids 1,x", 2, "--prompt-ids '1,x': whole numbers with commas"),
    ("generate --demo -f nowhere.txt", 1, "generate: nowhere.txt: the prompt can not be read: No such file"),
    ("generate --demo -f {folder}", 1, "empty: the prompt can not be read: Is a directory"),
    ("generate --demo -f {latin}", 1, "byte 1 is not UTF-8"),
    ("generate --hf-repo nonsense -p x", 2, "OWNER/NAME or OWNER/NAME:QUANT is needed"),
    ("generate --hf-repo o/n:Q8_0 --hf-file x.gguf -p x", 2, "give the quantisation or the file, not both"),
    ("generate --demo -p x --device nonsense", 1, "device 'nonsense' is unknown; use auto"),
    ("generate --demo -p x --device kompute:0:nonsense", 1, "has an unknown option"),
    ("test-ops --replay {latin}", 1, "is no file that test-ops --repro wrote"),
    ("convert nowhere", 1, "nowhere: no such folder"),
    ("convert {folder}", 1, "only safetensors can be converted"),
    ("inspect nowhere.gguf", 1, "nowhere.gguf: no such file"),
    ("inspect {folder}", 1, "is a folder; give the .gguf file in it"),
    ("inspect {latin}", 1, "needs 24 bytes, 2 are left"),
    ('generate --demo -p "" --device numpy', 1, "vkbackend generate: the prompt is empty; give at least one token"),
    ("generate --demo -p x -n -1", 2, "vkbackend generate: -n is -1; a whole number of 0 or more"),
    ("generate --demo --prompt-ids 999999999 --device numpy", 1, "prompt token 0 is 999999999; allowed are 0..4095"),
    ("generate --demo -p 1234567 -c 4 --device numpy", 1, "the prompt has 7 tokens, the context holds 4"),
    ("generate --demo -p x --temp nan", 2, "generate: --temp is nan; a finite number"),
    ("generate --demo -p x --top-p 2", 2, "generate: --top-p is 2.0; allowed is "),
    ('generate --demo -p x --stop ""', 2, "--stop: string 0 is ''"),
    ("bench --demo --spec-draft-n-max 5", 2, "--spec-draft-n-max is of drafts: give --spec-type draft-mtp too"),
    ("generate --demo -p x --spec-type draft-mtp --spec-draft-n-max 0", 2, "generate: --spec-draft-n-max is 0; "),
]


@pytest.mark.parametrize(("command", "status", "text"), COMMANDS, ids=[c[0] for c in COMMANDS])
def test_commands(command: str, status: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.txt").write_bytes(b"a\xff")
    (tmp_path / "empty").mkdir()
    words = [w.format(latin=tmp_path / "latin.txt", folder=tmp_path / "empty") for w in shlex.split(command)]
    assert main(words) == status
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert lines and lines[-1].startswith(f"vkbackend {words[0]}: ") and text in lines[-1]
    assert len(lines) == 1 and not out
