"""What `convert` makes of checkpoints that the fixtures do not show: head ratios, layouts, parts, types, memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hf_checkpoint import Tensors, dequantised, tiny, write_checkpoint
from numpy.typing import NDArray

from vkbackend.errors import ModelError
from vkbackend.model.convert import convert, write
from vkbackend.model.convert.config import read_config
from vkbackend.model.gguf import open_gguf
from vkbackend.model.hparams import read_hparams

ARCHS = ("qwen35", "qwen35moe", "qwen3next")


def contents(path: Path) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor."""
    file = open_gguf(path)
    return {n: (t.type, t.shape, file.tensor_bytes(n).tobytes()) for n, t in file.tensors.items()}


@pytest.mark.parametrize(("n_k", "n_v"), [(2, 6), (3, 6), (2, 2), (1, 4)])
def test_v_heads_are_tiled(tmp_path: Path, rng: np.random.Generator, n_k: int, n_v: int) -> None:
    """V head h of the file is member h // n_k of the group of k head h % n_k, wherever v heads are."""
    config, t = tiny(rng, n_k=n_k, n_v=n_v)
    file = open_gguf(convert(write_checkpoint(tmp_path / "hf", config, t), tmp_path, "f32"))
    at, r, d, keys = "model.layers.0.linear_attn.", n_v // n_k, 32, 2 * n_k * 32

    def check(name: str, made: NDArray[np.float32], wanted: NDArray[np.float32], dim: int) -> None:
        for h in range(n_v):
            source = (h % n_k) * r + h // n_k
            a, b = made[h * dim : (h + 1) * dim], wanted[source * dim : (source + 1) * dim]
            assert np.array_equal(a, b), f"{name}, head {h}"

    made = {n: dequantised(file, f"blk.0.{n}") for n in ("attn_qkv.weight", "ssm_conv1d.weight", "ssm_a")}
    qkv, conv = t[at + "in_proj_qkv.weight"], t[at + "conv1d.weight"][:, 0]
    assert np.array_equal(made["attn_qkv.weight"][:keys], qkv[:keys])
    assert np.array_equal(made["ssm_conv1d.weight"][:keys], conv[:keys])
    check("attn_qkv", made["attn_qkv.weight"][keys:], qkv[keys:], d)
    check("ssm_conv1d", made["ssm_conv1d.weight"][keys:], conv[keys:], d)
    check("attn_gate", dequantised(file, "blk.0.attn_gate.weight"), t[at + "in_proj_z.weight"], d)
    check("ssm_alpha", dequantised(file, "blk.0.ssm_alpha.weight"), t[at + "in_proj_a.weight"], 1)
    check("ssm_beta", dequantised(file, "blk.0.ssm_beta.weight"), t[at + "in_proj_b.weight"], 1)
    check("ssm_dt", dequantised(file, "blk.0.ssm_dt.bias"), t[at + "dt_bias"], 1)
    check("ssm_a", made["ssm_a"], (-np.exp(t[at + "A_log"].astype(np.float64))).astype(np.float32), 1)
    check("ssm_out", dequantised(file, "blk.0.ssm_out.weight").T, t[at + "out_proj.weight"].T, d)


def test_qwen3next_heads_stay_grouped(tmp_path: Path, rng: np.random.Generator) -> None:
    n_k, n_v, d = 2, 6, 32
    config, t = tiny(rng, "qwen3next", n_k, n_v)
    file = open_gguf(convert(write_checkpoint(tmp_path / "hf", config, t), tmp_path, "f32"))
    at = "model.layers.0.linear_attn."
    groups = t[at + "in_proj_qkvz.weight"].reshape(n_k, -1, 32)  # per k head q, k, v, z
    q, k, v, z = (part.reshape(-1, 32) for part in np.split(groups, [d, 2 * d, 2 * d + 3 * d], axis=1))
    assert np.array_equal(dequantised(file, "blk.0.attn_qkv.weight"), np.concatenate([q, k, v]))
    assert np.array_equal(dequantised(file, "blk.0.attn_gate.weight"), z)
    for name, source in (("ssm_ba.weight", "in_proj_ba.weight"), ("ssm_dt.bias", "dt_bias")):
        assert np.array_equal(dequantised(file, f"blk.0.{name}"), t[at + source])
    assert np.array_equal(dequantised(file, "blk.0.ssm_out.weight"), t[at + "out_proj.weight"])
    assert np.array_equal(dequantised(file, "blk.0.ssm_conv1d.weight"), t[at + "conv1d.weight"][:, 0])


def test_fused_and_separate_experts_are_the_same(tmp_path: Path, rng: np.random.Generator) -> None:
    config, t = tiny(rng, "qwen35moe")
    fused = convert(write_checkpoint(tmp_path / "fused", config, t), tmp_path, "f16")
    for at in ("model.layers.0.", "model.layers.1.", "mtp.layers.0."):
        both, down = t.pop(at + "mlp.experts.gate_up_proj"), t.pop(at + "mlp.experts.down_proj")
        for e in range(4):
            t[f"{at}mlp.experts.{e}.gate_proj.weight"] = both[e, :32]
            t[f"{at}mlp.experts.{e}.up_proj.weight"] = both[e, 32:]
            t[f"{at}mlp.experts.{e}.down_proj.weight"] = down[e]
    assert contents(convert(write_checkpoint(tmp_path / "apart", config, t), tmp_path, "f16")) == contents(fused)


def test_layouts_of_published_checkpoints(tmp_path: Path, rng: np.random.Generator) -> None:
    """Several files, and a model with vision: text_config, model.language_model.*, model.visual.*."""
    config, t = tiny(rng)
    wanted = contents(convert(write_checkpoint(tmp_path / "one", config, t), tmp_path, "q8_0"))
    assert contents(convert(write_checkpoint(tmp_path / "many", config, t, n_shards=3), tmp_path, "q8_0")) == wanted
    vision = {n.replace("model.", "model.language_model.", 1): x for n, x in t.items()}
    vision["model.visual.blocks.0.attn.qkv.weight"] = np.ones((3, 1), np.float32)
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    assert contents(convert(write_checkpoint(tmp_path / "vision", outer, vision), tmp_path, "q8_0")) == wanted


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_pieces_of_any_size(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, arch: str, kind: str
) -> None:
    config, t = tiny(rng, arch)
    folder = write_checkpoint(tmp_path / "hf", config, t)
    wanted = contents(convert(folder, tmp_path, kind))
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(write, "CHUNK", 97)  # less than a row, and a number that nothing is a multiple of
    made = convert(folder, tmp_path / "small.gguf", kind, progress=lambda *at: seen.append(at))
    assert contents(made) == wanted
    total = sum(len(data) for _, _, data in wanted.values())
    assert seen == sorted(seen) and seen[-1] == (total, total) and len(seen) > len(wanted)


def test_bf16_checkpoints_stay_as_they_are(tmp_path: Path, rng: np.random.Generator) -> None:
    config, t = tiny(rng)
    bits: Tensors = {n: (x.view(np.uint32) >> 16).astype(np.uint16) for n, x in t.items()}
    values = {n: (x.astype(np.uint32) << 16).view(np.float32) for n, x in bits.items()}
    folder = write_checkpoint(tmp_path / "hf", config, bits)
    path = convert(folder, tmp_path)
    file = open_gguf(path)
    assert path.name == "hf-BF16.gguf" and file.metadata["general.file_type"] == 32
    for name, source in (("token_embd", "model.embed_tokens"), ("blk.1.attn_q", "model.layers.1.self_attn.q_proj")):
        made = file.tensor_bytes(name + ".weight")
        assert file.tensors[name + ".weight"].type == gguf.GGMLQuantizationType.BF16
        assert np.array_equal(made.view(np.uint16), bits[source + ".weight"].reshape(-1)), name
    norm = dequantised(file, "output_norm.weight")
    assert norm.dtype == np.float32 and np.array_equal(norm, values["model.norm.weight"] + np.float32(1))
    # The same values from a float32 checkpoint.
    assert contents(convert(write_checkpoint(tmp_path / "f32", config, values), tmp_path, "bf16")) == contents(path)


def test_rows_that_blocks_do_not_divide_become_f16(tmp_path: Path, rng: np.random.Generator) -> None:
    config, t = tiny(rng)
    config["intermediate_size"] = 48
    for name in [n for n in t if ".mlp." in n]:
        t[name] = t[name][:, :48] if "down" in name else t[name][:48]
    file = open_gguf(convert(write_checkpoint(tmp_path / "hf", config, t), tmp_path, "q8_0"))
    kinds = {n: gguf.GGMLQuantizationType(file.tensors[f"blk.0.ffn_{n}.weight"].type).name for n in ("up", "down")}
    assert kinds == {"up": "Q8_0", "down": "F16"}


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
def test_parts(tmp_path: Path, rng: np.random.Generator, arch: str) -> None:
    config, t = tiny(rng, arch)
    folder = write_checkpoint(tmp_path / "hf", config, t)
    both, trunk = convert(folder, tmp_path / "both.gguf", "f32"), convert(folder, tmp_path / "t.gguf", "f32", "without")
    block = convert(folder, tmp_path / "b.gguf", "f32", "only")
    assert block.name == "mtp-b.gguf"
    shared = {"token_embd.weight", "output.weight", "output_norm.weight"}
    whole = contents(both)
    assert contents(trunk) == {n: x for n, x in whole.items() if not n.startswith("blk.2.")}
    assert contents(block) == {n: x for n, x in whole.items() if n.startswith("blk.2.") or n in shared}
    for path, n_layer, n_nextn in ((both, 3, 1), (trunk, 2, 0), (block, 3, 1)):
        hparams = read_hparams(open_gguf(path))
        assert (hparams.n_layer, hparams.n_nextn, hparams.recurrent[:2]) == (n_layer, n_nextn, (True, False))
    assert f"{arch}.nextn_predict_layers" not in open_gguf(trunk).metadata


def test_tensors_that_few_checkpoints_have(tmp_path: Path, rng: np.random.Generator) -> None:
    config, t = tiny(rng)
    t["mtp.embed_tokens.weight"] = t["model.embed_tokens.weight"] + np.float32(1)
    t["mtp.lm_head.weight"] = t["lm_head.weight"] + np.float32(1)
    t["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    file = open_gguf(convert(write_checkpoint(tmp_path / "hf", config, t), tmp_path, "f32"))
    for name, source in (("embed_tokens", "mtp.embed_tokens"), ("shared_head_head", "mtp.lm_head")):
        assert np.array_equal(dequantised(file, f"blk.2.nextn.{name}.weight"), t[source + ".weight"])
    assert not any("rotary" in name for name in file.tensors)


def test_a_checkpoint_without_the_block_its_config_speaks_of(tmp_path: Path, rng: np.random.Generator) -> None:
    config, t = tiny(rng)
    folder = write_checkpoint(tmp_path / "hf", config, {n: x for n, x in t.items() if not n.startswith("mtp.")})
    assert read_hparams(open_gguf(convert(folder, tmp_path))).n_nextn == 0
    with pytest.raises(ModelError, match=r"hf: has no MTP block"):
        convert(folder, tmp_path, mtp="only")


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_tied_embeddings(tmp_path: Path, rng: np.random.Generator, place: str) -> None:
    config, t = tiny(rng)
    outer = {"architectures": config["architectures"], "text_config": config}
    (config if place == "inside" else outer)["tie_word_embeddings"] = True
    made = contents(convert(write_checkpoint(tmp_path / "hf", outer, t), tmp_path / "a.gguf", "f32"))
    assert "output.weight" not in made
    del t["lm_head.weight"]
    assert contents(convert(write_checkpoint(tmp_path / "hf", outer, t), tmp_path / "b.gguf", "f32")) == made


def test_sizes_in_the_metadata(tmp_path: Path, rng: np.random.Generator) -> None:
    config, t = tiny(rng, "qwen35moe")
    del config["rope_parameters"], config["layer_types"]  # older configs
    config |= {"rope_theta": 5e6, "partial_rotary_factor": 0.5, "full_attention_interval": 2}
    file = open_gguf(convert(write_checkpoint(tmp_path / "hf", config, t), tmp_path))
    h = read_hparams(file)
    assert (h.arch, h.n_embd, h.n_head, h.n_head_kv, h.head_dim, h.n_rot) == ("qwen35moe", 32, 2, 1, 16, 8)
    assert (h.rope_freq_base, h.rope_sections, h.rms_eps) == (5e6, (11, 11, 10, 0), pytest.approx(1e-6))
    assert (h.n_k_heads, h.n_v_heads, h.head_k_dim, h.head_v_dim, h.conv_kernel) == (2, 6, 32, 32, 4)
    assert (h.n_expert, h.n_expert_used, h.n_ff_exp, h.n_ff_shexp) == (4, 2, 32, 32)
    assert (h.n_vocab, h.n_ctx_train, h.recurrent) == (1024, 512, (True, False, False))


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_memory_does_not_grow_with_the_model(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config, t = tiny(rng)
    n_ff = config["intermediate_size"] = 1 << 16
    for name in [n for n in t if ".mlp." in n]:
        t[name] = np.tile(t[name], (1, n_ff // 64) if "down" in name else (n_ff // 64, 1))
    largest = max(x.nbytes for x in t.values())  # 8 MiB, nine times
    folder = write_checkpoint(tmp_path / "hf", config, t)
    monkeypatch.setattr(write, "CHUNK", 1 << 16)  # its usual size would hide what grows with tensors as small as these
    tracemalloc.start()
    try:
        convert(folder, tmp_path, kind)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < largest / 2, f"{peak >> 10} KiB at once, the largest tensor has {largest >> 10}"


def test_what_configs_leave_out(tmp_path: Path, rng: np.random.Generator) -> None:
    """Defaults are transformers': a quarter of the head rotates, every fourth layer attends."""
    config, _ = tiny(rng)
    for key in ("rope_parameters", "layer_types", "full_attention_interval"):
        del config[key]
    config |= {"num_hidden_layers": 8, "rope_theta": 1e6, "rope_scaling": {"mrope_section": [2, 1, 1]}, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    c = read_config(tmp_path)
    assert (c.n_rot, c.interval, c.rope_sections) == (8, 4, (2, 1, 1, 0))
    assert c.recurrent == (True, True, True, False) * 2
