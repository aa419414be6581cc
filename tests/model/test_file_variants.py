"""Every way of writing one model that is met in files: the same logits, bit for bit, of trunk and MTP block.

docs/files.md has the table of them; a test here keeps it complete. Every variant is loaded on NumPy, with
VKBACKEND_FULL=1 on Kompute and direct Vulkan too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import lru_cache
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
TOKENS = [5, 17, 300, 41, 5, 998, 0, 64]
DOC = Path(__file__).resolve().parents[2] / "docs" / "files.md"
DEVICES = ["numpy_device", "kompute", "vulkan"] if os.environ.get("VKBACKEND_FULL") else ["numpy_device"]
MOE = ["qwen35moe", "qwen3next", "qwen3next with `ssm_in`"]
ARCHS = ["qwen35", *MOE]

Change = Callable[[Content], None]
Request = pytest.FixtureRequest
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
        c.tensors.pop(nextn(c) + "shared_head_norm.weight", None)

    return written, left_out


for _kind in ("BF16", "F16"):
    for _what, _names in (("norms", r"norm\.weight$"), ("convolution, `ssm_a` and `ssm_dt`", r"ssm_(conv1d|a$|dt)")):

        @pair(f"{_what} in {_kind.lower()}")
        def _(kind: str = _kind, names: str = _names) -> tuple[Change, Change]:
            return lambda c: round_to(c, kind, names), lambda c: (round_to(c, kind, names), cast(c, kind, names))[0]


# ---- tests


Logits = list[NDArray[np.float32]]
Bases = Callable[[str], Content]
Wanted = Callable[[str, str], Logits]


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """The file whose variants are made: a fixture, and for experts a small random model (layer 3 of 4 attends)."""

    @lru_cache
    def make(arch: str) -> Content:
        if arch == "qwen35":
            return read_content(fixture("gguf/dense-q8_0.gguf"))
        path = tmp_path_factory.mktemp("base") / "moe.gguf"
        heads = Heads(n_k_heads=2, n_v_heads=4)
        content = read_content(write_model(path, 5, n_vocab=1000, interval=4, experts=(2, 4), heads=heads))
        set_flags(content, content["block_count"])
        return content if arch == "qwen35moe" else as_qwen3next(content, packed_in="ssm_in" in arch)

    return lambda arch: copy(make(arch))


@pytest.fixture(scope="module")
def wanted_of(base_of: Bases, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    """Logits of the base on a device."""

    @lru_cache
    def find(arch: str, device: str) -> Logits:
        path = write_content(base_of(arch), tmp_path_factory.mktemp("wanted") / "base.gguf")
        return logits(load(path, device=request.getfixturevalue(device)))

    return find


def copy(c: Content) -> Content:
    return Content(c.arch, dict(c.keys), dict(c.tensors))


def logits(model: Model, mtp: bool = True) -> Logits:
    """Logits of the trunk, and of the MTP block over the prompt and one token drafted on."""
    out = model.context(n_ctx=32, hidden="post_norm").decode(TOKENS, logits="all")
    if not mtp:
        return [out.logits]
    ctx = model.mtp_context(n_ctx=32)
    first = ctx.decode(TOKENS, out.hidden)
    assert first.hidden is not None
    return [out.logits, first.logits, ctx.decode([7], first.hidden[-1:]).logits]


def check_equal(one: Logits, two: Logits) -> None:
    for a, b in zip(one, two, strict=True):
        assert np.isfinite(a).all() and a.std() > 0
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("title", VARIANTS)
def test_variants(
    title: str, arch: str, device: str, base_of: Bases, wanted_of: Wanted, tmp_path: Path, request: Request
) -> None:
    content = base_of(arch)
    plain = write_content(content, tmp_path / "plain.gguf").read_bytes()
    VARIANTS[title](content)
    path = write_content(content, tmp_path / "v.gguf")
    assert path.read_bytes() != plain
    check_equal(wanted_of(arch, device), logits(load(path, device=request.getfixturevalue(device))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("title", PAIRS)
def test_pairs(
    title: str, arch: str, device: str, base_of: Bases, wanted_of: Wanted, tmp_path: Path, request: Request
) -> None:
    outs = []
    for i, change in enumerate(PAIRS[title]):
        content = base_of(arch)
        change(content)
        path = write_content(content, tmp_path / f"{i}.gguf")
        outs.append(logits(load(path, device=request.getfixturevalue(device))))
    check_equal(*outs)
    # The pair is another model than the base. (The small ones have no norm of the block to begin with.)
    same = all((a == b).all() for a, b in zip(outs[0], wanted_of(arch, device), strict=True))
    assert same == ("shared_head_norm" in title and arch != "qwen35")


@pytest.mark.parametrize("device", DEVICES)
def test_version_2(device: str, wanted_of: Wanted, tmp_path: Path, request: Request) -> None:
    raw = bytearray(fixture("gguf/dense-q8_0.gguf").read_bytes())
    assert raw[4] == 3
    raw[4] = 2
    (tmp_path / "v2.gguf").write_bytes(raw)
    model = load(tmp_path / "v2.gguf", device=request.getfixturevalue(device))
    check_equal(wanted_of("qwen35", device), logits(model))


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", ARCHS)
def test_trunk_and_block_apart(
    arch: str, device: str, base_of: Bases, wanted_of: Wanted, tmp_path: Path, request: Request
) -> None:
    trunk, mtp = parted(base_of(arch), tmp_path)
    opened, wanted = request.getfixturevalue(device), wanted_of(arch, device)
    check_equal(wanted, logits(load(trunk, device=opened, draft=mtp)))
    alone = load(trunk, device=opened)
    check_equal(wanted[:1], logits(alone, mtp=False))
    with pytest.raises(ModelError, match=r"no MTP block"):
        alone.mtp_context()
    block = load(mtp, device=opened)
    assert block.has_mtp
    with pytest.raises(ModelError, match=r"MTP block only"):
        block.context()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", ARCHS)
def test_split(arch: str, device: str, base_of: Bases, wanted_of: Wanted, tmp_path: Path, request: Request) -> None:
    path = write_content(base_of(arch), tmp_path / "s.gguf", per_part=25)
    parts = sorted(tmp_path.glob("s-*.gguf"))
    assert path == parts[0] and open_model(path).n_parts == len(parts) > 2
    for given in (path, parts[-1]):
        check_equal(wanted_of(arch, device), logits(load(given, device=request.getfixturevalue(device))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_block_with_a_table_and_a_head_of_its_own(
    arch: str, device: str, base_of: Bases, wanted_of: Wanted, tmp_path: Path, request: Request
) -> None:
    """Both hold the trunk's rows moved by one: so tokens and logits of the block move, and nothing else."""
    content = base_of(arch)
    for part, name in (("embed_tokens", "token_embd"), ("shared_head_head", "output")):
        rows = np.roll(np.arange(len(content.tensors["token_embd.weight"].data)), 1)
        content.tensors[nextn(content) + f"{part}.weight"] = content.tensors[f"{name}.weight"].rows(rows)
    model = load(write_content(content, tmp_path / "own.gguf"), device=request.getfixturevalue(device))
    trunk, block, _ = wanted_of(arch, device)
    out = model.context(n_ctx=32, hidden="post_norm").decode(TOKENS, logits="all")
    np.testing.assert_array_equal(out.logits, trunk)
    moved = [t + 1 for t in TOKENS]
    assert max(moved) < 1000
    got = model.mtp_context(n_ctx=32).decode(moved, out.hidden).logits
    np.testing.assert_array_equal(got, np.roll(block, 1, axis=1))


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", MOE)
@pytest.mark.parametrize("title", MOE_VARIANTS)
def test_moe_variants(
    title: str, arch: str, device: str, base_of: Bases, wanted_of: Wanted, tmp_path: Path, request: Request
) -> None:
    content = base_of(arch)
    MOE_VARIANTS[title](content)
    path = write_content(content, tmp_path / "after.gguf")
    check_equal(wanted_of(arch, device), logits(load(path, device=request.getfixturevalue(device))))


def test_the_page_lists_every_variant() -> None:
    rows = re.findall(r"^\| (.+?) \|", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    assert not [t for t in (*VARIANTS, *PAIRS, *MOE_VARIANTS) if t not in rows]
