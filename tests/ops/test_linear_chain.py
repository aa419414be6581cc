"""Chains of products: the bits of separate levels, on every format; devices that do not run workgroups side by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from vkbackend.chains import PlacedChains
from vkbackend.device import dispatching
from vkbackend.device.base import Array
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.null import NullDevice
from vkbackend.device.shared_memory import shared_bytes
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.errors import DeviceError
from vkbackend.graph import Graph
from vkbackend.ops.add import add
from vkbackend.ops.case import Case, CaseBuilder, run_built
from vkbackend.ops.linear import CHAIN_KERNELS, FORMATS, layer_case, linear
from vkbackend.ops.linear_chain import ENTRY_WORDS, LANES, MAX_OUT, MAX_SCALES, MAX_SHARED, MAX_TOKENS, PAIRS, x_quads
from vkbackend.ops.op import MAX_LINKS
from vkbackend.schedule import Plan

Dispatching = KomputeDevice | VulkanDevice
Pair = tuple[Dispatching, Dispatching]  # the same device without chains, and with them
TOO_MANY = 4096  # workgroups: no CPU driver runs as many side by side


def _open(kind: type[KomputeDevice] | type[VulkanDevice], subgroups: bool, **limits: int) -> Dispatching:
    try:
        device = kind(0, subgroups)
    except DeviceError as error:
        pytest.skip(f"no Vulkan device here: {error}")
    device.info = replace(device.info, limits=replace(device.info.limits, **limits))
    return device


def _chained(kind: type[KomputeDevice] | type[VulkanDevice], subgroups: bool, **limits: int) -> Dispatching:
    """One workgroup runs side by side with itself on every device."""
    return _open(kind, subgroups, **{"resident_groups": 1, "chain_bytes": 1 << 30, **limits})


@pytest.fixture(scope="module", params=["vulkan", "vulkan, shared memory", "kompute"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """(without chains, with chains): the same device, opened twice."""
    kind = KomputeDevice if request.param == "kompute" else VulkanDevice
    subgroups = "shared" not in request.param
    devices = _open(kind, subgroups, resident_groups=0), _chained(kind, subgroups)
    yield devices
    for device in devices:
        device.close()


Build = Callable[[CaseBuilder], None]


def _results(device: Dispatching, build: Build, seed: int) -> tuple[dict[str, Array], Plan]:
    builder = CaseBuilder(device, np.random.default_rng(seed))
    results = run_built(Case("", build), builder)
    return results, device.compile(builder.graph).plan


@pytest.fixture(scope="module")
def direct() -> Iterator[Pair]:
    """The same for the direct device with subgroups."""
    devices = _open(VulkanDevice, True, resident_groups=0), _chained(VulkanDevice, True)
    yield devices
    for device in devices:
        device.close()


def _same_bits(pair: Pair, build: Build, saved: int, seed: int) -> PlacedChains:
    """One chain gives the bits of 1 + `saved` levels; the chain."""
    apart, apart_plan = _results(pair[0], build, seed)
    joined, joined_plan = _results(pair[1], build, seed)
    assert len(apart_plan.levels) - len(joined_plan.levels) == saved
    assert len(joined_plan.chains.launches) == 1
    for name, want in apart.items():
        np.testing.assert_array_equal(joined[name].view(np.uint32), want.view(np.uint32))
    return joined_plan.chains


def _layer(fmts: list[str], n: int) -> Build:
    return layer_case(n, fmts).build


@pytest.mark.parametrize(
    "fmts", [[f] * 6 for f in FORMATS] + [[a] * 3 + [b] * 3 for a, b in PAIRS], ids=lambda f: "-".join(dict.fromkeys(f))
)
def test_the_bits_of_separate_levels(direct: Pair, fmts: list[str], seed: int) -> None:
    _same_bits(direct, _layer(fmts, 1 + seed % MAX_TOKENS), 3, seed)


@pytest.mark.parametrize("fmts", [["q8_0"] * 6, ["q4_k"] * 3 + ["q6_k"] * 3], ids=lambda f: "-".join(dict.fromkeys(f)))
def test_the_bits_of_separate_levels_everywhere(pair: Pair, fmts: list[str], seed: int) -> None:
    _same_bits(pair, _layer(fmts, 1 + seed % MAX_TOKENS), 3, seed)


@pytest.mark.parametrize("n", [1, 2])
def test_the_bits_of_work_shaped_as_for_a_gpu(n: int, seed: int) -> None:
    """Several teams share a weight row; two rows of x of 4,096 columns do not fit into workgroup memory at once."""

    def long_rows(b: CaseBuilder) -> None:
        shapes = [(512, 4096), (8192, 512), (512, 4096)]
        matrices = [
            (b.normal(*shape, scale=shape[1] ** -0.5), f)
            for shape, f in zip(shapes, ("q8_0", "q8_0", "f32"), strict=True)
        ]
        first, up, down = b.weights(matrices)
        x = add(b.graph, b.input(b.normal(n, 4096)), b.input(b.normal(n, 4096)))
        squares = add(b.graph, b.input(b.uniform(1, 50, n, 24)), b.input(b.uniform(1, 2, n, 24))).reshape(n, 8, 3)
        y = linear(b.graph, x, [first], group_squares=squares, eps=1e-6)
        inner = linear(b.graph, y, [up], norm=b.input(b.uniform(0.5, 1.5, 512)), eps=1e-6, swiglu=True)
        y = linear(b.graph, inner, [down], residual=y)
        b.output(add(b.graph, y, b.input(b.normal(n, 512))))

    limits = {"subgroup_size": 32, "max_shared_bytes": 32768}
    pair = _open(VulkanDevice, True, resident_groups=0, **limits), _chained(VulkanDevice, True, **limits)
    try:
        chains = _same_bits(pair, long_rows, 2, seed)
        entries = chains.words[2:].reshape(-1, ENTRY_WORDS)  # after the number of the run and one counter
        n_in, split, steps_of_block = entries[:, 3], entries[:, 15], entries[:, 16]
        n_steps = n_in // (16 * LANES * split)
        assert split.tolist() == [16, 4, 16] and n_steps.tolist() == [2, 1, 2]
        assert (n_steps > steps_of_block).tolist() == [n == 2, False, n == 2]
    finally:
        for device in pair:
            device.close()


@pytest.mark.parametrize("room", [32768, MAX_SHARED, 1 << 20])
@pytest.mark.parametrize("subgroup", [True, False])
def test_workgroup_memory_is_what_x_leaves(room: int, subgroup: bool) -> None:
    for n in range(1, MAX_TOKENS + 1):
        quads = x_quads(n, replace(NullDevice().info.limits, max_shared_bytes=room))
        for kernel in (CHAIN_KERNELS["f32",], CHAIN_KERNELS["q4_k", "q6_k"]):
            need = shared_bytes(kernel, subgroup, (n, quads, MAX_SCALES))
            assert 16 * quads < need <= min(room, MAX_SHARED)


def test_the_same_program_again(pair: Pair, seed: int) -> None:
    """Counters and tables are written anew for every run, other programs in between."""
    builders = [CaseBuilder(pair[1], np.random.default_rng(seed + i)) for i in range(2)]
    first = [run_built(layer_case(1 + i, ["q8_0"] * 6), b) for i, b in enumerate(builders)]
    programs = [b.device.compile(b.graph) for b in builders]
    for i in (0, 1, 0, 0, 1):
        got = programs[i].run(builders[i].feeds)
        for name, want in first[i].items():
            np.testing.assert_array_equal(got[name].view(np.uint32), want.view(np.uint32))


# ---- which levels join


def _levels(n_tokens: int = 1, n_out: int = 64, resident: int = 132, n_products: int = 4, **limits: int) -> list[int]:
    """How many levels each chain of n products in a row has, with an op before and after them."""
    info = NullDevice().info.limits
    device = NullDevice(
        replace(
            info,
            **{
                "resident_groups": resident,
                "chain_bytes": 1 << 24,
                "max_invocations": 1024,
                "max_shared_bytes": 49152,
                **limits,
            },
        )
    )
    b = CaseBuilder(device, np.random.default_rng(0))
    matrices = [
        (np.zeros((n_out, 64), np.float32), "f16"),
        *[(np.zeros((64, 64), np.float32), "f16")] * (n_products - 1),
    ]
    first, *rest = b.weights(matrices)
    x = add(b.graph, b.input(b.normal(n_tokens, 64)), b.input(b.normal(n_tokens, 64)))
    y = linear(b.graph, x, [first]).narrow(1, 0, 64)
    for w in rest:
        y = linear(b.graph, y, [w])
    b.output(add(b.graph, y, x))
    program = device.compile(b.graph)
    n_levels = len(program.plan.levels)
    lengths = [chain.push[1] for chain in program.plan.chains.launches]
    assert n_levels == 2 + n_products - sum(n - 1 for n in lengths)
    return lengths


def test_which_levels_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "all_run", lambda chains, tried, runs: True)  # the null device runs nothing
    assert _levels() == [4]
    assert _levels(n_tokens=MAX_TOKENS) == [4]
    assert _levels(n_products=1) == []
    assert _levels(n_products=MAX_LINKS + 3) == [MAX_LINKS, 3]
    assert _levels(resident=0) == []
    assert _levels(n_tokens=MAX_TOKENS + 1) == []
    assert _levels(n_out=MAX_OUT + 64) == [3]
    assert _levels(chain_bytes=1 << 10) == []
    assert _levels(max_invocations=256) == []
    assert _levels(max_shared_bytes=4096) == []


# ---- devices that do not run workgroups side by side


def test_a_device_that_fails_the_trial_goes_on_without_chains(seed: int) -> None:
    device = _chained(VulkanDevice, True, resident_groups=TOO_MANY)
    apart = _open(VulkanDevice, True, resident_groups=0)
    try:
        with pytest.warns(RuntimeWarning, match=f"does not run {TOO_MANY} workgroups side by side"):
            got, plan = _results(device, _layer(["f32"] * 6, 1), seed)
        want, _ = _results(apart, _layer(["f32"] * 6, 1), seed)
        assert plan.chains.launches == []
        for name in want:
            np.testing.assert_array_equal(got[name].view(np.uint32), want[name].view(np.uint32))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _results(device, _layer(["f32"] * 6, 2), seed)  # said once
    finally:
        device.close()
        apart.close()


def test_a_chain_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(dispatching, "all_run", lambda chains, tried, runs: True)
    device = _chained(KomputeDevice, True, resident_groups=TOO_MANY)
    try:
        with pytest.raises(DeviceError, match=r"1 of 1 chains of products did not end.*kompute:0:unchained"):
            _results(device, _layer(["f32"] * 6, 1), seed)
    finally:
        device.close()


def test_a_chain_that_did_nothing_is_an_error(direct: Pair, seed: int) -> None:
    """What the run before has left does not pass for its end."""
    builder = CaseBuilder(direct[1], np.random.default_rng(seed))
    layer_case(1, ["f32"] * 6).build(builder)
    program = direct[1].compile(builder.graph)
    program.run(builder.feeds)
    program._recording = _NoRecording()
    with pytest.raises(DeviceError, match="1 of 1 chains of products did not end"):
        program.run(builder.feeds)


class _NoRecording:
    def run(self) -> None:
        pass

    def level_seconds(self) -> list[float]:
        return []


def test_options_of_devices() -> None:
    from vkbackend.device import open_device

    with pytest.raises(DeviceError, match="kompute:N:unchained"):
        open_device("kompute:0:chained")
    _open(KomputeDevice, True).close()
    device = open_device("kompute:0:unchained")
    assert device.info.limits.chain_bytes == 0
    device.close()


def test_a_chain_needs_its_own_memory() -> None:
    """A value that the host reads (an output) is not in the arena: the products around it stay apart."""
    device = NullDevice(
        replace(
            NullDevice().info.limits,
            resident_groups=132,
            chain_bytes=1 << 24,
            max_invocations=1024,
            max_shared_bytes=49152,
        )
    )
    b = CaseBuilder(device, np.random.default_rng(0))
    w, v = b.weights([(np.zeros((64, 64), np.float32), "f16")] * 2)
    g: Graph = b.graph
    x = add(g, b.input(b.normal(1, 64)), b.input(b.normal(1, 64)))
    y = linear(g, x, [w])
    b.output(y)
    b.output(add(g, linear(g, y, [v]), x))
    assert device.compile(g).plan.chains.launches == []
