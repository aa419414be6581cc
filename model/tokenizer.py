"""The tokenizer inside a GGUF file: byte-level BPE through the `tokenizers` library.

Pre-tokenizer names `qwen35` and `qwen2`: the split patterns of the models' published tokenizer files. Control and
user-defined tokens are atomic; any bytes survive encode and decode.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from vkbackend.errors import ContextError, ModelError
from vkbackend.model.gguf import GGUFFile

# The two differ in whether combining marks belong to words.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[LETTERS]+|\p{N}| ?[^\sLETTERS\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {"qwen2": _SPLIT.replace("LETTERS", r"\p{L}"), "qwen35": _SPLIT.replace("LETTERS", r"\p{L}\p{M}")}
_CONTROL, _USER_DEFINED = 3, 4
_END_NAMES = ("<|endoftext|>", "<|im_end|>")


class Tokenizer:
    """Text to token ids and back.

    `eos_ids`: ids that end a text (the file's EOS, and the end-of-turn tokens it defines). `n_vocab`: number of ids.
    Text is not Unicode-normalised, so that every string comes back as it went in.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        types: Sequence[int],
        pre: str,
        eos_id: int | None = None,
        add_bos: bool = False,
        bos_id: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        from tokenizers import AddedToken, Regex
        from tokenizers import Tokenizer as Backend
        from tokenizers.decoders import ByteLevel as ByteLevelDecoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel, Split
        from tokenizers.pre_tokenizers import Sequence as Steps

        self.n_vocab = len(tokens)
        self.chat_template = chat_template
        self._tokens = tokens
        self._bos = [bos_id] if add_bos and bos_id is not None else []
        self._special = {t: i for i, t in enumerate(tokens) if types[i] in (_CONTROL, _USER_DEFINED)}
        vocab = {t: i for i, t in enumerate(tokens)}
        pairs = [_pair(m) for m in merges]
        missing = next((p for p in pairs if p[0] + p[1] not in vocab or p[0] not in vocab or p[1] not in vocab), None)
        if missing is not None:
            raise ModelError(f"tokenizer.ggml.merges: {missing} joins tokens that are not all in tokenizer.ggml.tokens")
        self._backend: Any = Backend(BPE(vocab, pairs, fuse_unk=False, byte_fallback=False))
        split = Split(Regex(_PATTERNS[pre]), behavior="isolated")
        self._backend.pre_tokenizer = Steps([split, ByteLevel(add_prefix_space=False, use_regex=False)])
        self._backend.decoder = ByteLevelDecoder()
        self._plain = Backend.from_str(self._backend.to_str()) if self._special else self._backend
        self._backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in self._special])
        ends = {self._special[name] for name in _END_NAMES if name in self._special}
        self.eos_ids = frozenset(ends | ({eos_id} if eos_id is not None else set()))

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """The tokenizer of a file. Raises `ModelError` naming the key that is missing or not supported."""
        meta = file.metadata

        def need(key: str) -> Any:
            if f"tokenizer.ggml.{key}" not in meta:
                raise ModelError(
                    f"{file.path}: metadata key 'tokenizer.ggml.{key}' is missing: no tokenizer in this file"
                )
            return meta[f"tokenizer.ggml.{key}"]

        if need("model") != "gpt2":
            raise ModelError(
                f"{file.path}: tokenizer.ggml.model is {need('model')!r}; 'gpt2' (byte-level BPE) is supported"
            )
        pre = meta.get("tokenizer.ggml.pre", "qwen2")
        if pre not in _PATTERNS:
            raise ModelError(f"{file.path}: tokenizer.ggml.pre is {pre!r}; supported are {', '.join(_PATTERNS)}")
        tokens = need("tokens")
        types = meta.get("tokenizer.ggml.token_type")
        types = [1] * len(tokens) if types is None else [int(t) for t in types]
        if len(types) != len(tokens):
            raise ModelError(
                f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
            )
        eos = meta.get("tokenizer.ggml.eos_token_id")
        if eos is not None and not 0 <= int(eos) < len(tokens):
            raise ModelError(f"{file.path}: tokenizer.ggml.eos_token_id is {eos}; allowed are 0..{len(tokens) - 1}")
        return cls(
            tokens,
            need("merges"),
            types,
            pre,
            None if eos is None else int(eos),
            bool(meta.get("tokenizer.ggml.add_bos_token", False)),
            meta.get("tokenizer.ggml.bos_token_id"),
            meta.get("tokenizer.chat_template"),
        )

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        """Token ids of a text. `parse_special`: control tokens written out in the text become their ids."""
        backend = self._backend if parse_special else self._plain
        return [*self._bos, *backend.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD. Control tokens appear as written."""
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for. Raises `ContextError` for an id outside the vocabulary."""
        if not 0 <= token < self.n_vocab:
            raise ContextError(f"token id {token} is outside the vocabulary; allowed are 0..{self.n_vocab - 1}")
        text = self._tokens[token]
        if text in self._special:
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


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable ones as they are, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(plain)]
    return {**{chr(b): b for b in plain}, **{chr(256 + i): b for i, b in enumerate(rest)}}


_BYTE_OF = _byte_alphabet()
