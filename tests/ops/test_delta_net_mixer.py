"""delta_net_mixer: its definition, bitwise independence of batches, rings and rollback, drift, containment, errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vkbackend.device.base import Device, Limits, Program
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import VkBackendError
from vkbackend.graph import Graph, Tensor, bound
from vkbackend.ops.case import POISON, nmse
from vkbackend.ops.delta_net_mixer import OP, ROWS, SHORT, conv_ring_columns, delta_net_mixer

Floats = NDArray[np.float32]
Reals = NDArray[np.float64]
EPS = 1e-6


@pytest.fixture(params=["kompute", "kompute_shared"])
def shader(request: pytest.FixtureRequest) -> KomputeDevice:
    found: KomputeDevice = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["numpy_device", "kompute", "kompute_shared"])
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = request.getfixturevalue(request.param)
    return found


@dataclass(frozen=True)
class Layer:
    """Sizes and parameters of a layer, and n_rs_seq of its memory."""

    n_k_heads: int
    n_v_heads: int
    dk: int
    dv: int
    conv_w: Floats  # [conv_dim, taps]
    dt_bias: Floats  # [n_v_heads]
    a: Floats  # [n_v_heads]
    norm_w: Floats  # [dv]
    n_rs_seq: int = 0
    grouped: bool = False

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Columns of qkv, z, alpha, beta in the projection."""
        value_dim = self.n_v_heads * self.dv
        return 2 * self.n_k_heads * self.dk + value_dim, value_dim, self.n_v_heads, self.n_v_heads

    @property
    def params(self) -> list[Floats]:
        return [self.conv_w, self.dt_bias, self.a, self.norm_w]

    def proj(self, rng: np.random.Generator, n_tokens: int) -> Floats:
        """Random rows [n_tokens, width] of the input projection."""
        return rng.standard_normal((n_tokens, sum(self.widths))).astype(np.float32)


def _layer(
    rng: np.random.Generator, heads: tuple[int, int] = (2, 4), size: tuple[int, int] = (32, 32), taps: int = 4,
    n_rs_seq: int = 0, grouped: bool = False, mildest: float = 0.01,
) -> Layer:  # fmt: skip
    (n_k, n_v), (dk, dv) = heads, size
    parts = (
        rng.normal(0, 0.5, (2 * n_k * dk + n_v * dv, taps)), rng.uniform(-2, 2, n_v), -rng.uniform(mildest, 4, n_v),
        rng.uniform(0.5, 1.5, dv),
    )  # fmt: skip
    return Layer(n_k, n_v, dk, dv, *(p.astype(np.float32) for p in parts), n_rs_seq, grouped)


@dataclass(frozen=True)
class Result:
    """y [n_seqs, n_tokens, n_v_heads * dv] and squares [n_seqs, n_tokens, n_v_heads, n_parts]."""

    y: NDArray[Any]
    squares: NDArray[Any]


class Mixer:
    """A layer with rings of its own on a device, poisoned at first, and a program per shape of batch."""

    def __init__(self, device: Device, layer: Layer, n_seq_max: int = 1) -> None:
        self.device, self.layer = device, layer
        conv_dim, taps = layer.conv_w.shape
        columns = conv_ring_columns(layer.n_rs_seq, taps)
        self.conv = self._ring(n_seq_max, columns, conv_dim)
        self.state = self._ring(n_seq_max, 1 + layer.n_rs_seq, layer.n_v_heads, layer.dv, layer.dk)
        self._programs: dict[tuple[int, int], Program] = {}

    def step(self, proj: Floats, n_past: int | Sequence[int], slots: Sequence[int] = (0,)) -> Result:
        """Mixes proj [n_tokens, width] of one sequence or [n_seqs, n_tokens, width]."""
        rows = proj[None] if proj.ndim == 2 else proj
        past = [n_past] if isinstance(n_past, int) else list(n_past)
        shape = rows.shape[1], rows.shape[0]
        if shape not in self._programs:
            self._programs[shape] = self._compile(*shape)
        feeds = {
            "proj": rows.reshape(-1, rows.shape[2]),
            "params": np.concatenate([p.reshape(-1) for p in self.layer.params]),
            "step": np.array([past, list(slots)]),
        }
        out = self._programs[shape].run(feeds)
        return Result(*(out[name].reshape(*rows.shape[:2], *out[name].shape[1:]) for name in ("y", "squares")))

    def clear(self) -> None:
        """Poisons the rings."""
        for ring in (self.conv, self.state):
            assert ring.storage.buffer is not None
            self.device.fill(ring.storage.buffer, 0, ring.size, POISON)

    def columns(self) -> NDArray[Any]:
        """The conv ring [n_seq_max, C, conv_dim]."""
        return self._read(self.conv)

    def states(self) -> NDArray[Any]:
        """The state ring [n_seq_max, R, n_v_heads, dv, dk]."""
        return self._read(self.state)

    def _ring(self, *shape: int) -> Tensor:
        n = int(np.prod(shape))
        buffer = self.device.allocate(n)
        self.device.fill(buffer, 0, n, POISON)
        return bound("ring", buffer, 0, shape)

    def _read(self, ring: Tensor) -> NDArray[Any]:
        buffer: Any = ring.storage.buffer
        if isinstance(self.device, NumpyDevice):
            return np.array(buffer.data).reshape(ring.shape)  # float64 stays float64
        return self.device.download(buffer, 0, ring.size).view(np.float32).reshape(ring.shape)

    def _compile(self, n_tokens: int, n_seqs: int) -> Program:
        g = Graph()
        y, squares = _add(g, self.layer, self.conv, self.state, n_tokens, n_seqs)
        g.output("y", y)
        g.output("squares", squares)
        return self.device.compile(g, poison=True)


def _add(g: Graph, layer: Layer, conv: Tensor, state: Tensor, n_tokens: int, n_seqs: int) -> tuple[Tensor, Tensor]:
    """The op on inputs proj, params and step."""
    proj = g.input("proj", (n_seqs * n_tokens, sum(layer.widths)))
    params = g.input("params", (sum(p.size for p in layer.params),))
    columns, at = [], 0
    for width in layer.widths:
        columns.append(proj.narrow(1, at, width))
        at += width
    parts, at = [], 0
    for part in layer.params:
        parts.append(params.narrow(0, at, part.size).reshape(*part.shape))
        at += part.size
    return delta_net_mixer(
        g, *columns, *parts, conv, state, g.input("step", (2, n_seqs), "i32"),
        n_tokens=n_tokens, n_k_heads=layer.n_k_heads, eps=EPS, grouped=layer.grouped,
    )  # fmt: skip


def _definition(layer: Layer, proj: Floats) -> tuple[Reals, Reals, Reals]:
    """y [n_tokens, value_dim], o [n_tokens, n_v_heads, dv] and states [n_tokens, n_v_heads, dv, dk] of a sequence from
    its beginning, in float64, one head at a time."""
    conv_w, dt_bias, a, norm_w = (p.astype(np.float64) for p in layer.params)
    ends = np.cumsum(layer.widths)
    qkv, z, alpha, beta = np.split(proj.astype(np.float64), ends[:3], axis=1)
    n_tokens, n_k, n_v, dk, dv = len(proj), layer.n_k_heads, layer.n_v_heads, layer.dk, layer.dv

    def silu(x: Reals) -> Reals:
        return x / (1 + np.exp(-x))

    taps = conv_w.shape[1]
    mixed = np.stack([np.convolve(qkv[:, c], conv_w[c, ::-1])[:n_tokens] for c in range(qkv.shape[1])], axis=1)
    assert np.allclose(mixed[0], qkv[0] * conv_w[:, taps - 1])  # the last tap is the newest column's
    mixed = silu(mixed)
    q, k, v = np.split(mixed, [n_k * dk, 2 * n_k * dk], axis=1)
    o, states = np.empty((n_tokens, n_v, dv)), np.empty((n_tokens, n_v, dv, dk))
    for h in range(n_v):
        h_k = h // (n_v // n_k) if layer.grouped else h % n_k
        state = np.zeros((dv, dk))
        for t in range(n_tokens):
            query, key = (x[t, h_k * dk : (h_k + 1) * dk] for x in (q, k))
            query, key = (x / np.sqrt(x @ x + EPS) for x in (query, key))
            decay = np.exp(np.log1p(np.exp(alpha[t, h] + dt_bias[h])) * a[h])
            rate = 1 / (1 + np.exp(-beta[t, h]))
            state = state * decay
            state = state + np.outer(rate * (v[t, h * dv : (h + 1) * dv] - state @ key), key)
            o[t, h], states[t, h] = state @ query / np.sqrt(dk), state
    y = o * norm_w * silu(z.reshape(o.shape))
    return y.reshape(n_tokens, -1), o, states


def _same(got: NDArray[Any], want: NDArray[Any]) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint32), np.ascontiguousarray(want).view(np.uint32))


def _cut(rng: np.random.Generator, n_tokens: int, most: int) -> list[int]:
    """Random batch sizes up to `most` that sum to n_tokens."""
    sizes: list[int] = []
    while (left := n_tokens - sum(sizes)) > 0:
        sizes.append(int(rng.integers(1, min(most, left) + 1)))
    return sizes


def _feed(mixer: Mixer, proj: Floats, sizes: Sequence[int], n_past: int = 0) -> Result:
    """Feeds one sequence's rows in batches of these sizes."""
    parts, at = [], 0
    for size in sizes:
        parts.append(mixer.step(proj[at : at + size], n_past + at))
        at += size
    return Result(np.concatenate([p.y for p in parts], axis=1), np.concatenate([p.squares for p in parts], axis=1))


# ---- values


@pytest.mark.parametrize(
    ("heads", "size", "taps", "n_rs_seq", "grouped"),
    [
        ((2, 4), (32, 32), 4, 2, False),
        ((2, 4), (32, 32), 4, 2, True),
        ((1, 2), (128, 128), 4, 0, False),
        ((2, 2), (16, 40), 3, 1, False),  # a head that does not fill its last workgroup
        ((1, 3), (64, 100), 2, 8, True),
        ((1, 1), (32, 8), 1, 4, False),
    ],
)
def test_against_the_definition(
    heads: tuple[int, int], size: tuple[int, int], taps: int, n_rs_seq: int, grouped: bool,
    device: Device, rng: np.random.Generator,
) -> None:  # fmt: skip
    layer = _layer(rng, heads, size, taps, n_rs_seq, grouped)
    sizes = [1, 5, 1, 20, 3]
    proj = layer.proj(rng, sum(sizes))
    mixer = Mixer(device, layer)
    got = _feed(mixer, proj, sizes)
    y, o, states = _definition(layer, proj)
    assert nmse(got.y[0], y) < 1e-11
    squares = [np.sum(o[:, :, i : i + ROWS] ** 2, axis=-1) for i in range(0, layer.dv, ROWS)]
    assert nmse(got.squares[0], np.stack(squares, axis=-1)) < 1e-11
    ring, columns = mixer.states()[0], mixer.columns()[0]
    for p in range(len(proj) - 1 - n_rs_seq, len(proj)):
        assert nmse(ring[p % len(ring)], states[p]) < 1e-11, f"state after position {p}"
    for p in range(max(0, len(proj) - len(columns)), len(proj)):
        np.testing.assert_array_equal(columns[p % len(columns)], proj[p, : layer.widths[0]])


# ---- bitwise independence of the batch


@pytest.mark.parametrize("n_rs_seq", range(9))
def test_any_split_gives_the_same_bits(n_rs_seq: int, shader: KomputeDevice, rng: np.random.Generator) -> None:
    """One by one, by sixteens, at random: same outputs, and the same words in every slot and column of the rings."""
    layer = _layer(rng, n_rs_seq=n_rs_seq)
    n_tokens = 37
    proj = layer.proj(rng, n_tokens)
    one_by_one = Mixer(shader, layer)
    want = _feed(one_by_one, proj, [1] * n_tokens)
    for sizes in ([16, 16, 5], [2, 3, 1, 15, 16], _cut(rng, n_tokens, SHORT)):
        mixer = Mixer(shader, layer)
        got = _feed(mixer, proj, sizes)
        _same(got.y, want.y)
        _same(got.squares, want.squares)
        _same(mixer.states(), one_by_one.states())
        _same(mixer.columns(), one_by_one.columns())


def test_sequences_do_not_meet(shader: KomputeDevice, rng: np.random.Generator) -> None:
    """Three sequences of different lengths in one batch, in mixed-up slots, against each one alone."""
    layer = _layer(rng, n_rs_seq=3)
    past, slots = [0, 9, 2], [3, 0, 2]
    proj = [layer.proj(rng, n + 5) for n in past]
    together = Mixer(shader, layer, n_seq_max=4)
    for p, n, slot in zip(proj, past, slots, strict=True):
        if n:
            together.step(p[:n], [0], [slot])
    got = together.step(np.stack([p[n:] for p, n in zip(proj, past, strict=True)]), past, slots)
    for s in range(3):
        alone = Mixer(shader, layer)
        want = _feed(alone, proj[s], [past[s], 5] if past[s] else [5])
        _same(got.y[s], want.y[0, past[s] :])
        _same(got.squares[s], want.squares[0, past[s] :])
        _same(together.states()[slots[s]], alone.states()[0])
        _same(together.columns()[slots[s]], alone.columns()[0])
    for ring in (together.states(), together.columns()):
        assert (np.ascontiguousarray(ring[1]).view(np.uint32) == POISON).all(), "slot 1 belongs to nobody here"


def test_both_variants_give_the_same_bits(
    kompute: KomputeDevice, kompute_shared: KomputeDevice, rng: np.random.Generator
) -> None:
    layer = _layer(rng, (1, 2), (128, 128), n_rs_seq=2)
    proj = layer.proj(rng, 12)
    one, two = Mixer(kompute, layer), Mixer(kompute_shared, layer)
    got, want = _feed(one, proj, [7, 1, 4]), _feed(two, proj, [7, 1, 4])
    _same(got.y, want.y)
    _same(got.squares, want.squares)
    _same(one.states(), two.states())


def test_workgroups_spread_over_two_axes(rng: np.random.Generator) -> None:
    """5 x 4 x 2 workgroups where only 7 fit along x: the two too many must do nothing."""
    layer = _layer(rng, size=(32, 64), n_rs_seq=1)
    proj = np.stack([layer.proj(rng, 20) for _ in range(5)])
    results = []
    for limit in (7, 65535):
        try:
            device = KomputeDevice(0)
        except VkBackendError as error:
            pytest.skip(f"no Vulkan device here: {error}")
        limits = replace(device.info.limits, max_groups=(limit, 65535, 65535))
        device.info = replace(device.info, limits=limits)
        mixer = Mixer(device, layer, n_seq_max=5)
        mixer.step(proj[:, :3], [0] * 5, range(5))
        out = mixer.step(proj[:, 3:], [3] * 5, range(5))  # a long batch: the ring's own kernel as well
        results.append((out.y, out.squares, mixer.states(), mixer.columns()))
        device.close()
    for got, want in zip(*results, strict=True):
        _same(got, want)


# ---- rings


@pytest.mark.parametrize("n_rs_seq", [1, 3, 8])
def test_rollback_leaves_no_trace(n_rs_seq: int, shader: KomputeDevice, rng: np.random.Generator) -> None:
    """Decode, go back d tokens, decode others: the same bits as if the first ones had never been there."""
    layer = _layer(rng, n_rs_seq=n_rs_seq)
    mixer, straight = Mixer(shader, layer), Mixer(shader, layer)
    for last in (1, 4, SHORT):  # size of the batch that is rolled back into
        for d in range(1, n_rs_seq + 1):
            kept = 9 + last - d
            proj, other = layer.proj(rng, 9 + last), layer.proj(rng, 6)
            mixer.clear()
            _feed(mixer, proj, [4, 5, last])
            got = _feed(mixer, other, [1, 1, 4], n_past=kept)
            straight.clear()
            _feed(straight, proj[:kept], [4] * (kept // 4) + [1] * (kept % 4))
            want = _feed(straight, other, [4, 1, 1], n_past=kept)
            _same(got.y, want.y)
            _same(got.squares, want.squares)
            newest = (kept + 5) % (1 + n_rs_seq)
            _same(mixer.states()[0, newest], straight.states()[0, newest])


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("n_rs_seq", range(9))
def test_ring_has_room(n_rs_seq: int, taps: int) -> None:
    """A short batch never writes a column that it reads, and leaves the window of every rollback whole."""
    c = conv_ring_columns(n_rs_seq, taps)
    for n_past in range(3 * c):
        for n_tokens in (1, 2, 7, SHORT - 1, SHORT):
            read = {p % c for p in range(max(0, n_past - taps + 1), n_past)}
            written = {p % c for p in range(n_past, n_past + n_tokens)}
            assert not read & written
        needed = range(max(0, n_past - n_rs_seq - taps + 1), n_past)
        assert all(max(q for q in range(n_past) if q % c == p % c) == p for p in needed)


def test_nothing_else_is_written(device: Device, rng: np.random.Generator) -> None:
    """5 tokens from the beginning: their columns, the states after the last 4, and not a word more."""
    layer = _layer(rng, n_rs_seq=3)
    mixer = Mixer(device, layer, n_seq_max=3)
    mixer.step(layer.proj(rng, 5), [0], [1])
    columns, states = np.zeros(mixer.conv.shape[:2], bool), np.zeros(mixer.state.shape[:2], bool)
    columns[1, :5] = states[1, [1, 2, 3, 4 % 4]] = True
    for ring, written in ((mixer.columns(), columns), (mixer.states(), states)):
        poisoned = np.ascontiguousarray(ring, np.float32).view(np.uint32) == POISON
        assert poisoned[~written].all() and not np.isnan(ring[written]).any()
    mixer.step(layer.proj(rng, 2), [0], [0])
    assert np.isnan(mixer.states()[0, 2:]).all() and not np.isnan(mixer.states()[0, :2]).any()


@pytest.mark.parametrize("n_rs_seq", [0, 5])
@pytest.mark.parametrize("n_tokens", [17, 40, 100])
def test_long_batches(n_tokens: int, n_rs_seq: int, shader: KomputeDevice, rng: np.random.Generator) -> None:
    """Prompts: as close to token by token as rounding allows, columns exactly, and decoding goes on after them."""
    layer = _layer(rng, n_rs_seq=n_rs_seq)
    proj = layer.proj(rng, 3 + n_tokens + 4)
    mixer, one_by_one = Mixer(shader, layer), Mixer(shader, layer)
    got, want = _feed(mixer, proj, [3, n_tokens, 1, 3]), _feed(one_by_one, proj, [1] * len(proj))
    assert nmse(got.y, want.y) < 1e-11 and nmse(got.squares, want.squares) < 1e-11
    assert nmse(mixer.states(), one_by_one.states()) < 1e-11
    _same(mixer.columns(), one_by_one.columns())


# ---- far and wild


def test_drift_over_512_steps(shader: KomputeDevice, rng: np.random.Generator) -> None:
    """Batches of 1 to 16 tokens with rollbacks in between, against float64: the error must not grow with the steps."""
    layer = _layer(rng, n_rs_seq=4, mildest=1e-4)
    layer = replace(layer, a=np.array([-1e-4, -1e-3, -1e-2, -4], np.float32))  # the first remembers 10,000 tokens
    mixer, exact = Mixer(shader, layer), Mixer(NumpyDevice(np.float64), layer)
    n_past = 0
    while n_past < 512:
        proj = layer.proj(rng, int(rng.integers(1, SHORT + 1)))
        got, want = mixer.step(proj, n_past), exact.step(proj, n_past)
        assert nmse(got.y, want.y) < 1e-10 and nmse(got.squares, want.squares) < 1e-10, f"outputs after {n_past}"
        n_past += len(proj)
        slot = (n_past - 1) % 5
        assert nmse(mixer.states()[0, slot], exact.states()[0, slot]) < 1e-10, f"state after {n_past}"
        if rng.random() < 0.5:
            n_past -= int(rng.integers(0, min(4, n_past - 1) + 1))


def test_bad_rows_reach_only_what_follows_them(shader: KomputeDevice, rng: np.random.Generator) -> None:
    layer = _layer(rng, n_rs_seq=1)
    proj = np.stack([layer.proj(rng, 6) for _ in range(2)])
    clean = Mixer(shader, layer, n_seq_max=2).step(proj, [0, 0], [0, 1])
    proj[0, 3] = np.nan
    got = Mixer(shader, layer, n_seq_max=2).step(proj, [0, 0], [0, 1])
    assert np.isnan(got.y[0, 3:]).all()
    _same(got.y[0, :3], clean.y[0, :3])
    _same(got.y[1], clean.y[1])
    _same(got.squares[1], clean.squares[1])


def test_large_and_small_numbers(device: Device, rng: np.random.Generator) -> None:
    """Gates at their ends, gates of z far out, vectors of no length at all: finite, and as the definition says."""
    layer = _layer(rng)
    proj = layer.proj(rng, 4)
    ends = np.cumsum(layer.widths)
    proj[0, ends[0] : ends[1]] *= 100
    proj[1, ends[1] :] = np.tile([90, -90], layer.n_v_heads)
    proj[:3, : layer.n_k_heads * layer.dk] = 0  # queries: conv and SiLU of zeros are zeros
    got = _feed(Mixer(device, layer), proj, [4])
    y, _, _ = _definition(layer, proj)
    assert np.isfinite(got.y).all() and not got.y[0, :3].any()
    assert nmse(got.y[0], y) < 1e-11


# ---- errors


def _tensors(changed: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Arguments of a layer of 2 k heads and 4 v heads of 32, 3 tokens of 2 sequences; `changed` shapes are wrong."""
    shapes: dict[str, tuple[int, ...]] = {
        "qkv": (6, 256), "z": (6, 128), "alpha": (6, 4), "beta": (6, 4), "conv_w": (256, 4), "dt_bias": (4,),
        "a": (4,), "norm_w": (32,), "conv_ring": (2, 22, 256), "state_ring": (2, 4, 4, 32, 32), "step": (2, 2),
        **changed,
    }  # fmt: skip
    g = Graph()
    proj, params = g.temp("proj", (6, 1000)), g.temp("params", (10_000,))
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name in ("qkv", "z", "alpha", "beta") and shape[0] == 6:
            tensors[name] = proj.narrow(1, 100, shape[1])
        elif name in ("conv_w", "dt_bias", "a", "norm_w"):
            tensors[name] = params.narrow(0, 0, int(np.prod(shape))).reshape(*shape)
        else:
            tensors[name] = g.temp(name, shape)
    return tensors


def _build(tensors: dict[str, Tensor], n_tokens: int = 3, n_k_heads: int = 2) -> None:
    delta_net_mixer(Graph(), *tensors.values(), n_tokens=n_tokens, n_k_heads=n_k_heads, eps=EPS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"state_ring": (2, 4, 4, 32, 48)}, r"head size 48 is not supported; supported are \(16, 32, 64, 128\)"),
        ({"state_ring": (2, 4, 3, 32, 32)}, "3 v heads are not a multiple of 2 k heads"),
        ({"qkv": (6, 260)}, r"qkv has 260 columns; 2 x 2 x 32 \+ 4 x 32 = 256"),
        ({"z": (6, 64)}, r"z must have shape \(6, 128\), got \(6, 64\)"),
        ({"alpha": (6, 2)}, r"alpha must have shape \(6, 4\), got \(6, 2\)"),
        ({"beta": (6, 5)}, r"beta must have shape \(6, 4\), got \(6, 5\)"),
        ({"conv_w": (128, 4)}, r"conv_w \(128, 4\) must be \(256, taps\)"),
        ({"conv_w": (256, 5)}, "conv kernel of 5 taps; 1..4 are supported"),
        ({"dt_bias": (2,)}, r"dt_bias must have shape \(4,\), got \(2,\)"),
        ({"norm_w": (64,)}, r"norm_w must have shape \(32,\), got \(64,\)"),
        ({"conv_ring": (2, 21, 256)}, r"conv ring \(2, 21, 256\) must be \(2, 22 or more, 256\)"),
        ({"conv_ring": (1, 22, 256)}, r"conv ring \(1, 22, 256\) must be"),
        ({"conv_ring": (2, 22, 128)}, r"conv ring \(2, 22, 128\) must be"),
        ({"step": (2, 3)}, "6 rows are not 3 sequences of 3"),
        ({"step": (3, 2)}, r"step \(3, 2\) must be \(2, n_seqs\)"),
        ({"state_ring": (2, 4, 32, 32)}, r"have \(2, 2, 3, 4, 2\) axes"),
    ],
)
def test_builder_errors(changed: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(VkBackendError, match=f"delta_net_mixer: .*{message}"):
        _build(_tensors(changed))


def test_builder_takes_the_right_shapes() -> None:
    _build(_tensors({}))


def test_views_and_places() -> None:
    g, right = Graph(), _tensors({})
    wrong = {
        "columns of one projection": {"z": g.temp("z", (6, 128))},
        "in one buffer": {"a": g.temp("a", (4,))},
        "must be contiguous": {"conv_w": g.temp("w", (4, 256)).permute(1, 0)},
        "rings must be contiguous": {"state_ring": g.temp("s", (2, 4, 4, 32, 32)).permute(0, 1, 2, 4, 3)},
    }
    for message, changed in wrong.items():
        with pytest.raises(VkBackendError, match=message):
            _build({**right, **changed})
    apart = g.temp("p", (12, 600)).narrow(1, 0, 128).reshape(6, 2, 128).narrow(1, 0, 1).reshape(6, 128)
    z = replace(apart, storage=right["qkv"].storage)
    with pytest.raises(VkBackendError, match="columns of one projection"):
        _build({**right, "z": z})
    n = 2 * 4 * 4 * 32 * 32
    shifted = g.temp("s", (n + 4,)).narrow(0, 2, n).reshape(2, 4, 4, 32, 32)
    with pytest.raises(VkBackendError, match="starts at word 2; it must start at a multiple of 4"):
        _build({**right, "state_ring": shifted})


def test_short_batches_are_one_dispatch(rng: np.random.Generator) -> None:
    layer = _layer(rng)
    for n_tokens, kernels in (
        (1, ["delta_net_mixer"]),
        (16, ["delta_net_mixer"]),
        (17, ["delta_net_mixer", "conv_ring_write"]),
    ):
        device = NumpyDevice()
        mixer = Mixer(device, layer)
        g = Graph()
        _add(g, layer, mixer.conv, mixer.state, n_tokens, 1)
        assert [d.kernel.name for stage in OP.lower(g.nodes[0], Limits()) for d in stage] == kernels
