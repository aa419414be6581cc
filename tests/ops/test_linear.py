"""linear: what its cases do not show: errors, bitwise independence of the batch, work shapes of other devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from vkbackend.device.base import Device, Limits
from vkbackend.device.kompute import KomputeDevice
from vkbackend.errors import DeviceError, VkBackendError
from vkbackend.graph import Graph, Tensor
from vkbackend.ops import linear as eager_linear
from vkbackend.ops.case import Case, CaseBuilder, nmse, run_case
from vkbackend.ops.linear import FORMATS, LARGE, MAX_ROWS, OP, linear
from vkbackend.quants import WeightFormat

Floats = NDArray[np.float32]


def _device_with(subgroups: bool, **changed: object) -> KomputeDevice:
    """A device of its own whose lowerings see other limits."""
    try:
        device = KomputeDevice(0, subgroups)
    except DeviceError as error:
        pytest.skip(f"no Vulkan device here: {error}")
    device.info = replace(device.info, limits=replace(device.info.limits, **changed))  # type: ignore[arg-type]
    return device


# Subgroups or shared memory, subgroup sizes reported and at least. Lanes that are apart need larger subgroups than a
# CPU driver has, so they are tried through shared memory.
CPU_SHAPE, GPU_SHAPE, GPU_SHAPE_APART = (True, 8, 8), (True, 32, 8), (False, 32, 32)


def _shaped(subgroups: bool, size: int, least: int) -> KomputeDevice:
    return _device_with(subgroups, subgroup_size=size, min_subgroup_size=least)


@pytest.fixture(scope="module", params=[CPU_SHAPE, GPU_SHAPE, GPU_SHAPE_APART], ids=str)
def any_shape(request: pytest.FixtureRequest) -> Iterator[KomputeDevice]:
    """Work shaped as for a CPU driver and as for a GPU: rows split over teams, lanes apart, 32 columns a lane."""
    device = _shaped(*request.param)
    yield device
    device.close()


@pytest.fixture(scope="module")
def wide() -> Iterator[KomputeDevice]:
    """Work shaped as for a GPU."""
    device = _shaped(*GPU_SHAPE)
    yield device
    device.close()


@pytest.fixture(scope="module")
def few_groups() -> Iterator[KomputeDevice]:
    """At most 3 workgroups along x, so that every larger dispatch is spread over x and y."""
    device = _device_with(True, max_groups=(3, 65535, 65535))
    yield device
    device.close()


# ---- bitwise independence of the batch


@dataclass(frozen=True)
class Setup:
    """One product: the weights' rows and format, and what is fused into it."""

    n_in: int
    rows: tuple[int, ...]
    fmt: str
    before: str = ""
    after: str = ""


def _product(device: Device, setup: Setup, seed: int, pick: slice) -> Floats:
    """Rows `pick` of the product of 16 rows of x, computed as a batch of their own."""
    b = CaseBuilder(device, np.random.default_rng(seed))
    x = b.normal(MAX_ROWS, setup.n_in)
    parts = [b.weight(b.normal(r, setup.n_in, scale=setup.n_in**-0.5), setup.fmt) for r in setup.rows]
    norm = b.input(b.uniform(0.5, 1.5, setup.n_in)) if setup.before == "norm" else None
    sums = b.uniform(1, 50, MAX_ROWS, setup.n_in // 16, 2)
    squares = b.input(sums[pick]) if setup.before == "groups" else None
    added = b.normal(MAX_ROWS, sum(setup.rows))
    residual = b.input(added[pick]) if setup.after == "residual" else None
    swiglu = setup.after == "swiglu"
    options = {"norm": norm, "group_squares": squares, "residual": residual}
    b.output(linear(b.graph, b.input(x[pick]), parts, eps=1e-6, swiglu=swiglu, **options))
    result: Floats = device.compile(b.graph, poison=True).run(b.feeds)["out0"]
    return result


SETUPS = [
    Setup(2048, (34, 6), "q8_0", "", "residual"),
    Setup(512, (300,), "q8_0", "norm", "swiglu"),
    Setup(256, (40,), "bf16", "groups", "residual"),
    Setup(96, (4100,), "f16"),
    Setup(768, (50,), "q4_k", "norm", "swiglu"),
    Setup(512, (34,), "q6_k", "groups", "residual"),
    Setup(16, (1,), "f32", "norm", "residual"),
    Setup(96, (LARGE + 30,), "q4_1", "norm"),
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_rows_do_not_depend_on_the_batch(setup: Setup, any_shape: KomputeDevice, seed: int) -> None:
    together = _product(any_shape, setup, seed, slice(0, MAX_ROWS))
    assert np.isfinite(together).all()
    for n in (1, 2, 3, 5):
        for start in (0, MAX_ROWS - n):
            pick = slice(start, start + n)
            alone = _product(any_shape, setup, seed, pick)
            np.testing.assert_array_equal(alone.view(np.uint32), together[pick].view(np.uint32), f"rows {pick}")


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_both_variants_give_the_same_bits(
    setup: Setup, kompute: KomputeDevice, kompute_shared: KomputeDevice, seed: int
) -> None:
    results = [_product(d, setup, seed, slice(0, 5)).view(np.uint32) for d in (kompute, kompute_shared)]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("setup", "least"), [(s, 32) for s in SETUPS] + [(SETUPS[0], 16), (Setup(256, (LARGE,), "q6_k"), 32)], ids=str
)
def test_how_far_lanes_are_apart_changes_no_bit(setup: Setup, least: int, seed: int) -> None:
    devices = _shaped(*GPU_SHAPE), _shaped(False, 32, least)
    results = [_product(d, setup, seed, slice(0, 3)).view(np.uint32) for d in devices]
    np.testing.assert_array_equal(*results)
    for d in devices:
        d.close()


@pytest.mark.parametrize(
    ("size", "least", "n_out", "wide", "apart"),
    [
        (8, 8, LARGE, 0, 1),
        (32, 8, LARGE, 1, 1),
        (16, 16, LARGE - 1, 0, 2),
        (32, 32, LARGE - 1, 0, 4),
        (64, 64, LARGE, 1, 4),
        (64, 1, LARGE, 1, 1),
    ],
)
def test_what_a_device_is_given(size: int, least: int, n_out: int, wide: int, apart: int) -> None:
    """The variants that the tests here compare are those that devices get."""
    g = Graph()
    linear(g, g.input("x", (3, 64)), [g.input("w", (n_out, 64))])
    [[dispatch]] = OP.lower(g.nodes[0], Limits(subgroup_size=size, min_subgroup_size=least))
    assert dispatch.spec[3:5] == (wide, apart)


def test_lanes_apart_in_the_larger_subgroups_of_a_cpu(kompute: KomputeDevice) -> None:
    """lavapipe has subgroups of 16 where a CPU has vectors of 512 bits, so two teams of a subgroup take turns there."""
    least = "from vkbackend.device import open_device as f; print(f('kompute:0').info.limits.min_subgroup_size)"
    environment = {**os.environ, "LP_NATIVE_VECTOR_WIDTH": "512"}

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        run = [sys.executable, *arguments]
        return subprocess.run(run, env=environment, capture_output=True, text=True, timeout=600, check=False)

    if kompute.info.limits.min_subgroup_size >= 16 or python("-c", least).stdout.strip() != "16":
        pytest.skip("not lavapipe, or a CPU without vectors of 512 bits")
    test = f"{__file__}::{test_both_variants_give_the_same_bits.__name__}"
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", test)
    assert done.returncode == 0 and f"{len(SETUPS)} passed" in done.stdout, done.stdout + done.stderr


# ---- other devices' work shapes


@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.label)
def test_cases_in_the_work_shapes_of_a_gpu(case: Case, wide: KomputeDevice, seed: int) -> None:
    result = run_case(case, wide, seed)
    assert result.ok, result


@pytest.mark.parametrize("n_rows", [2, 70])
def test_more_workgroups_than_one_axis_allows(n_rows: int, few_groups: KomputeDevice, seed: int) -> None:
    def build(b: CaseBuilder) -> None:
        x, w = b.input(b.normal(n_rows, 64)), b.weight(b.normal(1500, 64), "q8_0")
        b.output(linear(b.graph, x, [w]))

    result = run_case(Case("spread", build), few_groups, seed)
    assert result.ok, result


# ---- rows do not touch each other


@pytest.mark.parametrize("n_rows", [3, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_spoils_only_itself(
    n_rows: int, bad: float, kompute: KomputeDevice, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((n_rows, 64)).astype(np.float32)
    w = rng.standard_normal((40, 64)).astype(np.float32)
    norm = rng.uniform(0.5, 1.5, 64).astype(np.float32)
    clean = eager_linear(x, [w], norm=norm, eps=1e-6, device=kompute)
    x[1, 7] = bad
    dirty = eager_linear(x, [w], norm=norm, eps=1e-6, device=kompute)
    others = np.arange(n_rows) != 1
    assert not np.isfinite(dirty[1]).any()
    np.testing.assert_array_equal(dirty[others], clean[others])


def test_large_gates_do_not_overflow(kompute: KomputeDevice) -> None:
    """silu(gate) of gates far outside exp's range: 0 on one side, the gate itself on the other."""
    x = np.zeros((2, 16), np.float32)
    x[0, 0], x[1, 0] = 1, -1
    w = np.zeros((2, 16), np.float32)
    w[:, 0] = 200, 3
    for rows in (1, 20):
        y = eager_linear(np.tile(x, (rows, 1)), [w], swiglu=True, device=kompute)
        np.testing.assert_allclose(y[0::2], 600, rtol=1e-6)
        np.testing.assert_allclose(y[1::2], 0, atol=1e-30)


# ---- the eager call and the reference


def test_eager_call_agrees_with_numpy(kompute: KomputeDevice, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 48)).astype(np.float32)
    parts = [rng.standard_normal((n, 48)).astype(np.float32) for n in (5, 2)]
    want = x.astype(np.float64) @ np.concatenate(parts).T.astype(np.float64)
    for device in ("numpy", kompute):
        got = eager_linear(x, parts, device=device)
        assert got.shape == (3, 7) and nmse(got, want) < 1e-12


# ---- errors


def _graph_tensor(shape: tuple[int, ...]) -> Tensor:
    return Graph().temp("t", shape)


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ([], {}, "no weights"),
        ([(4, 24)], {}, r"weights \(4, 24\) do not fit x \(3, 32\)"),
        ([(4, 32), (5,)], {}, r"weights \(5,\) do not fit"),
        ([(4, 32), (5, 32)], {"swiglu": True}, "swiglu needs pairs of rows, got 5"),
        ([(4, 32)], {"norm": (31,)}, r"norm must have shape \(32,\)"),
        ([(4, 32)], {"group_squares": (2, 2, 1)}, r"group_squares \(2, 2, 1\), x \(3, 32\)"),
        ([(4, 32)], {"group_squares": (3, 4, 1)}, r"group_squares \(3, 4, 1\)"),
        ([(4, 32)], {"group_squares": (3, 2, 1), "norm": (32,)}, "exclude each other"),
        ([(4, 32)], {"residual": (3, 5)}, r"residual \(3, 5\) is not \(3, 4\)"),
        ([(4, 32)], {"residual": (3, 4), "swiglu": True}, "exclude each other"),
    ],
)
def test_builder_errors(parts: list[tuple[int, ...]], options: dict[str, object], message: str) -> None:
    lifted = {k: _graph_tensor(v) if isinstance(v, tuple) else v for k, v in options.items()}
    with pytest.raises(VkBackendError, match=message):
        linear(Graph(), _graph_tensor((3, 32)), [_graph_tensor(p) for p in parts], **lifted)  # type: ignore[arg-type]


def test_columns_of_x_must_be_contiguous() -> None:
    with pytest.raises(VkBackendError, match="contiguous"):
        linear(Graph(), _graph_tensor((32, 3)).permute(1, 0), [_graph_tensor((4, 32))])


@pytest.mark.parametrize(("n_in", "start"), [(40, 0), (32, 2)])
def test_lowering_errors(n_in: int, start: int) -> None:
    """16-byte loads need rows of x in whole chunks, at multiples of 4 words."""
    g = Graph()
    linear(g, g.input("x", (3, 64)).narrow(1, start, n_in), [_graph_tensor((4, n_in))])
    with pytest.raises(VkBackendError, match="multiple of 16 columns"):
        OP.lower(g.nodes[0], Limits())


def test_every_format_is_covered() -> None:
    """A format that is uploaded packed needs kernels here."""
    from vkbackend.quants import _FORMATS

    packed: set[str] = {f.name for f in _FORMATS.values() if isinstance(f, WeightFormat)}
    assert packed == set(FORMATS)
