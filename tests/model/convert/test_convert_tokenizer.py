"""Tokenizer files of checkpoints: token types, padding, special ids, pre-tokenizers, chat templates, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_paths import fixture
from hf_checkpoint import QWEN2_SPLIT, tiny, write_checkpoint, write_tokenizer

from vkbackend.errors import ModelError
from vkbackend.model.convert import convert
from vkbackend.model.gguf import open_gguf
from vkbackend.model.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    return write_checkpoint(tmp_path / "hf", *tiny(rng))


def published() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(fixture("hf/dense/tokenizer.json").read_text())
    return value


def keys(folder: Path) -> dict[str, Any]:
    """The tokenizer keys of a converted checkpoint."""
    return dict(open_gguf(convert(folder, folder.parent / "out.gguf", "f16", force=True)).metadata)


def test_types_of_tokens(folder: Path) -> None:
    added = [
        {"id": 1005, "content": "<|endoftext|>", "special": True},
        {"id": 1006, "content": "<|fim_prefix|>", "special": False},  # named like a control token
        {"id": 1007, "content": "<think>", "special": False},
        {"id": 1010, "content": "<tool>", "special": True},
    ]
    write_tokenizer(folder, added_tokens=added)
    k = keys(folder)
    tokens, types = k["tokenizer.ggml.tokens"], k["tokenizer.ggml.token_type"].tolist()
    assert tokens[1004:1012] == [
        *([t for t, i in published()["model"]["vocab"].items() if i == 1004]),
        "<|endoftext|>", "<|fim_prefix|>", "<think>", "[PAD1008]", "[PAD1009]", "<tool>", "[PAD1011]",
    ]  # fmt: skip
    assert types == [1] * 1005 + [3, 3, 4, 5, 5, 3] + [5] * 13
    assert len(tokens) == 1024


def test_the_tokenizer_of_the_file_is_that_of_the_checkpoint(folder: Path) -> None:
    from tokenizers import Tokenizer as Backend

    mine = Tokenizer.from_gguf(open_gguf(convert(folder, folder.parent, "f16")))
    theirs = Backend.from_file(str(folder / "tokenizer.json"))
    for text in ("def f(x):\n\treturn x  # 12345 naïve", "<|im_start|>user\nHi<|im_end|>\n", "don't  you'LL\r\n\r\n "):
        assert mine.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert mine.eos_ids == {1005, 1007}


def test_special_ids(folder: Path) -> None:
    k = keys(folder)
    assert (k["tokenizer.ggml.eos_token_id"], k["tokenizer.ggml.padding_token_id"]) == (1007, 1005)
    assert k["tokenizer.ggml.add_bos_token"] is False and "tokenizer.chat_template" not in k
    # Without tokenizer_config.json, config.json says.
    (folder / "tokenizer_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 1006}))
    assert keys(folder)["tokenizer.ggml.eos_token_id"] == 1006


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "no tokenizer_config.json"])
def test_chat_templates(folder: Path, place: str) -> None:
    template = "{% for m in messages %}{{ m.content }} ñ\n{% endfor %}"
    if place == "tokenizer_config.json":
        config = json.loads((folder / place).read_text())
        (folder / place).write_text(json.dumps({**config, "chat_template": template}))
    else:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if place.startswith("no "):
        (folder / "tokenizer_config.json").unlink()
    assert keys(folder)["tokenizer.chat_template"] == template


def test_pre_tokenizers(folder: Path) -> None:
    assert keys(folder)["tokenizer.ggml.pre"] == "qwen35"
    for pattern in (QWEN2_SPLIT, QWEN2_SPLIT.replace(r"\p{L}+", r"[\p{L}]+")):
        steps = published()["pre_tokenizer"]
        steps["pretokenizers"][0]["pattern"]["Regex"] = pattern
        write_tokenizer(folder, pre_tokenizer=steps)
        assert keys(folder)["tokenizer.ggml.pre"] == "qwen2"


def test_merges_in_pairs(folder: Path) -> None:
    wanted = keys(folder)["tokenizer.ggml.merges"]
    model = published()["model"]
    model["merges"] = [m.split(" ") if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    write_tokenizer(folder, model=model)
    assert keys(folder)["tokenizer.ggml.merges"] == wanted and len(wanted) == 749


def test_unsound_files(folder: Path) -> None:
    def refuses(message: str, **changes: Any) -> None:
        write_tokenizer(folder, **changes)
        with pytest.raises(ModelError, match=message):
            convert(folder, folder.parent / "out.gguf")

    file = published()
    refuses(r"tokenizer\.json: is no byte-level BPE", model={"type": "Unigram", "vocab": []})
    refuses(r"tokenizer\.json: is no byte-level BPE", model=None)
    refuses(r"token 'x' has id 1024; allowed are 0\.\.1023", added_tokens=[{"id": 1024, "content": "x"}])
    refuses(r"token 'x' has id None", added_tokens=[{"content": "x"}])
    refuses(r"token 'x' has id -1", model={**file["model"], "vocab": {"x": -1}})
    refuses(r"split pattern is .*'a\+'.*only those of qwen2, qwen35", pre_tokenizer={
        "type": "Split", "pattern": {"Regex": "a+"}})  # fmt: skip
    refuses(r"split pattern is \[\]", pre_tokenizer=None)
    refuses("there are no merges", model={**file["model"], "merges": []})
    refuses("not sound", model={**file["model"], "merges": [1, 2]})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: no such file"):
        convert(folder, folder.parent / "out.gguf")
    assert [p.name for p in folder.parent.iterdir()] == ["hf"]
