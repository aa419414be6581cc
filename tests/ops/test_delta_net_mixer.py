"""delta_net_mixer: its definition, bitwise independence of batches, rings and rollback, drift, containment, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mixer_layer import EPS, Mixer, add_mixer, cut, definition, feed, make_layer, same

from vkbackend.device.base import Device, Limits
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import VkBackendError
from vkbackend.graph import Graph, Tensor
from vkbackend.ops.case import POISON, nmse
from vkbackend.ops.delta_net_mixer import OP, ROWS, SHORT, conv_ring_columns, delta_net_mixer
from vkbackend.schedule import plan


@pytest.fixture(params=["kompute", "kompute_shared"])
def shader(request: pytest.FixtureRequest) -> KomputeDevice:
    found: KomputeDevice = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["numpy_device", "kompute", "kompute_shared"])
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = request.getfixturevalue(request.param)
    return found


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
    layer = make_layer(rng, heads, size, taps, n_rs_seq, grouped)
    sizes = [1, 5, 1, 20, 3]
    proj = layer.proj(rng, sum(sizes))
    mixer = Mixer(device, layer)
    got = feed(mixer, proj, sizes)
    y, o, states = definition(layer, proj)
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
    layer = make_layer(rng, n_rs_seq=n_rs_seq)
    n_tokens = 37
    proj = layer.proj(rng, n_tokens)
    one_by_one = Mixer(shader, layer)
    want = feed(one_by_one, proj, [1] * n_tokens)
    for sizes in ([16, 16, 5], [2, 3, 1, 15, 16], cut(rng, n_tokens, SHORT)):
        mixer = Mixer(shader, layer)
        got = feed(mixer, proj, sizes)
        same(got.y, want.y)
        same(got.squares, want.squares)
        same(mixer.states(), one_by_one.states())
        same(mixer.columns(), one_by_one.columns())


def test_sequences_do_not_meet(shader: KomputeDevice, rng: np.random.Generator) -> None:
    """Three sequences of different lengths in one batch, in mixed-up slots, against each one alone."""
    layer = make_layer(rng, n_rs_seq=3)
    past, slots = [0, 9, 2], [3, 0, 2]
    proj = [layer.proj(rng, n + 5) for n in past]
    together = Mixer(shader, layer, n_seq_max=4)
    for p, n, slot in zip(proj, past, slots, strict=True):
        if n:
            together.step(p[:n], [0], [slot])
    got = together.step(np.stack([p[n:] for p, n in zip(proj, past, strict=True)]), past, slots)
    for s in range(3):
        alone = Mixer(shader, layer)
        want = feed(alone, proj[s], [past[s], 5] if past[s] else [5])
        same(got.y[s], want.y[0, past[s] :])
        same(got.squares[s], want.squares[0, past[s] :])
        same(together.states()[slots[s]], alone.states()[0])
        same(together.columns()[slots[s]], alone.columns()[0])
    for ring in (together.states(), together.columns()):
        assert (np.ascontiguousarray(ring[1]).view(np.uint32) == POISON).all(), "slot 1 belongs to nobody here"


def test_all_variants_give_the_same_bits(
    kompute: KomputeDevice, kompute_shared: KomputeDevice, rng: np.random.Generator
) -> None:
    """With subgroups, through shared memory, and with the larger workgroups that a GPU has."""
    as_gpu = KomputeDevice(0)
    as_gpu.info = replace(as_gpu.info, limits=replace(as_gpu.info.limits, subgroup_size=32))
    layer = make_layer(rng, (1, 2), (128, 128), n_rs_seq=2)
    proj = layer.proj(rng, 12)
    one, *others = (Mixer(d, layer) for d in (kompute, kompute_shared, as_gpu))
    want = feed(one, proj, [7, 1, 4])
    for other in others:
        got = feed(other, proj, [7, 1, 4])
        same(got.y, want.y)
        same(got.squares, want.squares)
        same(other.states(), one.states())
        same(other.columns(), one.columns())
    as_gpu.close()


def test_workgroups_spread_over_two_axes(rng: np.random.Generator) -> None:
    """5 x 4 x 2 workgroups where only 7 fit along x: the two too many must do nothing."""
    layer = make_layer(rng, size=(32, 64), n_rs_seq=1)
    proj = np.stack([layer.proj(rng, 40) for _ in range(5)])
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
        out = mixer.step(proj[:, 3:], [3] * 5, range(5))  # a long batch: the kernels of prompts as well
        results.append((out.y, out.squares, mixer.states(), mixer.columns()))
        device.close()
    for got, want in zip(*results, strict=True):
        same(got, want)


# ---- rings


@pytest.mark.parametrize("n_rs_seq", [1, 3, 8])
def test_rollback_leaves_no_trace(n_rs_seq: int, shader: KomputeDevice, rng: np.random.Generator) -> None:
    """Decode, go back d tokens, decode others: the same bits as if the first ones had never been there."""
    layer = make_layer(rng, n_rs_seq=n_rs_seq)
    mixer, straight = Mixer(shader, layer), Mixer(shader, layer)
    for last in (1, 4, SHORT):  # size of the batch that is rolled back into
        for d in range(1, n_rs_seq + 1):
            kept = 9 + last - d
            proj, other = layer.proj(rng, 9 + last), layer.proj(rng, 6)
            mixer.clear()
            feed(mixer, proj, [4, 5, last])
            got = feed(mixer, other, [1, 1, 4], n_past=kept)
            straight.clear()
            feed(straight, proj[:kept], [4] * (kept // 4) + [1] * (kept % 4))
            want = feed(straight, other, [4, 1, 1], n_past=kept)
            same(got.y, want.y)
            same(got.squares, want.squares)
            newest = (kept + 5) % (1 + n_rs_seq)
            same(mixer.states()[0, newest], straight.states()[0, newest])


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
    layer = make_layer(rng, n_rs_seq=3)
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
    layer = make_layer(rng, n_rs_seq=n_rs_seq)
    proj = layer.proj(rng, 3 + n_tokens + 4)
    mixer, one_by_one = Mixer(shader, layer), Mixer(shader, layer)
    got, want = feed(mixer, proj, [3, n_tokens, 1, 3]), feed(one_by_one, proj, [1] * len(proj))
    assert nmse(got.y, want.y) < 1e-11 and nmse(got.squares, want.squares) < 1e-11
    assert nmse(mixer.states(), one_by_one.states()) < 1e-11
    same(mixer.columns(), one_by_one.columns())


# ---- far and wild


def test_drift_over_512_steps(shader: KomputeDevice, rng: np.random.Generator) -> None:
    """Batches of 1 to 16 tokens with rollbacks in between, against float64: the error must not grow with the steps."""
    layer = make_layer(rng, n_rs_seq=4, mildest=1e-4)
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
    layer = make_layer(rng, n_rs_seq=1)
    proj = np.stack([layer.proj(rng, 6) for _ in range(2)])
    clean = Mixer(shader, layer, n_seq_max=2).step(proj, [0, 0], [0, 1])
    proj[0, 3] = np.nan
    got = Mixer(shader, layer, n_seq_max=2).step(proj, [0, 0], [0, 1])
    assert np.isnan(got.y[0, 3:]).all()
    same(got.y[0, :3], clean.y[0, :3])
    same(got.y[1], clean.y[1])
    same(got.squares[1], clean.squares[1])


def test_large_and_small_numbers(device: Device, rng: np.random.Generator) -> None:
    """Gates at their ends, gates of z far out, vectors of no length at all: finite, and as the definition says."""
    layer = make_layer(rng)
    proj = layer.proj(rng, 4)
    ends = np.cumsum(layer.widths)
    proj[0, ends[0] : ends[1]] *= 100
    proj[1, ends[1] :] = np.tile([90, -90], layer.n_v_heads)
    proj[:3, : layer.n_k_heads * layer.dk] = 0  # queries: conv and SiLU of zeros are zeros
    got = feed(Mixer(device, layer), proj, [4])
    y, _, _ = definition(layer, proj)
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


@pytest.mark.parametrize(
    ("n_tokens", "n_rs_seq", "shared", "kernels"),
    [
        (1, 0, 32768, [["mixer"]]),
        (16, 3, 32768, [["mixer"]]),
        (17, 0, 32768, [["mixer"], ["ring"]]),
        (34, 3, 32768, [["mixer"], ["ring"]]),
        (32, 0, 32768, [["prepare"], ["scan", "ring"], ["finish"]]),
        (35, 3, 32768, [["prepare"], ["scan", "ring"], ["finish", "mixer"]]),
        (512, 0, 16384, [["mixer"], ["ring"]]),  # no more than Vulkan guarantees
    ],
)
def test_kernels_by_length(n_tokens: int, n_rs_seq: int, shared: int, kernels: list[list[str]]) -> None:
    layer = make_layer(np.random.default_rng(0), n_rs_seq=n_rs_seq)
    mixer, g = Mixer(NumpyDevice(), layer), Graph()
    add_mixer(g, layer, mixer.conv, mixer.state, n_tokens, 1)
    limits = Limits(max_shared_bytes=shared)
    short = {"delta_net_mixer": "mixer", "conv_ring_write": "ring"}
    names = [[d.kernel.name for d in stage] for stage in OP.lower(g.nodes[0], limits)]
    assert [[short.get(n, n.removeprefix("delta_net_")) for n in stage] for stage in names] == kernels
    levels = [[launch.kernel.name for launch in level] for level in plan(g, limits).levels]
    assert levels == names, "dispatches of one stage touch different rows, so nothing holds them apart"


@pytest.mark.parametrize(
    ("limits", "lanes"),
    [
        (Limits(subgroup_size=32, max_invocations=256), 256),
        (Limits(subgroup_size=32, max_invocations=128), 128),
        (Limits(subgroup_size=8, max_invocations=1024), 128),
    ],
)
def test_large_workgroups_are_for_gpus_that_have_them(limits: Limits, lanes: int) -> None:
    layer = make_layer(np.random.default_rng(0))
    mixer, g = Mixer(NumpyDevice(), layer), Graph()
    add_mixer(g, layer, mixer.conv, mixer.state, 1, 1)
    assert [[d.kernel.local_size for d in stage] for stage in OP.lower(g.nodes[0], limits)] == [[lanes]]
