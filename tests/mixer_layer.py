"""A gated-delta-net layer for tests: parameters, the mixer with rings of its own, the definition in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkbackend.device.base import Device, Program
from vkbackend.device.numpy import NumpyDevice
from vkbackend.graph import Graph, Tensor, bound
from vkbackend.ops.case import POISON
from vkbackend.ops.delta_net_mixer import conv_ring_columns, delta_net_mixer

Floats = NDArray[np.float32]
Reals = NDArray[np.float64]
EPS = 1e-6


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


def make_layer(
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
        y, squares = add_mixer(g, self.layer, self.conv, self.state, n_tokens, n_seqs)
        g.output("y", y)
        g.output("squares", squares)
        return self.device.compile(g, poison=True)


def add_mixer(g: Graph, layer: Layer, conv: Tensor, state: Tensor, n_tokens: int, n_seqs: int) -> tuple[Tensor, Tensor]:
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


def definition(layer: Layer, proj: Floats) -> tuple[Reals, Reals, Reals]:
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


def same(got: NDArray[Any], want: NDArray[Any]) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint32), np.ascontiguousarray(want).view(np.uint32))


def cut(rng: np.random.Generator, n_tokens: int, most: int) -> list[int]:
    """Random batch sizes up to `most` that sum to n_tokens."""
    sizes: list[int] = []
    while (left := n_tokens - sum(sizes)) > 0:
        sizes.append(int(rng.integers(1, min(most, left) + 1)))
    return sizes


def feed(mixer: Mixer, proj: Floats, sizes: Sequence[int], n_past: int = 0) -> Result:
    """Feeds one sequence's rows in batches of these sizes."""
    parts, at = [], 0
    for size in sizes:
        parts.append(mixer.step(proj[at : at + size], n_past + at))
        at += size
    return Result(np.concatenate([p.y for p in parts], axis=1), np.concatenate([p.squares for p in parts], axis=1))
