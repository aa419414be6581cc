"""Chains of products: the bits of separate levels, on every format; devices that do not run workgroups side by side."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from vkbackend.chains import MAX_LINKS
from vkbackend.device import dispatching
from vkbackend.device.base import Array
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.null import NullDevice
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.errors import DeviceError
from vkbackend.graph import Graph
from vkbackend.ops.add import add
from vkbackend.ops.case import CaseBuilder, run_built
from vkbackend.ops.linear import FORMATS, layer_case, linear
from vkbackend.ops.linear_chain import MAX_OUT, MAX_TOKENS, PAIRS

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


def _programs(
    device: Dispatching, n: int, fmts: list[str], seed: int
) -> tuple[dict[str, Array], dispatching.DispatchProgram]:
    builder = CaseBuilder(device, np.random.default_rng(seed))
    results = run_built(layer_case(n, fmts), builder)
    return results, device.compile(builder.graph)


@pytest.fixture(scope="module")
def direct() -> Iterator[Pair]:
    """The same for the direct device with subgroups."""
    devices = _open(VulkanDevice, True, resident_groups=0), _chained(VulkanDevice, True)
    yield devices
    for device in devices:
        device.close()


def _same_bits(pair: Pair, fmts: list[str], seed: int) -> None:
    n = 1 + seed % MAX_TOKENS
    apart, apart_program = _programs(pair[0], n, fmts, seed)
    joined, joined_program = _programs(pair[1], n, fmts, seed)
    assert (
        len(apart_program.plan.levels) - len(joined_program.plan.levels) == 3 and len(joined_program.plan.chains) == 1
    )
    for name, want in apart.items():
        np.testing.assert_array_equal(joined[name].view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize(
    "fmts", [[f] * 6 for f in FORMATS] + [[a] * 3 + [b] * 3 for a, b in PAIRS], ids=lambda f: "-".join(dict.fromkeys(f))
)
def test_the_bits_of_separate_levels(direct: Pair, fmts: list[str], seed: int) -> None:
    _same_bits(direct, fmts, seed)


@pytest.mark.parametrize("fmts", [["q8_0"] * 6, ["q4_k"] * 3 + ["q6_k"] * 3], ids=lambda f: "-".join(dict.fromkeys(f)))
def test_the_bits_of_separate_levels_everywhere(pair: Pair, fmts: list[str], seed: int) -> None:
    _same_bits(pair, fmts, seed)


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
    assert n_levels == 2 + n_products - sum(c.push[1] - 1 for c in program.plan.chains)
    return [c.push[1] for c in program.plan.chains]


def test_which_levels_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "all_run", lambda chains, tried, run: True)  # the null device runs nothing
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
            got, program = _programs(device, 1, ["f32"] * 6, seed)
        want, _ = _programs(apart, 1, ["f32"] * 6, seed)
        assert program.plan.chains == []
        for name in want:
            np.testing.assert_array_equal(got[name].view(np.uint32), want[name].view(np.uint32))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _programs(device, 2, ["f32"] * 6, seed)  # said once
    finally:
        device.close()
        apart.close()


def test_a_chain_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(dispatching, "all_run", lambda chains, tried, run: True)
    device = _chained(VulkanDevice, True, resident_groups=TOO_MANY)
    try:
        with pytest.raises(DeviceError, match=r"1 of 1 chains of products did not end.*vulkan:0:unchained"):
            _programs(device, 1, ["f32"] * 6, seed)
    finally:
        device.close()


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
    assert device.compile(g).plan.chains == []
