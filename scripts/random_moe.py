"""Writes a qwen35moe with random weights in the shapes of the 35B-A3B model: for measuring speed, its text is noise.

    .venv/bin/python scripts/random_moe.py OUT.gguf --layers 8 --type q8_0
    .venv/bin/vkbackend bench -m OUT.gguf -p 512 -n 128 --spec-type none,draft-mtp

Time per token is that of the head plus layers / 40 of the whole model's layers. With all 40 layers q8_0 takes 35 GB.
"""

from __future__ import annotations

import argparse

import gguf
import numpy as np

from vkbackend.quants import random_blocks

N_EMBD, N_HEAD, N_HEAD_KV, HEAD_DIM, N_ROT = 2048, 16, 2, 256, 64
N_K_HEADS, N_V_HEADS, LINEAR_DIM, TAPS = 16, 32, 128, 4
N_FF_EXP = N_FF_SHEXP = 512
N_USED, INTERVAL = 8, 4
DRAWN = 1 << 14  # rows of random blocks that a large tensor repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--layers", type=int, default=8, help="blocks of the trunk (the real model: 40)")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--type", default="q8_0", help="of all matrices but the router: q8_0, q4_k, q4_0, f16, ...")
    parser.add_argument("--vocab", type=int, default=248320)
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    kind = gguf.GGMLQuantizationType[args.type.upper()]
    writer = gguf.GGUFWriter(args.out, "qwen35moe")
    add_metadata(writer, args.layers, args.experts, args.vocab)

    def matrix(name: str, *shape: int, scale: float = 1.0) -> None:
        rows, cols = int(np.prod(shape[:-1])), shape[-1]
        raw = random_blocks(rng, int(kind), min(rows, DRAWN), cols, scale * cols**-0.5)
        raw = np.concatenate([raw] * -(-rows // DRAWN))[:rows] if rows > DRAWN else raw
        writer.add_tensor(name, raw.reshape(*shape[:-1], -1), raw_dtype=kind)

    def vector(name: str, *shape: int, mean: float = 0.0, scale: float = 0.1) -> None:
        writer.add_tensor(name, (mean + scale * rng.standard_normal(shape)).astype(np.float32))

    matrix("token_embd.weight", args.vocab, N_EMBD, scale=N_EMBD**0.5)
    matrix("output.weight", args.vocab, N_EMBD, scale=3.0)
    vector("output_norm.weight", N_EMBD, mean=1.0)
    for i in range(args.layers + 1):
        b = f"blk.{i}."
        vector(b + "attn_norm.weight", N_EMBD, mean=1.0)
        vector(b + "post_attention_norm.weight", N_EMBD, mean=1.0)
        if i < args.layers and (i + 1) % INTERVAL:
            keys, values = N_K_HEADS * LINEAR_DIM, N_V_HEADS * LINEAR_DIM
            matrix(b + "attn_qkv.weight", 2 * keys + values, N_EMBD)
            matrix(b + "attn_gate.weight", values, N_EMBD)
            matrix(b + "ssm_alpha.weight", N_V_HEADS, N_EMBD)
            matrix(b + "ssm_beta.weight", N_V_HEADS, N_EMBD)
            vector(b + "ssm_a", N_V_HEADS, mean=-0.5)
            vector(b + "ssm_dt.bias", N_V_HEADS)
            vector(b + "ssm_conv1d.weight", 2 * keys + values, TAPS, scale=0.5)
            vector(b + "ssm_norm.weight", LINEAR_DIM, mean=1.0)
            matrix(b + "ssm_out.weight", N_EMBD, values, scale=0.3)
        else:
            matrix(b + "attn_q.weight", 2 * N_HEAD * HEAD_DIM, N_EMBD)
            matrix(b + "attn_k.weight", N_HEAD_KV * HEAD_DIM, N_EMBD)
            matrix(b + "attn_v.weight", N_HEAD_KV * HEAD_DIM, N_EMBD)
            matrix(b + "attn_output.weight", N_EMBD, N_HEAD * HEAD_DIM, scale=0.3)
            vector(b + "attn_q_norm.weight", HEAD_DIM, mean=1.0)
            vector(b + "attn_k_norm.weight", HEAD_DIM, mean=1.0)
        vector(b + "ffn_gate_inp.weight", args.experts, N_EMBD, scale=N_EMBD**-0.5)
        vector(b + "ffn_gate_inp_shexp.weight", N_EMBD, scale=N_EMBD**-0.5)
        for what, n_ff, n in (("exps", N_FF_EXP, (args.experts,)), ("shexp", N_FF_SHEXP, ())):
            matrix(b + f"ffn_gate_{what}.weight", *n, n_ff, N_EMBD)
            matrix(b + f"ffn_up_{what}.weight", *n, n_ff, N_EMBD)
            matrix(b + f"ffn_down_{what}.weight", *n, N_EMBD, n_ff, scale=0.3)
    b = f"blk.{args.layers}.nextn."
    matrix(b + "eh_proj.weight", N_EMBD, 2 * N_EMBD)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        vector(b + f"{name}.weight", N_EMBD, mean=1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, n_layers: int, n_expert: int, n_vocab: int) -> None:
    """Hyper-parameters and a vocabulary of numbered words."""
    for key, value in {
        "block_count": n_layers + 1,
        "context_length": 262144,
        "embedding_length": N_EMBD,
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
        "full_attention_interval": INTERVAL,
        "nextn_predict_layers": 1,
        "expert_count": n_expert,
        "expert_used_count": N_USED,
        "expert_feed_forward_length": N_FF_EXP,
        "expert_shared_feed_forward_length": N_FF_SHEXP,
    }.items():
        writer.add_uint32(f"qwen35moe.{key}", value)
    writer.add_float32("qwen35moe.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen35moe.rope.freq_base", 1e7)
    writer.add_array("qwen35moe.rope.dimension_sections", [11, 11, 10, 0])
    letters = [chr(0x21 + i) for i in range(94)]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen35")
    writer.add_array("tokenizer.ggml.tokens", [*letters, '!"', *(f"w{i}" for i in range(n_vocab - 95))])
    writer.add_array("tokenizer.ggml.token_type", [1] * n_vocab)
    writer.add_array("tokenizer.ggml.merges", ['! "'])


if __name__ == "__main__":
    main()
