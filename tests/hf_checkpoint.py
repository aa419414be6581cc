"""Hugging Face checkpoints for tests: written by hand, and GGUF files turned back into them.

The way back knows nothing of the converter: whole tensors, reshaped and transposed, from the format's description.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from fixture_paths import fixture
from numpy.typing import NDArray

from vkbackend.model.gguf import GGUFFile, open_gguf

Tensors = dict[str, NDArray[Any]]
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMES = {"qwen35": "Qwen3_5ForCausalLM", "qwen35moe": "Qwen3_5MoeForCausalLM", "qwen3next": "Qwen3NextForCausalLM"}
_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64", "uint8": "F8_E4M3"}


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """One safetensors file; uint16 arrays are the bits of bf16 values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, t in tensors.items():
        header[name] = {"dtype": _DTYPES[t.dtype.name], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(t.tobytes() for t in tensors.values()))


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: Tensors, n_shards: int = 1) -> Path:
    """A checkpoint's folder with the fixtures' tokenizer. n_shards > 1: spread over files with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["architectures"][0] == NAMES["qwen3next"])
    if n_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    places = {}
    for i in range(n_shards):
        file = f"model-{i + 1:05d}-of-{n_shards:05d}.safetensors"
        shard = dict(list(tensors.items())[i::n_shards])
        write_safetensors(folder / file, shard)
        places.update(dict.fromkeys(shard, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def write_tokenizer(folder: Path, qwen2: bool = False, **changes: Any) -> None:
    """tokenizer.json and tokenizer_config.json as the fixtures' checkpoints have them."""
    tokenizer = json.loads(fixture("hf/dense/tokenizer.json").read_text())
    if qwen2:
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = QWEN2_SPLIT
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, **changes}))
    names = {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def from_gguf(path: Path, folder: Path) -> Path:
    """The checkpoint that a GGUF file of this family was made from, up to the order of tensors."""
    file = open_gguf(path)
    config = _config(file)
    return write_checkpoint(folder, config, _tensors(file, config))


def dequantised(file: GGUFFile, name: str) -> NDArray[np.float32]:
    info = file.tensors[name]
    raw = gguf.quant_shape_to_byte_shape(info.shape, gguf.GGMLQuantizationType(info.type))
    data = file.tensor_bytes(name).reshape(raw)
    values: NDArray[np.float32] = gguf.dequantize(data, gguf.GGMLQuantizationType(info.type)).reshape(info.shape)
    return values


def _config(file: GGUFFile) -> dict[str, Any]:
    arch = file.metadata["general.architecture"]
    k = {key.removeprefix(arch + "."): value for key, value in file.metadata.items()}
    n_nextn = k["nextn_predict_layers"]
    rope: dict[str, Any] = {
        "rope_theta": k["rope.freq_base"],
        "partial_rotary_factor": k["rope.dimension_count"] / k["attention.key_length"],
    }
    if arch != "qwen3next":
        rope = {"rope_parameters": {**rope, "mrope_section": k["rope.dimension_sections"].tolist()[:3]}}
    config = {
        "architectures": [NAMES[arch]],
        "num_hidden_layers": k["block_count"] - n_nextn,
        "max_position_embeddings": k["context_length"],
        "hidden_size": k["embedding_length"],
        "vocab_size": len(k["tokenizer.ggml.tokens"]),
        "intermediate_size": k.get("feed_forward_length"),
        "num_attention_heads": k["attention.head_count"],
        "num_key_value_heads": k["attention.head_count_kv"],
        "head_dim": k["attention.key_length"],
        "rms_norm_eps": float(f"{k['attention.layer_norm_rms_epsilon']:.6g}"),
        "linear_conv_kernel_dim": k["ssm.conv_kernel"],
        "linear_key_head_dim": k["ssm.state_size"],
        "linear_value_head_dim": k["ssm.inner_size"] // k["ssm.time_step_rank"],
        "linear_num_key_heads": k["ssm.group_count"],
        "linear_num_value_heads": k["ssm.time_step_rank"],
        "full_attention_interval": k["full_attention_interval"],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **rope,
    }
    if arch != "qwen3next":  # whose config.json says nothing of its MTP block
        config["mtp_num_hidden_layers"] = n_nextn
    for ours, theirs in (
        ("expert_count", "num_experts"),
        ("expert_used_count", "num_experts_per_tok"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        config[theirs] = k.get(ours)
    return config


_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
    "ffn_gate_exps.weight": "mlp.experts.{e}.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.{e}.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.{e}.down_proj.weight",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}
_TILED_ROWS = ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias")


def _tensors(file: GGUFFile, config: dict[str, Any]) -> Tensors:
    out: Tensors = {}
    n_main, n_k, n_v = (config[k] for k in ("num_hidden_layers", "linear_num_key_heads", "linear_num_value_heads"))
    tiled = config["architectures"][0] != NAMES["qwen3next"]
    key_rows = 2 * n_k * config["linear_key_head_dim"]

    def grouped(x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows of v heads in tiles, back in groups by k head."""
        d = x.shape[0] // n_v
        return x.reshape(n_v // n_k, n_k, d, -1).swapaxes(0, 1).reshape(x.shape) if tiled else x

    for name in file.tensors:
        x = dequantised(file, name)
        block, _, rest = name.removeprefix("blk.").partition(".") if name.startswith("blk.") else ("", "", name)
        if rest.endswith("norm.weight") and rest != "ssm_norm.weight":
            x = x - np.float32(1)
        if rest in _OUTSIDE:
            out[_OUTSIDE[rest]] = x
            continue
        i = int(block)
        prefix = f"model.layers.{i}." if i < n_main else f"mtp.layers.{i - n_main}."
        if rest in _TILED_ROWS:
            x = grouped(x)
        elif rest == "ssm_out.weight":
            x = grouped(np.ascontiguousarray(x.T)).T
        elif rest in ("attn_qkv.weight", "ssm_conv1d.weight"):
            x = np.concatenate([x[:key_rows], grouped(x[key_rows:])])
        if rest == "ssm_a":
            x = np.log(-x.astype(np.float64)).astype(np.float32)
        if rest == "ssm_conv1d.weight":
            x = x[:, None, :]
        if rest == "ffn_gate_inp_shexp.weight":
            x = x.reshape(1, -1)
        x = np.ascontiguousarray(x)
        if "{e}" in _BLOCK[rest]:
            out.update({prefix + _BLOCK[rest].format(e=e): x[e] for e in range(len(x))})
        else:
            out[prefix + _BLOCK[rest]] = x
    return out if tiled else _packed(out, n_k)


def _packed(tensors: Tensors, n_k: int) -> Tensors:
    """Qwen3-Next's in_proj_qkvz: per k head q, k, v, z."""
    out: Tensors = {}
    for name, x in tensors.items():
        if name.endswith("in_proj_qkv.weight"):
            z = tensors[name.replace("in_proj_qkv", "in_proj_z")]
            q, k, v = np.split(x, [(len(x) - len(z)) // 2, len(x) - len(z)])
            parts = [part.reshape(n_k, -1, x.shape[1]) for part in (q, k, v, z)]
            out[name.replace("in_proj_qkv", "in_proj_qkvz")] = np.concatenate(parts, 1).reshape(-1, x.shape[1])
        elif not name.endswith("in_proj_z.weight"):
            out[name] = x
    return out


def tiny(rng: np.random.Generator, arch: str = "qwen35", n_k: int = 2, n_v: int = 6) -> tuple[dict[str, Any], Tensors]:
    """A small random model: its config and its tensors, float32, one MTP block. Experts are fused in qwen35moe only."""
    n_embd, n_ff, dim, n_main, n_vocab, taps = 32, 64, 32, 2, 1024, 4
    config: dict[str, Any] = {
        "architectures": [NAMES[arch]],
        "num_hidden_layers": n_main,
        "max_position_embeddings": 512,
        "hidden_size": n_embd,
        "vocab_size": n_vocab,
        "intermediate_size": n_ff,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": taps,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_num_key_heads": n_k,
        "linear_num_value_heads": n_v,
        "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": 2,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    t: Tensors = {}

    def add(name: str, *shape: int) -> None:
        t[name] = rng.standard_normal(shape).astype(np.float32)

    add("model.embed_tokens.weight", n_vocab, n_embd)
    add("lm_head.weight", n_vocab, n_embd)
    add("mtp.fc.weight", n_embd, 2 * n_embd)
    for name in ("model.norm", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"):
        add(name + ".weight", n_embd)
    for at in ("model.layers.0.", "model.layers.1.", "mtp.layers.0."):
        add(at + "input_layernorm.weight", n_embd)
        add(at + "post_attention_layernorm.weight", n_embd)
        if at == "model.layers.0.":
            keys, values, of = 2 * n_k * dim, n_v * dim, at + "linear_attn."
            if arch == "qwen3next":
                add(of + "in_proj_qkvz.weight", keys + 2 * values, n_embd)
                add(of + "in_proj_ba.weight", 2 * n_v, n_embd)
            else:
                add(of + "in_proj_qkv.weight", keys + values, n_embd)
                add(of + "in_proj_z.weight", values, n_embd)
                add(of + "in_proj_a.weight", n_v, n_embd)
                add(of + "in_proj_b.weight", n_v, n_embd)
            add(of + "conv1d.weight", keys + values, 1, taps)
            add(of + "dt_bias", n_v)
            add(of + "A_log", n_v)
            add(of + "norm.weight", dim)
            add(of + "out_proj.weight", n_embd, values)
        else:
            for name, rows in (("q", 64), ("k", 16), ("v", 16)):
                add(f"{at}self_attn.{name}_proj.weight", rows, n_embd)
            add(at + "self_attn.o_proj.weight", n_embd, 32)
            add(at + "self_attn.q_norm.weight", 16)
            add(at + "self_attn.k_norm.weight", 16)
        if arch == "qwen35":
            _swiglu(add, at + "mlp.", n_embd, n_ff)
            continue
        add(at + "mlp.gate.weight", 4, n_embd)
        add(at + "mlp.shared_expert_gate.weight", 1, n_embd)
        _swiglu(add, at + "mlp.shared_expert.", n_embd, 32)
        if arch == "qwen35moe":
            add(at + "mlp.experts.gate_up_proj", 4, 64, n_embd)
            add(at + "mlp.experts.down_proj", 4, n_embd, 32)
        for e in range(4 if arch == "qwen3next" else 0):
            _swiglu(add, f"{at}mlp.experts.{e}.", n_embd, 32)
    return config, t


def _swiglu(add: Callable[..., None], at: str, n_embd: int, n_ff: int) -> None:
    add(at + "gate_proj.weight", n_ff, n_embd)
    add(at + "up_proj.weight", n_ff, n_embd)
    add(at + "down_proj.weight", n_embd, n_ff)
