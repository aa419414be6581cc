"""Checkpoints that can not be converted: what is said, and that nothing is left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_checkpoint import Tensors, tiny, write_checkpoint, write_safetensors

from vkbackend.errors import ModelError
from vkbackend.model.convert import convert
from vkbackend.model.convert.checkpoint import open_checkpoint, read_rows

Change = Callable[[dict[str, Any], Tensors], object]


def refuse(tmp_path: Path, config: dict[str, Any], tensors: Tensors, message: str, **how: Any) -> None:
    folder = write_checkpoint(tmp_path / "hf", config, tensors)
    with pytest.raises(ModelError, match=message):
        convert(folder, tmp_path / "out.gguf", **how)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: c.update(architectures=["LlamaForCausalLM"]), r"is 'LlamaForCausalLM'; Qwen3_5ForCausalLM, "),
        (lambda c, t: c.update(architectures=[["x"]]), r"the architecture is \['x'\]"),
        (lambda c, t: c.update(quantization_config={"bits": 4}), "weights are quantised"),
        (lambda c, t: c.update(text_config=[]), "'text_config' is no object"),
        (lambda c, t: c.pop("hidden_size"), r"config\.json: 'hidden_size' is missing; it must be a whole number"),
        (lambda c, t: c.update(vocab_size=True), "'vocab_size' is True; it must be a whole number"),
        (lambda c, t: c.update(rms_norm_eps="1e-6"), "'rms_norm_eps' is '1e-6'; it must be a positive number"),
        (lambda c, t: c.update(rms_norm_eps=float("nan")), "'rms_norm_eps' is nan"),
        (lambda c, t: c.update(num_key_value_heads=3), "'num_key_value_heads' is 3; .*divisor"),
        (lambda c, t: c.update(linear_num_value_heads=5), "'linear_num_value_heads' is 5; .*multiple"),
        (lambda c, t: c.update(layer_types=["linear_attention"] * 3), r"'layer_types' .*2 \(num_hidden_layers\)"),
        (lambda c, t: c.update(layer_types=["linear_attention", "sliding"]), "'layer_types'"),
        (lambda c, t: c.update(attn_output_gate=False), "'attn_output_gate' is False"),
        (lambda c, t: c.update(mtp_num_hidden_layers=2), "MTP blocks .* is 2"),
        (lambda c, t: c["rope_parameters"].update(rope_type="yarn"), "type is 'yarn'"),
        (lambda c, t: c["rope_parameters"].pop("rope_theta"), "'rope_theta' is missing"),
        (lambda c, t: c["rope_parameters"].update(mrope_section=[1, -1, 0]), "'mrope_section'"),
        (lambda c, t: t.pop("model.embed_tokens.weight"), "no tensor 'model.embed_tokens.weight'"),
        (lambda c, t: t.pop("lm_head.weight"), "no tensor 'lm_head.weight'"),
        (lambda c, t: t.pop("mtp.fc.weight"), "no tensor 'mtp.fc.weight'"),
        (lambda c, t: t.pop("model.layers.0.linear_attn.A_log"), r"no tensor 'model\.layers\.0\.linear_attn\.A_log'"),
        (lambda c, t: c.update(head_dim=32), r"q_proj\.weight' has shape \[64, 32\]; \[128, 32\] is needed"),
        (lambda c, t: t.update({"model.layers.0.extra": t["lm_head.weight"]}), r"unknown.*'model\.layers\.0\.extra'"),
        (lambda c, t: t.update({"mtp.extra": t["lm_head.weight"]}), r"unknown.*'mtp\.extra'"),
        (lambda c, t: t.update({"model.layers.2.extra": t["lm_head.weight"]}), "1 tensors are unknown"),
        (lambda c, t: t.update({"lm_head.weight": t["lm_head.weight"].astype(np.int64)}), "elements of type I64"),
        (lambda c, t: t["model.layers.1.mlp.up_proj.weight"].fill(np.nan), r"'blk\.1\.ffn_up\.weight' holds nan"),
        (lambda c, t: t["lm_head.weight"].fill(-7e4), r"'output\.weight' holds 70000; F16"),
        (lambda c, t: t["model.norm.weight"].fill(np.inf), r"'output_norm\.weight' holds inf"),
        (lambda c, t: t["lm_head.weight"].fill(7e4), r"'output\.weight' holds 70000; F16 .* 65504: take bf16"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, rng: np.random.Generator, change: Change, message: str) -> None:
    config, t = tiny(rng)
    change(config, t)
    refuse(tmp_path, config, t, message, type="f16")


def test_layers_without_experts(tmp_path: Path, rng: np.random.Generator) -> None:
    config, t = tiny(rng, "qwen35moe")
    refuse(tmp_path, {**config, "mlp_only_layers": [1]}, t, "some layers have no experts")


@pytest.mark.parametrize("mtp", ["only", "without"])
def test_qwen3next_has_no_parts(tmp_path: Path, rng: np.random.Generator, mtp: str) -> None:
    refuse(tmp_path, *tiny(rng, "qwen3next"), r"qwen3next can not be split .*qwen35, qwen35moe can", mtp=mtp)


def test_arguments(tmp_path: Path, rng: np.random.Generator) -> None:
    config, t = tiny(rng)
    refuse(tmp_path, config, t, "type 'q4_0' can not be written; f32, f16, bf16, q8_0 can", type="q4_0")
    refuse(tmp_path, config, t, "mtp='both'", mtp="both")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ModelError, match="is part of the checkpoint"):
        convert(tmp_path / "hf", tmp_path / "link.gguf", force=True)
    with pytest.raises(ModelError, match=r"model\.safetensors: is no folder"):
        convert(tmp_path / "hf", tmp_path / "hf" / "model.safetensors", force=True)


def test_folders(tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        convert(tmp_path / "hf")
    folder = write_checkpoint(tmp_path / "hf", *tiny(rng))
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"config\.json: holds a list"):
        convert(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: can not be read as JSON"):
        convert(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        convert(folder)


def test_shards(tmp_path: Path, rng: np.random.Generator) -> None:
    config, t = tiny(rng)
    folder = write_checkpoint(tmp_path / "hf", config, t, n_shards=3)
    index = folder / "model.safetensors.index.json"
    good = index.read_text()

    def refuses(message: str, text: str = good) -> None:
        index.write_text(text)
        with pytest.raises(ModelError, match=message):
            convert(folder, tmp_path / "out.gguf")

    refuses("'weight_map' must map", '{"weight_map": {"a": 1}}')
    refuses("'weight_map' must map", "{}")
    refuses("a file beside the index", '{"weight_map": {"a": "../a.safetensors"}}')
    places = json.loads(good)
    places["weight_map"]["lost"] = "model-00002-of-00003.safetensors"
    refuses(r"00002-of-00003\.safetensors: 'lost' is not in it", json.dumps(places))
    second, third = (folder / f"model-0000{i}-of-00003.safetensors" for i in (2, 3))
    kept = second.read_bytes()
    write_safetensors(second, dict(t))
    refuses(r"is also in model-0000\d-of-00003")
    second.write_bytes(kept)
    third.rename(folder / "elsewhere")
    refuses(r"1 of 3 files are missing: model-00003-of-00003\.safetensors")
    assert not (tmp_path / "out.gguf").exists()


def test_damaged_files(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_checkpoint(tmp_path / "hf", *tiny(rng))
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def refuses(message: str, data: bytes) -> None:
        path.write_bytes(data)
        with pytest.raises(ModelError, match=message):
            convert(folder, tmp_path / "out.gguf")

    def with_entry(**changes: Any) -> bytes:
        entry = {**header["lm_head.weight"], **changes}
        raw = json.dumps({**header, "lm_head.weight": {k: v for k, v in entry.items() if v is not None}}).encode()
        return len(raw).to_bytes(8, "little") + raw + whole[8 + length :]

    refuses(r"ends at byte \d+, the file has \d+; it is truncated", whole[:-1])
    refuses(r"the header is to have \d+ bytes, at most 92 are possible", whole[:100])
    refuses(r"at most 0 are possible", b"")
    refuses(r"at most 0 are possible", whole[:5])
    refuses("the header is no JSON", whole[:8] + b"x" + whole[9:])
    refuses("the header is no JSON object", (2).to_bytes(8, "little") + b"[]")
    refuses("entry of 'lm_head.weight' is not sound", with_entry(dtype=None))
    refuses("entry of 'lm_head.weight' is not sound", with_entry(data_offsets=[8, 4]))
    refuses("entry of 'lm_head.weight' is not sound", with_entry(shape=[-1024, -32]))
    refuses("entry of 'lm_head.weight' is not sound", with_entry(shape=["1024", 32]))
    refuses(r"'lm_head.weight' has 131072 bytes; F32 \[1024, 33\] has 135168", with_entry(shape=[1024, 33]))
    refuses(r"elements of type F8_E4M3; F32, F16, BF16 can be converted", with_entry(dtype="F8_E4M3"))
    path.write_bytes(whole)
    assert convert(folder, tmp_path / "out.gguf").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out.gguf"]


def test_a_file_cut_short_while_it_is_read(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_checkpoint(tmp_path / "hf", *tiny(rng))
    tensors = open_checkpoint(folder)
    name, last = max(tensors.items(), key=lambda item: item[1].offset)
    with (folder / "model.safetensors").open("ab") as f:
        f.truncate(last.offset + 4)
    with pytest.raises(ModelError, match=rf"'{re.escape(name)}': \d+ elements are needed at byte \d+, 1 are there"):
        read_rows(last, name, 0, last.n_rows)


def test_a_failing_disk_leaves_the_old_file(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "hf", *tiny(rng))
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        convert(folder, out, progress=progress, force=True)
    assert out.read_bytes() == b"old" and sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out.gguf"]
