"""Tiny qwen35 and qwen35moe models for tests, written with gguf-py: random float32 weights, a byte vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

N_EMBD, N_FF = 64, 64
N_HEAD, N_HEAD_KV, HEAD_DIM, N_ROT = 2, 1, 32, 8
N_K_HEADS, N_V_HEADS, LINEAR_DIM, TAPS = 1, 2, 16, 4
N_FF_EXP, N_FF_SHEXP = 32, 48


@dataclass(frozen=True)
class Heads:
    """Numbers and sizes of heads: of attention, and of gated delta net layers (k and v heads of one size)."""

    n_head: int = N_HEAD
    n_head_kv: int = N_HEAD_KV
    head_dim: int = HEAD_DIM
    n_rot: int = N_ROT
    n_k_heads: int = N_K_HEADS
    n_v_heads: int = N_V_HEADS
    linear_dim: int = LINEAR_DIM


HEADS = Heads()


def write_model(
    path: Path,
    seed: int,
    n_vocab: int = 64,
    n_main: int = 4,
    interval: int = 2,
    head: str = "random",
    sharp: float = 3.0,
    experts: tuple[int, int] | None = None,
    heads: Heads = HEADS,
    head_type: str = "F32",
) -> Path:
    """Writes a model with an MTP block.

    head: "random": nothing ties the block to the trunk. "perfect": every mixer and feed-forward adds nothing, so that
    the trunk's next token depends on the last token only, and the block predicts the same. sharp: scale of the logits.
    experts: (used by a token, of all) makes it a qwen35moe. head_type: of the embedding table and the output matrix.
    """
    rng = np.random.default_rng(seed)
    still = head == "perfect"
    arch = "qwen35moe" if experts else "qwen35"
    w = gguf.GGUFWriter(str(path), arch)
    sizes = {
        "block_count": n_main + 1,
        "context_length": 4096,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": heads.n_head,
        "attention.head_count_kv": heads.n_head_kv,
        "attention.key_length": heads.head_dim,
        "attention.value_length": heads.head_dim,
        "rope.dimension_count": heads.n_rot,
        "ssm.conv_kernel": TAPS,
        "ssm.inner_size": heads.n_v_heads * heads.linear_dim,
        "ssm.state_size": heads.linear_dim,
        "ssm.time_step_rank": heads.n_v_heads,
        "ssm.group_count": heads.n_k_heads,
        "full_attention_interval": interval,
        "nextn_predict_layers": 1,
    }
    if experts:
        sizes |= {"expert_used_count": experts[0], "expert_count": experts[1]}
        sizes |= {"expert_feed_forward_length": N_FF_EXP, "expert_shared_feed_forward_length": N_FF_SHEXP}
    for key, value in sizes.items():
        w.add_uint32(f"{arch}.{key}", value)
    w.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    w.add_float32(f"{arch}.rope.freq_base", 1e7)
    w.add_array(f"{arch}.rope.dimension_sections", [2, 1, 1, 0])
    w.add_string("tokenizer.ggml.model", "gpt2")
    w.add_string("tokenizer.ggml.pre", "qwen35")
    w.add_array("tokenizer.ggml.tokens", [*(chr(0x21 + i) if i < 9999 else f"{i}" for i in range(n_vocab - 1)), '!"'])
    w.add_array("tokenizer.ggml.token_type", [1] * n_vocab)
    w.add_array("tokenizer.ggml.merges", ['! "'])  # gguf-py leaves empty arrays out

    def add(name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> None:
        values = mean + scale * rng.standard_normal(shape)
        w.add_tensor(name, values.astype(np.float32))

    def matrix(name: str, rows: int, cols: int, scale: float = 1.0, kind: str = "F32") -> None:
        quantised = gguf.GGMLQuantizationType[kind]
        values = (scale * cols**-0.5 * rng.standard_normal((rows, cols))).astype(np.float32)
        w.add_tensor(name, gguf.quants.quantize(values, quantised), raw_dtype=quantised)

    def norm(name: str, n: int) -> None:
        add(name, n, scale=0.1, mean=1.0)

    matrix("token_embd.weight", n_vocab, N_EMBD, scale=N_EMBD**0.5, kind=head_type)
    matrix("output.weight", n_vocab, N_EMBD, scale=sharp, kind=head_type)
    norm("output_norm.weight", N_EMBD)
    adds = 0.0 if still else 0.5
    for i in range(n_main + 1):
        b = f"blk.{i}."
        norm(b + "attn_norm.weight", N_EMBD)
        norm(b + "post_attention_norm.weight", N_EMBD)
        if i < n_main and (i + 1) % interval:
            keys, values = heads.n_k_heads * heads.linear_dim, heads.n_v_heads * heads.linear_dim
            matrix(b + "attn_qkv.weight", 2 * keys + values, N_EMBD)
            matrix(b + "attn_gate.weight", values, N_EMBD)
            matrix(b + "ssm_alpha.weight", heads.n_v_heads, N_EMBD)
            matrix(b + "ssm_beta.weight", heads.n_v_heads, N_EMBD)
            w.add_tensor(b + "ssm_a", -rng.uniform(0.02, 1, heads.n_v_heads).astype(np.float32))
            add(b + "ssm_dt.bias", heads.n_v_heads)
            add(b + "ssm_conv1d.weight", 2 * keys + values, TAPS, scale=0.5)
            norm(b + "ssm_norm.weight", heads.linear_dim)
            matrix(b + "ssm_out.weight", N_EMBD, values, scale=adds)
        else:
            matrix(b + "attn_q.weight", 2 * heads.n_head * heads.head_dim, N_EMBD)
            matrix(b + "attn_k.weight", heads.n_head_kv * heads.head_dim, N_EMBD)
            matrix(b + "attn_v.weight", heads.n_head_kv * heads.head_dim, N_EMBD)
            matrix(b + "attn_output.weight", N_EMBD, heads.n_head * heads.head_dim, scale=adds)
            norm(b + "attn_q_norm.weight", heads.head_dim)
            norm(b + "attn_k_norm.weight", heads.head_dim)
        if experts:
            matrix(b + "ffn_gate_inp.weight", experts[1], N_EMBD)
            add(b + "ffn_gate_inp_shexp.weight", N_EMBD, scale=N_EMBD**-0.5)
            for kind, n_ff, n in (("exps", N_FF_EXP, experts[1:]), ("shexp", N_FF_SHEXP, ())):
                add(b + f"ffn_gate_{kind}.weight", *n, n_ff, N_EMBD, scale=N_EMBD**-0.5)
                add(b + f"ffn_up_{kind}.weight", *n, n_ff, N_EMBD, scale=N_EMBD**-0.5)
                add(b + f"ffn_down_{kind}.weight", *n, N_EMBD, n_ff, scale=adds * n_ff**-0.5)
        else:
            matrix(b + "ffn_gate.weight", N_FF, N_EMBD)
            matrix(b + "ffn_up.weight", N_FF, N_EMBD)
            matrix(b + "ffn_down.weight", N_EMBD, N_FF, scale=adds)
    b = f"blk.{n_main}.nextn."
    if still:
        eye: Any = np.eye(N_EMBD, 2 * N_EMBD, dtype=np.float32)  # the embedding half only
        w.add_tensor(b + "eh_proj.weight", eye)
        w.add_tensor(b + "enorm.weight", np.ones(N_EMBD, np.float32))
    else:
        matrix(b + "eh_proj.weight", N_EMBD, 2 * N_EMBD)
        norm(b + "enorm.weight", N_EMBD)
    norm(b + "hnorm.weight", N_EMBD)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
