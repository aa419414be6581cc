"""The GGUF reader: the same as gguf-py's on sound files, a clear `ModelError` on every unsound one."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from fixture_paths import fixture

from vkbackend.cli.common import demo_model
from vkbackend.errors import ModelError
from vkbackend.model.gguf import GGUFFile, open_gguf

FILES = ["demo", "dense-q8_0", "mtp-dense-f32", "moe-q4_0", "next-q4_k_m", "dense-k-q6_k"]
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, U32, F32, BOOL = 8, 9, 4, 6, 7


# ---- a writer of its own, which also writes unsound files


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def array(kind: int, n: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", kind, n) + payload


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """`dims` in the file's order: the row length first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(
    pairs: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    n_tensors: int | None = None,
    n_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    n_t, n_p = len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs
    head = magic + struct.pack("<IQQ", version, n_t, n_p)
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def write(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "made.gguf"
    path.write_bytes(raw)
    return path


def sound() -> bytes:
    """A small file with one of everything."""
    pairs = [
        pair("a.string", STRING, string("žluť")),
        pair("a.number", U32, struct.pack("<I", 7)),
        pair("a.bools", ARRAY, array(BOOL, 3, b"\x00\x01\x02")),
        pair("a.strings", ARRAY, array(STRING, 2, string("x") + string(""))),
        pair("a.nested", ARRAY, array(ARRAY, 2, array(0, 2, b"\x01\x02") + array(0, 0, b""))),
    ]
    tensors = [tensor("w", (32, 2), int(gguf.GGMLQuantizationType.Q8_0), 0), tensor("b", (3,), 0, 96)]
    return gguf_bytes(pairs, tensors, bytes(range(68)) + bytes(28) + np.arange(3, dtype="<f4").tobytes())


# ---- sound files


def path_of(name: str) -> Path:
    return demo_model() if name == "demo" else fixture(f"gguf/{name}.gguf")


@pytest.mark.parametrize("name", FILES)
def test_everything_is_as_gguf_py_reads_it(name: str) -> None:
    file, want = open_gguf(path_of(name)), gguf.GGUFReader(path_of(name))
    fields = {k: f.contents() for k, f in want.fields.items() if not k.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for key, value in fields.items():
        got = file.metadata[key]
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == value, key
        assert isinstance(got, np.ndarray | list) or type(got) is type(value), key
    assert list(file.tensors) == [t.name for t in want.tensors]
    for t in want.tensors:
        info = file.tensors[t.name]
        assert info.shape == tuple(int(n) for n in reversed(t.shape))
        assert (info.type, info.offset, info.nbytes) == (int(t.tensor_type), t.data_offset, t.n_bytes)
        np.testing.assert_array_equal(file.tensor_bytes(t.name), np.asarray(t.data).reshape(-1).view(np.uint8))


def check_sound(file: GGUFFile) -> None:
    assert file.metadata["a.string"] == "žluť" and file.metadata["a.number"] == 7
    assert file.metadata["a.bools"].tolist() == [False, True, True]
    assert file.metadata["a.strings"] == ["x", ""]
    assert [a.tolist() for a in file.metadata["a.nested"]] == [[1, 2], []]
    assert file.tensors["w"].shape == (2, 32)
    assert file.tensor_bytes("w").tobytes() == bytes(range(68))
    assert file.tensor_bytes("b").view(np.float32).tolist() == [0, 1, 2]


@pytest.mark.parametrize("version", [2, 3])
def test_versions(version: int, tmp_path: Path) -> None:
    raw = bytearray(sound())
    raw[4] = version
    file = open_gguf(write(tmp_path, bytes(raw)))
    assert file.version == version
    check_sound(file)


def test_numbers_of_every_type(tmp_path: Path, rng: np.random.Generator) -> None:
    numbers: dict[int, Any] = {}
    for kind, code in CODES.items():
        raw = rng.integers(0, 256, struct.calcsize(code), dtype=np.uint8).tobytes()
        numbers[kind] = struct.unpack("<" + code, raw)[0]
    pairs = [pair(f"k{kind}", kind, struct.pack("<" + CODES[kind], v)) for kind, v in numbers.items()]
    pairs += [
        pair(f"k{kind}.array", ARRAY, array(kind, 3, 3 * struct.pack("<" + CODES[kind], v)))
        for kind, v in numbers.items()
    ]
    file = open_gguf(write(tmp_path, gguf_bytes(pairs, [])))
    for kind, v in numbers.items():
        got, many = file.metadata[f"k{kind}"], file.metadata[f"k{kind}.array"]
        assert type(got) is type(v) and len(many) == 3
        assert np.array_equal(got, v, equal_nan=kind in (6, 12))
        assert np.array_equal(many, [v] * 3, equal_nan=kind in (6, 12))


def test_tensor_data_is_a_read_only_view_of_the_file() -> None:
    file = open_gguf(demo_model())
    one, two = file.tensor_bytes("token_embd.weight"), file.tensor_bytes("token_embd.weight")
    assert not one.flags.writeable and not one.flags.owndata
    assert one.ctypes.data == two.ctypes.data


def test_alignment(tmp_path: Path) -> None:
    pairs = [pair("general.alignment", U32, struct.pack("<I", 256))]
    tensors = [tensor("a", (2,), 0, 0), tensor("b", (2,), 0, 256)]
    data = struct.pack("<2f", 1, 2) + bytes(248) + struct.pack("<2f", 3, 4)
    file = open_gguf(write(tmp_path, gguf_bytes(pairs, tensors, data, alignment=256)))
    assert file.alignment == 256 and file.tensors["a"].offset % 256 == 0
    assert file.tensor_bytes("b").view(np.float32).tolist() == [3, 4]


def test_strings_that_are_not_utf8_do_not_stop_a_file(tmp_path: Path) -> None:
    file = open_gguf(write(tmp_path, gguf_bytes([pair("k", STRING, string(b"a\xffb"))], [])))
    assert file.metadata["k"] == "a�b"


@pytest.mark.parametrize("kind", [4, 5, 38, 77, 0xFFFFFFFF])
def test_an_unknown_quantisation_fails_only_when_its_data_is_asked_for(kind: int, tmp_path: Path) -> None:
    tensors = [tensor("odd", (32,), kind, 0), tensor("fine", (2,), 0, 64)]
    file = open_gguf(write(tmp_path, gguf_bytes([], tensors, bytes(64) + struct.pack("<2f", 1, 2))))
    assert file.tensors["odd"].type == kind and file.tensors["odd"].shape == (32,)
    assert file.tensor_bytes("fine").view(np.float32).tolist() == [1, 2]
    with pytest.raises(ModelError, match=rf"made.gguf: tensor 'odd' has quantisation id {kind}.*known ids are 0, 1,"):
        file.tensor_bytes("odd")


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(ModelError, match=r"demo.*there is no tensor 'blk.99'"):
        open_gguf(demo_model()).tensor_bytes("blk.99")


# ---- unsound files


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    raw = sound()
    check_sound(open_gguf(write(tmp_path, raw)))
    for n in range(len(raw)):
        with pytest.raises(ModelError, match=r"made\.gguf"):
            open_gguf(write(tmp_path, raw[:n]))


def test_damaged_files_never_fail_otherwise(tmp_path: Path, rng: np.random.Generator) -> None:
    """Random bytes changed: the file opens, or a `ModelError` of one line says what is wrong; nothing else happens."""
    raw, opened = sound(), 0
    for _ in range(2000):
        damaged = bytearray(raw)
        for at in rng.integers(0, len(raw) - 108, rng.integers(1, 4)):  # the last 108 bytes are data
            damaged[at] = rng.choice([0, 1, 8, 9, 0x7F, 0xFF, int(rng.integers(256))])
        try:
            file = open_gguf(write(tmp_path, bytes(damaged)))
            for info in file.tensors.values():
                if info.nbytes >= 0:
                    assert file.tensor_bytes(info.name).size == info.nbytes
            opened += 1
        except ModelError as error:
            assert "made.gguf" in str(error) and str(error).isprintable()
    assert 0 < opened < 2000


HUGE = 1 << 62
BAD: list[tuple[str, bytes, str]] = [
    ("empty", b"", "can not be opened"),
    ("short", b"GGUF\x03", "needs 24 bytes, 5 are left"),
    ("magic", gguf_bytes([], [], magic=b"GGML"), "starts with b'GGML', a GGUF file starts with b'GGUF'"),
    ("version 1", gguf_bytes([], [], version=1), r"version 1 is not supported, versions \(2, 3\) are"),
    ("big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian, convert it to little-endian"),
    ("tensor count", gguf_bytes([], [], bytes(99), n_tensors=HUGE), f"tensor count.*counts {HUGE} items, at most"),
    ("pair count", gguf_bytes([], [], bytes(99), n_pairs=HUGE), f"metadata count.*counts {HUGE} items, at most"),
    ("key length", gguf_bytes([struct.pack("<Q", HUGE)], [], bytes(99)), f"key 0 at byte .*needs {HUGE} bytes, "),
    ("string length", gguf_bytes([pair("k", STRING, struct.pack("<Q", HUGE))], []), f"'k' .*needs {HUGE} bytes, "),
    ("array length", gguf_bytes([pair("k", ARRAY, array(U32, HUGE, b""))], []), f"'k' .*counts {HUGE} items, at most"),
    ("strings", gguf_bytes([pair("k", ARRAY, array(STRING, 1 << 32, bytes(99)))], []), "'k' .*counts 4294967296 items"),
    (
        "string in array",
        gguf_bytes([pair("k", ARRAY, array(STRING, 2, string("a") + struct.pack("<Q", HUGE)))], []),
        f"'k' .*needs {HUGE} bytes",
    ),
    ("value type", gguf_bytes([pair("k", 13, bytes(8))], []), "'k' .*value type 13 is unknown; allowed are 0..12"),
    ("element type", gguf_bytes([pair("k", ARRAY, array(99, 1, bytes(8)))], []), "'k' .*element type 99 is unknown"),
    (
        "nesting",
        gguf_bytes([pair("k", ARRAY, array(ARRAY, 1, array(ARRAY, 1, array(ARRAY, 1, bytes(99)))))], []),
        "'k' .*nested deeper than 2",
    ),
    ("a key twice", gguf_bytes([pair("k", 0, b"\x01")] * 2, []), "'k' .*the key appears twice"),
    ("alignment 0", gguf_bytes([pair("general.alignment", U32, bytes(4))], []), "general.alignment is 0; a power of"),
    (
        "alignment 48",
        gguf_bytes([pair("general.alignment", U32, struct.pack("<I", 48))], []),
        "is 48; a power of",
    ),
    (
        "alignment text",
        gguf_bytes([pair("general.alignment", STRING, string("x"))], []),
        "is 'x'; a power of",
    ),
    ("no dimensions", gguf_bytes([], [tensor("w", (), 0, 0)]), "'w' .*has 0 dimensions; allowed are 1..4"),
    ("5 dimensions", gguf_bytes([], [tensor("w", (1,) * 5, 0, 0)]), "'w' .*has 5 dimensions; allowed are 1..4"),
    ("dimension 0", gguf_bytes([], [tensor("w", (4, 0), 0, 0)]), r"'w' .*shape \(0, 4\); every dimension must be"),
    ("size overflows", gguf_bytes([], [tensor("w", (1 << 33,) * 3, 0, 0)]), "'w' .*the size below 2.62"),
    ("odd row", gguf_bytes([], [tensor("w", (33,), 8, 0)], bytes(99)), "'w' .*rows of 33 elements.*a multiple of 32"),
    ("offset", gguf_bytes([], [tensor("w", (4,), 0, 16)], bytes(99)), "'w' .*16 is not a multiple of the alignment 32"),
    ("offset far off", gguf_bytes([], [tensor("w", (4,), 0, HUGE)]), r"'w' .*data ends at byte \d+, the file has 64"),
    ("data short", gguf_bytes([], [tensor("w", (4,), 0, 0)], bytes(15)), "'w' .*ends at byte 80, the file has 79"),
    ("escape codes", gguf_bytes([pair("a\n\x1b[2J", 13, b"")], []), r"metadata 'a\\n\\x1b\[2J' .*type 13 is unknown"),
    (
        "shared data",
        gguf_bytes([], [tensor("w", (16,), 0, 0), tensor("v", (4,), 0, 32)], bytes(64)),
        "'v' at byte .*its data begins inside that of 'w'",
    ),
    ("a name twice", gguf_bytes([], [tensor("w", (4,), 0, 0)] * 2, bytes(32)), "'w' .*the name appears twice"),
]


@pytest.mark.parametrize(("raw", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_unsound_files_are_refused_with_place_and_numbers(raw: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"made.gguf: .*{message}"):
        open_gguf(write(tmp_path, raw))


N = 1 << 18
DENSE: dict[str, tuple[list[bytes], list[bytes]]] = {  # as many Python objects as can be asked for with few bytes
    "strings": ([pair("k", ARRAY, array(STRING, N // 11, string("€") * (N // 11)))], []),
    "no text": ([pair("k", ARRAY, array(STRING, N // 8, bytes(N // 8 * 8)))], []),
    "empty arrays": ([pair("k", ARRAY, array(ARRAY, N // 12, array(0, 0, b"") * (N // 12)))], []),
    "small arrays": ([pair("k", ARRAY, array(ARRAY, N // 13, array(0, 1, b"a") * (N // 13)))], []),
    "keys": ([pair(f"{i:04x}", ARRAY, array(0, 0, b"")) for i in range(N // 28)], []),
    "tensors": ([], [tensor(f"{i:04x}", (1,), 99, 0) for i in range(N // 44)]),
    "wide text": ([pair("k", STRING, string("a" * N + "😀"))], []),
    "no UTF-8": ([pair("k", STRING, string(b"\xff" * N))], []),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_file_holds_a_small_multiple_of_its_size(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes(*DENSE[name]))
    size = path.stat().st_size
    start = time.process_time()
    open_gguf(path)
    assert time.process_time() - start < max(1.0, size / 1e6)
    tracemalloc.start()
    try:
        file = open_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 20 * size
    finally:
        tracemalloc.stop()
    assert len(file.metadata) + len(file.tensors) > 0
    if name == "empty arrays":
        assert len({id(a) for a in file.metadata["k"]}) == 1


def test_no_such_file_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf: no such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match=r"is a folder; give the \.gguf file in it"):
        open_gguf(tmp_path)
    for wrong in (5, None, b"model.gguf"):
        with pytest.raises(ModelError, match=r"the path of a model is .*; a str or a path is needed"):
            open_gguf(wrong)  # type: ignore[arg-type]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ModelError, match="is a pipe"):  # opened, it would wait for a writer
            open_gguf(tmp_path / "pipe")
