"""Text that is shown: whole characters, nothing of a stop string, whatever the tokens' boundaries."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vkbackend.errors import ContextError
from vkbackend.model.tokenizer import Tokenizer
from vkbackend.spec.stopping import TextAssembler, check_stop


class Pieces:
    """A tokenizer whose token i stands for the bytes it was given."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


def shown(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    assembler = TextAssembler(cast(Tokenizer, Pieces(pieces)), stop)
    out = [assembler.push(i) for i in range(len(pieces))]
    return [*out, assembler.finish()], assembler.stopped


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """What must be shown: character by character, the first stop string that is complete ends the text."""
    for n in range(1, len(text) + 1):
        ends = [len(s) for s in stop if text[:n].endswith(s)]
        if ends:
            return text[: n - max(ends)], True
    return text, False


def chop(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


TEXTS = st.text(alphabet="ab<>é😀\n", max_size=40)


@settings(max_examples=400, deadline=None)
@example("xab<y", [1, 4], ["ab<", "b"])  # the one that is complete first begins second
@example("xab<y", [1, 4], ["b<", "ab<", "<"])
@given(
    TEXTS, st.lists(st.integers(0, 200), max_size=60), st.lists(st.text("ab<>é😀", min_size=1, max_size=4), max_size=3)
)
def test_text_and_stops_do_not_depend_on_boundaries(text: str, cuts: list[int], stop: list[str]) -> None:
    pieces, stopped = shown(chop(text.encode(), cuts), stop)
    assert ("".join(pieces), stopped) == cut(text, stop)
    assert not any("\ufffd" in p for p in pieces)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    pieces, stopped = shown([b"Hello", b" wor", b"ld</", b"s", b"pan> ", b"</st", b"op>", b"more"], ["</stop>"])
    assert pieces == ["Hello", " wor", "ld", "", "</span> ", "", "", "", ""]
    assert stopped


def test_held_text_comes_at_the_end() -> None:
    assert shown([b"a", b"<st"], ["<stop>"]) == (["a", "", "<st"], False)


def test_a_character_in_four_tokens() -> None:
    face = "😀".encode()
    assert shown([b"x", face[:1], face[1:2], face[2:3], face[3:], b"y"])[0] == ["x", "", "", "", "😀", "y", ""]


def test_an_unfinished_character_is_never_shown() -> None:
    assert "".join(shown([b"ab", "é".encode()[:1]])[0]) == "ab"


def test_bytes_that_are_no_text() -> None:
    assert "".join(shown([b"a\xff", b"\xfe", b"b"])[0]) == "a\ufffd\ufffdb"


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3]])
def test_bad_stop_strings(stop: list[str]) -> None:
    with pytest.raises(ContextError, match="stop string"):
        check_stop(stop)


def test_one_stop_string_may_stand_alone() -> None:
    assert check_stop("ab") == ("ab",)
