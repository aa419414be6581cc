"""A checkpoint's tokenizer.json as GGUF metadata: vocabulary, token types, merges, special ids, chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from vkbackend.errors import ModelError
from vkbackend.model.convert.checkpoint import read_json
from vkbackend.model.tokenizer import PATTERNS

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


@dataclass(frozen=True)
class Vocabulary:
    """What the tokenizer keys hold. `tokens` and `types` have one entry per row of the embedding table."""

    pre: str
    tokens: list[str]
    types: list[int]
    special: Any  # gguf.SpecialVocab: merges, special ids, whether to add BOS, chat template


def read_vocabulary(folder: Path, n_vocab: int) -> Vocabulary:
    """Reads a checkpoint's tokenizer files. Raises `ModelError` naming the file and what is wrong in it.

    n_vocab: rows of the embedding table; ids that the tokenizer does not use become unused tokens [PAD<id>].
    """
    path = folder / "tokenizer.json"
    file = read_json(path)
    model = file.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise ModelError(f"{path}: is no byte-level BPE tokenizer; only that can be converted")
    tokens, types = [f"[PAD{i}]" for i in range(n_vocab)], [UNUSED] * n_vocab

    def put(token: Any, token_id: Any, kind: int) -> None:
        if not isinstance(token, str) or type(token_id) is not int or not 0 <= token_id < n_vocab:
            raise ModelError(f"{path}: token {token!r} has id {token_id!r}; allowed are 0..{n_vocab - 1} (vocab_size)")
        tokens[token_id], types[token_id] = token, kind

    for token, token_id in model["vocab"].items():
        put(token, token_id, NORMAL)
    for added in file.get("added_tokens") or []:
        content = str(added.get("content"))
        put(content, added.get("id"), CONTROL if added.get("special") or _looks_special(content) else USER_DEFINED)
    return Vocabulary(_pre(path, file), tokens, types, _special(folder, n_vocab))


def _looks_special(token: str) -> bool:
    """Models name control tokens <|...|>, though some files do not mark them as special."""
    return token.startswith("<|") and token.endswith("|>")


def _pre(path: Path, file: dict[str, Any]) -> str:
    """The name of the pre-tokenizer, known by its split pattern."""
    steps = file.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    found = [p.get("Regex") for s in steps if isinstance(p := s.get("pattern"), dict)]
    for name, pattern in PATTERNS.items():
        if [_plain(str(f)) for f in found] == [_plain(pattern)]:
            return name
    raise ModelError(f"{path}: the split pattern is {str(found)[:200]}; only those of {', '.join(PATTERNS)} are known")


def _plain(pattern: str) -> str:
    # A class of one class is that class: files write it either way.
    return pattern.replace(r"[\p{L}]", r"\p{L}")


def _special(folder: Path, n_vocab: int) -> Any:
    try:
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=n_vocab)
        if special.chat_template is None and (folder / "chat_template.jinja").is_file():
            special.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"{folder}: the tokenizer files are not sound: {type(error).__name__}: {error}") from error
    if not special.merges:
        raise ModelError(f"{folder / 'tokenizer.json'}: there are no merges in it")
    return special
