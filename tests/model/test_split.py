"""Split models: any part stands for the whole; parts that are missing, exchanged, mixed or joined are named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_content import Content, Key, read_content, stored, write_content
from synthetic import write_model

from vkbackend.cli import main
from vkbackend.errors import ModelError
from vkbackend.model.gguf import open_gguf
from vkbackend.model.loader import load
from vkbackend.model.split import open_model

N_PARTS = 3


@pytest.fixture
def whole(tmp_path: Path, seed: int) -> Path:
    return write_model(tmp_path / "whole.gguf", seed)


@pytest.fixture
def parts(whole: Path) -> list[Path]:
    """The same model in three parts."""
    content = read_content(whole)
    first = write_content(content, whole.with_name("x.gguf"), per_part=-(-len(content.tensors) // N_PARTS))
    found = sorted(first.parent.glob("x-*.gguf"))
    assert [p.name for p in found] == [f"x-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return found


def test_any_part_opens_the_whole(whole: Path, parts: list[Path]) -> None:
    want = open_gguf(whole)
    for path in parts:
        file = open_model(path)
        assert file.path == parts[0]
        assert list(file.tensors) == list(want.tensors)
        for name in want.tensors:
            np.testing.assert_array_equal(file.tensor_bytes(name), want.tensor_bytes(name))
        assert set(want.metadata) == {k for k in file.metadata if not k.startswith("split.")}


def test_a_split_model_computes_the_same(whole: Path, parts: list[Path], rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 64, 9).tolist()
    outs = []
    for path in (whole, parts[1]):
        model = load(path, device="numpy")
        out = model.context(n_ctx=32, hidden="post_norm").decode(tokens, logits="all")
        outs.append((out.logits, model.mtp_context(n_ctx=32).decode(tokens, out.hidden).logits))
    for one, two in zip(*outs, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_split_draft(whole: Path, parts: list[Path]) -> None:
    content = read_content(whole)
    for name in list(content.tensors):
        if name.startswith("blk.4."):
            del content.tensors[name]
    content.set("block_count", 4)
    content.drop("nextn_predict_layers")
    trunk = write_content(content, whole.with_name("trunk.gguf"))
    assert not load(trunk, device="numpy").has_mtp
    assert load(trunk, device="numpy", draft=parts[2]).has_mtp


def test_a_first_part_without_tensors(whole: Path) -> None:
    content = read_content(whole)
    first = write_content(content, whole.with_name("y.gguf"), per_part=40, small_first=True)
    assert not open_gguf(first).tensors
    assert set(open_model(first).tensors) == set(content.tensors)


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_that_was_merged_is_whole(whole: Path, count: int) -> None:
    """gguf-split leaves split.count = 0 in what it has merged; the name may still be that of a part."""
    content = read_content(whole)
    content.keys["split.count"] = Key(count, gguf.GGUFValueType.UINT16)
    path = write_content(content, whole.with_name("z-00001-of-00002.gguf"))
    assert set(open_model(path).tensors) == set(content.tensors)


def test_inspect_shows_the_whole(parts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    n = len(open_model(parts[0]).tensors)
    assert main(["inspect", str(parts[2])]) == 0
    out = capsys.readouterr().out
    assert f"{n} tensors" in out and "3 parts" in out and "4 layers" in out
    assert "token_embd.weight" in out and "blk.4.nextn.eh_proj.weight" in out


# ---- refusals


def swap(one: Path, two: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


def other_model(parts: list[Path], change: Callable[[Content], None]) -> Path:
    """The third part of a changed copy of the model."""
    content = read_content(parts[0].with_name("whole.gguf"))
    change(content)
    folder = parts[0].parent / "other"
    folder.mkdir()
    write_content(content, folder / "x.gguf", per_part=-(-len(content.tensors) // N_PARTS))
    return sorted(folder.glob("x-*.gguf"))[2]


def without_last(content: Content) -> None:
    for name in list(content.tensors)[-1:]:
        del content.tensors[name]


@pytest.mark.parametrize("opened", [0, 1, 2])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_part_is_named(parts: list[Path], gone: int, opened: int) -> None:
    parts[gone].unlink()
    message = (
        "no such file" if gone == opened else rf"is part {opened + 1} of 3 .* missing beside it: {parts[gone].name}$"
    )
    with pytest.raises(ModelError, match=message):
        open_model(parts[opened])


def test_several_missing_parts(parts: list[Path]) -> None:
    alone = parts[1].parent / "alone"
    alone.mkdir()
    shutil.copy(parts[1], alone)
    with pytest.raises(ModelError, match=rf"missing beside it: {parts[0].name}, {parts[2].name}$"):
        open_model(alone / parts[1].name)


def test_exchanged_parts_are_named(parts: list[Path]) -> None:
    swap(parts[1], parts[2])
    with pytest.raises(ModelError, match=r"x-00002-of-00003.gguf: holds part 3 of 3 .* its name says part 2 of 3"):
        open_model(parts[0])
    with pytest.raises(ModelError, match=r"x-00002-of-00003.gguf: is part 3 of 3 .* must end in -00003-of-00003.gguf"):
        open_model(parts[1])


@pytest.mark.parametrize("name", ["model.gguf", "x-00002-of-00003.gguf", "x-00001-of-00004.gguf", "x-1-of-3.gguf"])
def test_a_renamed_part_is_named(parts: list[Path], name: str) -> None:
    path = parts[0].rename(parts[0].with_name(name))
    with pytest.raises(ModelError, match=rf"{name}: is part 1 of 3 .* must end in -00001-of-00003.gguf; rename it"):
        open_model(path)


def test_joined_parts_are_refused(parts: list[Path]) -> None:
    joined = parts[0].with_name("joined.gguf")
    joined.write_bytes(b"".join(p.read_bytes() for p in parts))
    with pytest.raises(ModelError, match=r"joined.gguf: end of data at byte \d+: another GGUF file follows"):
        open_model(joined)


@pytest.mark.parametrize("padded", [True, False])
def test_files_are_joined_with_and_without_padding(tmp_path: Path, padded: bool) -> None:
    content = Content("qwen35", tensors={"odd": stored(np.ones(3))})
    path = write_content(content, tmp_path / "one.gguf")
    info = open_gguf(path).tensors["odd"]
    raw = path.read_bytes()
    assert len(raw) == info.offset + 32
    path.write_bytes(raw if padded else raw[: info.offset + info.nbytes])
    assert open_gguf(path).tensors
    path.write_bytes(path.read_bytes() + raw)
    with pytest.raises(ModelError, match=r"another GGUF file follows"):
        open_gguf(path)


def test_a_part_of_another_count(parts: list[Path]) -> None:
    content = read_content(parts[0].with_name("whole.gguf"))
    folder = parts[0].parent / "four"
    folder.mkdir()
    write_content(content, folder / "x.gguf", per_part=-(-len(content.tensors) // 4))
    shutil.copy(folder / "x-00002-of-00004.gguf", parts[1])
    with pytest.raises(ModelError, match=r"x-00002-of-00003.gguf: holds part 2 of 4 .* part 2 of 3"):
        open_model(parts[2])


def test_a_part_with_fewer_tensors(parts: list[Path]) -> None:
    content = read_content(parts[2])
    content.tensors.pop(list(content.tensors)[-1])
    n = len(open_model(parts[0]).tensors)
    parts[2].unlink()
    write_content(content, parts[2])
    with pytest.raises(ModelError, match=rf"hold {n - 1} tensors together, split.tensors.count is {n}"):
        open_model(parts[0])


def test_a_part_of_a_model_of_another_size(parts: list[Path]) -> None:
    shutil.copy(other_model(parts, without_last), parts[2])
    with pytest.raises(ModelError, match=r"00003.gguf: 'split.tensors.count' is \d+, in x-00001-of-00003.gguf it is"):
        open_model(parts[0])


def test_a_tensor_in_two_parts(parts: list[Path]) -> None:
    content = read_content(parts[2])
    content.tensors["token_embd.weight"] = stored(np.zeros((64, 64)))
    parts[2].unlink()
    write_content(content, parts[2])
    with pytest.raises(ModelError, match=r"00003.gguf: tensor 'token_embd.weight' is in x-00001-of-00003.gguf too"):
        open_model(parts[1])


def test_contradicting_metadata(parts: list[Path]) -> None:
    content = read_content(parts[1])
    content.arch = "llama"
    parts[1].unlink()
    write_content(content, parts[1])
    with pytest.raises(ModelError, match=r"00002.* 'general.architecture' is 'llama', in x-00001.* it is 'qwen35'"):
        open_model(parts[0])


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
@pytest.mark.parametrize("value", ["many", -1, 1 << 40])
def test_keys_of_other_kinds(whole: Path, key: str, value: object) -> None:
    content = read_content(whole)
    content.keys["split.count"] = Key(2, gguf.GGUFValueType.UINT16)
    kind = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.INT64
    content.keys[key] = Key(value, kind)
    for i in (1, 2):
        content.keys["split.no"] = (
            content.keys["split.no"] if key == "split.no" else Key(i - 1, gguf.GGUFValueType.INT32)
        )
        write_content(content, whole.with_name(f"k-0000{i}-of-00002.gguf"))
        for name in list(content.tensors):
            content.tensors[f"more.{name}"] = content.tensors.pop(name)
    with pytest.raises(ModelError, match=rf"{key} is .*; a whole number from 0 to \d+ is needed"):
        open_model(whole.with_name("k-00001-of-00002.gguf"))
