"""Choosing the file of a draft by names, and beside a model on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from vkbackend.errors import ModelError
from vkbackend.spec import model_files
from vkbackend.spec.model_files import (
    choose_draft,
    choose_main,
    file_type,
    find_draft,
    has_block,
    is_main_file,
    part_names,
    type_bits,
)


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
        "x-imatrix.gguf",
        "x.imatrix.gguf",
        "X-mmproj-F16.gguf",
        "x_mmproj_q8_0.gguf",
        "x-mtp-q8_0.gguf",
        "x-imatrix-q4_k_m.gguf",
        "b/y.gguf",
    ]
    assert [n for n in names if is_main_file(n)] == ["x-mtp-q8_0.gguf", "x-imatrix-q4_k_m.gguf", "b/y.gguf"]


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
    assert choose_draft(["b/mtp-q8_0.gguf", "mtp-q8_0.gguf"], "x-q8_0.gguf") == "mtp-q8_0.gguf"
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
    [
        ("", "x-Q4_K_M.gguf"),
        ("q8_0", "x-Q8_0.gguf"),
        ("UD-Q4_K_XL", "x-UD-Q4_K_XL.gguf"),
        ("Q4_K_M", "x-Q4_K_M.gguf"),
        ("q4_k", "x-Q4_K_M.gguf"),
        ("Q8", "x-Q8_0.gguf"),
    ],
)
def test_the_main_file(quant: str, chosen: str) -> None:
    assert choose_main(NAMES, quant) == chosen


def test_side_files_are_never_chosen() -> None:
    names = ["a-imatrix.gguf", "a-mmproj-F16.gguf", "mmproj-Q6_K.gguf", "mtp-a-F16.gguf", "b-Q6_K.gguf"]
    assert choose_main(names) == choose_main(names, "q6_k") == "b-Q6_K.gguf"
    with pytest.raises(ModelError, match="'F16' in it; there are q6_k"):
        choose_main(names, "F16")


def test_the_main_file_without_the_usual_type() -> None:
    assert choose_main(["b-Q8_0.gguf", "a-Q6_K.gguf", "mtp-a-Q4_K_M.gguf"]) == "b-Q8_0.gguf"
    assert choose_main(["b-Q5_0.gguf", "a-Q6_K.gguf", "mtp-a-Q4_K_M.gguf"]) == "a-Q6_K.gguf"


def test_the_nearest_name_of_a_type() -> None:
    assert choose_main(["a-Q5_K_S.gguf", "b-Q5_K_M.gguf", "c-Q5_K_L.gguf"], "Q5_K") == "b-Q5_K_M.gguf"
    assert choose_main(["a-Q6_K_L.gguf", "b-Q6_K.gguf"], "Q6_K") == "b-Q6_K.gguf"
    assert choose_main(["a-Q4_0.gguf", "a-Q40.gguf", "Q4_1/a.gguf"], "Q4_1") == "Q4_1/a.gguf"
    assert choose_main(["Q8_0/a-Q4_0.gguf", "b/c-Q8_0.gguf"], "Q8_0") == "b/c-Q8_0.gguf"
    with pytest.raises(ModelError, match="'Q4' in it; there are q5_0"):
        choose_main(["a-Q5_0.gguf"], "Q4")


def test_split_models() -> None:
    parts = [f"Q8_0/x-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    names = [*reversed(parts), "x-Q2_K.gguf"]
    assert choose_main(names, "q8_0") == choose_main(parts[1:]) == parts[0]
    assert [part_names(n) for n in (*parts, "x-Q2_K.gguf")] == [parts, parts, parts, ["x-Q2_K.gguf"]]
    drafts = ["mtp-x-Q8_0-00002-of-00002.gguf", "mtp-x-Q8_0-00001-of-00002.gguf"]
    assert choose_draft(drafts, "x-Q8_0.gguf") == drafts[1]


def test_the_block_of_a_split_model_is_in_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkbackend.model import gguf

    def open_part(path: Path) -> File:
        return File("blk.8.nextn.eh_proj.weight" if "00002-of" in path.name else "blk.0.attn_norm.weight")

    monkeypatch.setattr(gguf, "open_gguf", open_part)
    assert has_block(tmp_path / "x-00001-of-00002.gguf") and not has_block(tmp_path / "x-00001-of-00001.gguf")


@pytest.mark.parametrize(
    ("names", "quant", "message"),
    [
        (["mmproj.gguf", "a.txt"], "", "o/n: there is no GGUF"),
        (NAMES, "q3_k_s", "'q3_k_s'.*bf16, q4_k_m, q8_0"),
    ],
)
def test_no_main_file(names: list[str], quant: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        choose_main(names, quant, "o/n")
