"""The tokenizer inside a GGUF file: byte-level BPE through the `tokenizers` library.

Pre-tokenizer names `qwen35` and `qwen2`: the split patterns of the models' published tokenizer files. Control and
user-defined tokens are atomic; any bytes survive encode and decode.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from vkbackend.errors import ContextError, ModelError, shown
from vkbackend.model.gguf import GGUFFile

T = TypeVar("T")

# The two differ in whether combining marks belong to words.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[LETTERS]+|\p{N}| ?[^\sLETTERS\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"qwen2": _SPLIT.replace("LETTERS", r"\p{L}"), "qwen35": _SPLIT.replace("LETTERS", r"\p{L}\p{M}")}
MAX_BLANKS = 1_000_000  # in a row: beyond some millions the regex engine's limit of steps ends the process
_LONG_BLANKS = re.compile(rf"(?<!\s)\s{{{MAX_BLANKS + 1}}}")
_CONTROL, _USER_DEFINED = 3, 4
_END_NAMES = ("<|endoftext|>", "<|im_end|>")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Tokenizer:
    """Text to token ids and back.

    `eos_ids`: ids that end a text (the file's EOS, and the end-of-turn tokens it defines). `n_vocab`: number of ids.
    `add_bos`: whether every text begins with the file's BOS. Text is not Unicode-normalised, so that every string
    comes back as it went in (Hugging Face's file of these models asks for NFC: ids differ where text is not NFC).
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        types: Sequence[int],
        pre: str,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        bos_id: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        from tokenizers import AddedToken, Regex
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel, Split
        from tokenizers.pre_tokenizers import Sequence as Steps

        self.n_vocab = len(tokens)
        self.chat_template = chat_template
        self.add_bos = add_bos and bos_id is not None
        self._tokens = tokens
        self._bos = [bos_id] if add_bos and bos_id is not None else []
        atomic = {i: tokens[i] for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED) and tokens[i]}
        self._atomic = frozenset(atomic)
        vocab = {t: i for i, t in enumerate(tokens)}
        pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
        _check_merges(pairs, vocab)
        model = BPE(vocab, pairs, fuse_unk=False, byte_fallback=False)
        # Bytes without a token are left out by the library without a word, and an atomic token may be spelled like
        # other bytes: what such vocabularies encode is compared with the text.
        self._missing = frozenset(b for c, b in _BYTE_OF.items() if c not in vocab)
        self._exact = not self._missing and all(t.isascii() for t in atomic.values())
        steps = Steps([Split(Regex(PATTERNS[pre]), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
        added = [AddedToken(t, normalized=False, special=types[i] == _CONTROL) for i, t in atomic.items()]
        # Both share the vocabulary, which is by far the largest part.
        self._backend: Any = Backend(model)
        self._plain: Any = Backend(model)
        for backend in (self._backend, self._plain):
            backend.pre_tokenizer = steps
            backend.add_tokens(added)
        self._plain.encode_special_tokens = True  # that is: as if they were ordinary text
        ends = {i for i, t in atomic.items() if t in _END_NAMES}
        self.eos_ids = frozenset(ends.union(eos_ids))

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """The tokenizer of a file. Raises `ModelError` naming the key that is missing or not supported."""
        meta = _Keys(file)
        if meta.get("model", str) != "gpt2":
            raise meta.error("model", "supported is 'gpt2' (byte-level BPE)")
        pre = meta.get("pre", str, "qwen2")
        if pre not in PATTERNS:
            raise meta.error("pre", f"supported are {', '.join(PATTERNS)}")
        tokens = meta.get("tokens", list)
        if not tokens:
            raise meta.error("tokens", "at least one token is needed")
        types = meta.get("token_type", np.ndarray, np.ones(len(tokens), np.int32)).tolist()
        if len(types) != len(tokens):
            raise meta.error("token_type", f"it has {len(types)} entries for {len(tokens)} tokens")
        ends = [i for key in _END_KEYS if (i := meta.token_id(key, len(tokens))) is not None]
        merges, add_bos = meta.get("merges", list), meta.get("add_bos_token", bool, False)
        bos_id = meta.token_id("bos_token_id", len(tokens))
        template = file.metadata.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise ModelError(
                f"{file.path}: metadata key 'tokenizer.chat_template' is {shown(template)}; a string is needed"
            )
        try:
            return cls(tokens, merges, types, pre, ends, add_bos, bos_id, template)
        except ModelError as error:
            raise ModelError(f"{file.path}: {error}") from error

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        parse_special: control tokens written out in the text become their ids; else they are text like any other.
        (User-defined tokens, which are not control tokens, always become their ids.) Raises `ContextError` for what
        is no string, is not Unicode text, has bytes that the vocabulary lacks, or a million blanks in a row.
        """
        if not isinstance(text, str):
            raise ContextError(f"encode: the text is {shown(text)}; a str is needed")
        backend = self._backend if parse_special else self._plain
        if len(text) > MAX_BLANKS and (run := _LONG_BLANKS.search(text)):
            raise ContextError(
                f"the text has more than {MAX_BLANKS} white-space characters in a row, from character {run.start()} "
                "on; is it a text?"
            )
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
            if not self._exact and self._bytes(ids) != text.encode():
                odd_bytes = ", ".join(f"0x{b:02X}" for b in sorted(self._missing.intersection(text.encode()))[:4])
                raise ContextError(
                    "the text can not be written with this model's vocabulary"
                    + (f": it has no token for the bytes {odd_bytes}" if odd_bytes else "; is the model file damaged?")
                )
            return [*self._bos, *ids]
        except (TypeError, UnicodeEncodeError) as error:
            odd = next((i for i, c in enumerate(text) if 0xD800 <= ord(c) < 0xE000), None)
            if odd is None:
                raise
            raise ContextError(
                f"the text is not valid Unicode: character {odd} is the lone surrogate U+{ord(text[odd]):04X}; "
                "was it read in the wrong encoding?"
            ) from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD. Control tokens appear as written."""
        return self._bytes(ids).decode("utf-8", errors="replace")

    def _bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.token_bytes(i) for i in ids)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for. Raises `ContextError` for an id outside the vocabulary."""
        if not 0 <= token < self.n_vocab:
            raise ContextError(f"token id {token} is outside the vocabulary; allowed are 0..{self.n_vocab - 1}")
        text = self._tokens[token]
        if token in self._atomic:
            return text.encode()
        try:
            return bytes(_BYTE_OF[c] for c in text)
        except KeyError:
            return text.encode()  # padding and other tokens outside the byte alphabet


class StreamDecoder:
    """Turns tokens into text as they come, holding back bytes until their character is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes (maybe empty)."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left: an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class _Keys:
    """Typed access to the tokenizer's metadata, with errors that name the key."""

    def __init__(self, file: GGUFFile) -> None:
        self._path, self._meta = file.path, file.metadata

    def error(self, key: str, problem: str) -> ModelError:
        value = shown(self._meta.get(f"tokenizer.ggml.{key}"))
        return ModelError(f"{self._path}: metadata key 'tokenizer.ggml.{key}' is {value}; {problem}")

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self._meta.get(f"tokenizer.ggml.{key}", default)
        if value is None:
            raise ModelError(
                f"{self._path}: metadata key 'tokenizer.ggml.{key}' is missing: there is no tokenizer in this file"
            )
        if not isinstance(value, kind) or (isinstance(value, list) and not all(isinstance(v, str) for v in value)):
            what = {str: "a string", bool: "a boolean", list: "an array of strings", np.ndarray: "an array of numbers"}
            raise self.error(key, f"{what[kind]} is needed")
        return value

    def token_id(self, key: str, n_vocab: int) -> int | None:
        value = self._meta.get(f"tokenizer.ggml.{key}")
        if value is not None and (type(value) is not int or not 0 <= value < n_vocab):
            raise self.error(key, f"allowed are 0..{n_vocab - 1}")
        return value


def _check_merges(pairs: Sequence[tuple[str, str]], vocab: Mapping[str, int]) -> None:
    """Refuses merges of or into what is no token: the library refuses some of them, and panics at others."""
    for i, (left, right) in enumerate(pairs):
        for token in (left, right, left + right):
            if not token or token not in vocab:
                raise ModelError(
                    f"tokenizer.ggml.merges: entry {i} is {shown(f'{left} {right}')}; {shown(token)} is not in "
                    "tokenizer.ggml.tokens"
                )


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable ones as they are, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(plain)]
    return {**{chr(b): b for b in plain}, **{chr(256 + i): b for i, b in enumerate(rest)}}


_BYTE_OF = _byte_alphabet()
