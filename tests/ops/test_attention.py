"""attention: what its cases do not show: bitwise independence of the batch and of kv_bound, extremes, errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import vkbackend as vkb
from vkbackend.device.base import Buffer, Device, Limits
from vkbackend.device.kompute import KomputeDevice
from vkbackend.errors import VkBackendError
from vkbackend.graph import Graph, bound
from vkbackend.ops.attention import MAX_TOKENS, OP, SPAN, attention
from vkbackend.ops.case import Case, CaseBuilder, nmse, run_case

Floats = NDArray[np.float32]
DEVICES = ["numpy_device", "kompute", "kompute_shared"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def few_groups(kompute: KomputeDevice) -> Iterator[KomputeDevice]:
    """At most 3 workgroups along x, so that every larger dispatch is spread over x and y."""
    usual = kompute.info
    kompute.info = replace(usual, limits=replace(usual.limits, max_groups=(3, 65535, 65535)))
    yield kompute
    kompute.info = usual


# ---- bitwise independence of the batch


@dataclass(frozen=True)
class Text:
    """One sequence whose q, gate, k and v are known at every position: [n_ctx, heads, head_dim]."""

    q: Floats
    gate: Floats
    k: Floats
    v: Floats


def _text(rng: np.random.Generator, n_ctx: int, heads: tuple[int, int], head_dim: int) -> Text:
    shapes = [(n_ctx, n, head_dim) for n in (heads[0], heads[0], heads[1], heads[1])]
    q, gate, k, v = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    return Text(2 * q, gate, k, v)


def _rows(device: Device, texts: Sequence[Text], past: Sequence[int], n_tokens: int, kv_bound: int) -> Floats:
    """Rows past[s] .. past[s] + n_tokens of every text, as one batch: [n_seqs, n_tokens, n_head * head_dim].

    Sequences sit in the last slots first, and whatever lies beyond the written part of the caches is NaN.
    """
    slots = np.arange(len(texts))[::-1]
    caches = np.full((2, len(texts), *texts[0].k.shape), np.nan, np.float32)
    for slot, text, p in zip(slots, texts, past, strict=True):
        caches[0, slot, : p + n_tokens] = text.k[: p + n_tokens]
        caches[1, slot, : p + n_tokens] = text.v[: p + n_tokens]
    b = CaseBuilder(device, np.random.default_rng(0))
    q, gate = (
        b.input(np.concatenate([x[p : p + n_tokens] for x, p in zip(parts, past, strict=True)]))
        for parts in ([t.q for t in texts], [t.gate for t in texts])
    )
    k_cache, v_cache = (b.state(c) for c in caches)
    step = b.input(np.stack([np.array(past), slots]))
    b.output(attention(b.graph, q, gate, k_cache, v_cache, step, n_tokens=n_tokens, kv_bound=kv_bound))
    y = device.compile(b.graph, poison=True).run(b.feeds)["out0"]
    return np.asarray(y, np.float32).reshape(len(texts), n_tokens, -1)


def _same(got: Floats, want: Floats, what: str) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), what)


HEADS = [((4, 2), 64), ((6, 1), 128), ((8, 2), 256), ((16, 1), 32)]


@pytest.mark.parametrize("start", [0, 118])
@pytest.mark.parametrize(("heads", "head_dim"), HEADS, ids=str)
def test_rows_do_not_depend_on_the_batch(
    heads: tuple[int, int], head_dim: int, start: int, kompute: KomputeDevice, rng: np.random.Generator
) -> None:
    """Positions within one chunk of keys, and across its border; alone, in batches, beside another sequence."""
    n_ctx = 300
    text, other = (_text(rng, n_ctx, heads, head_dim) for _ in range(2))
    together = _rows(kompute, [text], [start], MAX_TOKENS, start + MAX_TOKENS)[0]
    assert np.isfinite(together).all()
    for n in (1, 3, 8, 15):
        for at in {0, 9 % (MAX_TOKENS - n), MAX_TOKENS - n}:
            want = together[at : at + n]
            for kv_bound in (start + at + n, n_ctx):
                alone = _rows(kompute, [text], [start + at], n, kv_bound)[0]
                _same(alone, want, f"{n} rows from {at}, kv_bound {kv_bound}")
            if n <= MAX_TOKENS // 2:
                pair = _rows(kompute, [other, text], [201, start + at], n, n_ctx)
                _same(pair[1], want, f"{n} rows from {at}, second of two sequences")


@pytest.mark.parametrize(("heads", "head_dim"), [HEADS[0], HEADS[2]], ids=str)
def test_prompt_rows_do_not_depend_on_the_batch(
    heads: tuple[int, int], head_dim: int, kompute: KomputeDevice, rng: np.random.Generator
) -> None:
    """Longer batches have another kernel: the same bits however a prompt is cut, and the small batches' values."""
    n_ctx, start = SPAN + 80, SPAN - 30
    text, other = (_text(rng, n_ctx, heads, head_dim) for _ in range(2))
    together = _rows(kompute, [text], [start], 60, n_ctx)[0]
    for at, n in ((0, 17), (11, 49)):
        _same(_rows(kompute, [text], [start + at], n, start + at + n)[0], together[at : at + n], f"{n} rows from {at}")
    pair = _rows(kompute, [other, text], [3, start + 20], 40, n_ctx)
    _same(pair[1], together[20:], "second of two sequences")
    few = np.concatenate([_rows(kompute, [text], [start + at], 15, n_ctx)[0] for at in range(0, 60, 15)])
    assert nmse(together, few) < 1e-11


@pytest.mark.parametrize("n_tokens", [1, 5, 16, 40])
def test_both_variants_give_the_same_bits(
    n_tokens: int, kompute: KomputeDevice, kompute_shared: KomputeDevice, rng: np.random.Generator
) -> None:
    text = _text(rng, 200, (8, 2), 128)
    one, two = (_rows(d, [text], [130], n_tokens, 200) for d in (kompute, kompute_shared))
    if n_tokens <= MAX_TOKENS:
        _same(one, two, "variants")
    else:
        assert nmse(one, two) < 1e-11


# ---- workgroups


@pytest.mark.parametrize("n_tokens", [2, 20])
def test_more_workgroups_than_one_axis_allows(n_tokens: int, few_groups: KomputeDevice, seed: int) -> None:
    def build(b: CaseBuilder) -> None:
        text = _text(b.rng, 1100, (4, 2), 32)
        k_cache, v_cache = b.state(text.k[None]), b.state(text.v[None])
        q, gate = b.input(text.q[:n_tokens]), b.input(text.gate[:n_tokens])
        step = b.input(np.array([[1050], [0]]))
        b.output(attention(b.graph, q, gate, k_cache, v_cache, step, n_tokens=n_tokens, kv_bound=1100))

    result = run_case(Case("spread", build), few_groups, seed)
    assert result.ok, result


def test_memory_for_partial_results_is_bounded() -> None:
    """A prompt in a long context must not need room for hundreds of partial results per row."""
    g = Graph()
    dispatches = _lowered(g, n_tokens=512, n_ctx=262_144, kv_bound=262_144)
    partials = dispatches[0][0].binds[5].tensor
    assert 2 <= partials.shape[2] <= 16


def _lowered(g: Graph, n_tokens: int, n_ctx: int, kv_bound: int) -> Any:
    q, gate = (g.temp(name, (n_tokens, 8, 256)) for name in ("q", "gate"))
    k, v = (g.temp(name, (1, n_ctx, 2, 256)) for name in ("k", "v"))
    attention(g, q, gate, k, v, g.input("step", (2, 1), "i32"), n_tokens=n_tokens, kv_bound=kv_bound)
    return OP.lower(g.nodes[0], Limits())


# ---- values at the edges


@pytest.mark.parametrize("n_tokens", [4, 18])
def test_one_key_gives_its_value(n_tokens: int, device: Device, rng: np.random.Generator) -> None:
    """Row 0 at position 0 sees one key: v times sigmoid(gate), whatever the score."""
    text = _text(rng, 40, (4, 2), 64)
    text.q[:] *= 1e3
    row = _rows(device, [text], [0], n_tokens, 40)[0, 0].reshape(4, 64)
    want = np.repeat(text.v[0], 2, axis=0) / (1 + np.exp(-text.gate[0].astype(np.float64)))
    np.testing.assert_allclose(row, want, rtol=1e-5)


@pytest.mark.parametrize("n_tokens", [3, 30])
def test_huge_scores_pick_one_key(n_tokens: int, device: Device, rng: np.random.Generator) -> None:
    """Scores around 1e6 and gates of +-200: exp must neither overflow nor lose the winner."""
    n_ctx = 200
    text = _text(rng, n_ctx, (2, 1), 32)
    text.k[:] = rng.standard_normal(text.k.shape) * 0.01
    text.k[:, 0, 0] = rng.permutation(n_ctx) * 1000.0
    text.q[:] = 0
    text.q[:, 0, 0], text.q[:, 1, 0] = 50.0, -50.0
    text.gate[:, :, ::2], text.gate[:, :, 1::2] = 200.0, -200.0
    start = n_ctx - n_tokens
    y = _rows(device, [text], [start], n_tokens, n_ctx)[0].reshape(n_tokens, 2, 32)
    for t in range(n_tokens):
        seen = text.k[: start + t + 1, 0, 0]
        for head, key in enumerate((seen.argmax(), seen.argmin())):
            np.testing.assert_allclose(y[t, head, ::2], text.v[key, 0, ::2], rtol=1e-6)
            np.testing.assert_allclose(y[t, head, 1::2], 0, atol=1e-30)


@pytest.mark.parametrize("n_tokens", [12, 40])
@pytest.mark.parametrize("start", [0, 120])
def test_later_rows_do_not_reach_earlier_ones(
    start: int, n_tokens: int, device: Device, rng: np.random.Generator
) -> None:
    """A NaN in q, k and v of row 6 spoils rows from 6 on only."""
    text = _text(rng, 200, (4, 2), 64)
    clean = _rows(device, [text], [start], n_tokens, 200)[0]
    for x in (text.q, text.k, text.v):
        x[start + 6] = np.nan
    dirty = _rows(device, [text], [start], n_tokens, 200)[0]
    assert np.isnan(dirty[6:]).all()
    if isinstance(device, KomputeDevice):
        _same(dirty[:6], clean[:6], "rows before the bad one")


# ---- the eager call


def test_eager_call_against_the_definition(device: Device, rng: np.random.Generator) -> None:
    text = _text(rng, 9, (2, 1), 8)
    step = np.array([[6], [0]])
    y = vkb.ops.attention(  # type: ignore[operator]
        text.q[6:9], text.gate[6:9], text.k[None], text.v[None], step, n_tokens=3, kv_bound=9, device=device
    )
    for t in range(3):
        for head in range(2):
            k, v = text.k[: 7 + t, 0].astype(np.float64), text.v[: 7 + t, 0].astype(np.float64)
            p = np.exp(k @ text.q[6 + t, head] / np.sqrt(8))
            want = p @ v / p.sum() / (1 + np.exp(-text.gate[6 + t, head].astype(np.float64)))
            np.testing.assert_allclose(y[t, 8 * head : 8 * head + 8], want, rtol=1e-4, atol=1e-6)


# ---- errors


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gate": (3, 4, 32)}, r"gate \(3, 4, 32\) must have q's shape \(3, 4, 64\)"),
        ({"k": (1, 50, 2, 32)}, r"caches \(1, 50, 2, 32\)"),
        ({"v": (1, 49, 2, 64)}, r"caches"),
        ({"k": (1, 50, 3, 64), "v": (1, 50, 3, 64)}, "4 query heads are not a multiple of 3 kv heads"),
        ({"q": (3, 4, 6), "gate": (3, 4, 6), "k": (1, 50, 2, 6), "v": (1, 50, 2, 6)}, "head_dim is 6; a multiple of 4"),
        ({"q": (3, 4, 260), "gate": (3, 4, 260), "k": (1, 50, 2, 260), "v": (1, 50, 2, 260)}, "up to 256"),
        ({"step": (2, 2)}, "3 rows are not 2 sequences of 3"),
        ({"kv_bound": 51}, r"kv_bound is 51; allowed are 3\.\.50"),
        ({"kv_bound": 2}, r"kv_bound is 2; allowed are 3\.\.50"),
    ],
)
def test_builder_errors(changed: dict[str, Any], message: str) -> None:
    shapes: dict[str, Any] = {
        "q": (3, 4, 64),
        "gate": (3, 4, 64),
        "k": (1, 50, 2, 64),
        "v": (1, 50, 2, 64),
        "step": (2, 1),
        **changed,
    }
    kv_bound = shapes.pop("kv_bound", 50)
    g = Graph()
    q, gate, k, v, step = (g.temp(name, shape) for name, shape in shapes.items())
    with pytest.raises(VkBackendError, match=message):
        attention(g, q, gate, k, v, step, n_tokens=3, kv_bound=kv_bound)


def test_q_and_caches_must_be_contiguous() -> None:
    g = Graph()
    q, k = g.temp("q", (3, 4, 64)), g.temp("k", (1, 50, 2, 64))
    wide, step = g.temp("qg", (3, 4, 128)).narrow(2, 0, 64), g.temp("step", (2, 1), "i32")
    with pytest.raises(VkBackendError, match="q must be contiguous"):
        attention(g, wide, q, k, k, step, n_tokens=3, kv_bound=50)
    half = g.temp("kv", (1, 50, 4, 64)).narrow(2, 0, 2)
    with pytest.raises(VkBackendError, match="caches must be contiguous"):
        attention(g, q, q, half, half, step, n_tokens=3, kv_bound=50)


class _Words:
    """A buffer that nothing is ever stored in."""

    n_words = 1 << 20


def test_caches_must_start_at_16_bytes() -> None:
    buffer: Buffer = _Words()
    k, v = (bound("cache", buffer, base, (1, 50, 2, 64)) for base in (64, 6466))
    g = Graph()
    q, step = g.temp("q", (1, 4, 64)), g.temp("step", (2, 1), "i32")
    attention(g, q, q, k, v, step, n_tokens=1, kv_bound=50)
    with pytest.raises(VkBackendError, match="'cache' starts at word 6466"):
        OP.lower(g.nodes[0], Limits())
