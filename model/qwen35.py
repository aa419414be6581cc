"""The qwen35 trunk as graphs: gated-delta-net layers with full attention in between, SwiGLU feed-forward.

Source of the maths: the model's published reference implementation, as written down in docs/design.md; names of
tensors as in GGUF files. `TrunkWeights.request` says which tensors a file must hold, `build_trunk` writes one
graph for one batch shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkbackend.graph import Graph, Tensor
from vkbackend.model.gguf import GGUFFile
from vkbackend.model.hparams import HParams
from vkbackend.model.memory import KVCache, Memory, RecurrentRing
from vkbackend.model.moe import MoeFfnKeys, moe_feed_forward, request_moe
from vkbackend.model.weights import Matrix, WeightLoader, check_shape
from vkbackend.ops.argmax import argmax
from vkbackend.ops.delta_net_mixer import delta_net_mixer
from vkbackend.ops.embed_rows import embed_rows
from vkbackend.ops.linear import linear
from vkbackend.ops.rms_norm import rms_norm
from vkbackend.ops.rope_attention import rope_attention
from vkbackend.ops.rope_kv_write import rope_table
from vkbackend.ops.swiglu import swiglu

HIDDEN_KINDS = ("pre_norm", "post_norm")


@dataclass(frozen=True)
class StepShape:
    """One batch shape, and what its graph returns.

    Rows are ordered sequence by sequence: row = s * n_tokens + t. `logits` is "none", "last" (one row per sequence) or
    "all"; `hidden` is None, "pre_norm" or "post_norm" (all rows); `kv_bound` is an upper bound on the positions
    that attention has to look at; `argmax` returns the greedy token of every logits row instead of its logits.
    """

    n_tokens: int
    n_seqs: int
    kv_bound: int
    logits: str = "last"
    hidden: str | None = None
    argmax: bool = False

    @property
    def n_rows(self) -> int:
        return self.n_tokens * self.n_seqs


@dataclass(frozen=True)
class RecurrentKeys:
    """Where a gated-delta-net layer's weights are: `proj` stacks qkv, z, alpha and beta."""

    proj: Matrix
    conv_w: str
    dt_bias: str
    a: str
    norm: str
    out: Matrix


@dataclass(frozen=True)
class AttentionKeys:
    """Where a full-attention layer's weights are: `proj` stacks q (with its gate), k and v."""

    proj: Matrix
    q_norm: str
    k_norm: str
    rope: str
    out: Matrix


@dataclass(frozen=True)
class DenseFfnKeys:
    """A SwiGLU feed-forward: gate and up rows interleaved in one matrix, or stacked if their quantisations differ."""

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class BlockKeys:
    """One block: norms, mixer, feed-forward."""

    attn_norm: str
    mixer: RecurrentKeys | AttentionKeys
    ffn_norm: str
    ffn: DenseFfnKeys | MoeFfnKeys


@dataclass(frozen=True)
class HeadKeys:
    """Embedding table, final norm and output matrix (the table again when tied)."""

    table: Matrix
    norm: str
    output: Matrix


def request_block(loader: WeightLoader, file: GGUFFile, hp: HParams, i: int) -> BlockKeys:
    """Asks the loader for block i of a file."""
    b = f"blk.{i}."
    mixer = _request_recurrent(loader, file, hp, b) if hp.recurrent[i] else _request_attention(loader, file, hp, b)
    return BlockKeys(
        attn_norm=loader.vector(file, b + "attn_norm.weight", (hp.n_embd,)),
        mixer=mixer,
        ffn_norm=loader.vector(file, b + "post_attention_norm.weight", (hp.n_embd,)),
        ffn=request_moe(loader, file, hp, b) if hp.n_expert else _request_dense(loader, file, hp, b),
    )


def _request_dense(loader: WeightLoader, file: GGUFFile, hp: HParams, b: str) -> DenseFfnKeys:
    for name in ("ffn_gate.weight", "ffn_up.weight"):
        check_shape(file, b + name, (hp.n_ff, hp.n_embd))
    check_shape(file, b + "ffn_down.weight", (hp.n_embd, hp.n_ff))
    return DenseFfnKeys(
        gate_up=loader.matrix(file, (b + "ffn_gate.weight", b + "ffn_up.weight"), interleave=True),
        down=loader.matrix(file, (b + "ffn_down.weight",)),
    )


def _request_recurrent(loader: WeightLoader, file: GGUFFile, hp: HParams, b: str) -> RecurrentKeys:
    proj = tuple(b + n for n in ("attn_qkv.weight", "attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight"))
    for name, n_rows in zip(proj, (hp.conv_dim, hp.value_dim, hp.n_v_heads, hp.n_v_heads), strict=True):
        check_shape(file, name, (n_rows, hp.n_embd))
    check_shape(file, b + "ssm_out.weight", (hp.n_embd, hp.value_dim))
    dt = b + "ssm_dt.bias"
    return RecurrentKeys(
        proj=loader.matrix(file, proj),
        conv_w=loader.vector(file, b + "ssm_conv1d.weight", (hp.conv_dim, hp.conv_kernel)),
        dt_bias=loader.vector(file, dt if dt in file.tensors else b + "ssm_dt", (hp.n_v_heads,)),
        a=loader.vector(file, b + "ssm_a", (hp.n_v_heads,)),
        norm=loader.vector(file, b + "ssm_norm.weight", (hp.head_v_dim,)),
        out=loader.matrix(file, (b + "ssm_out.weight",)),
    )


def _request_attention(loader: WeightLoader, file: GGUFFile, hp: HParams, b: str) -> AttentionKeys:
    proj = tuple(b + n for n in ("attn_q.weight", "attn_k.weight", "attn_v.weight"))
    for name, n_heads in zip(proj, (2 * hp.n_head, hp.n_head_kv, hp.n_head_kv), strict=True):  # q with its gate
        check_shape(file, name, (n_heads * hp.head_dim, hp.n_embd))
    check_shape(file, b + "attn_output.weight", (hp.n_embd, hp.n_head * hp.head_dim))
    return AttentionKeys(
        proj=loader.matrix(file, proj),
        q_norm=loader.vector(file, b + "attn_q_norm.weight", (hp.head_dim,)),
        k_norm=loader.vector(file, b + "attn_k_norm.weight", (hp.head_dim,)),
        rope=loader.add_constant(f"rope {hp.n_rot} {hp.rope_freq_base}", rope_table(hp.n_rot, hp.rope_freq_base)),
        out=loader.matrix(file, (b + "attn_output.weight",)),
    )


def request_head(loader: WeightLoader, file: GGUFFile, hp: HParams) -> HeadKeys:
    """Asks the loader for the embedding table, the final norm and the output matrix."""
    check_shape(file, "output.weight", (hp.n_vocab, hp.n_embd))
    table = loader.matrix(file, ("token_embd.weight",))
    output = loader.matrix(file, ("output.weight",)) if "output.weight" in file.tensors else table
    return HeadKeys(table, loader.vector(file, "output_norm.weight", (hp.n_embd,)), output)


@dataclass(frozen=True)
class Trunk:
    """Everything a trunk's graphs are built from, but the memory they work on."""

    hp: HParams
    loader: WeightLoader
    blocks: tuple[BlockKeys, ...]
    head: HeadKeys


def build_trunk(trunk: Trunk, memory: Memory, shape: StepShape) -> Graph:
    """The graph of one trunk step. Inputs, i32: tokens [n_rows], step [2, n_seqs] (n_past and slot of each sequence).

    Outputs as the shape asks: logits [rows, n_vocab] or argmax i32 [rows], hidden [n_rows, n_embd].
    """
    g = Graph()
    tokens = g.input("tokens", (shape.n_rows,), "i32")
    step = g.input("step", (2, shape.n_seqs), "i32")
    x = trunk_rows(g, trunk, memory, tokens, step, shape)
    finish(g, trunk.hp, trunk.loader, trunk.head, x, shape)
    return g


def trunk_rows(g: Graph, trunk: Trunk, memory: Memory, tokens: Tensor, step: Tensor, shape: StepShape) -> Tensor:
    """The rows after the last block, [n_rows, n_embd], of tokens i32 [n_rows] at the places that step says."""
    hp, loader = trunk.hp, trunk.loader
    x = embed_rows(g, tokens, loader.parts(trunk.head.table))
    caches, rings = iter(memory.kv), iter(memory.rings)
    for block in trunk.blocks:
        if isinstance(block.mixer, RecurrentKeys):
            x = recurrent_mixer(g, hp, loader, block.attn_norm, block.mixer, next(rings), x, step, shape)
        else:
            x = attention_mixer(g, hp, loader, block.attn_norm, block.mixer, next(caches), x, step, shape)
        x = feed_forward(g, hp, loader, block, x)
    return x


def recurrent_mixer(
    g: Graph,
    hp: HParams,
    loader: WeightLoader,
    norm: str,
    keys: RecurrentKeys,
    ring: RecurrentRing,
    x: Tensor,
    step: Tensor,
    shape: StepShape,
) -> Tensor:
    """x + gated delta net of rms(x). x [n_rows, n_embd]."""
    proj = linear(g, x, loader.parts(keys.proj), norm=loader.tensor(norm, hp.n_embd), eps=hp.rms_eps)
    at = 0
    columns = []
    for width in (hp.conv_dim, hp.value_dim, hp.n_v_heads, hp.n_v_heads):
        columns.append(proj.narrow(1, at, width))
        at += width
    qkv, z, alpha, beta = columns
    mixed, squares = delta_net_mixer(
        g, qkv, z, alpha, beta,
        loader.tensor(keys.conv_w, hp.conv_dim, hp.conv_kernel),
        loader.tensor(keys.dt_bias, hp.n_v_heads),
        loader.tensor(keys.a, hp.n_v_heads),
        loader.tensor(keys.norm, hp.head_v_dim),
        ring.conv, ring.state, step,
        n_tokens=shape.n_tokens, n_k_heads=hp.n_k_heads, eps=hp.rms_eps, grouped=hp.arch == "qwen3next",
    )  # fmt: skip
    return linear(g, mixed, loader.parts(keys.out), group_squares=squares, eps=hp.rms_eps, residual=x)


def attention_mixer(
    g: Graph,
    hp: HParams,
    loader: WeightLoader,
    norm: str,
    keys: AttentionKeys,
    cache: KVCache,
    x: Tensor,
    step: Tensor,
    shape: StepShape,
) -> Tensor:
    """x + gated causal attention of rms(x). x [n_rows, n_embd]."""
    proj = linear(g, x, loader.parts(keys.proj), norm=loader.tensor(norm, hp.n_embd), eps=hp.rms_eps)
    rows, q_width, kv_width = x.shape[0], 2 * hp.n_head * hp.head_dim, hp.n_head_kv * hp.head_dim
    qg = proj.narrow(1, 0, q_width).reshape(rows, hp.n_head, 2 * hp.head_dim)
    k = proj.narrow(1, q_width, kv_width).reshape(rows, hp.n_head_kv, hp.head_dim)
    v = proj.narrow(1, q_width + kv_width, kv_width).reshape(rows, hp.n_head_kv, hp.head_dim)
    mixed = rope_attention(
        g, qg, k, v, loader.tensor(keys.q_norm, hp.head_dim), loader.tensor(keys.k_norm, hp.head_dim),
        loader.constant(keys.rope), cache.k, cache.v, step,
        n_tokens=shape.n_tokens, kv_bound=shape.kv_bound, eps=hp.rms_eps,
    )  # fmt: skip
    return linear(g, mixed, loader.parts(keys.out), residual=x)


def feed_forward(g: Graph, hp: HParams, loader: WeightLoader, block: BlockKeys, x: Tensor) -> Tensor:
    """x + SwiGLU, dense or of experts, of rms(x). x [n_rows, n_embd]."""
    if isinstance(block.ffn, MoeFfnKeys):
        return moe_feed_forward(g, hp, loader, block.ffn_norm, block.ffn, x)
    norm = loader.tensor(block.ffn_norm, hp.n_embd)
    keys = block.ffn.gate_up
    inner = linear(g, x, loader.parts(keys), norm=norm, eps=hp.rms_eps, swiglu=keys.interleave)
    if not keys.interleave:
        n_ff = inner.shape[1] // 2
        inner = swiglu(g, inner.narrow(1, 0, n_ff), inner.narrow(1, n_ff, n_ff))
    return linear(g, inner, loader.parts(block.ffn.down), residual=x)


def finish(g: Graph, hp: HParams, loader: WeightLoader, head: HeadKeys, x: Tensor, shape: StepShape) -> None:
    """Names the outputs that the shape asks for, from the last block's rows x [n_rows, n_embd]."""
    norm = loader.tensor(head.norm, hp.n_embd)
    if shape.hidden == "pre_norm":
        g.output("hidden", x)
    elif shape.hidden == "post_norm":
        g.output("hidden", rms_norm(g, x, norm, hp.rms_eps))
    if shape.logits == "none":
        return
    if shape.logits == "last":
        x = x.reshape(shape.n_seqs, shape.n_tokens, hp.n_embd).narrow(1, shape.n_tokens - 1, 1)
        x = x.reshape(shape.n_seqs, hp.n_embd)
    logits = head_logits(g, hp, loader, head, x)
    if shape.argmax:
        g.output("argmax", argmax(g, logits))
    else:
        g.output("logits", logits)


def head_logits(g: Graph, hp: HParams, loader: WeightLoader, head: HeadKeys, x: Tensor) -> Tensor:
    """Logits [n_rows, n_vocab] of rows x [n_rows, n_embd] before the head's norm."""
    return linear(g, x, loader.parts(head.output), norm=loader.tensor(head.norm, hp.n_embd), eps=hp.rms_eps)
