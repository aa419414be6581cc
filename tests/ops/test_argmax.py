"""argmax: ties, infinities and NaN, wherever they fall among the spans that workgroups look at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from vkbackend.device.base import Device
from vkbackend.device.kompute import KomputeDevice
from vkbackend.errors import VkBackendError
from vkbackend.graph import Graph
from vkbackend.ops import argmax as eager_argmax
from vkbackend.ops.argmax import SPAN, argmax

DEVICES = ["numpy_device", "kompute", "kompute_shared"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = request.getfixturevalue(request.param)
    return found


def first_best(row: NDArray[np.float32]) -> int:
    """The definition, one value after another."""
    best, at = -np.inf, -1
    for i, value in enumerate(row.tolist()):
        if value > best or (value == best and at < 0):
            best, at = value, i
    return max(at, 0)


def test_lowest_index_wins_ties(device: Device, rng: np.random.Generator) -> None:
    n = 2 * SPAN + 100
    places = [(0, n - 1), (SPAN - 1, SPAN), (5, 133), (SPAN + 7, 2 * SPAN + 7), (128, 127), (n - 2, n - 1)]
    x = rng.uniform(-2, 1, (len(places), n)).astype(np.float32)
    for row, pair in zip(x, places, strict=True):
        row[list(pair)] = 3
    assert eager_argmax(x, device=device).tolist() == [min(pair) for pair in places]


def test_zeros_of_both_signs_are_equal(device: Device) -> None:
    x = np.full((2, 300), -1, np.float32)
    x[0, [4, 200]] = -0.0, 0.0
    x[1, [4, 200]] = 0.0, -0.0
    assert eager_argmax(x, device=device).tolist() == [4, 4]


def test_nan_and_infinities(device: Device) -> None:
    nan, inf = np.nan, np.inf
    rows = [[nan, -inf, nan], [nan, nan, nan], [-inf, -inf, -inf], [1, nan, inf], [nan, -3, -2], [inf, inf, nan]]
    assert eager_argmax(np.array(rows, np.float32), device=device).tolist() == [1, 0, 0, 2, 2, 0]


@pytest.mark.parametrize("n", [1, 2, 127, 129, SPAN, SPAN + 1, 3 * SPAN - 1])
def test_against_the_definition(n: int, device: Device, rng: np.random.Generator) -> None:
    x = np.round(rng.standard_normal((4, n)) * 2).astype(np.float32)
    x[rng.random((4, n)) < 0.1] = np.nan
    assert eager_argmax(x, device=device).tolist() == [first_best(row) for row in x]


def test_more_workgroups_than_one_axis_allows(kompute: KomputeDevice, rng: np.random.Generator) -> None:
    x = rng.standard_normal((11, SPAN + 1)).astype(np.float32)
    usual = kompute.info
    kompute.info = replace(usual, limits=replace(usual.limits, max_groups=(4, 65535, 65535)))
    try:
        got = eager_argmax(x, device=kompute)
    finally:
        kompute.info = usual
    assert got.tolist() == x.argmax(-1).tolist()


def test_columns_must_be_contiguous() -> None:
    g = Graph()
    with pytest.raises(VkBackendError, match="contiguous"):
        argmax(g, g.temp("t", (5, 3)).permute(1, 0))


def test_one_after_another_with_the_same_counters(kompute: KomputeDevice, rng: np.random.Generator) -> None:
    """Both write one result, so they stand in two levels and share counters: the first must leave them zero."""
    a, b = (rng.standard_normal((3, 2 * SPAN + 9)).astype(np.float32) for _ in range(2))
    g = Graph()
    out = argmax(g, g.input("a", a.shape))
    argmax(g, g.input("b", b.shape), out=out)
    g.output("y", out)
    program = kompute.compile(g, poison=True)
    for _ in range(2):
        assert program.run({"a": a, "b": b})["y"].tolist() == b.argmax(-1).tolist()
        a, b = b, a
