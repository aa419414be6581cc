"""What a checkpoint's config.json says about the model, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkbackend.errors import ModelError
from vkbackend.model.convert.checkpoint import read_json
from vkbackend.model.hparams import MOE_ARCHS

ARCHS = {
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    "Qwen3NextForCausalLM": "qwen3next",
}
# Where a config leaves something out, transformers' configuration classes mean these.
DEFAULT_SECTIONS, DEFAULT_ROTARY_FACTOR, DEFAULT_INTERVAL = (11, 11, 10), 0.25, 4


@dataclass(frozen=True)
class Config:
    """Sizes of a checkpoint, named as in `vkbackend.model.hparams`; of its trunk, `n_nextn` aside.

    `recurrent[i]`: whether trunk layer i is a gated delta net. `n_nextn`: MTP blocks the config speaks of; None when
    it does not. `n_ff` is 0 where the config has none, `rope_sections` empty in qwen3next.
    """

    arch: str
    n_main: int
    n_nextn: int | None
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
    interval: int
    recurrent: tuple[bool, ...]
    tied: bool
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_ff_shexp: int

    @property
    def is_moe(self) -> bool:
        return self.arch in MOE_ARCHS

    @property
    def key_dim(self) -> int:
        return self.n_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        return self.n_v_heads * self.head_v_dim


def read_config(folder: Path) -> Config:
    """Reads config.json. Raises `ModelError` naming the key, its value and what is allowed."""
    path = folder / "config.json"
    whole = read_json(path)
    names = whole.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    arch = ARCHS.get(name) if isinstance(name, str) else None
    if arch is None:
        raise ModelError(f"{path}: the architecture is {name!r}; {', '.join(ARCHS)} can be converted")
    if whole.get("quantization_config"):
        raise ModelError(f"{path}: the weights are quantised; take the model's unquantised checkpoint")
    text = whole.get("text_config", whole)
    if not isinstance(text, dict):
        raise ModelError(f"{path}: 'text_config' is no object")
    keys = _Keys(path, text)
    moe = arch in MOE_ARCHS
    n_main = keys.count("num_hidden_layers")
    n_head, n_head_kv = keys.count("num_attention_heads"), keys.count("num_key_value_heads")
    if n_head % n_head_kv:
        raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads = {n_head}")
    n_k_heads, n_v_heads = keys.count("linear_num_key_heads"), keys.count("linear_num_value_heads")
    if n_v_heads % n_k_heads:
        raise keys.error("linear_num_value_heads", f"a multiple of linear_num_key_heads = {n_k_heads}")
    if moe and (keys.get("decoder_sparse_step") not in (None, 1) or keys.get("mlp_only_layers")):
        raise ModelError(f"{path}: some layers have no experts (decoder_sparse_step, mlp_only_layers): not supported")
    if keys.get("attn_output_gate") not in (None, True):
        raise keys.error("attn_output_gate", "true")
    head_dim = keys.count("head_dim", default=keys.count("hidden_size") // n_head)
    rope = _rope(keys)
    n_rot = int(head_dim * rope.number("partial_rotary_factor", DEFAULT_ROTARY_FACTOR))
    interval = keys.count("full_attention_interval", default=DEFAULT_INTERVAL)
    tied = keys.get("tie_word_embeddings", whole.get("tie_word_embeddings", False))
    return Config(
        arch=arch,
        n_main=n_main,
        n_nextn=_n_nextn(keys),
        n_ctx_train=keys.count("max_position_embeddings"),
        n_vocab=keys.count("vocab_size"),
        n_embd=keys.count("hidden_size"),
        n_ff=keys.count("intermediate_size", default=0 if moe else None),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_rot=n_rot,
        rope_freq_base=rope.number("rope_theta"),
        rope_sections=() if arch == "qwen3next" else _sections(rope),
        rms_eps=keys.number("rms_norm_eps"),
        conv_kernel=keys.count("linear_conv_kernel_dim"),
        head_k_dim=keys.count("linear_key_head_dim"),
        head_v_dim=keys.count("linear_value_head_dim"),
        n_k_heads=n_k_heads,
        n_v_heads=n_v_heads,
        interval=interval,
        recurrent=_recurrent(keys, n_main, interval),
        tied=bool(tied),
        n_expert=keys.count("num_experts") if moe else 0,
        n_expert_used=keys.count("num_experts_per_tok") if moe else 0,
        n_ff_exp=keys.count("moe_intermediate_size") if moe else 0,
        n_ff_shexp=keys.count("shared_expert_intermediate_size") if moe else 0,
    )


class _Keys:
    """Typed access to a JSON object, with errors that name the key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def error(self, key: str, allowed: str) -> ModelError:
        found = self.values.get(key)
        return ModelError(
            f"{self.path}: '{key}' {'is missing' if found is None else f'is {found!r}'}; it must be {allowed}"
        )

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self.error(key, f"a whole number from 1 to {(1 << 31) - 1}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.error(key, "a positive number")
        return float(value)


def _rope(keys: _Keys) -> _Keys:
    """The rotary embedding's keys: an object of their own in newer configs, spread out in older ones."""
    rope = keys.get("rope_parameters", keys.get("rope_scaling", {}))
    if not isinstance(rope, dict):
        raise keys.error("rope_parameters", "an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ModelError(f"{keys.path}: the rotary embedding's type is {kind!r}; only 'default' can be converted")
    outer = {key: keys.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    return _Keys(keys.path, {**outer, **rope})


def _sections(rope: _Keys) -> tuple[int, ...]:
    value = rope.get("mrope_section", list(DEFAULT_SECTIONS))
    if not isinstance(value, list) or len(value) not in (3, 4) or any(type(v) is not int or v < 0 for v in value):
        raise rope.error("mrope_section", "3 or 4 whole numbers")
    return tuple((*value, 0)[:4])


def _n_nextn(keys: _Keys) -> int | None:
    value = keys.get("mtp_num_hidden_layers", keys.get("num_nextn_predict_layers"))
    if value not in (None, 0, 1) or isinstance(value, bool):
        raise ModelError(f"{keys.path}: the number of MTP blocks (mtp_num_hidden_layers) is {value!r}; 0 or 1 can be")
    return None if value is None else int(value)


def _recurrent(keys: _Keys, n_main: int, interval: int) -> tuple[bool, ...]:
    kinds = keys.get("layer_types")
    if kinds is None:
        return tuple((i + 1) % interval != 0 for i in range(n_main))
    known = ("linear_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != n_main or any(k not in known for k in kinds):
        raise keys.error("layer_types", f"{n_main} (num_hidden_layers) of {' and '.join(known)}")
    return tuple(kind == known[0] for kind in kinds)
