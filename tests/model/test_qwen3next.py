"""qwen3next: packed rows taken apart, against the qwen35moe model that computes the same.

Golden values of whole models are in test_goldens.py, and in ../shared only; what is written out here runs everywhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_content import Content, read_content, write_content
from numpy.typing import NDArray
from packed import as_qwen3next
from synthetic import Heads, write_model

import vkbackend as vkb
from vkbackend.device.kompute import KomputeDevice
from vkbackend.errors import ModelError
from vkbackend.graph import Tensor
from vkbackend.model.context import Context
from vkbackend.model.gguf import open_gguf
from vkbackend.model.hparams import read_hparams
from vkbackend.model.loader import load
from vkbackend.model.qwen3next import unpacked
from vkbackend.ops.case import nmse


def moe_content(tmp_path: Path, seed: int, n_k_heads: int, n_v_heads: int, kind: str = "F32") -> Content:
    heads = Heads(n_k_heads=n_k_heads, n_v_heads=n_v_heads, linear_dim=32)
    content = read_content(write_model(tmp_path / "moe.gguf", seed, experts=(2, 4), heads=heads))
    if kind != "F32":
        for name, t in content.tensors.items():
            if name.endswith(("attn_qkv.weight", "attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight")):
                content.tensors[name] = t.cast(kind)
    return content


def tensor_of(ctx: Context, t: Tensor) -> NDArray[np.float32]:
    """What a ring holds."""
    return ctx._device.download(t.storage.buffer, t.storage.base, t.size).view(np.float32).reshape(t.shape)


# ---- packed rows


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("packed_in", [False, True])
@pytest.mark.parametrize("n_k_heads", [1, 2, 3])
def test_rows_are_taken_apart_bit_by_bit(n_k_heads: int, packed_in: bool, kind: str, tmp_path: Path, seed: int) -> None:
    """Whatever the quantisation, the rows are those that lie apart in qwen35moe, in grouped order."""
    n_v, dim = 2 * n_k_heads, 32
    content = moe_content(tmp_path, seed, n_k_heads, n_v, kind)
    path = write_content(as_qwen3next(content, packed_in), tmp_path / "next.gguf")
    file = open_gguf(path)
    got = unpacked(file, read_hparams(file))
    assert not [n for n in got.tensors if n.endswith(("ssm_ba.weight", "ssm_in.weight"))]
    grouped = [j * n_k_heads + g for g in range(n_k_heads) for j in range(2)]
    rows = [h * dim + i for h in grouped for i in range(dim)]
    keys = [*range(2 * n_k_heads * dim)]
    orders = {
        "attn_qkv": keys + [len(keys) + r for r in rows], "attn_gate": rows, "ssm_alpha": grouped, "ssm_beta": grouped
    }  # fmt: skip
    for b in ("blk.0.", "blk.2."):
        for part, order in orders.items():
            name, want = f"{b}{part}.weight", content.tensors[f"{b}{part}.weight"].data[order]
            assert got.tensors[name].shape == (len(order), 64)
            np.testing.assert_array_equal(got.tensor_bytes(name), want.reshape(-1).view(np.uint8))
            assert got.tensors[name].nbytes == want.nbytes


@pytest.mark.parametrize("packed_in", [False, True])
@pytest.mark.parametrize(("n_k_heads", "n_v_heads"), [(2, 4), (1, 3)])
@pytest.mark.parametrize("device_name", ["numpy_device", "kompute"])
def test_it_computes_what_the_qwen35moe_model_does(
    device_name: str, n_k_heads: int, n_v_heads: int, packed_in: bool, tmp_path: Path, rng: np.random.Generator,
    seed: int, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if device_name == "kompute" and packed_in != (n_k_heads == 2):
        pytest.skip("the other two combinations differ in what NumPy's tests see")
    content = moe_content(tmp_path, seed, n_k_heads, n_v_heads)
    path = write_content(as_qwen3next(content, packed_in), tmp_path / "next.gguf")
    tokens = rng.integers(0, 64, 12).tolist()
    outs = []
    for file, device in ((tmp_path / "moe.gguf", "numpy"), (path, request.getfixturevalue(device_name))):
        model = load(file, device=device)
        ctx = model.context(n_ctx=32, n_rs_seq=2, hidden="post_norm")
        out = ctx.decode(tokens, logits="all")
        outs.append([out.logits, model.mtp_context(n_ctx=32).decode(tokens, out.hidden).logits])
        states = [tensor_of(ctx, ring.state)[0] for ring in ctx.memory.rings]  # [n_slots, n_v_heads, dv, dk]
        if file == path:
            tiled = [(h % n_k_heads) * (n_v_heads // n_k_heads) + h // n_k_heads for h in range(n_v_heads)]
            states = [state[:, tiled] for state in states]
        outs[-1] += states
    for want, got in zip(*outs, strict=True):
        assert nmse(got, want) <= 1e-9


def test_a_file_without_a_block(tmp_path: Path, seed: int) -> None:
    """The first files of this architecture have no MTP block."""
    content = as_qwen3next(moe_content(tmp_path, seed, 2, 4))
    content.tensors = {n: t for n, t in content.tensors.items() if not n.startswith("blk.4.")}
    content.set("block_count", 4)
    content.drop("nextn_predict_layers")
    content.drop("rope.dimension_sections")
    model = load(write_content(content, tmp_path / "next.gguf"), device="numpy")
    assert not model.has_mtp and model.hparams.rope_sections == ()
    whole = load(write_content(as_qwen3next(moe_content(tmp_path, seed, 2, 4)), tmp_path / "w.gguf"), device="numpy")
    one, two = (m.context(n_ctx=32).decode([1, 2, 3], logits="all").logits for m in (model, whole))
    np.testing.assert_array_equal(one, two)


def test_rollback(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """The ring that qwen35 has: after a rollback the same bits as if the tokens had never been there."""
    path = write_content(as_qwen3next(moe_content(tmp_path, seed, 2, 4)), tmp_path / "next.gguf")
    model = load(path, device="numpy")
    tokens = rng.integers(0, 64, 9).tolist()
    ctx, plain = (model.context(n_ctx=32, n_rs_seq=4) for _ in range(2))
    ctx.decode(tokens)
    ctx.decode([5, 6, 7])
    ctx.seq_rm(0, 9)
    plain.decode(tokens)
    for t in (8, 9, 10):
        np.testing.assert_array_equal(ctx.decode([t]).logits, plain.decode([t]).logits)


@pytest.mark.parametrize("where", ["numpy", "kompute"])
def test_speculation_changes_no_token(where: str, kompute: KomputeDevice, tmp_path: Path, seed: int) -> None:
    path = write_content(as_qwen3next(moe_content(tmp_path, seed, 2, 4)), tmp_path / "next.gguf")
    model = load(path, device="numpy" if where == "numpy" else kompute)
    plain = vkb.generate(model, [3, 7, 9], 16, n_ctx=64, ignore_eos=True)
    drafted = vkb.generate(model, [3, 7, 9], 16, spec=vkb.DraftMTP(3), n_ctx=64, ignore_eos=True)
    assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0


@pytest.mark.parametrize("name", ["ssm_ba", "ssm_in"])
def test_wrong_shapes_are_refused(name: str, tmp_path: Path, seed: int) -> None:
    content = as_qwen3next(moe_content(tmp_path, seed, 2, 4), packed_in=True)
    whole = content.tensors[f"blk.2.{name}.weight"]
    content.tensors[f"blk.2.{name}.weight"] = whole.rows(slice(-1))
    n = len(whole.data)
    with pytest.raises(ModelError, match=rf"blk.2.{name}.weight' has shape \({n - 1}, 64\); .* \({n}, 64\)"):
        load(write_content(content, tmp_path / "bad.gguf"), device="numpy")
