"""Tiny qwen35 and qwen35moe models for tests, written with gguf-py: random float32 weights, a byte vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

N_EMBD, N_FF = 64, 64
N_HEAD, N_HEAD_KV, HEAD_DIM, N_ROT = 2, 1, 32, 8
N_K_HEADS, N_V_HEADS, LINEAR_DIM, TAPS = 1, 2, 16, 4
N_FF_EXP, N_FF_SHEXP = 32, 48


def write_model(
    path: Path,
    seed: int,
    n_vocab: int = 64,
    n_main: int = 4,
    interval: int = 2,
    head: str = "random",
    sharp: float = 3.0,
    experts: tuple[int, int] | None = None,
) -> Path:
    """Writes a model with an MTP block.

    head: "random": nothing ties the block to the trunk. "perfect": every mixer and feed-forward adds nothing, so that
    the trunk's next token depends on the last token only, and the block predicts the same. sharp: scale of the logits.
    experts: (used by a token, of all) makes it a qwen35moe.
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
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD_KV,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "rope.dimension_count": N_ROT,
        "ssm.conv_kernel": TAPS,
        "ssm.inner_size": N_V_HEADS * LINEAR_DIM,
        "ssm.state_size": LINEAR_DIM,
        "ssm.time_step_rank": N_V_HEADS,
        "ssm.group_count": N_K_HEADS,
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
    w.add_array("tokenizer.ggml.tokens", [*(chr(0x21 + i) for i in range(n_vocab - 1)), '!"'])
    w.add_array("tokenizer.ggml.token_type", [1] * n_vocab)
    w.add_array("tokenizer.ggml.merges", ['! "'])  # gguf-py leaves empty arrays out

    def add(name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> None:
        values = mean + scale * rng.standard_normal(shape)
        w.add_tensor(name, values.astype(np.float32))

    def matrix(name: str, rows: int, cols: int, scale: float = 1.0) -> None:
        add(name, rows, cols, scale=scale * cols**-0.5)

    def norm(name: str, n: int) -> None:
        add(name, n, scale=0.1, mean=1.0)

    matrix("token_embd.weight", n_vocab, N_EMBD, scale=N_EMBD**0.5)
    matrix("output.weight", n_vocab, N_EMBD, scale=sharp)
    norm("output_norm.weight", N_EMBD)
    adds = 0.0 if still else 0.5
    for i in range(n_main + 1):
        b = f"blk.{i}."
        norm(b + "attn_norm.weight", N_EMBD)
        norm(b + "post_attention_norm.weight", N_EMBD)
        if i < n_main and (i + 1) % interval:
            keys, values = N_K_HEADS * LINEAR_DIM, N_V_HEADS * LINEAR_DIM
            matrix(b + "attn_qkv.weight", 2 * keys + values, N_EMBD)
            matrix(b + "attn_gate.weight", values, N_EMBD)
            matrix(b + "ssm_alpha.weight", N_V_HEADS, N_EMBD)
            matrix(b + "ssm_beta.weight", N_V_HEADS, N_EMBD)
            w.add_tensor(b + "ssm_a", -rng.uniform(0.02, 1, N_V_HEADS).astype(np.float32))
            add(b + "ssm_dt.bias", N_V_HEADS)
            add(b + "ssm_conv1d.weight", 2 * keys + values, TAPS, scale=0.5)
            norm(b + "ssm_norm.weight", LINEAR_DIM)
            matrix(b + "ssm_out.weight", N_EMBD, values, scale=adds)
        else:
            matrix(b + "attn_q.weight", 2 * N_HEAD * HEAD_DIM, N_EMBD)
            matrix(b + "attn_k.weight", N_HEAD_KV * HEAD_DIM, N_EMBD)
            matrix(b + "attn_v.weight", N_HEAD_KV * HEAD_DIM, N_EMBD)
            matrix(b + "attn_output.weight", N_EMBD, N_HEAD * HEAD_DIM, scale=adds)
            norm(b + "attn_q_norm.weight", HEAD_DIM)
            norm(b + "attn_k_norm.weight", HEAD_DIM)
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
