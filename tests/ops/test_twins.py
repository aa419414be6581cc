"""The fused gated-delta-net mixer against the same layer composed of small ops.

Both get the same numbers in several steps, so that conv columns and states of earlier batches are read as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vkbackend.device.base import Device
from vkbackend.device.numpy import NumpyDevice
from vkbackend.graph import Graph, Tensor, bound
from vkbackend.ops.case import nmse
from vkbackend.ops.causal_conv import causal_conv
from vkbackend.ops.delta_gates import delta_gates
from vkbackend.ops.delta_net_mixer import conv_ring_columns, delta_net_mixer
from vkbackend.ops.gated_delta_net import gated_delta_net
from vkbackend.ops.gated_rms_norm import gated_rms_norm
from vkbackend.ops.l2_norm import l2_norm

Array = NDArray[Any]
EPS = 1e-6
TAPS = 4


@dataclass(frozen=True)
class Layer:
    """Sizes and parameters of one layer. The two ops know v heads as wide as k heads only."""

    n_k_heads: int
    n_v_heads: int
    size: int
    conv_w: Array  # [conv_dim, taps]
    dt_bias: Array  # [n_v_heads]
    a: Array  # [n_v_heads]
    norm_w: Array  # [size]

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Columns of qkv, z, alpha, beta in the projection."""
        v = self.n_v_heads * self.size
        return 2 * self.n_k_heads * self.size + v, v, self.n_v_heads, self.n_v_heads


def make_layer(rng: np.random.Generator, n_k_heads: int, n_v_heads: int, size: int) -> Layer:
    conv_dim = (2 * n_k_heads + n_v_heads) * size
    return Layer(
        n_k_heads,
        n_v_heads,
        size,
        conv_w=rng.normal(0, 0.5, (conv_dim, TAPS)),
        dt_bias=rng.uniform(-2, 2, n_v_heads),
        a=-rng.uniform(0.01, 4, n_v_heads),
        norm_w=rng.uniform(0.5, 1.5, size),
    )


def columns(g: Graph, layer: Layer, n_rows: int) -> list[Tensor]:
    proj = g.input("proj", (n_rows, sum(layer.widths)))
    ends = np.cumsum(layer.widths)
    return [proj.narrow(1, int(end) - n, n) for end, n in zip(ends, layer.widths, strict=True)]


def nan_ring(device: Device, *shape: int) -> Tensor:
    """A ring that the first step must not read."""
    n = int(np.prod(shape))
    buffer = device.allocate(n)
    device.fill(buffer, 0, n, 0x7FC00000)
    return bound("ring", buffer, 0, shape)


class Fused:
    """The mixer, with its rings on the device."""

    def __init__(self, device: Device, layer: Layer, n_seqs: int) -> None:
        self.device, self.layer, self.n_seqs = device, layer, n_seqs
        self.conv = nan_ring(device, n_seqs, conv_ring_columns(0, TAPS), layer.widths[0])
        self.state = nan_ring(device, n_seqs, 1, layer.n_v_heads, layer.size, layer.size)

    def step(self, proj: Array, n_past: int) -> tuple[Array, Array]:
        layer, g, n_tokens = self.layer, Graph(), len(proj) // self.n_seqs
        qkv, z, alpha, beta = columns(g, layer, len(proj))
        parts = (layer.conv_w.reshape(-1), layer.dt_bias, layer.a, layer.norm_w)
        params = g.input("params", (sum(p.size for p in parts),))
        ends = np.cumsum([p.size for p in parts])
        conv_w, dt_bias, a, norm_w = (
            params.narrow(0, int(end) - part.size, part.size) for end, part in zip(ends, parts, strict=True)
        )
        y, squares = delta_net_mixer(
            g, qkv, z, alpha, beta, conv_w.reshape(*layer.conv_w.shape), dt_bias, a, norm_w, self.conv, self.state,
            g.input("step", (2, self.n_seqs), "i32"), n_tokens=n_tokens, n_k_heads=layer.n_k_heads, eps=EPS,
        )  # fmt: skip
        g.output("y", y)
        g.output("squares", squares)
        step = np.array([[n_past] * self.n_seqs, range(self.n_seqs)])
        feeds = {"proj": proj, "params": np.concatenate(parts), "step": step}
        out = self.device.compile(g, poison=True).run(feeds)
        heads = out["y"].reshape(len(proj), layer.n_v_heads, layer.size)
        mean = out["squares"].astype(np.float64).sum(-1, keepdims=True) / layer.size
        state = read(self.device, self.state).reshape(self.state.shape)[:, 0]
        return heads / np.sqrt(mean + EPS), state


class Composed:
    """Small ops; the state goes from step to step through the host."""

    def __init__(self, device: Device, layer: Layer, n_seqs: int) -> None:
        self.device, self.layer, self.n_seqs = device, layer, n_seqs
        self.conv = nan_ring(device, n_seqs, TAPS - 1, layer.widths[0])
        self.state = np.zeros((n_seqs, 1, layer.n_v_heads, layer.size, layer.size))

    def step(self, proj: Array, n_past: int) -> tuple[Array, Array]:
        layer, g, n_tokens = self.layer, Graph(), len(proj) // self.n_seqs
        n_rows, n_k, n_v, size = len(proj), layer.n_k_heads, layer.n_v_heads, layer.size
        qkv, z, alpha, beta = columns(g, layer, n_rows)
        params = {"conv_w": layer.conv_w, "dt_bias": layer.dt_bias, "a": layer.a, "norm_w": layer.norm_w}
        w = {name: g.input(name, value.shape) for name, value in params.items()}
        step = g.input("step", (2, self.n_seqs), "i32")
        mixed = causal_conv(g, qkv, w["conv_w"], self.conv, step, n_tokens=n_tokens)

        def heads(first: int, n: int) -> Tensor:
            return mixed.narrow(1, first * size, n * size).reshape(n_rows, n, size)

        def by_sequence(t: Tensor) -> Tensor:
            return t.reshape(self.n_seqs, n_tokens, t.shape[1], t.size // (n_rows * t.shape[1]))

        q, k = (l2_norm(g, heads(first, n_k), EPS) for first in (0, n_k))
        decay, rate = delta_gates(g, alpha, beta, w["dt_bias"], w["a"])
        state = g.input("state", self.state.shape)
        o, after = gated_delta_net(
            g, by_sequence(q), by_sequence(k), by_sequence(heads(2 * n_k, n_v)), by_sequence(decay), by_sequence(rate),
            state,
        )  # fmt: skip
        y = gated_rms_norm(g, o.reshape(n_rows, n_v, size), z.reshape(n_rows, n_v, size), w["norm_w"], EPS)
        g.output("y", y)
        g.output("after", after)
        feeds = {"proj": proj, "state": self.state, "step": np.array([[n_past] * self.n_seqs, range(self.n_seqs)])}
        out = self.device.compile(g, poison=True).run({**feeds, **params})
        self.state = out["after"][0][:, None]
        return out["y"], self.state[:, 0]


def read(device: Device, ring: Tensor) -> Array:
    buffer: Any = ring.storage.buffer
    if isinstance(device, NumpyDevice):
        return np.asarray(buffer.data)  # float64, not rounded as a download is
    return device.download(buffer, 0, ring.size).view(np.float32)


@pytest.mark.parametrize("on", ["float64", "kompute", "kompute_shared"])
@pytest.mark.parametrize(("heads", "size"), [((2, 4), 32), ((2, 2), 128), ((1, 3), 16), ((2, 6), 64)])
def test_fused_is_composed(
    on: str, heads: tuple[int, int], size: int, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    device: Device = NumpyDevice(np.float64) if on == "float64" else request.getfixturevalue(on)
    n_seqs = 2
    layer = make_layer(rng, *heads, size)
    fused, composed = Fused(device, layer, n_seqs), Composed(device, layer, n_seqs)
    n_past = 0
    for n_tokens in (1, 5, 1, 40, 3):
        proj = rng.normal(0, 1, (n_seqs * n_tokens, sum(layer.widths)))
        got, got_state = fused.step(proj, n_past)
        want, want_state = composed.step(proj, n_past)
        bound_on = 1e-24 if on == "float64" else 1e-9
        assert nmse(got, want) <= bound_on, f"output of {n_tokens} tokens after {n_past}"
        assert nmse(got_state, want_state) <= bound_on, f"state after {n_past} + {n_tokens}"
        n_past += n_tokens
