"""Files whose header is sound and whose content is not: refused before anything is allocated; shown without harm."""

from __future__ import annotations

import io
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fuzz import targets

from vkbackend.cli import main
from vkbackend.device.null import NullDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import ModelError
from vkbackend.model.loader import load

CONV = "blk.0.ssm_conv1d.weight"  # [64, 4] in the tiny model
# Every matrix with its dimensions the wrong way round or, where they are equal, halved and doubled.
MISFITS = [
    (name, dims[::-1] if dims[0] != dims[1] else (32, 128), 0, len(raw), f"'{name}' has shape .*the metadata ask for")
    for name, (dims, _, raw) in targets.tiny_model()[1].items()
    if len(dims) == 2 and name not in (CONV, "token_embd.weight")
]
for part in ("embed_tokens", "shared_head_head"):  # the MTP block's own
    MISFITS.append((f"blk.2.nextn.{part}.weight", (64, 32), 0, 8192, r"has shape \(32, 64\); the metadata ask for"))


def write(
    path: Path, tensors: dict[str, tuple[tuple[int, ...], int, bytes]], keys: dict[str, bytes] | None = None
) -> Path:
    """The tiny model with some tensors (dims as in a file, type, bytes) and keys (type and value) replaced."""
    pairs, table = targets.tiny_model()
    path.write_bytes(targets.file_bytes(pairs | (keys or {}), table | tensors))
    return path


def text_key(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<IQ", 8, len(raw)) + raw


@pytest.mark.parametrize("device", [NullDevice, NumpyDevice])
@pytest.mark.parametrize(
    ("name", "dims", "kind", "n_bytes", "message"),
    [
        (
            CONV,
            (256,),
            8,
            272,
            r"'blk\.0\.ssm_conv1d\.weight' is q8_0 with shape \(256,\); as rows of 4 it must be f32",
        ),
        (CONV, (4, 64), 24, 256, r"'blk\.0\.ssm_conv1d\.weight': quantisation 24 \(i8\) can not be decoded here"),
        (CONV, (4, 64), 99, 256, "'blk.0.ssm_conv1d.weight' has quantisation id 99, which is unknown here"),
        ("output.weight", (64, 64), 15, 0, "rows of 64 elements; its quantisation needs a multiple of 256"),
        ("output.weight", (64, 64), 24, 4096, r"'output\.weight': quantisation 24 \(i8\) can not be decoded"),
        *MISFITS,
        ("blk.0.ssm_a", (3,), 0, 12, r"'blk\.0\.ssm_a' has shape \(3,\); \(2,\) is needed"),
    ],
)
def test_tensors_that_can_not_be_used(
    device: type[NullDevice | NumpyDevice],
    name: str,
    dims: tuple[int, ...],
    kind: int,
    n_bytes: int,
    message: str,
    tmp_path: Path,
) -> None:
    path, opened = write(tmp_path / "made.gguf", {name: (dims, kind, bytes(n_bytes))}), device()
    with pytest.raises(ModelError, match=rf"made\.gguf: .*{message}"):
        load(path, opened)
    assert opened.allocated_bytes < 4096  # the table of rotations at most


def test_a_quantised_convolution_of_the_right_rows_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "made.gguf", {CONV: ((256,), 1, np.zeros(256, np.float16).tobytes())})
    assert load(path, "numpy").context(n_ctx=4).decode([0]).logits.shape == (1, 64)


# ---- what inspect shows


def test_inspect_shows_strange_names_without_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"a\x1b[2J\n": text_key("\x1b[31mred\r\nline"), "b\u202e": text_key("\x9b2J")}
    path = write(tmp_path / "made.gguf", {"t\x1b[1A\t": ((1,), 99, b"")}, keys)
    assert main(["inspect", str(path)]) == 0
    out, err = capsys.readouterr()
    assert not err and all(c.isprintable() or c == "\n" for c in out)
    assert r"a\x1b[2J\n" in out and r"\x1b[31mred\r\nline" in out and r"t\x1b[1A\t" in out and r"b\u202e" in out


def test_one_long_name_does_not_widen_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {f"{i:05}": struct.pack("<IB", 0, 1) for i in range(5000)} | {"x" * 100_000: text_key("y" * 100_000)}
    path, start = write(tmp_path / "made.gguf", {}, keys), time.process_time()
    assert main(["inspect", str(path)]) == 0
    assert len(capsys.readouterr().out) < 2_000_000
    assert time.process_time() - start < 10


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_terminal_of_few_characters(form: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, raw = write(tmp_path / "made.gguf", {}, {"key": text_key("žluť 中文")}), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["inspect", str(path), *form]) == 0
    assert b"?lu? ??" in raw.getvalue()
