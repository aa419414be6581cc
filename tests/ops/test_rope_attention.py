"""rope_attention: the same bits in every batch, for every kv_bound and in every run; the caches; errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vkbackend.device.base import Device, Limits, Program
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.device.shared_memory import shared_bytes
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.errors import VkBackendError
from vkbackend.graph import Graph, Tensor, bound
from vkbackend.ops.case import nmse
from vkbackend.ops.rope_attention import CHUNK, KERNEL, MAX_PARTS, MAX_TOKENS, OP, rope_attention, shared_need
from vkbackend.ops.rope_kv_write import rope_table

Floats = NDArray[np.float32]
EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    n_head: int
    n_kv: int
    head_dim: int
    n_rot: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of qg, k and v in the projection."""
        return 2 * self.n_head * self.head_dim, self.n_kv * self.head_dim, self.n_kv * self.head_dim


class Layer:
    """The op with caches of n_seqs sequences, all NaN at first; sequence s sits in slot n_seqs - 1 - s."""

    def __init__(self, device: Device, sizes: Sizes, norms: Floats, n_seqs: int, n_ctx: int) -> None:
        self.device, self.sizes, self.norms, self.n_seqs, self.n_ctx = device, sizes, norms, n_seqs, n_ctx
        shape = (n_seqs, n_ctx, sizes.n_kv, sizes.head_dim)
        self.n_words = int(np.prod(shape))
        self.buffer = device.allocate(2 * self.n_words)
        device.fill(self.buffer, 0, 2 * self.n_words, 0x7FC00000)
        self.caches = [bound("cache", self.buffer, i * self.n_words, shape) for i in range(2)]
        self.programs: dict[tuple[int, int], Program] = {}

    def fill(self, past: Floats) -> None:
        """Puts rows of the first slot, [2, words], at the start of both caches."""
        for i in range(2):
            self.device.upload(self.buffer, i * self.n_words, past[i])

    def program(self, n_tokens: int, kv_bound: int) -> Program:
        g, sizes = Graph(), self.sizes
        n_rows = self.n_seqs * n_tokens
        x = g.input("x", (n_rows, sum(sizes.widths)))
        norms = g.input("norms", self.norms.shape)
        views, at = [], 0
        for width, heads in zip(sizes.widths, (sizes.n_head, sizes.n_kv, sizes.n_kv), strict=True):
            views.append(x.narrow(1, at, width).reshape(n_rows, heads, width // heads))
            at += width
        q_norm, k_norm = (norms.narrow(0, i, 1).reshape(sizes.head_dim) for i in range(2))
        table = g.input("table", (sizes.n_rot // 2, 2), "i32")
        step = g.input("step", (2, self.n_seqs), "i32")
        y = rope_attention(
            g, *views, q_norm, k_norm, table, *self.caches, step, n_tokens=n_tokens, kv_bound=kv_bound, eps=EPS
        )
        g.output("y", y)
        return self.device.compile(g, poison=True)

    def decode(self, texts: Sequence[Floats], past: Sequence[int], n_tokens: int, kv_bound: int = 0) -> Floats:
        """Rows past[s] .. past[s] + n_tokens of every text [n_ctx, width]: [n_seqs, n_tokens, width of y]."""
        key = (n_tokens, kv_bound or self.n_ctx)
        if key not in self.programs:
            self.programs[key] = self.program(*key)
        feeds = {
            "x": np.concatenate([t[p : p + n_tokens] for t, p in zip(texts, past, strict=True)]),
            "norms": self.norms,
            "table": rope_table(self.sizes.n_rot, 1e7),
            "step": np.array([past, np.arange(self.n_seqs)[::-1]], np.int32),
        }
        y = self.programs[key].run(feeds)["y"]
        return np.asarray(y, np.float32).reshape(self.n_seqs, n_tokens, -1)

    def cached(self) -> NDArray[np.uint32]:
        """The bits of both caches, [2, n_seqs, n_ctx, n_kv, head_dim]."""
        words = self.device.download(self.buffer, 0, 2 * self.n_words)
        return words.view(np.uint32).reshape(2, *self.caches[0].shape)


def _layer(device: Device, sizes: Sizes, n_seqs: int, n_ctx: int) -> Layer:
    norms = np.random.default_rng(1).uniform(0.5, 1.5, (2, sizes.head_dim)).astype(np.float32)  # of all of a test
    return Layer(device, sizes, norms, n_seqs, n_ctx)


def _text(rng: np.random.Generator, sizes: Sizes, n_ctx: int) -> Floats:
    return rng.standard_normal((n_ctx, sum(sizes.widths))).astype(np.float32)


def _same(got: Floats, want: Floats, what: str) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), what)


SIZES = [Sizes(4, 2, 64, 16), Sizes(8, 2, 256, 64), Sizes(3, 1, 36, 12)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_cut_of_a_text_gives_the_same_bits(sizes: Sizes, kompute: KomputeDevice, rng: np.random.Generator) -> None:
    """Row by row, in batches, beside another sequence, with other bounds: results and caches, over a chunk's border."""
    n_ctx, n = 300, 144
    text, other = (_text(rng, sizes, n_ctx) for _ in range(2))
    wanted: tuple[Floats, NDArray[np.uint32]] | None = None
    for cut in ([16] * 9, [15, 1, 9, 8, 7, 16, 16, 16, 16, 16, 2, 5, 1, 1, 1, 14]):
        layer, rows, at = _layer(kompute, sizes, 1, n_ctx), [], 0
        for i, size in enumerate(cut):
            rows.append(layer.decode([text], [at], size, (0, max(at + size, 20))[i % 2])[0])
            at += size
        assert at == n
        y, caches = np.concatenate(rows), layer.cached()[:, 0, :n]
        assert np.isfinite(y).all() and np.isfinite(caches.view(np.float32)).all()
        np.testing.assert_array_equal(caches[1].reshape(n, -1), text[:n, -sizes.widths[2] :].view(np.uint32))
        if wanted is None:
            wanted = y, caches
        _same(y, wanted[0], f"cut {cut}")
        np.testing.assert_array_equal(caches, wanted[1], f"caches, cut {cut}")
    assert wanted is not None
    pair, rows = _layer(kompute, sizes, 2, n_ctx), []
    for at in range(0, n, 12):
        rows.append(pair.decode([other, text], [at, at], 12)[1])
    _same(np.concatenate(rows), wanted[0], "second of two sequences")
    np.testing.assert_array_equal(pair.cached()[:, 0, :n], wanted[1], "caches, second of two sequences")


def test_the_same_bits_in_every_run_and_variant(
    kompute: KomputeDevice, kompute_shared: KomputeDevice, vulkan: VulkanDevice, rng: np.random.Generator
) -> None:
    """Which workgroup comes last is chance; the counters must be zero again for the next run."""
    sizes, n_ctx = SIZES[0], 700
    text = _text(rng, sizes, n_ctx)
    past = rng.standard_normal((2, 624 * sizes.widths[1])).astype(np.float32)
    wanted: Floats | None = None
    for device in (kompute, kompute_shared, vulkan):
        layer = _layer(device, sizes, 1, n_ctx)
        layer.fill(past)
        for _ in range(8):
            y = layer.decode([text], [624], 16)[0]
            wanted = y if wanted is None else wanted
            _same(y, wanted, f"again on {device.info.name}")
    assert wanted is not None and np.isfinite(wanted).all()


def test_long_contexts_do_not_need_more_parts(kompute: KomputeDevice, rng: np.random.Generator) -> None:
    """Positions around 64 parts: parts of two chunks give the right values and the same bits in any batch."""
    sizes, n_ctx, start = Sizes(2, 1, 8, 4), 8300, CHUNK * MAX_PARTS - 6
    text = _text(rng, sizes, n_ctx)
    layers = [_layer(d, sizes, 1, n_ctx) for d in (kompute, kompute, NumpyDevice(np.float64))]
    past = rng.standard_normal((2, start * sizes.widths[1])).astype(np.float32)
    for layer in layers:
        layer.fill(past)
    together = layers[0].decode([text], [start], 12)[0]
    alone = np.concatenate([layers[1].decode([text], [start + t], 1)[0] for t in range(12)])
    _same(alone, together, "rows alone")
    assert nmse(together, layers[2].decode([text], [start], 12)[0]) < 1e-9


@pytest.mark.parametrize("start", [0, 120])
def test_later_rows_do_not_reach_earlier_ones(start: int, device: KomputeDevice, rng: np.random.Generator) -> None:
    """A NaN in everything of row 6 spoils rows from 6 on only."""
    sizes = SIZES[0]
    text = _text(rng, sizes, 200)
    layer = _layer(device, sizes, 1, 200)
    for at in range(0, start, 15):
        layer.decode([text], [at], 15)
    clean = layer.decode([text], [start], 12)[0]
    text[start + 6] = np.nan
    dirty = layer.decode([text], [start], 12)[0]
    assert np.isnan(dirty[6:]).all()
    _same(dirty[:6], clean[:6], "rows before the bad one")


def _views(g: Graph, n_tokens: int, sizes: Sizes) -> list[Tensor]:
    x, out, at = g.temp("x", (n_tokens, sum(sizes.widths))), [], 0
    for width, heads in zip(sizes.widths, (sizes.n_head, sizes.n_kv, sizes.n_kv), strict=True):
        out.append(x.narrow(1, at, width).reshape(n_tokens, heads, width // heads))
        at += width
    return out


def _built(sizes: Sizes, n_tokens: int, n_ctx: int, kv_bound: int) -> Graph:
    g = Graph()
    norms, table = g.temp("norms", (2, sizes.head_dim)), g.temp("table", (sizes.n_rot // 2, 2), "i32")
    q_norm, k_norm = (norms.narrow(0, i, 1).reshape(sizes.head_dim) for i in range(2))
    caches = [g.temp("cache", (1, n_ctx, sizes.n_kv, sizes.head_dim)) for _ in range(2)]
    step = g.temp("step", (2, 1), "i32")
    views = _views(g, n_tokens, sizes)
    rope_attention(g, *views, q_norm, k_norm, table, *caches, step, n_tokens=n_tokens, kv_bound=kv_bound, eps=EPS)
    return g


def test_memory_for_partial_results_is_bounded() -> None:
    lowered: Any = OP.lower(_built(Sizes(8, 2, 256, 64), 16, 262_144, 262_144).nodes[0], Limits())
    assert [len(stage) for stage in lowered] == [1]
    assert lowered[0][0].binds[6].tensor.shape == (16, 8, MAX_PARTS, 260)


@pytest.mark.parametrize("subgroup", [True, False])
@pytest.mark.parametrize("head_dim", [4, 100, 256])
def test_workgroups_need_no_more_memory_than_is_reckoned_with(head_dim: int, subgroup: bool) -> None:
    for heads in range(1, 5):
        assert shared_bytes(KERNEL, subgroup, (heads, head_dim, 2)) <= shared_need(heads, head_dim)


def test_devices_with_little_workgroup_memory_take_fewer_heads() -> None:
    graph = _built(Sizes(8, 2, 256, 64), 16, 4096, 4096)
    for n_bytes, heads in ((49152, 4), (16384, 2)):
        lowered: Any = OP.lower(graph.nodes[0], Limits(max_shared_bytes=n_bytes))
        assert lowered[0][0].spec[0] == heads and shared_need(heads, 256) <= n_bytes


def test_prompts_go_through_the_two_ops() -> None:
    names = [[n.op.name for n in _built(SIZES[0], n, 100, 100).nodes] for n in (MAX_TOKENS, MAX_TOKENS + 1)]
    assert names == [["rope_attention"], ["rope_kv_write", "attention"]]


@pytest.mark.parametrize(
    ("sizes", "kv_bound", "message"),
    [
        (Sizes(4, 3, 64, 16), 50, "4 query heads are not a multiple of 3 kv heads"),
        (Sizes(4, 2, 6, 2), 50, "head_dim is 6; a multiple of 4 up to 256 is needed"),
        (Sizes(4, 2, 260, 16), 50, "head_dim is 260"),
        (Sizes(4, 2, 64, 16), 51, r"kv_bound is 51; allowed are 3\.\.50"),
        (Sizes(4, 2, 64, 16), 2, r"kv_bound is 2; allowed are 3\.\.50"),
        (Sizes(4, 2, 16, 18), 50, "rope_attention: 18 rotated dims do not fit a head of 16"),
    ],
)
def test_builder_errors(sizes: Sizes, kv_bound: int, message: str) -> None:
    with pytest.raises(VkBackendError, match=message):
        _built(sizes, 3, 50, kv_bound)
