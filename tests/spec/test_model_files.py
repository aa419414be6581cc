"""Choosing the file of a draft by names, and beside a model on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from vkbackend.errors import ModelError
from vkbackend.spec import model_files
from vkbackend.spec.model_files import choose_draft, choose_main, file_type, find_draft, is_main_file, type_bits


@pytest.mark.parametrize(
    ("name", "kind", "bits"),
    [
        ("Qwen3.5-4B-Q4_K_M.gguf", "q4_k_m", 4),
        ("a/b/Qwen3.5-4B-UD-Q5_K_XL.gguf", "q5_k_xl", 5),
        ("model.IQ4_NL.gguf", "iq4_nl", 4),
        ("demo-qwen35-mtp-q8_0.gguf", "q8_0", 8),
        ("mtp-dense-f32.gguf", "f32", 32),
        ("x-BF16.gguf", "bf16", 16),
        ("x-MXFP4_MOE.gguf", "mxfp4_moe", 4),
        ("Qwen35.gguf", "", 0),
        ("q8_0/model.gguf", "", 0),
    ],
)
def test_names_of_types(name: str, kind: str, bits: int) -> None:
    assert (file_type(name), type_bits(name)) == (kind, bits)


def test_side_files_are_no_models() -> None:
    names = [
        "a/mmproj-F16.gguf",
        "imatrix.gguf",
        "mtp-x-q8_0.gguf",
        "MTP-x.GGUF",
        "readme.md",
        "x-mtp-q8_0.gguf",
        "b/y.gguf",
    ]
    assert [n for n in names if is_main_file(n)] == ["x-mtp-q8_0.gguf", "b/y.gguf"]


def test_the_deepest_shared_folder_comes_before_the_nearest_bits() -> None:
    names = [
        "mtp-q8_0.gguf",
        "a/mtp-q2_k.gguf",
        "a/b/mtp-f16.gguf",
        "a/b/mtp-q5_k.gguf",
        "a/c/mtp-q8_0.gguf",
        "a/b/x.gguf",
    ]
    assert choose_draft(names, "a/b/x-q8_0.gguf") == "a/b/mtp-q5_k.gguf"
    assert choose_draft(names, "a/b/x-bf16.gguf") == "a/b/mtp-f16.gguf"
    assert choose_draft(names, "a/x-q8_0.gguf") == "a/c/mtp-q8_0.gguf"
    assert choose_draft(names, "z/x-q8_0.gguf") in names
    assert choose_draft(["x.gguf", "mmproj.gguf"], "x.gguf") is None


class File:
    def __init__(self, *tensors: str) -> None:
        self.tensors = dict.fromkeys(tensors)


def test_beside_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkbackend.model import gguf

    main = tmp_path / "model-q4_k_m.gguf"
    for name in (main.name, "mtp-model-q8_0.gguf", "mtp-model-q4_0.gguf", "mtp-notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "mtp-folder-q4_k_m.gguf").mkdir()
    monkeypatch.setattr(gguf, "open_gguf", lambda path: File("blk.0.attn_norm.weight"))
    assert find_draft(main) == tmp_path / "mtp-model-q4_0.gguf"
    monkeypatch.setattr(gguf, "open_gguf", lambda path: File("blk.8.nextn.eh_proj.weight"))
    assert find_draft(main) is None


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no\.gguf"):
        model_files.find_draft(tmp_path / "no.gguf")


NAMES = [
    "README.md", "mmproj-F16.gguf", "x-Q8_0.gguf", "x-Q4_K_M.gguf", "x-UD-Q4_K_XL.gguf", "x-BF16.gguf",
    "mtp-x-Q8_0.gguf", "old/a-Q4_K_M.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("quant", "chosen"),
    [("", "x-Q4_K_M.gguf"), ("q8_0", "x-Q8_0.gguf"), ("UD-Q4_K_XL", "x-UD-Q4_K_XL.gguf"), ("Q4_K_M", "x-Q4_K_M.gguf")],
)
def test_the_main_file(quant: str, chosen: str) -> None:
    assert choose_main(NAMES, quant) == chosen


def test_the_main_file_without_the_usual_type() -> None:
    assert choose_main(["b-Q8_0.gguf", "a-Q6_K.gguf", "mtp-a-Q4_K_M.gguf"]) == "a-Q6_K.gguf"


@pytest.mark.parametrize(
    ("names", "quant", "message"),
    [
        (["mmproj.gguf", "a.txt"], "", "o/n: there is no GGUF"),
        (NAMES, "q3_k_s", "'q3_k_s'.*bf16, q4_k_m, q8_0"),
        (["x-Q4_K_M-00001-of-00002.gguf", "x-Q4_K_M-00002-of-00002.gguf"], "", "split"),
    ],
)
def test_no_main_file(names: list[str], quant: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        choose_main(names, quant, "o/n")
