"""The inputs that fuzzing found, run again: nothing but refusals of one line, in bearable time. Needs no atheris."""

from __future__ import annotations

import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from fuzz.targets import TARGETS, Source, changed_file, one_input

from vkbackend.cli import main

INPUTS = Path(__file__).with_name("corpus.zip")


def corpus(target: int) -> list[bytes]:
    """The inputs of one target, as fuzz.py takes them."""
    with zipfile.ZipFile(INPUTS) as file:
        found = [file.read(name) for name in sorted(file.namelist())]
    return [data for data in found if data and data[0] % len(TARGETS) == target]


@pytest.mark.parametrize("target", range(len(TARGETS)), ids=[t.__name__ for t in TARGETS])
def test_every_input_is_taken_or_refused(target: int) -> None:
    inputs = corpus(target)
    assert len(inputs) > 10
    for data in inputs:
        start = time.process_time()
        one_input(data)
        assert time.process_time() - start < 5, f"{data[:200]!r} took too long"


@pytest.mark.parametrize("target", [0, 1, 5])
def test_the_command_line_fails_in_one_line(
    target: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
    rng: np.random.Generator,
) -> None:
    """Some of the files through inspect and generate: status 0, or 1 and a single line; no warnings of NumPy."""
    path, ends = tmp_path / "strange.gguf", set()
    inputs = corpus(target)
    for i in rng.permutation(len(inputs))[:25]:
        data = inputs[i][1:]
        path.write_bytes(changed_file(Source(data), target == 5) if target else data)
        for words in (["inspect"], ["generate", "-p", "AB", "-n", "1", "-c", "8", "--device", "numpy", "-m"]):
            status = main([*words, str(path)])
            out, err = capsys.readouterr()
            if err.startswith("-c is 8; "):  # a remark: more than this file's context_length
                err = err.partition("\n")[2]
            ends.add((words[0], status))
            assert status in (0, 1)
            assert all(c.isprintable() or c == "\n" for c in out + err)
            if status:
                assert err.startswith(f"vkbackend {words[0]}: ") and err.count("\n") == 1 and len(err) < 1500
            else:
                assert not err
    assert ("generate", 1) in ends and not recwarn.list
