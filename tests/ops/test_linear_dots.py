"""linear_dots: which products it takes, its values, independence of the batch, bytes made on the way, odd numbers.

CPU drivers are never asked for it, so the device of these tests is told that it is a GPU, and no product is too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from spirv_module import check_fit

import vkbackend.schedule as schedule
from vkbackend.device.base import Device, Features, Limits
from vkbackend.device.null import NullDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.graph import Tensor
from vkbackend.ops import linear_dots
from vkbackend.ops.case import Case, CaseBuilder, nmse, run_case
from vkbackend.ops.linear import MAX_ROWS, OP, linear
from vkbackend.ops.linear_dots import ENOUGH_WEIGHTS, LARGE, ORDERS, WIDE

Floats = NDArray[np.float32]
GPU = Limits(
    max_invocations=1024, subgroup_size=32, min_subgroup_size=32, subgroup_shuffle=True,
    features=Features(integer_dot=True),
)  # fmt: skip
DECODE_CASES = [c for c in OP.cases() if int(c.label.split()[0].removeprefix("n=")) <= MAX_ROWS]
ALLOWED = 1e-8  # NMSE against float64; 16 bits for the largest of 16 columns give some 1e-9


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_dots, "ENOUGH_WEIGHTS", 0)


# ---- which products


def kernels(limits: Limits, rows: Sequence[int], fmts: Sequence[str], n: int = 2, n_in: int = 256) -> list[str]:
    b = CaseBuilder(NullDevice(limits), np.random.default_rng(0))
    parts = [b.weight(b.normal(r, n_in), fmt) for r, fmt in zip(rows, fmts, strict=True)]
    linear(b.graph, b.input(b.normal(n, n_in)), parts, norm=b.input(b.normal(n_in)), eps=1e-6)
    return [d.kernel.name for stage in b.graph.nodes[-1].op.lower(b.graph.nodes[-1], limits) for d in stage]


def test_large_products_only() -> None:
    rows = ENOUGH_WEIGHTS // 256
    assert kernels(GPU, [rows], ["q8_0"]) == ["row_bytes", "linear_dots"]
    assert kernels(GPU, [rows - 1], ["q8_0"]) == ["linear_rows"]
    assert kernels(GPU, [rows - 64, 64], ["q4_k", "q6_k"]) == ["row_bytes", "linear_dots", "linear_dots"]
    assert kernels(GPU, [rows - 64, 64], ["q8_0", "f16"]) == ["linear_rows", "linear_rows"]


@pytest.mark.parametrize(
    "limits",
    [
        replace(GPU, features=Features()),
        replace(GPU, subgroup_shuffle=False),
        replace(GPU, subgroup_size=8),
    ],
    ids=["no instruction", "no shuffles", "few lanes"],
)
def test_where_a_device_has_what_it_takes(limits: Limits, any_size: None) -> None:
    assert kernels(limits, [64], ["q8_0"]) == ["linear_rows"]


@pytest.mark.usefixtures("any_size")
def test_x_is_made_bytes_once_for_an_order_of_columns() -> None:
    names = kernels(GPU, [64, 64, 64, 64, 64], ["q8_0", "q4_k", "iq4_xs", "q6_k", "f16"])
    assert names[:2] == ["row_bytes"] * 2
    assert names[2:] == ["linear_dots", "linear_dots", "linear_rows", "linear_dots", "linear_rows"]


# ---- values


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda c: c.label)
def test_cases(case: Case, dots_device: VulkanDevice, seed: int) -> None:
    result = run_case(case, dots_device, seed)
    assert result.nmse <= ALLOWED


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("n_out", [LARGE + 16, WIDE])
@pytest.mark.parametrize("fmt", ["q4_0", "q8_0", "q5_k"])
def test_many_weight_rows(n_out: int, fmt: str, dots_device: VulkanDevice, seed: int) -> None:
    def build(b: CaseBuilder) -> None:
        w = b.weight(b.normal(n_out, 256), fmt)
        b.output(linear(b.graph, b.input(b.normal(3, 256)), [w], norm=b.input(b.uniform(0.5, 1.5, 256)), eps=1e-6))

    assert run_case(Case("many rows", build), dots_device, seed).nmse <= ALLOWED


def _one(device: Device, x: Floats, fmt: str = "q8_0") -> Floats:
    b = CaseBuilder(device, np.random.default_rng(5))
    b.output(linear(b.graph, b.input(x), [b.weight(b.normal(40, x.shape[1]), fmt)]))
    result: Floats = device.compile(b.graph, poison=True).run(b.feeds)["out0"]
    return result


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad: float, dots_device: VulkanDevice, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 256), np.float32)
    x[1, 77] = bad
    y = _one(dots_device, x)
    assert not np.isfinite(y[1]).any() and np.isfinite(y[[0, 2]]).all()


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-20, 1e25])
@pytest.mark.parametrize("fmt", ["q8_0", "q5_1"])
def test_very_small_and_large_x(scale: float, fmt: str, dots_device: VulkanDevice, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 256), np.float32)
    y = _one(dots_device, (x * np.float32(scale)).astype(np.float32), fmt)
    assert np.isfinite(y).all()
    if scale in (0.0, 1e-38):
        assert np.abs(y).max() < 1e-30
    else:
        assert nmse(y / scale, _one(NumpyDevice(), x, fmt)) <= ALLOWED


@pytest.mark.usefixtures("any_size")
def test_one_large_column_costs_only_its_neighbours_precision(dots_device: VulkanDevice, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((1, 512), np.float32)
    x[0, 100] = 3000.0
    b = CaseBuilder(dots_device, np.random.default_rng(seed))
    w = b.normal(64, 512)
    w[:, 100] = 0.0  # the large column gives nothing, the others are seen as they are
    b.output(linear(b.graph, b.input(x), [b.weight(w, "q8_0")]))
    y = dots_device.compile(b.graph).run(b.feeds)["out0"]
    reference = CaseBuilder(NumpyDevice(), np.random.default_rng(seed))
    reference.normal(64, 512)
    reference.output(linear(reference.graph, reference.input(x), [reference.weight(w, "q8_0")]))
    expected = NumpyDevice().compile(reference.graph).run(reference.feeds)["out0"]
    # 15 columns with an error of at most 3000 / 65,024, uniform: all together 2 % of one weight's share.
    assert np.abs(y - expected).max() < 0.046 * np.abs(w).max() * 15


# ---- chains of products: bytes made where the result is made, and the same bits in any batch

CHAINS = {
    "q8_0": ("q8_0",) * 4,
    "nibbles": ("q4_0", "q4_1", "q5_0", "q4_k"),
    "both orders": ("q4_k", "q8_0", "q6_k", "q8_0"),
    "others between": ("f16", "q8_0", "mxfp4", "q2_k"),
}


def _chain(device: Device, n: int, fmts: Sequence[str], seed: int, groups: bool = False) -> CaseBuilder:
    """A block as the model has it: a product into the residual stream, gate and up, down, the next block's first."""
    n_embd, n_ff = 512, 768
    b = CaseBuilder(device, np.random.default_rng(seed))
    x, residual = b.normal(MAX_ROWS, n_embd), b.normal(MAX_ROWS, n_embd)
    squares = b.uniform(1, 50, MAX_ROWS, n_embd // 128, 2)
    shapes = ((n_embd, n_embd), (2 * n_ff, n_embd), (n_embd, n_ff), (70, n_embd))
    w = [b.weight(b.normal(*s, scale=s[1] ** -0.5), f) for s, f in zip(shapes, fmts, strict=True)]
    norms = [b.input(b.uniform(0.5, 1.5, n_embd)) for _ in range(2)]
    given: Tensor | None = b.input(squares[:n]) if groups else None
    h = linear(b.graph, b.input(x[:n]), [w[0]], residual=b.input(residual[:n]), group_squares=given, eps=1e-6)
    inner = linear(b.graph, h, [w[1]], norm=norms[0], eps=1e-6, swiglu=True)
    out = linear(b.graph, inner, [w[2]], residual=h)
    b.output(out)
    b.output(linear(b.graph, out, [w[3]], norm=norms[1], eps=1e-6))
    return b


def _kernels(device: VulkanDevice, b: CaseBuilder) -> list[str]:
    launches = [launch for level in schedule.plan(b.graph, device.info.limits).levels for launch in level]
    for launch in launches:
        check_fit(launch.kernel, len(launch.push), len(launch.spec), len(launch.buffers))
    return [launch.kernel.name for launch in launches]


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("groups", [False, True], ids=["", "groups"])
@pytest.mark.parametrize("fmts", CHAINS.values(), ids=CHAINS.keys())
def test_a_chain(
    fmts: Sequence[str], groups: bool, dots_device: VulkanDevice, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = _chain(NumpyDevice(), MAX_ROWS, fmts, seed, groups)
    expected = NumpyDevice().compile(reference.graph).run(reference.feeds)
    together: dict[str, Floats] = {}
    for n in (MAX_ROWS, 1, 2, 5, 8):
        b = _chain(dots_device, n, fmts, seed, groups)
        made_there = _kernels(dots_device, b)
        joined = dots_device.compile(b.graph, poison=True)
        results, again = joined.run(b.feeds), joined.run(b.feeds)
        with monkeypatch.context() as apart:
            apart.setattr(schedule, "fuse", list)
            made_alone = _kernels(dots_device, b)
            separate = dots_device.compile(b.graph, poison=True).run(b.feeds)
        assert made_there.count("row_bytes") == int(fmts[0] in ORDERS)  # all but the first x are products
        assert made_alone.count("row_bytes") == sum(f in ORDERS for f in fmts)
        together = together or results
        for name, y in results.items():
            np.testing.assert_array_equal(y.view(np.uint32), again[name].view(np.uint32))
            np.testing.assert_array_equal(y.view(np.uint32), separate[name].view(np.uint32))
            np.testing.assert_array_equal(y.view(np.uint32), together[name][:n].view(np.uint32), f"{n} rows")
            assert nmse(y, expected[name][:n]) <= ALLOWED
