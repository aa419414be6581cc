"""From tokens to text that may be shown: whole characters only, and nothing of a stop string.

A token of a byte-level vocabulary may hold a part of a character, and a stop string may begin in one token and end in
another. `TextAssembler` takes tokens one by one and gives out text as soon as it is certain.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.errors import ContextError
from vkbackend.model.tokenizer import StreamDecoder, Tokenizer


class TextAssembler:
    """Turns a run of tokens into text pieces that can be shown at once.

    stop: strings at which the text ends; the text before the one that is complete first is kept, the string itself
    never shown. The pieces do not depend on how tokens come in groups. Bytes that are no UTF-8 become U+FFFD; an
    unfinished character at the end is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stop = check_stop(stop)
        self.stopped = False  # whether a stop string is complete: later tokens give nothing
        self._characters = StreamDecoder(tokenizer)
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that is certain after one more token; often empty."""
        if self.stopped:
            return ""
        text = self._held + self._characters.push(token)
        end = first_stop(text, self.stop)
        if end is not None:
            self.stopped = True
            self._held = ""
            return text[:end]
        keep = len(text) - _unfinished_stop(text, self.stop)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text still held back, when no more tokens come."""
        text, self._held = self._held, ""
        return text


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple. Raises `ContextError` for an empty one, which would stop everything."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for i, text in enumerate(strings):
        if not isinstance(text, str) or not text:
            raise ContextError(f"stop string {i} is {text!r}; each must be a string of at least one character")
    return strings


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first (of several ending there, the longest), or None."""
    found = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    return min(found)[1] if found else None


def _unfinished_stop(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of the text that is a beginning of a stop string."""
    for n in range(min(len(text), max(map(len, stop), default=1) - 1), 0, -1):
        if any(len(s) > n and text.endswith(s[:n]) for s in stop):
            return n
    return 0
