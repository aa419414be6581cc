"""Hyper-parameters of a model file, read from its metadata and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vkbackend.errors import ModelError, quoted, shown
from vkbackend.model.gguf import GGUFFile

KNOWN_ARCHS = ("qwen35", "qwen35moe", "qwen3next")
MOE_ARCHS = ("qwen35moe", "qwen3next")
MAX_BLOCKS = 4096
MAX_SECTION = 1 << 16
MAX_FREQ_BASE = 1e30  # far from what float32 can not hold


@dataclass(frozen=True)
class HParams:
    """Sizes of a model, named as in its metadata (spec/model.md of the design).

    `n_layer` counts the trunk's `n_main` blocks and the `n_nextn` MTP blocks after them; `recurrent[i]` tells whether
    block i is a gated delta net. `n_ff` is 0 in MoE files that do not give it, the expert sizes are 0 in dense ones.
    """

    arch: str
    n_layer: int
    n_nextn: int
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    rope_freq_base: float
    rope_sections: tuple[int, ...]
    rms_eps: float
    conv_kernel: int
    head_k_dim: int
    head_v_dim: int
    n_k_heads: int
    n_v_heads: int
    recurrent: tuple[bool, ...]
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    n_ff_shexp: int = 0

    @property
    def n_main(self) -> int:
        return self.n_layer - self.n_nextn

    @property
    def key_dim(self) -> int:
        return self.n_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        return self.n_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim


def read_hparams(file: GGUFFile) -> HParams:
    """Reads and checks a file's hyper-parameters. Raises `ModelError` naming the key, its value and what is allowed."""
    meta = _Keys(file)
    arch = meta.text("general.architecture")
    if arch not in KNOWN_ARCHS:
        raise ModelError(f"{file.path}: general.architecture is {quoted(arch)}; supported are {', '.join(KNOWN_ARCHS)}")
    meta.prefix = arch + "."
    n_layer = meta.count("block_count", most=MAX_BLOCKS)
    n_nextn = meta.count("nextn_predict_layers", default=0, least=0)
    if n_nextn >= n_layer:
        raise meta.error("nextn_predict_layers", n_nextn, f"fewer than block_count = {n_layer}")
    n_head, n_head_kv = meta.count("attention.head_count"), meta.count("attention.head_count_kv")
    if n_head % n_head_kv:
        raise meta.error("attention.head_count_kv", n_head_kv, f"a divisor of head_count = {n_head}")
    n_embd = meta.count("embedding_length")
    head_dim = meta.count("attention.key_length", default=n_embd // n_head or None)
    if meta.count("attention.value_length", default=head_dim) != head_dim:
        raise meta.error("attention.value_length", meta.get("attention.value_length"), f"key_length = {head_dim}")
    n_rot = meta.count("rope.dimension_count", default=head_dim)
    if n_rot > head_dim or n_rot % 2:
        raise meta.error("rope.dimension_count", n_rot, f"an even number up to the head size {head_dim}")
    n_v_heads, n_k_heads = meta.count("ssm.time_step_rank"), meta.count("ssm.group_count")
    if n_v_heads % n_k_heads:
        raise meta.error("ssm.time_step_rank", n_v_heads, f"a multiple of ssm.group_count = {n_k_heads}")
    inner = meta.count("ssm.inner_size")
    if inner % n_v_heads:
        raise meta.error("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank = {n_v_heads}")
    n_ff = meta.count("feed_forward_length", default=0, least=0)
    n_expert = n_expert_used = n_ff_exp = n_ff_shexp = 0
    if arch in MOE_ARCHS:
        n_expert, n_expert_used = meta.count("expert_count"), meta.count("expert_used_count")
        if n_expert_used > n_expert:
            raise meta.error("expert_used_count", n_expert_used, f"at most expert_count = {n_expert}")
        n_ff_exp = meta.count("expert_feed_forward_length", default=n_ff // n_expert_used or None)
        n_ff_shexp = meta.count("expert_shared_feed_forward_length", default=n_ff_exp)
    elif not n_ff:
        n_ff = meta.count("feed_forward_length")
    freq_base = meta.number("rope.freq_base", default=10000.0, most=MAX_FREQ_BASE)
    if freq_base < 1:
        raise meta.error("rope.freq_base", freq_base, f"a number from 1 to {MAX_FREQ_BASE:g}")
    return HParams(
        arch=arch,
        n_layer=n_layer,
        n_nextn=n_nextn,
        n_ctx_train=meta.count("context_length"),
        n_vocab=_n_vocab(file, n_embd),
        n_embd=n_embd,
        n_ff=n_ff,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_rot=n_rot,
        rope_freq_base=freq_base,
        rope_sections=_sections(meta),
        rms_eps=meta.number("attention.layer_norm_rms_epsilon", most=1.0),
        conv_kernel=meta.count("ssm.conv_kernel"),
        head_k_dim=meta.count("ssm.state_size"),
        head_v_dim=inner // n_v_heads,
        n_k_heads=n_k_heads,
        n_v_heads=n_v_heads,
        recurrent=_recurrent(meta, n_layer, n_layer - n_nextn),
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        n_ff_exp=n_ff_exp,
        n_ff_shexp=n_ff_shexp,
    )


class _Keys:
    """Typed access to metadata, with errors that name the key."""

    def __init__(self, file: GGUFFile) -> None:
        self.path, self.meta, self.prefix = file.path, file.metadata, ""

    def get(self, key: str) -> Any:
        return self.meta.get(self.prefix + key)

    def error(self, key: str, found: object, allowed: str) -> ModelError:
        is_found = "is missing" if found is None else f"is {shown(found)}"
        return ModelError(f"{self.path}: metadata key '{self.prefix}{key}' {is_found}; it must be {allowed}")

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.error(key, value, "a string")
        return value

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = (1 << 31) - 1) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.error(key, value, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None, *, most: float) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value <= most:
            raise self.error(key, value, f"a positive number up to {most:g}")
        return float(value)


def _n_vocab(file: GGUFFile, n_embd: int) -> int:
    """Rows of the embedding table, which the tokenizer must not exceed."""
    table, tokens = file.tensors.get("token_embd.weight"), file.metadata.get("tokenizer.ggml.tokens")
    n_tokens = len(tokens) if isinstance(tokens, list) else None
    if table is None:
        if not n_tokens:
            raise ModelError(f"{file.path}: has neither token_embd.weight nor tokenizer.ggml.tokens: no vocabulary")
        return n_tokens
    if len(table.shape) != 2 or table.shape[1] != n_embd:
        raise ModelError(
            f"{file.path}: tensor 'token_embd.weight' has shape {table.shape}; [n_vocab, {n_embd}] is needed, as "
            "embedding_length says"
        )
    if n_tokens is not None and n_tokens != table.shape[0]:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.tokens has {n_tokens} entries, 'token_embd.weight' {table.shape[0]} rows; "
            "they must be alike"
        )
    return table.shape[0]


def _sections(meta: _Keys) -> tuple[int, ...]:
    value = meta.get("rope.dimension_sections")
    if value is None:
        if meta.prefix.startswith("qwen35"):
            raise meta.error("rope.dimension_sections", None, "3 or 4 whole numbers")
        return ()
    if not isinstance(value, np.ndarray) or len(value) not in (3, 4) or value.dtype.kind not in "iu":
        raise meta.error("rope.dimension_sections", value, "3 or 4 whole numbers")
    sections = tuple(int(v) for v in value)
    if not all(0 <= v <= MAX_SECTION for v in sections):
        raise meta.error("rope.dimension_sections", value, f"whole numbers from 0 to {MAX_SECTION}")
    return sections


def _recurrent(meta: _Keys, n_layer: int, n_main: int) -> tuple[bool, ...]:
    flags = meta.get("attention.recurrent_layers")
    if flags is not None:
        if not isinstance(flags, np.ndarray) or len(flags) not in (n_main, n_layer) or flags.dtype.kind not in "biu":
            raise meta.error("attention.recurrent_layers", flags, f"an array of {n_layer} booleans")
        return tuple(i < n_main and bool(flags[i]) for i in range(n_layer))
    interval = meta.count("full_attention_interval", default=4)
    return tuple(i < n_main and (i + 1) % interval != 0 for i in range(n_layer))
