"""Every way of writing one model that is met in files: the same logits, bit for bit, of trunk and MTP block.

docs/files.md has the table of them; a test here keeps it complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from fixture_paths import fixture
from gguf_content import Content, Key, Stored, read_content, stored, write_content
from numpy.typing import NDArray
from packed import as_qwen3next
from synthetic import Heads, write_model

from vkbackend.errors import ModelError
from vkbackend.model.loader import Model, load
from vkbackend.model.split import open_model

BOOL, INT32, UINT32 = (gguf.GGUFValueType[n] for n in ("BOOL", "INT32", "UINT32"))
TOKENS = [5, 17, 300, 41, 5, 999, 0, 64]
DOC = Path(__file__).resolve().parents[2] / "docs" / "files.md"

Change = Callable[[Content], None]
VARIANTS: dict[str, Change] = {}
PAIRS: dict[str, tuple[Change, Change]] = {}


def variant(title: str) -> Callable[[Change], Change]:
    """Registers a change after which the file is another, and the model the same."""

    def register(change: Change) -> Change:
        VARIANTS[title] = change
        return change

    return register


def n_main(c: Content) -> int:
    return int(c["block_count"] - c["nextn_predict_layers"])


def nextn(c: Content) -> str:
    return f"blk.{n_main(c)}.nextn."


def set_flags(c: Content, n: int) -> None:
    c.set_array("attention.recurrent_layers", [i < n_main(c) and (i + 1) % 4 != 0 for i in range(n)], BOOL)


def round_to(c: Content, kind: str, names: str) -> None:
    """Gives tensors values that a narrow type holds exactly."""
    for name in c.tensors:
        if re.search(names, name):
            c.tensors[name] = c.tensors[name].cast(kind).cast("F32")


def cast(c: Content, kind: str, names: str) -> None:
    for name in c.tensors:
        if re.search(names, name):
            c.tensors[name] = c.tensors[name].cast(kind)


# ---- keys


@variant("`ssm_dt` for `ssm_dt.bias`")
def _(c: Content) -> None:
    c.rename("ssm_dt.bias", "ssm_dt")


@variant("`rope.dimension_sections` of 3")
def _(c: Content) -> None:
    c.set_array("rope.dimension_sections", c["rope.dimension_sections"][:3], INT32)


@variant("`rope.dimension_sections` of another integer type")
def _(c: Content) -> None:
    c.set_array("rope.dimension_sections", c["rope.dimension_sections"], UINT32)


@variant("`full_attention_interval` only")
def _(c: Content) -> None:
    c.drop("attention.recurrent_layers")


@variant("neither `full_attention_interval` nor `attention.recurrent_layers` (4 is meant)")
def _(c: Content) -> None:
    c.drop("attention.recurrent_layers")
    c.drop("full_attention_interval")


@variant("`attention.recurrent_layers` only, an entry for every block")
def _(c: Content) -> None:
    set_flags(c, c["block_count"])
    c.drop("full_attention_interval")


@variant("`attention.recurrent_layers` without the MTP block's entry")
def _(c: Content) -> None:
    set_flags(c, n_main(c))
    c.drop("full_attention_interval")


@variant("`attention.recurrent_layers` against `full_attention_interval` (the array wins)")
def _(c: Content) -> None:
    set_flags(c, c["block_count"])
    c.set("full_attention_interval", 2)


@variant("keys and tensors that are unknown here")
def _(c: Content) -> None:
    c.set("something.new", 3)
    c.keys["general.odd"] = Key("text", gguf.GGUFValueType.STRING)
    c.tensors["blk.0.something_new.weight"] = stored(np.zeros((3, 5)))


# ---- tensors


@variant("tensors in another order")
def _(c: Content) -> None:
    c.tensors = dict(sorted(c.tensors.items(), reverse=True))


@variant("`ssm_conv1d` with an axis of 1 between")
def _(c: Content) -> None:
    for name, t in c.tensors.items():
        if name.endswith("ssm_conv1d.weight"):
            c.tensors[name] = Stored(t.data[:, None], t.type)


@variant("`ssm_a` as a column")
def _(c: Content) -> None:
    for name, t in c.tensors.items():
        if name.endswith("ssm_a"):
            c.tensors[name] = Stored(t.data[:, None], t.type)


@variant("`nextn.embed_tokens` and `nextn.shared_head_head` written out")
def _(c: Content) -> None:
    c.tensors[nextn(c) + "embed_tokens.weight"] = c.tensors["token_embd.weight"]
    c.tensors[nextn(c) + "shared_head_head.weight"] = c.tensors["output.weight"]


# ---- the same model as another file, where the fixture as it is would be another model


def pair(title: str) -> Callable[[Callable[[], tuple[Change, Change]]], None]:
    def register(make: Callable[[], tuple[Change, Change]]) -> None:
        PAIRS[title] = make()

    return register


@pair("no `output` (tied to `token_embd`)")
def _() -> tuple[Change, Change]:
    def untied(c: Content) -> None:
        c.tensors["output.weight"] = c.tensors["token_embd.weight"]

    def tied(c: Content) -> None:
        del c.tensors["output.weight"]

    return untied, tied


@pair("no `nextn.shared_head_norm` (`output_norm` is meant)")
def _() -> tuple[Change, Change]:
    def written(c: Content) -> None:
        c.tensors[nextn(c) + "shared_head_norm.weight"] = c.tensors["output_norm.weight"]

    def left_out(c: Content) -> None:
        del c.tensors[nextn(c) + "shared_head_norm.weight"]

    return written, left_out


for _kind in ("BF16", "F16"):
    for _what, _names in (("norms", r"norm\.weight$"), ("convolution, `ssm_a` and `ssm_dt`", r"ssm_(conv1d|a$|dt)")):

        @pair(f"{_what} in {_kind.lower()}")
        def _(kind: str = _kind, names: str = _names) -> tuple[Change, Change]:
            return lambda c: round_to(c, kind, names), lambda c: (round_to(c, kind, names), cast(c, kind, names))[0]


# ---- tests


@pytest.fixture(scope="module")
def base() -> Content:
    return read_content(fixture("gguf/dense-q8_0.gguf"))


def copy(c: Content) -> Content:
    return Content(c.arch, dict(c.keys), dict(c.tensors))


def logits(model: Model, tokens: list[int] = TOKENS, mtp: bool = True) -> list[NDArray[np.float32]]:
    """Logits of the trunk, and of the MTP block over the prompt and one token drafted on."""
    out = model.context(n_ctx=32, hidden="post_norm").decode(tokens, logits="all")
    if not mtp:
        return [out.logits]
    ctx = model.mtp_context(n_ctx=32)
    first = ctx.decode(tokens, out.hidden)
    assert first.hidden is not None
    return [out.logits, first.logits, ctx.decode([7], first.hidden[-1:]).logits]


def check_equal(one: list[NDArray[np.float32]], two: list[NDArray[np.float32]]) -> None:
    for a, b in zip(one, two, strict=True):
        assert np.isfinite(a).all() and a.std() > 0
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def wanted(base: Content, tmp_path_factory: pytest.TempPathFactory) -> list[NDArray[np.float32]]:
    return logits(load(fixture("gguf/dense-q8_0.gguf"), device="numpy"))


@pytest.mark.parametrize("title", VARIANTS)
def test_variants(title: str, base: Content, wanted: list[NDArray[np.float32]], tmp_path: Path) -> None:
    content = copy(base)
    plain = write_content(content, tmp_path / "plain.gguf").read_bytes()
    VARIANTS[title](content)
    path = write_content(content, tmp_path / "v.gguf")
    assert path.read_bytes() != plain
    check_equal(wanted, logits(load(path, device="numpy")))


@pytest.mark.parametrize("title", PAIRS)
def test_pairs(title: str, base: Content, wanted: list[NDArray[np.float32]], tmp_path: Path) -> None:
    outs = []
    for i, change in enumerate(PAIRS[title]):
        content = copy(base)
        change(content)
        outs.append(logits(load(write_content(content, tmp_path / f"{i}.gguf"), device="numpy")))
    check_equal(*outs)
    assert any((a != b).any() for a, b in zip(outs[0], wanted, strict=True))  # the pair is another model than the base


def test_version_2(base: Content, wanted: list[NDArray[np.float32]], tmp_path: Path) -> None:
    raw = bytearray(fixture("gguf/dense-q8_0.gguf").read_bytes())
    assert raw[4] == 3
    raw[4] = 2
    (tmp_path / "v2.gguf").write_bytes(raw)
    check_equal(wanted, logits(load(tmp_path / "v2.gguf", device="numpy")))


def parted(base: Content, tmp_path: Path) -> tuple[Path, Path]:
    """The trunk without its MTP block, and the block with what it shares with the trunk."""
    block = f"blk.{n_main(base)}."
    trunk, mtp = copy(base), copy(base)
    trunk.tensors = {n: t for n, t in base.tensors.items() if not n.startswith(block)}
    trunk.set("block_count", n_main(base))
    set_flags(trunk, n_main(base))
    trunk.drop("nextn_predict_layers")
    mtp.tensors = {n: t for n, t in base.tensors.items() if n.startswith(block) or not n.startswith("blk.")}
    return write_content(trunk, tmp_path / "trunk.gguf"), write_content(mtp, tmp_path / "mtp-x.gguf")


def test_trunk_and_block_apart(base: Content, wanted: list[NDArray[np.float32]], tmp_path: Path) -> None:
    trunk, mtp = parted(base, tmp_path)
    check_equal(wanted, logits(load(trunk, device="numpy", draft=mtp)))
    alone = load(trunk, device="numpy")
    check_equal(wanted[:1], logits(alone, mtp=False))
    with pytest.raises(ModelError, match=r"no MTP block"):
        alone.mtp_context()
    block = load(mtp, device="numpy")
    assert block.has_mtp
    with pytest.raises(ModelError, match=r"MTP block only"):
        block.context()


def test_split(base: Content, wanted: list[NDArray[np.float32]], tmp_path: Path) -> None:
    path = write_content(copy(base), tmp_path / "s.gguf", per_part=40)
    assert open_model(path).n_parts > 2
    check_equal(wanted, logits(load(path, device="numpy")))


MOE_VARIANTS: dict[str, Change] = {}


def moe_variant(title: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        MOE_VARIANTS[title] = change
        return change

    return register


@moe_variant("`ffn_gate_up_exps` for `ffn_gate_exps` and `ffn_up_exps`")
def _(c: Content) -> None:
    for b in [n.removesuffix("ffn_gate_exps.weight") for n in c.tensors if n.endswith("ffn_gate_exps.weight")]:
        gate, up = (c.tensors.pop(b + f"ffn_{n}_exps.weight") for n in ("gate", "up"))
        c.tensors[b + "ffn_gate_up_exps.weight"] = Stored(np.concatenate([gate.data, up.data], axis=1), gate.type)


@moe_variant("`ffn_gate_inp_shexp` as one row")
def _(c: Content) -> None:
    for name, t in c.tensors.items():
        if name.endswith("ffn_gate_inp_shexp.weight"):
            c.tensors[name] = Stored(t.data.reshape(1, -1), t.type)


@moe_variant("no `feed_forward_length`")
def _(c: Content) -> None:
    c.drop("feed_forward_length")


@moe_variant("no `expert_feed_forward_length` (`feed_forward_length` / `expert_used_count` is meant)")
def _(c: Content) -> None:
    assert c["feed_forward_length"] == 2 * c["expert_feed_forward_length"]
    c.drop("expert_feed_forward_length")


@pytest.mark.parametrize("arch", ["qwen35moe", "qwen3next", "qwen3next with `ssm_in`"])
@pytest.mark.parametrize("title", MOE_VARIANTS)
def test_moe_variants(title: str, arch: str, tmp_path: Path, seed: int) -> None:
    heads = Heads(n_k_heads=2, n_v_heads=4)
    content = read_content(write_model(tmp_path / "moe.gguf", seed, experts=(2, 4), heads=heads))
    if arch != "qwen35moe":
        content = as_qwen3next(content, packed_in="ssm_in" in arch)
    tokens = [t % 64 for t in TOKENS]
    before = logits(load(write_content(content, tmp_path / "before.gguf"), device="numpy"), tokens)
    MOE_VARIANTS[title](content)
    check_equal(before, logits(load(write_content(content, tmp_path / "after.gguf"), device="numpy"), tokens))


def test_the_page_lists_every_variant() -> None:
    rows = re.findall(r"^\| (.+?) \|", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    assert not [t for t in (*VARIANTS, *PAIRS, *MOE_VARIANTS) if t not in rows]
