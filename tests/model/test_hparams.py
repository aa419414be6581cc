"""Hyper-parameters: read as the files say, and every key that does not fit is named with what is allowed."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_paths import fixture

from vkbackend.cli.common import demo_model
from vkbackend.errors import ModelError
from vkbackend.model.gguf import GGUFFile, TensorInfo, open_gguf
from vkbackend.model.hparams import HParams, read_hparams

EVERY_FOURTH = (True, True, True, False) * 2 + (False,)

DENSE = HParams(
    arch="qwen35", n_layer=9, n_nextn=1, n_ctx_train=4096, n_vocab=1024, n_embd=128, n_ff=384, n_head=4, n_head_kv=2,
    head_dim=64, n_rot=16, rope_freq_base=1e7, rope_sections=(3, 3, 2, 0), rms_eps=float(np.float32(1e-6)),
    conv_kernel=4, head_k_dim=32, head_v_dim=32, n_k_heads=2, n_v_heads=4, recurrent=EVERY_FOURTH,
)  # fmt: skip
MOE = replace(DENSE, arch="qwen35moe", n_ff=0, n_expert=8, n_expert_used=3, n_ff_exp=64, n_ff_shexp=96)
WANT = {
    "dense-q8_0": DENSE,
    "mtp-dense-f32": DENSE,
    "dense-k-q4_0": replace(DENSE, n_embd=256, n_ff=512, head_k_dim=128, head_v_dim=128),
    "moe-q4_0": MOE,
    "next-q4_0": replace(MOE, arch="qwen3next", n_ff=128, rope_sections=()),
}


@pytest.mark.parametrize("name", WANT)
def test_files(name: str) -> None:
    assert read_hparams(open_gguf(fixture(f"gguf/{name}.gguf"))) == WANT[name]


def test_the_demo_model() -> None:
    hp = read_hparams(open_gguf(demo_model()))
    assert (hp.n_main, hp.key_dim, hp.value_dim, hp.conv_dim) == (8, 256, 512, 1024)
    assert hp.recurrent == EVERY_FOURTH and hp.n_vocab == 4096


# ---- made-up metadata


def meta(arch: str = "qwen35", **changed: Any) -> GGUFFile:
    """Sound metadata with some keys changed (dots written as __); None takes a key away."""
    keys: dict[str, Any] = {
        "block_count": 9, "nextn_predict_layers": 1, "context_length": 4096, "embedding_length": 128,
        "feed_forward_length": 384, "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
        "attention.value_length": 64, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e7,
        "rope.dimension_count": 16, "rope.dimension_sections": np.array([3, 3, 2, 0], np.int32), "ssm.conv_kernel": 4,
        "ssm.inner_size": 128, "ssm.state_size": 32, "ssm.time_step_rank": 4, "ssm.group_count": 2,
    }  # fmt: skip
    if arch != "qwen35":
        keys |= {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 64}
    keys |= {key.replace("__", "."): value for key, value in changed.items()}
    all_keys = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in keys.items() if v is not None}
    table = TensorInfo("token_embd.weight", (1024, 128), 0, 0, 0)
    return GGUFFile(Path("made.gguf"), 3, all_keys, {table.name: table}, 32, mmap.mmap(-1, 1))


def test_made_up_metadata_is_sound() -> None:
    assert read_hparams(meta()) == replace(DENSE, rms_eps=1e-6)


def test_layers_by_interval_and_by_array() -> None:
    assert read_hparams(meta(full_attention_interval=3)).recurrent == (True, True, False) * 2 + (True, True, False)
    assert read_hparams(meta(full_attention_interval=1)).recurrent == (False,) * 9
    flags = np.array([True, False, False, True, True, False, True, True, True])
    both = meta(full_attention_interval=3, attention__recurrent_layers=flags)
    assert read_hparams(both).recurrent == (*flags[:8].tolist(), False)  # the MTP block never is
    assert read_hparams(meta(attention__recurrent_layers=flags[:8])).recurrent == (*flags[:8].tolist(), False)
    assert read_hparams(meta(nextn_predict_layers=None)).recurrent == (True, True, True, False) * 2 + (True,)


def test_defaults() -> None:
    hp = read_hparams(meta(attention__key_length=None, attention__value_length=None))
    assert hp.head_dim == 32
    hp = read_hparams(meta(rope__dimension_count=None, nextn_predict_layers=None, rope__freq_base=None))
    assert (hp.n_rot, hp.n_nextn, hp.n_main, hp.rope_freq_base) == (64, 0, 9, 10000.0)
    hp = read_hparams(meta("qwen35moe", expert_shared_feed_forward_length=None, feed_forward_length=None))
    assert (hp.n_ff, hp.n_ff_exp, hp.n_ff_shexp) == (0, 64, 64)
    assert read_hparams(meta("qwen35moe", expert_feed_forward_length=None)).n_ff_exp == 128
    assert read_hparams(meta("qwen3next", rope__dimension_sections=None)).rope_sections == ()


@pytest.mark.parametrize("sections", [[11, 11, 10], [11, 11, 10, 0]])
def test_three_or_four_sections(sections: list[int]) -> None:
    hp = read_hparams(meta(rope__dimension_sections=np.array(sections, np.int32)))
    assert hp.rope_sections == tuple(sections)


def test_vocabulary_without_an_embedding_table() -> None:
    file = meta()
    file.tensors.clear()
    with pytest.raises(ModelError, match=r"made\.gguf: has neither token_embd\.weight nor tokenizer\.ggml\.tokens"):
        read_hparams(file)
    file.metadata = {**file.metadata, "tokenizer.ggml.tokens": ["a", "b"]}
    assert read_hparams(file).n_vocab == 2


REQUIRED = [
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.dimension_sections", "ssm.conv_kernel",
    "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(ModelError, match=rf"made\.gguf: metadata key 'qwen35\.{key}' is missing; it must be "):
        read_hparams(meta(**{key: None}))


@pytest.mark.parametrize("key", ["expert_count", "expert_used_count"])
@pytest.mark.parametrize("arch", ["qwen35moe", "qwen3next"])
def test_missing_expert_keys_are_named(arch: str, key: str) -> None:
    with pytest.raises(ModelError, match=rf"'{arch}\.{key}' is missing"):
        read_hparams(meta(arch, **{key: None}))


WRONG = [
    ("block_count", 0, "is 0; it must be a whole number from 1 to 4096"),
    ("block_count", 1 << 30, "a whole number from 1 to 4096"),
    ("block_count", 9.0, "is 9.0; it must be a whole number"),
    ("block_count", True, "is True; it must be a whole number"),
    ("embedding_length", "128", "is '128'; it must be a whole number"),
    ("nextn_predict_layers", 9, "is 9; it must be fewer than block_count = 9"),
    ("nextn_predict_layers", -1, "is -1; it must be a whole number from 0"),
    ("attention.head_count", np.array([4, 4]), "a whole number"),
    ("attention.head_count_kv", 3, "is 3; it must be a divisor of head_count = 4"),
    ("attention.head_count_kv", 0, "is 0; it must be a whole number from 1"),
    ("attention.value_length", 32, "is 32; it must be key_length = 64"),
    ("attention.layer_norm_rms_epsilon", 0.0, "is 0.0; it must be a positive number"),
    ("attention.layer_norm_rms_epsilon", float("nan"), "a positive number"),
    ("attention.layer_norm_rms_epsilon", 1.5, "is 1.5; it must be a positive number up to 1"),
    ("rope.freq_base", 0.5, "is 0.5; it must be a number from 1 to 1e+30".replace("+", "\\+")),
    ("rope.dimension_sections", np.array([-1, 3, 2]), r"is \[-1, 3, 2\]; it must be whole numbers from 0"),
    ("rope.dimension_sections", np.zeros(5000), "is an array of 5000; it must be 3 or 4 whole numbers"),
    ("attention.recurrent_layers", np.ones(9), "an array of 9 booleans"),
    ("block_count", 1 << 31, "is 2147483648; it must be a whole number from 1 to 4096"),
    ("attention.key_length", 0, "is 0; it must be a whole number from 1"),
    ("context_length", 1 << 63, "a whole number from 1 to 2147483647"),
    ("rope.freq_base", float("inf"), "a positive number"),
    ("rope.freq_base", "big", "a positive number"),
    ("rope.dimension_count", 66, "is 66; it must be an even number up to the head size 64"),
    ("rope.dimension_count", 15, "is 15; it must be an even number"),
    ("rope.dimension_sections", np.array([8, 8], np.int32), "3 or 4 whole numbers"),
    ("rope.dimension_sections", np.array([3.0, 3.0, 2.0]), "3 or 4 whole numbers"),
    ("rope.dimension_sections", 16, "3 or 4 whole numbers"),
    ("ssm.time_step_rank", 3, "is 3; it must be a multiple of ssm.group_count = 2"),
    ("ssm.inner_size", 130, "is 130; it must be a multiple of ssm.time_step_rank = 4"),
    ("ssm.conv_kernel", 0, "is 0; it must be a whole number from 1"),
    ("full_attention_interval", 0, "is 0; it must be a whole number from 1"),
    ("attention.recurrent_layers", np.ones(7, bool), "an array of 9 booleans"),
    ("attention.recurrent_layers", True, "an array of 9 booleans"),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG)
def test_wrong_values_are_named_with_what_is_allowed(key: str, value: object, message: str) -> None:
    with pytest.raises(ModelError, match=rf"made\.gguf: metadata key 'qwen35\.{key}' .*{message}"):
        read_hparams(meta(**{key: value}))


def test_experts_used_must_exist() -> None:
    with pytest.raises(ModelError, match=r"'qwen35moe\.expert_used_count' is 9; it must be at most expert_count = 8"):
        read_hparams(meta("qwen35moe", expert_used_count=9))


def test_other_architectures_are_refused() -> None:
    with pytest.raises(ModelError, match=r"architecture is 'llama'; supported are qwen35, qwen35moe, qwen3next"):
        read_hparams(meta("llama"))
    file = meta()
    file.metadata = {}
    with pytest.raises(ModelError, match=r"'general\.architecture' is missing; it must be a string"):
        read_hparams(file)


@pytest.mark.parametrize("shape", [(1024, 64), (1024,), (2, 4, 128)])
def test_the_embedding_table_must_fit(shape: tuple[int, ...]) -> None:
    file = meta()
    file.tensors["token_embd.weight"] = TensorInfo("token_embd.weight", shape, 0, 0, 0)
    with pytest.raises(ModelError, match=r"'token_embd.weight' has shape .*; \[n_vocab, 128\] is needed"):
        read_hparams(file)


def test_the_vocabulary_must_fit() -> None:
    file = meta()
    file.metadata = {**file.metadata, "tokenizer.ggml.tokens": ["a"] * 1023}
    with pytest.raises(ModelError, match=r"tokens has 1023 entries, 'token_embd.weight' 1024 rows"):
        read_hparams(file)
