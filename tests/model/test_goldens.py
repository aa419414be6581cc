"""Whole models against golden values from independent implementations (tests/fixtures and ../shared/fixtures).

Bounds are those of the fixtures' README: logits within 1e-3, greedy tokens equal where the margin is above 1e-2,
hidden rows and states within an NMSE of 1e-8. The KV cache is float32. VKBACKEND_FULL=1: every file on every device,
and on each of them all lengths of prompts and numbers of drafts that there are golden values of.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_paths import fixture
from gguf_content import read_content, write_content
from next_checkpoint import next_checkpoint

import vkbackend as vkb
from vkbackend.device import open_device
from vkbackend.device.base import Device
from vkbackend.model.context import Context
from vkbackend.model.convert import convert
from vkbackend.model.gguf import open_gguf
from vkbackend.model.hparams import read_hparams
from vkbackend.model.loader import Model, load
from vkbackend.ops.case import nmse

FULL = bool(os.environ.get("VKBACKEND_FULL"))
FLOAT32 = ["dense-f32", "moe-f32", "next-f32"]  # the weights that most golden values are of
FILES = [
    *FLOAT32,
    *(f"dense-{q}" for q in ("f16", "q8_0", "q4_0", "q4_k_m", "q6_k")),
    *(f"dense-k-{q}" for q in ("q4_0", "q4_k_m", "q6_k")),
    *(f"{m}-{q}" for m in ("moe", "next") for q in ("f16", "q8_0", "q4_0", "q4_k_m")),
]
DEVICES = {
    "numpy_device": FILES,
    "kompute": [*FLOAT32, "dense-q8_0", "dense-k-q4_k_m", "dense-k-q6_k", "moe-q4_k_m", "next-q4_k_m"],
    "vulkan": [*FLOAT32, "dense-k-q4_k_m", "moe-q4_0", "next-q8_0"],
}
if FULL:
    DEVICES = dict.fromkeys([*DEVICES, "kompute_shared"], FILES)
CASES = [(name, device) for device, names in DEVICES.items() for name in names]
FLOAT32_CASES = [case for case in CASES if case[0] in FLOAT32]

Models = Callable[[str, str], Model]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a name. Fixtures have no float32 file of moe and next: those are converted from checkpoints."""

    @lru_cache
    def find(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        if name == "moe-f32":
            return convert(fixture("hf/moe/model.safetensors").parent, folder / "moe.gguf", "f32")
        if name == "next-f32":
            return convert(next_checkpoint(folder / "hf"), folder / "next.gguf", "f32")
        return fixture(f"gguf/{name}.gguf")

    return find


@pytest.fixture(scope="module")
def model_on(path_of: Callable[[str], Path], request: pytest.FixtureRequest) -> Models:
    @lru_cache(maxsize=2)
    def open_on(name: str, device: str) -> Model:
        opened: Device = request.getfixturevalue(device)
        return load(path_of(name), device=opened, n_ubatch=64)

    return open_on


@lru_cache
def golden(name: str, kind: str = "") -> Any:
    """The golden archive of a file: its own; kind "hf" or "ref": of its unquantised model."""
    base, _, quantisation = name.rpartition("-")
    kind = kind or ("ref" if quantisation == "f32" else quantisation)
    return dict(np.load(fixture(f"goldens/{base}/{kind}.npz")))


def prompt_of(name: str, n: int) -> list[int]:
    prompt: list[int] = golden(name, "hf")[f"prompt_{n}"].tolist()
    return prompt


def lengths(name: str, device: str) -> list[int]:
    if name not in FLOAT32:
        return [33]
    return [1, 5, 33, 100] if FULL or device != "vulkan" else [100]


@pytest.mark.parametrize(("name", "device", "n"), [(*case, n) for case in CASES for n in lengths(*case)])
def test_logits_and_greedy_text(name: str, device: str, n: int, model_on: Models) -> None:
    want, prompt, model = golden(name), prompt_of(name, n), model_on(name, device)
    ctx = model.context(n_ctx=256)
    logits = ctx.decode(prompt, logits="all").logits
    assert np.abs(logits - want[f"logits_{n}"]).max() <= 1e-3
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < 64:
        tokens.append(int(ctx.decode(tokens[-1:], greedy=True).argmax[0]))
    differ = np.flatnonzero(np.array(tokens) != want[f"greedy_{n}"])
    # Only a near tie may fall the other way; after it the two texts are about different things.
    assert len(differ) == 0 or want[f"margin_{n}"][differ[0]] <= 1e-2, f"token {differ[0]} of {tokens}"


@pytest.mark.parametrize(
    ("name", "device"),
    [case for case in CASES if FULL or case in (("moe-q4_k_m", "kompute"), ("next-q8_0", "vulkan"))],
)
def test_speculative_text_is_plain_text(name: str, device: str, model_on: Models) -> None:
    model, prompt = model_on(name, device), prompt_of(name, 33)
    plain = vkb.generate(model, prompt, 40, n_ctx=128, ignore_eos=True)
    drafted = vkb.generate(model, prompt, 40, spec=vkb.DraftMTP(3), n_ctx=128, ignore_eos=True)
    assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0
    differ = np.flatnonzero(np.array(plain.tokens) != golden(name)["greedy_33"][:40])
    assert len(differ) == 0 or golden(name)["margin_33"][differ[0]] <= 1e-2


@pytest.mark.parametrize(
    ("name", "device", "kind"),
    [
        (*case, kind)
        for case in CASES
        for kind in ("post_norm", "pre_norm")
        if kind == "post_norm" or case[0] in FLOAT32
    ],
)
def test_mtp_block(name: str, device: str, kind: str, model_on: Models, path_of: Callable[[str], Path]) -> None:
    """Logits over the prompt and of a chain of drafts; of float32 weights the block's own rows too."""
    want, model, prompt = golden(name), model_on(name, device), prompt_of(name, 33)
    prefix = "mtp_" if kind == "post_norm" else "mtp_pre_"
    rows = model.context(n_ctx=64, hidden=kind).decode(prompt).hidden
    assert rows is not None
    mtp = model.mtp_context(n_ctx=64, hidden=kind)
    before = np.concatenate([np.zeros_like(rows[:1]), rows[:-1]])
    out = mtp.decode(prompt, before)
    assert np.abs(out.logits - want[f"{prefix}logits"]).max() <= 1e-3
    tokens = want[f"{prefix}chain_tokens"].tolist()
    hidden, chain = rows[-1:], []
    for i, token in enumerate(tokens[:4]):
        step = mtp.decode([token], hidden)
        assert np.abs(step.logits[0] - want[f"{prefix}chain_logits"][i]).max() <= 1e-3
        assert step.hidden is not None and int(step.logits[0].argmax()) == tokens[i + 1]
        hidden = step.hidden
        chain.append(hidden[0])
    if name in FLOAT32:
        assert out.hidden is not None and nmse(before, want[f"{prefix}h_in"]) <= 1e-8
        for mine, theirs in ((out.hidden, want[f"{prefix}h_out"]), (np.array(chain), want[f"{prefix}chain_h"])):
            # Golden rows have gone through the norm in both conventions.
            assert nmse(mine if kind == "post_norm" else head_norm(path_of(name), mine), theirs) <= 1e-8


@pytest.mark.parametrize("kind", ["pre_norm", "post_norm"])
@pytest.mark.parametrize(("name", "device"), FLOAT32_CASES)
def test_hidden_rows_and_states(name: str, device: str, kind: str, model_on: Models) -> None:
    want = golden(name)
    ctx = model_on(name, device).context(n_ctx=64, n_rs_seq=3, hidden=kind)
    out = ctx.decode(prompt_of(name, 33))
    assert out.hidden is not None
    assert nmse(out.hidden, want["h_pre_33" if kind == "pre_norm" else "h_post_33"]) <= 1e-8
    assert len(ctx.memory.rings) == len(want["state_S_33"]) == 6
    for i, ring in enumerate(ctx.memory.rings):
        state = read(ctx, ring.state)[0, 32 % ring.state.shape[1]]
        assert nmse(state, want["state_S_33"][i].transpose(0, 2, 1)) <= 1e-8
        columns = read(ctx, ring.conv)[0]
        newest = np.stack([columns[p % len(columns)] for p in (30, 31, 32)])
        assert nmse(newest, want["conv_33"][i]) <= 1e-8


@pytest.mark.parametrize("n_blocks", range(1, 8))
@pytest.mark.parametrize("name", FLOAT32)
def test_rows_after_each_block(name: str, n_blocks: int, path_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The first blocks of a model alone: what leaves them, against the reference and transformers."""
    content = read_content(path_of(name))
    blocks = tuple(f"blk.{i}." for i in range(n_blocks))
    content.tensors = {n: t for n, t in content.tensors.items() if not n.startswith("blk.") or n.startswith(blocks)}
    content.set("block_count", n_blocks)
    content.drop("nextn_predict_layers")
    content.keys.pop(f"{content.arch}.attention.recurrent_layers", None)
    model = load(write_content(content, tmp_path / "m.gguf"), device=open_device("numpy"))
    rows = model.context(n_ctx=64, hidden="pre_norm").decode(prompt_of(name, 33)).hidden
    assert nmse(rows, golden(name)["layers_33"][n_blocks]) <= 1e-8
    assert nmse(rows, golden(name, "hf")["hidden_33"][n_blocks]) <= 1e-8


@pytest.mark.parametrize(
    ("name", "device", "n_prompt", "n_max"),
    [
        (*case, n_prompt, n_max)
        for case in FLOAT32_CASES
        for n_prompt in (5, 33)
        for n_max in (1, 2, 3, 4)
        if FULL or (n_prompt, n_max) == ((33, 1) if case[1] == "vulkan" else (5, 4))
    ],
)
def test_counts_of_speculation(name: str, device: str, n_prompt: int, n_max: int, model_on: Models) -> None:
    want = golden(name)
    spec = vkb.DraftMTP(n_max)
    gen = vkb.generate(model_on(name, device), prompt_of(name, n_prompt), 64, spec=spec, n_ctx=256, ignore_eos=True)
    assert gen.tokens == want[f"greedy_{n_prompt}"].tolist()
    drafted, accepted, rounds = want[f"spec_{n_prompt}_{n_max}"].tolist()
    assert (gen.stats.drafted, gen.stats.steps) == (drafted, rounds)
    # The golden count leaves out what the last round accepted beyond the 64th token.
    assert 1 + rounds + accepted == 64 and 0 <= gen.stats.accepted - accepted <= n_max


@pytest.mark.parametrize(("name", "device"), [case for case in CASES if case[1] != "numpy_device"])
def test_weights_stay_in_their_bytes(name: str, device: str, model_on: Models, path_of: Callable[[str], Path]) -> None:
    """Nothing is expanded on a GPU, experts included: what formats need beyond the file's bytes is a few percent."""
    in_file = sum(t.nbytes for t in open_gguf(path_of(name)).tensors.values())
    assert in_file <= model_on(name, device).weight_bytes <= 1.03 * in_file


@pytest.mark.parametrize("name", FLOAT32[1:])
def test_converted_files_have_the_sizes_of_the_fixtures(name: str, path_of: Callable[[str], Path]) -> None:
    f16 = read_hparams(open_gguf(fixture(f"gguf/{name.replace('f32', 'f16')}.gguf")))
    assert read_hparams(open_gguf(path_of(name))) == f16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["dense-q8_0", "dense-k-q4_k_m", "moe-q8_0"] if FULL else ["dense-q8_0", "moe-q8_0"])
def test_decode_batches_are_bitwise_invariant(name: str, device: str, seed: int, model_on: Models) -> None:
    """A token's logits are the same bits alone, in any batch up to 16, and however the earlier ones were split."""
    model = model_on(name, device)
    tokens = prompt_of(name, 100)[:48]
    alone = model.context(n_ctx=64)
    want = np.concatenate([alone.decode([t]).logits for t in tokens])
    rng = np.random.default_rng(seed)
    for splits in ([16, 16, 16], [3] * 16, [1, 2, 15, 14, 16], random_split(rng, 48), random_split(rng, 48)):
        ctx = model.context(n_ctx=64, n_rs_seq=int(rng.integers(0, 9)))
        at = 0
        for n in splits:
            got = ctx.decode(tokens[at : at + n], logits="all").logits
            np.testing.assert_array_equal(got.view(np.uint32), want[at : at + n].view(np.uint32), f"{splits} at {at}")
            at += n
    # The prompt kernels are within 1e-4 of that.
    chunked = model.context(n_ctx=64).decode(tokens, logits="all").logits
    assert np.abs(chunked - want).max() <= 1e-4


def head_norm(path: Path, x: Any) -> Any:
    """The norm behind the MTP block of a file of 8 blocks and this one."""
    weight = open_gguf(path).tensor_bytes("blk.8.nextn.shared_head_norm.weight").view(np.float32)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def random_split(rng: np.random.Generator, n: int) -> list[int]:
    out: list[int] = []
    while n:
        out.append(int(rng.integers(1, min(16, n) + 1)))
        n -= out[-1]
    return out


def read(ctx: Context, tensor: Any) -> Any:
    """What the context's memory holds."""
    words = ctx._device.download(tensor.storage.buffer, tensor.storage.base, tensor.size)
    return words.view(np.float32).reshape(tensor.shape)
