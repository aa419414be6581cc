"""The tokenizer against Hugging Face's own reading of the same vocabulary, and what must hold of any text."""

from __future__ import annotations

import json
import mmap
import time
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_paths import fixture
from hypothesis import given, settings
from hypothesis import strategies as st

from vkbackend.cli.common import demo_model
from vkbackend.errors import ContextError, ModelError
from vkbackend.model.gguf import GGUFFile, open_gguf
from vkbackend.model.tokenizer import _BYTE_OF, _LONG_BLANKS, PATTERNS, StreamDecoder, Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@lru_cache
def small() -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(fixture("gguf/dense-q8_0.gguf")))


@lru_cache
def demo() -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(demo_model()))


@lru_cache
def hugging_face() -> Any:
    from tokenizers import Tokenizer as Backend

    return Backend.from_file(str(fixture("hf/dense/tokenizer.json")))


# Pieces whose neighbours decide how they are split: letters, marks, digits, spaces, line ends, contractions, specials.
PIECES = [
    "the", "Hello", "don't", "WE'LL", "'s", "'", "x", "ſ", "é", "e\u0301", "naïve", "Å", "\u0301", "ñ̃",
    "हिन्दी", "ภาษาไทย", "שָׁלוֹם", "中文", "日本語テキスト", "한국어", "각", "😀",
    "👩‍👩‍👧", "🇨🇿", "0", "42", "3.14", "٣", "Ⅷ", "½", " ", "  ",
    "\t", "\n", "\r\n", "\n\n ", "\u00a0", "\u3000", "\u2028", "!", "...", "?!\n", "--", "(", ")", "_", "</s>",
    "\x00", "\x7f", "\ufeff", "\U0010ffff", *SPECIAL, "<|im_end", "|>", "def f(x):\n    return x\n",
]  # fmt: skip
any_text = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=12).map("".join)


@settings(max_examples=600, deadline=None)
@given(any_text)
def test_ids_are_hugging_faces(text: str) -> None:
    """On NFC text: their file of this vocabulary normalises first."""
    text = unicodedata.normalize("NFC", text)
    assert small().encode(text) == hugging_face().encode(text, add_special_tokens=False).ids


@settings(max_examples=300, deadline=None)
@given(any_text)
def test_control_tokens_can_be_left_as_text(text: str) -> None:
    text = unicodedata.normalize("NFC", text)
    other = hugging_face()
    other.encode_special_tokens = True
    try:
        want = other.encode(text, add_special_tokens=False).ids
    finally:
        other.encode_special_tokens = False
    got = small().encode(text, parse_special=False)
    assert got == want
    assert not {1005, 1006, 1007} & set(got)


@settings(max_examples=400, deadline=None)
@given(any_text, st.booleans())
def test_every_text_comes_back(text: str, parse_special: bool) -> None:
    for tokenizer in (small(), demo()):
        ids = tokenizer.encode(text, parse_special=parse_special)
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_the_split_patterns_are_the_published_ones() -> None:
    published = json.loads(fixture("hf/dense/tokenizer.json").read_text())
    assert published["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] == PATTERNS["qwen35"]


def test_marks_belong_to_words_in_qwen35_only() -> None:
    """a + combining acute + b: one word for qwen35, three pieces for qwen2 (the mark is no letter there)."""
    vocab = [*_BYTE_OF, "ab", "aÌ", "aÌģ", "Ìģ", "aÌģb"]  # "Ìģ" are the two bytes of the mark
    merges = ["Ì ģ", "a Ìģ", "aÌģ b"]
    text = "a\u0301b"
    for pre, n in (("qwen35", 1), ("qwen2", 3)):
        ids = Tokenizer(vocab, merges, [1] * len(vocab), pre).encode(text)
        assert len(ids) == n, pre


def test_digits_stand_alone() -> None:
    ids = demo().encode("x1234")
    assert [demo().token_bytes(i) for i in ids] == [b"x", b"1", b"2", b"3", b"4"]


# ---- control and user-defined tokens


def made(**changed: Any) -> GGUFFile:
    """A file of the 256 byte tokens, the word "ab", two control and two user-defined tokens; None takes a key away."""
    tokens = [*_BYTE_OF, "ab", "<|endoftext|>", "<|im_end|>", "<think>", "žluť"]
    keys = {
        "model": "gpt2", "pre": "qwen35", "tokens": tokens, "token_type": np.array([1] * 257 + [3, 3, 4, 4], np.int32),
        "merges": ["a b"], "eos_token_id": 258,
    } | changed  # fmt: skip
    meta = {f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not None}
    return GGUFFile(Path("made.gguf"), 3, meta, {}, 32, mmap.mmap(-1, 1))


def test_user_defined_tokens_are_always_atomic_control_tokens_when_asked() -> None:
    t = Tokenizer.from_gguf(made())
    assert t.encode("<think>ab<|im_end|>žluť") == [259, 256, 258, 260]
    as_text = t.encode("<think>ab<|im_end|>žluť", parse_special=False)
    assert as_text[:2] == [259, 256] and as_text[-1] == 260 and 258 not in as_text
    assert t.decode(as_text) == "<think>ab<|im_end|>žluť"
    assert t.token_bytes(260) == "žluť".encode()


def test_tokens_that_end_a_text() -> None:
    assert Tokenizer.from_gguf(made()).eos_ids == {257, 258}
    assert Tokenizer.from_gguf(made(eos_token_id=None)).eos_ids == {257, 258}
    assert Tokenizer.from_gguf(made(eos_token_id=5, eot_token_id=6)).eos_ids == {5, 6, 257, 258}
    plain = np.ones(261, np.int32)  # written out in the vocabulary, but not as control tokens
    assert Tokenizer.from_gguf(made(token_type=plain)).eos_ids == {258}
    assert demo().eos_ids == {4093, 4095}


def test_bos() -> None:
    with_bos = Tokenizer.from_gguf(made(add_bos_token=True, bos_token_id=257))
    assert with_bos.add_bos and with_bos.encode("ab") == [257, 256] and with_bos.encode("") == [257]
    assert with_bos.encode("ab", parse_special=False) == [257, 256]
    for without in (made(bos_token_id=257), made(add_bos_token=True), made(add_bos_token=False, bos_token_id=257)):
        t = Tokenizer.from_gguf(without)
        assert not t.add_bos and t.encode("ab") == [256]


def test_an_empty_text() -> None:
    assert demo().encode("") == [] and demo().decode([]) == ""


@pytest.mark.parametrize("token", [-1, 4096, 1 << 40])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(ContextError, match=rf"token id {token} is outside the vocabulary; allowed are 0\.\.4095"):
        demo().decode([5, token])


def test_a_string_that_is_not_text_is_refused() -> None:
    with pytest.raises(ContextError, match=r"character 2 is the lone surrogate U\+DC80"):
        demo().encode("ab\udc80c")


@pytest.mark.parametrize("text", [5, None, b"abc", ["a"], np.array(["a"])])
def test_only_a_string_is_encoded(text: Any) -> None:
    with pytest.raises(ContextError, match=r"encode: the text is .*; a str is needed"):
        demo().encode(text)


@pytest.mark.parametrize("blank", [" ", "\n", "\u00a0"])
def test_a_million_blanks_but_no_more(blank: str) -> None:
    """Some millions more made the library's regex engine end the process."""
    start = time.process_time()
    text = "a" + blank * 1_000_000
    assert demo().decode(demo().encode(text)) == text
    with pytest.raises(ContextError, match="more than 1000000 white-space characters in a row, from character 1 on"):
        demo().encode(text + " ")
    assert time.process_time() - start < 20


def test_long_blanks_are_found_in_one_pass() -> None:
    start = time.process_time()
    assert _LONG_BLANKS.search((" " * 50_000 + "a") * 40) is None
    assert time.process_time() - start < 3


@pytest.mark.parametrize("unit", ["a", "!", "ab", "\x00", "'s", "😀", "<|im_star"])
def test_a_million_of_one_character_takes_seconds(unit: str) -> None:
    text = unit * (300_000 // len(unit.encode()))
    start = time.process_time()
    assert demo().decode(demo().encode(text)) == text
    assert time.process_time() - start < 6


def test_chains_of_merges_are_not_quadratic() -> None:
    tokens = [*_BYTE_OF, *("a" * i for i in range(2, 1000))]
    t = Tokenizer(tokens, ["a " + "a" * i for i in range(1, 999)], [1] * len(tokens), "qwen35")
    start = time.process_time()
    assert t.decode(t.encode("a" * 300_000)) == "a" * 300_000
    assert time.process_time() - start < 6


def test_duplicates_and_empty_tokens_do_no_harm() -> None:
    tokens = [*_BYTE_OF, "ab", "ab", "a", "", "", "X", "X"]
    t = Tokenizer(tokens, ["a b"] * 3, [1] * 256 + [1, 1, 1, 1, 3, 3, 4], "qwen35")
    for text in ("ab", "aabX", "", "žX b"):
        assert t.decode(t.encode(text)) == text


def test_texts_that_a_vocabulary_can_not_write_are_refused() -> None:
    letters = Tokenizer(["a", "b", "<x>"], [], [1, 1, 3], "qwen35")
    assert letters.decode(letters.encode("ab<x>ba")) == "ab<x>ba"
    with pytest.raises(ContextError, match="it has no token for the bytes 0x00, 0x0A, 0x20, 0xBE"):
        letters.encode("a b\n\x00ž")
    # Byte-level BPE writes a blank as U+0120: here that is the name of a control token, which has other bytes.
    odd = Tokenizer([c for c in _BYTE_OF if c != "Ġ"] + ["Ġ"], [], [1] * 255 + [3], "qwen35")
    assert odd.decode(odd.encode("Ġ")) == "Ġ"
    with pytest.raises(ContextError, match="can not be written with this model's vocabulary; is the model file dam"):
        odd.encode("a b")


# ---- streaming


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 4095), max_size=30))
def test_a_stream_of_any_tokens_adds_up(ids: list[int]) -> None:
    stream = StreamDecoder(demo())
    assert "".join([stream.push(i) for i in ids] + [stream.flush()]) == demo().decode(ids)


@settings(max_examples=300, deadline=None)
@given(any_text)
def test_a_stream_never_breaks_a_character(text: str) -> None:
    text = text.replace("\ufffd", "")
    stream, seen = StreamDecoder(demo()), ""
    for byte in text.encode():  # one token for every byte: the worst that can be
        piece = stream.push(_byte_token(byte))
        assert "\ufffd" not in piece
        seen += piece
        assert text.startswith(seen)
    assert seen == text and stream.flush() == ""


@lru_cache
def _byte_token(byte: int) -> int:
    return next(i for i in range(4096) if demo().token_bytes(i) == bytes([byte]))


def test_what_is_left_of_a_character_is_flushed_once() -> None:
    stream = StreamDecoder(demo())
    assert [stream.push(_byte_token(b)) for b in "é".encode()[:1]] == [""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == "" and stream.push(_byte_token(97)) == "a"


# ---- files that do not fit

BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "'tokenizer.ggml.model' is missing: there is no tokenizer"),
    ({"model": "llama"}, r"'tokenizer.ggml.model' is 'llama'; supported is 'gpt2'"),
    ({"model": 3}, "is 3; a string is needed"),
    ({"pre": "llama-bpe"}, "'tokenizer.ggml.pre' is 'llama-bpe'; supported are qwen2, qwen35"),
    ({"tokens": []}, "tokens' is .*; at least one token is needed"),
    ({"merges": ["a\n\x1b" * 500]}, r"merges: entry 0 is 'a\\n\\x1ba.*1501 characters\); '.* is not in"),
    ({"tokens": None}, "'tokenizer.ggml.tokens' is missing"),
    ({"tokens": np.arange(9)}, "'tokenizer.ggml.tokens' .*an array of strings is needed"),
    ({"tokens": ["a", 3]}, "'tokenizer.ggml.tokens' .*an array of strings is needed"),
    ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
    ({"merges": ["a b", "ab c"]}, "merges: entry 1 is 'ab c'; 'abc' is not in tokenizer.ggml.tokens"),
    ({"merges": ["ã £"]}, "merges: entry 0 is 'ã £'; 'ã£' is not in tokenizer.ggml.tokens"),  # the library panics
    ({"merges": ["ab"]}, "merges: entry 0 is 'ab '; '' is not in"),
    ({"token_type": np.ones(3, np.int32)}, "'tokenizer.ggml.token_type' .*it has 3 entries for 261 tokens"),
    ({"token_type": "x"}, "an array of numbers is needed"),
    ({"eos_token_id": 261}, r"'tokenizer.ggml.eos_token_id' is 261; allowed are 0\.\.260"),
    ({"eos_token_id": -1}, r"'tokenizer.ggml.eos_token_id' is -1; allowed are 0\.\.260"),
    ({"eot_token_id": "x"}, r"'tokenizer.ggml.eot_token_id' is 'x'; allowed"),
    ({"bos_token_id": 1 << 40}, r"'tokenizer.ggml.bos_token_id' is 1099511627776; allowed"),
    ({"add_bos_token": 1}, "'tokenizer.ggml.add_bos_token' is 1; a boolean is needed"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=[f"{i}-{next(iter(c))}" for i, (c, _) in enumerate(BAD)])
def test_unsound_files_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"^made\.gguf: (?!.*made\.gguf).*{message}") as caught:
        Tokenizer.from_gguf(made(**changed))
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


def test_a_template_that_is_no_text_is_refused() -> None:
    file = made()
    file.metadata["tokenizer.chat_template"] = 5
    with pytest.raises(
        ModelError, match=r"^made\.gguf: metadata key 'tokenizer\.chat_template' is 5; a string is needed"
    ):
        Tokenizer.from_gguf(file)
