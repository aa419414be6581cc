"""What is fuzzed: six targets, each a function of bytes that may raise `VkBackendError` of one line and nothing else.

`one_input` is the whole: the first byte of an input picks the target. fuzz.py drives it with atheris, guided by
coverage; test_corpus.py replays what that found, corpus.zip, without atheris.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from vkbackend.cli.common import demo_model
from vkbackend.device.null import NullDevice
from vkbackend.errors import VkBackendError
from vkbackend.model.chat_template import answer_of
from vkbackend.model.gguf import GGUFFile, open_gguf
from vkbackend.model.hparams import read_hparams
from vkbackend.model.loader import load
from vkbackend.model.tokenizer import Tokenizer

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Numbers where checks are off by one, and sizes that no machine has.
EDGES = (0, 1, 2, 3, 7, 31, 32, 33, 64, 127, 128, 255, 256, 4096, 4097, 65535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


class Source:
    """Bytes as a source of choices; zeros and empty strings when they are used up."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def __bool__(self) -> bool:
        return self.at < len(self.data)

    def bytes(self, n: int) -> bytes:
        self.at += n
        return self.data[self.at - n : self.at]

    def byte(self) -> int:
        return int.from_bytes(self.bytes(1), "little")

    def below(self, n: int) -> int:
        return int.from_bytes(self.bytes(2), "little") % n

    def number(self) -> int:
        kind = self.byte()
        if kind < 128:
            return EDGES[kind % len(EDGES)]
        return int.from_bytes(self.bytes(1 + kind % 8), "little")

    def string(self) -> bytes:
        return self.bytes(self.byte() % 32)

    def rest(self) -> bytes:
        return self.bytes(len(self.data) - self.at)


# ---- files: raw bytes, and a sound tiny model with some things changed


def raw_file(data: bytes) -> None:
    """A GGUF file of these bytes: read whole, hyper-parameters and tokenizer made, every tensor looked at."""
    with _file(data) as path:
        file = open_gguf(path)
        for name in file.tensors:
            with _refusals():
                file.tensor_bytes(name)
        with _refusals():
            read_hparams(file)
        with _refusals():
            tokenizer = Tokenizer.from_gguf(file)
            tokenizer.decode(tokenizer.encode("a b\n"))


def changed_model(data: bytes) -> None:
    """A sound tiny model with keys and tensors changed or taken away: loaded, and one token decoded."""
    _load(changed_file(Source(data)))


def changed_moe(data: bytes) -> None:
    """The same of a mixture of experts."""
    _load(changed_file(Source(data), experts=True))


def _load(raw: bytes) -> None:
    with _file(raw) as path:
        null = load(path, NullDevice())  # type: ignore[arg-type]
        with _refusals():
            null.context(n_ctx=8, n_rs_seq=1).decode([0], seq=0)
        model = load(path, "numpy")
        if model.hparams.n_vocab <= 4096:
            model.context(n_ctx=8).decode([0], seq=0)


def changed_file(choose: Source, experts: bool = False) -> bytes:
    """The bytes of the tiny model after up to four changes."""
    keys, tensors = tiny_model(experts)
    pairs, table = dict(keys), dict(tensors)
    names, tensor_names = list(pairs), list(table)
    for _ in range(1 + choose.byte() % 4):
        if not choose:
            break
        what = choose.byte() % 8
        key, name = names[choose.below(len(names))], tensor_names[choose.below(len(tensor_names))]
        if what < 4:
            pairs[key] = _value(choose)
        elif what == 4:
            pairs.pop(key, None)
        elif what == 5:
            table.pop(name, None)
        else:
            dims, kind, raw = tensors[name]
            if what == 6:
                kind = choose.byte() % 48
            else:
                dims = tuple(choose.number() for _ in range(1 + choose.byte() % 4))
            table[name] = (dims, kind, raw)
    return file_bytes(pairs, table)


def file_bytes(pairs: Mapping[str, bytes], table: Mapping[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    """A GGUF file. pairs: type and value as in a file. table: dimensions in a file's order, type, data."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(table), len(pairs))
    head += b"".join(_string(k.encode()) + v for k, v in pairs.items())
    body = b""
    for name, (dims, kind, raw) in table.items():
        head += _string(name.encode()) + struct.pack("<I", len(dims))
        head += b"".join(struct.pack("<Q", d & (1 << 64) - 1) for d in dims) + struct.pack("<IQ", kind, len(body))
        body += raw + bytes(-len(raw) % 32)
    return head + bytes(-len(head) % 32) + body


def _value(choose: Source, depth: int = 0) -> bytes:
    """A typed value as in a file."""
    kind = choose.byte() % 13
    if kind == STRING:
        return struct.pack("<I", kind) + _string(choose.string())
    if kind == ARRAY:
        inner, n = _value(choose, depth + 1) if depth < 3 else struct.pack("<IB", 0, 1), choose.byte() % 12
        return struct.pack("<I", ARRAY) + inner[:4] + struct.pack("<Q", n) + inner[4:] * n
    size = struct.calcsize(SCALARS[kind])
    raw = (choose.number() & (1 << 64) - 1).to_bytes(8, "little")[:size]
    if kind in (6, 12) and choose.byte() % 2:
        raw = struct.pack("<" + SCALARS[kind], choose.number() % 1000 / 100 - 1)
    return struct.pack("<I", kind) + raw


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


@lru_cache
def tiny_model(experts: bool = False) -> tuple[dict[str, bytes], dict[str, tuple[tuple[int, ...], int, bytes]]]:
    """Metadata (type and payload) and tensors (dims, type, bytes) of a model of one attention and one delta net."""
    from synthetic import write_model

    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "tiny.gguf", seed=1, n_main=2, experts=(2, 4) if experts else None)
        read = gguf.GGUFReader(path)
        keys = {}
        for name, field in read.fields.items():
            if not name.startswith("GGUF."):
                raw = b"".join(np.asarray(p).tobytes() for p in field.parts)
                keys[name] = raw[8 + len(name) :]
        tensors = {
            t.name: (tuple(int(d) for d in t.shape), int(t.tensor_type), np.asarray(t.data).tobytes())
            for t in read.tensors
        }
    keys["tokenizer.ggml.eos_token_id"] = struct.pack("<II", 4, 1)
    keys["tokenizer.ggml.add_bos_token"] = struct.pack("<IB", 7, 0)
    arch = "qwen35moe" if experts else "qwen35"
    keys[f"{arch}.attention.recurrent_layers"] = struct.pack("<IIQ3B", ARRAY, 7, 3, 1, 0, 0)
    keys["general.alignment"] = struct.pack("<II", 4, 32)
    return keys, tensors


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[Path]:
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.NamedTemporaryFile(suffix=".gguf", dir=folder) as file:
        file.write(data)
        file.flush()
        yield Path(file.name)


# ---- texts


def any_vocabulary(data: bytes) -> None:
    """A tokenizer made of these bytes, and a text for it."""
    choose = Source(data)
    flags = choose.byte()
    alphabet = list(_alphabet()) if flags & 1 else []
    tokens = alphabet + [choose.string().decode("utf-8", "replace") for _ in range(choose.byte() % 24)]
    merges = [choose.string().decode("utf-8", "replace") for _ in range(choose.byte() % 8)]
    if flags & 2:
        merges = [" ".join(tokens[choose.below(len(tokens))] for _ in range(2)) for _ in merges] if tokens else merges
    types = [1] * len(alphabet) + [choose.byte() % 7 for _ in tokens[len(alphabet) :]]
    meta: dict[str, Any] = {"model": "gpt2", "pre": ("qwen35", "qwen2")[flags >> 2 & 1], "tokens": tokens}
    meta |= {"merges": merges, "token_type": np.array(types, np.int32)}
    if flags & 8:
        meta |= {"add_bos_token": True, "bos_token_id": choose.byte()}
    if flags & 16:
        meta |= {"eos_token_id": choose.number()}
    file = GGUFFile(Path("made.gguf"), 3, {f"tokenizer.ggml.{k}": v for k, v in meta.items()}, {}, 32, mmap.mmap(-1, 1))
    _round_trip(Tokenizer.from_gguf(file), choose.rest(), bool(flags & 32))


@lru_cache
def _alphabet() -> str:
    from vkbackend.model.tokenizer import _BYTE_OF

    return "".join(_BYTE_OF)


def any_text(data: bytes) -> None:
    """A text, or what is none, through the demo model's tokenizer."""
    _round_trip(_demo(), data[1:], bool(data[:1] > b"\x7f"))


@lru_cache
def _demo() -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(demo_model()))


def _round_trip(tokenizer: Tokenizer, raw: bytes, special: bool) -> None:
    text = raw.decode("utf-8", "surrogateescape" if raw[:1] == b"\xed" else "replace")
    ids = tokenizer.encode(text, parse_special=special)
    back = b"".join(tokenizer.token_bytes(i) for i in ids[tokenizer.add_bos :])
    if back != text.encode():
        raise AssertionError(f"{text!r} came back as {back!r}")
    if any(not 0 <= i < tokenizer.n_vocab for i in ids):
        raise AssertionError(f"ids {ids} of {tokenizer.n_vocab}")


# ---- chat templates


def any_template(data: bytes) -> None:
    """A chat template, under a clock in place of its process: the time it may take is not what is tested here."""
    variables = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True, "tools": None}
    with _clock(1.0):
        answer = answer_of(data.decode("utf-8", "replace"), variables)
    if "error" in answer and not answer["error"].isprintable():
        raise AssertionError(f"{answer['error']!r} is more than a line")


@contextlib.contextmanager
def _clock(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        with contextlib.suppress(TimeoutError):
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


TARGETS: tuple[Callable[[bytes], None], ...] = (
    raw_file,
    changed_model,
    any_vocabulary,
    any_text,
    any_template,
    changed_moe,
)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Refusals are what is wanted, if they are one line of bearable length."""
    try:
        yield
    except VkBackendError as error:
        message = str(error)
        if not message.isprintable() or len(message) > 1200:
            raise AssertionError(f"not one line: {message[:2000]!r}") from error


def one_input(data: bytes) -> None:
    """Runs the target that the first byte names. Anything but `VkBackendError` comes out."""
    if data:
        with _refusals():
            TARGETS[data[0] % len(TARGETS)](data[1:])
