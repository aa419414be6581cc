"""delta_net_mixer on prompts, which go by blocks: values, rings, hard numbers, what must stay apart."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mixer_layer import Floats, Layer, Mixer, Result, add_mixer, cut, definition, feed, make_layer, same
from numpy.typing import NDArray

from vkbackend.device.base import Device, Limits
from vkbackend.device.numpy import NumpyDevice
from vkbackend.graph import Graph
from vkbackend.ops.case import POISON, nmse
from vkbackend.ops.delta_net_blocks import BLOCK, WORTH_BLOCKS, n_by_blocks
from vkbackend.ops.delta_net_mixer import OP, ROWS
from vkbackend.ops.op import At


def check_outputs(layer: Layer, proj: Floats, got: Result, first: int = 0, worst: float = 1e-11) -> None:
    """Every token from `first` on and every head by itself: a large one must not hide what is wrong with a small one.

    o = S q may come out small where large numbers cancel, so errors are held against |S| |q|.
    """
    _, o, states = definition(layer, proj)
    z = proj[:, layer.widths[0] : sum(layer.widths[:2])].astype(np.float64).reshape(o.shape)
    y = got.y[0].astype(np.float64).reshape(-1, *o.shape[1:])
    error = y / (layer.norm_w * z / (1 + np.exp(-z)))[first:] - o[first:]
    scale = np.sum(states[first:] ** 2, axis=(2, 3)) / layer.dk  # [n_tokens, n_v_heads]
    off = np.sum(error**2, axis=-1) / scale
    assert off.shape == (len(proj) - first, layer.n_v_heads) and np.max(off) < worst, np.argwhere(~(off < worst))
    squares = np.stack([np.sum(o[:, :, i : i + ROWS] ** 2, axis=-1) for i in range(0, layer.dv, ROWS)], axis=-1)
    off = np.abs(got.squares[0] - squares[first:]) / scale[..., None]
    assert np.max(off) < 2 * worst**0.5, np.argwhere(~(off < 2 * worst**0.5))


def check_rings(layer: Layer, proj: Floats, mixer: Mixer, worst: float = 1e-11) -> None:
    """Every state that a rollback may ask for, and every column, after all of proj."""
    _, _, states = definition(layer, proj)
    ring, columns = mixer.states()[0], mixer.columns()[0]
    for p in range(len(proj) - 1 - layer.n_rs_seq, len(proj)):
        assert nmse(ring[p % len(ring)], states[p]) < worst, f"state after position {p}"
    for p in range(max(0, len(proj) - len(columns)), len(proj)):
        np.testing.assert_array_equal(columns[p % len(columns)], proj[p, : layer.widths[0]])


def goes_by_blocks(device: Device, layer: Layer, n_tokens: int) -> bool:
    return n_by_blocks(n_tokens, 1 + layer.n_rs_seq, device.info.limits) > 0


# ---- values


@pytest.mark.parametrize(
    ("heads", "size", "taps", "n_rs_seq", "grouped", "n_tokens"),
    [
        ((2, 4), (32, 32), 4, 0, False, 32),
        ((2, 4), (32, 32), 4, 2, True, 65),
        ((1, 2), (128, 128), 4, 3, False, 100),
        ((2, 2), (16, 40), 3, 1, False, 33),  # a head that does not fill its last workgroup
        ((1, 3), (64, 100), 2, 8, True, 47),
        ((2, 8), (64, 20), 4, 0, True, 49),
        ((2, 8), (16, 16), 4, 15, False, 47),
        ((1, 1), (32, 8), 1, 4, False, 36),
        ((1, 1), (16, 131), 4, 0, False, 63),  # wider than the workgroup that finishes it
    ],
)
@pytest.mark.parametrize("before", [0, 2])
def test_against_the_definition(
    heads: tuple[int, int], size: tuple[int, int], taps: int, n_rs_seq: int, grouped: bool, n_tokens: int, before: int,
    device: Device, rng: np.random.Generator,
) -> None:  # fmt: skip
    """A prompt at the beginning and after a few tokens, and decoding after it."""
    layer = make_layer(rng, heads, size, taps, n_rs_seq, grouped)
    assert goes_by_blocks(device, layer, n_tokens)
    mixer, proj = Mixer(device, layer), layer.proj(rng, before + n_tokens + 4)
    if before:
        feed(mixer, proj, [before])
    got = mixer.step(proj[before : before + n_tokens], before)
    check_outputs(layer, proj[: before + n_tokens], got, before)
    check_rings(layer, proj[: before + n_tokens], mixer)
    after = feed(mixer, proj[before + n_tokens :], [1, 3], before + n_tokens)
    check_outputs(layer, proj, after, before + n_tokens)
    check_rings(layer, proj, mixer)


def test_every_length(device: Device, rng: np.random.Generator) -> None:
    """Blocks that end anywhere, with a ring of three slots behind them."""
    layer = make_layer(rng, (1, 1), (16, 16), n_rs_seq=2)
    for n_tokens in range(WORTH_BLOCKS + 2, WORTH_BLOCKS + 2 + BLOCK):
        assert goes_by_blocks(device, layer, n_tokens)
        mixer, proj = Mixer(device, layer), layer.proj(rng, n_tokens)
        check_outputs(layer, proj, mixer.step(proj, 0))
        check_rings(layer, proj, mixer)


@pytest.mark.parametrize("n_rs_seq", [1, 3, 8])
def test_rollback_into_a_prompt(n_rs_seq: int, device: Device, rng: np.random.Generator) -> None:
    """Back by every distance that the ring allows, then other tokens, as if the first ones had never been there."""
    layer = make_layer(rng, n_rs_seq=n_rs_seq)
    n_tokens = 50
    prompt, other = layer.proj(rng, n_tokens), layer.proj(rng, 5)
    mixer = Mixer(device, layer)
    for d in range(1, n_rs_seq + 1):
        mixer.clear()
        mixer.step(prompt, 0)
        got = feed(mixer, other, [1, 4], n_tokens - d)
        check_outputs(layer, np.concatenate([prompt[: n_tokens - d], other]), got, n_tokens - d)


def test_prompts_and_decoding_by_turns(device: Device, rng: np.random.Generator) -> None:
    """512 tokens in batches of all lengths; the first head forgets one part in 10,000 at most."""
    n_tokens = 4096 if os.environ.get("VKBACKEND_FULL") else 512
    layer = make_layer(rng, n_rs_seq=4)
    layer = replace(layer, a=np.array([-1e-4, -1e-3, -1e-2, -4], np.float32))
    mixer, exact = Mixer(device, layer), Mixer(NumpyDevice(np.float64), layer)
    n_past = 0
    for size in cut(rng, n_tokens, 120):
        proj = layer.proj(rng, size)
        got, want = mixer.step(proj, n_past), exact.step(proj, n_past)
        assert nmse(got.y, want.y) < 1e-10 and nmse(got.squares, want.squares) < 1e-10, f"outputs after {n_past}"
        n_past += size
        slot = (n_past - 1) % 5
        assert nmse(mixer.states()[0, slot], exact.states()[0, slot]) < 1e-10, f"state after {n_past}"


# ---- hard numbers


def gated(layer: Layer, proj: Floats, alpha: Any = None, beta: Any = None) -> Floats:
    """proj with these alpha and beta (arrays that fit [n_tokens, n_v_heads])."""
    a, b, end = np.cumsum(layer.widths)[1:]
    out = proj.copy()
    for start, stop, value in ((a, b, alpha), (b, end, beta)):
        if value is not None:
            out[:, start:stop] = value
    return out


def test_gates_from_nothing_to_all(device: Device, rng: np.random.Generator) -> None:
    """Tokens that forget all (e^-400, nothing in float32) among tokens that forget nothing, in every pattern."""
    layer = make_layer(rng, mildest=1)
    layer = replace(layer, a=np.full(4, -4, np.float32), dt_bias=np.zeros(4, np.float32))
    proj = layer.proj(rng, 96)
    alpha = rng.choice([100.0, 30.0, 3.0, -3.0, -30.0, -100.0], (96, 4), p=[0.05, 0.05, 0.1, 0.1, 0.3, 0.4])
    alpha[:32, 0], alpha[32:64, 0], alpha[:, 1] = -100, 100, -20
    proj = gated(layer, proj, alpha)
    mixer = Mixer(device, layer)
    got = mixer.step(proj, 0)
    assert np.isfinite(got.y).all() and np.isfinite(got.squares).all()
    check_outputs(layer, proj, got, worst=1e-10)
    check_rings(layer, proj, mixer, worst=1e-10)


def test_a_small_gate_after_large_ones(device: Device, rng: np.random.Generator) -> None:
    """Differences of sums of gates would be off by 1e-5 here: as many digits as of a gate of a hundred are gone."""
    layer = make_layer(rng, (1, 1), (32, 32))
    layer = replace(layer, a=np.full(1, -4, np.float32), dt_bias=np.zeros(1, np.float32))
    alpha = np.where(np.arange(48) % BLOCK < 8, 100.0, -3.0)[:, None]
    proj = gated(layer, layer.proj(rng, 48), alpha)
    check_outputs(layer, proj, Mixer(device, layer).step(proj, 0), worst=2e-12)


@pytest.mark.parametrize("beta", [-30, 0, 30])
def test_one_key_again_and_again(beta: float, device: Device, rng: np.random.Generator) -> None:
    """The same token throughout, nothing forgotten: I + L is as far from I as it can get."""
    layer = make_layer(rng, n_rs_seq=1)
    proj = gated(layer, np.tile(layer.proj(rng, 1), (70, 1)), -100, beta)
    proj[40:, : 2 * layer.n_k_heads * layer.dk] *= -1
    mixer = Mixer(device, layer)
    got = mixer.step(proj, 0)
    if beta > -30:
        check_outputs(layer, proj, got, worst=1e-9)
        check_rings(layer, proj, mixer, worst=1e-9)
    else:  # a step size of 1e-13: next to nothing is written, and nothing may come up
        assert np.abs(got.y).max() < 1e-9 and np.abs(mixer.states()).max() < 1e-9


def test_vectors_of_no_length(device: Device, rng: np.random.Generator) -> None:
    layer = make_layer(rng)
    proj = layer.proj(rng, 48)
    key_dim = layer.n_k_heads * layer.dk
    proj[:24, :key_dim] = 0
    proj[8:40, key_dim : 2 * key_dim] = 0
    mixer = Mixer(device, layer)
    got = mixer.step(proj, 0)
    y, _, _ = definition(layer, proj)
    assert np.isfinite(got.y).all() and not got.y[0, :24].any()
    assert nmse(got.y[0], y) < 1e-11
    check_rings(layer, proj, mixer)


# ---- apart


def test_all_that_a_dispatch_addresses_is_declared() -> None:
    """Or the scheduler would give the memory of a scratch tensor away before its last reader has run."""
    layer = make_layer(np.random.default_rng(0), n_rs_seq=2)
    mixer, g = Mixer(NumpyDevice(), layer), Graph()
    add_mixer(g, layer, mixer.conv, mixer.state, 40, 2)
    for stage in OP.lower(g.nodes[0], Limits(max_shared_bytes=32768)):
        for d in stage:
            declared = {b.tensor.storage for b in (*d.binds, *d.also)}
            assert {v.tensor.storage for v in d.push if isinstance(v, At)} <= declared, d.kernel.name


def test_sequences_do_not_meet(device: Device, rng: np.random.Generator) -> None:
    """Three prompts in one batch, in mixed-up slots, the middle one with a bad row: each like alone, bit for bit."""
    layer = make_layer(rng, (2, 4), (32, 24), n_rs_seq=3)
    past, slots, n = [0, 9, 2], [3, 0, 2], 45
    proj = [layer.proj(rng, p + n) for p in past]
    proj[1][30] = np.nan
    together = Mixer(device, layer, n_seq_max=4)
    for p, before, slot in zip(proj, past, slots, strict=True):
        if before:
            together.step(p[:before], [0], [slot])
    got = together.step(np.stack([p[before:] for p, before in zip(proj, past, strict=True)]), past, slots)
    for s in (0, 2):
        alone = Mixer(device, layer)
        if past[s]:
            alone.step(proj[s][: past[s]], 0)
        want = alone.step(proj[s][past[s] :], past[s])
        same(got.y[s], want.y[0])
        same(got.squares[s], want.squares[0])
        same(together.states()[slots[s]], alone.states()[0])
        same(together.columns()[slots[s]], alone.columns()[0])
    assert np.isnan(got.y[1, 30 - past[1] :]).all()
    for ring in (together.states(), together.columns()):
        assert (np.ascontiguousarray(ring[1], np.float32).view(np.uint32) == POISON).all(), "slot 1 belongs to nobody"


def test_again_is_the_same(device: Device, rng: np.random.Generator) -> None:
    """A race between workgroups or a missing barrier would show as different bits now and then."""
    layer = make_layer(rng, (2, 4), (64, 64), n_rs_seq=2)
    proj = layer.proj(rng, 80)
    mixer = Mixer(device, layer)
    results: list[tuple[NDArray[Any], ...]] = []
    for _ in range(4):
        mixer.clear()
        got = mixer.step(proj, 0)
        results.append((got.y, got.squares, mixer.states(), mixer.columns()))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            same(one, two)
