"""The NumPy fallback's own forms of ops (`Op.prepare`), beyond the cases: who uses them, and few rows in turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vkbackend.device.numpy import NumpyDevice
from vkbackend.device.numpy_parts import Workspace, rms_rows_to
from vkbackend.graph import Graph
from vkbackend.ops import linear_numpy
from vkbackend.ops.linear_numpy import FEW_ROWS, prepared_linear
from vkbackend.ops.op import Op


@pytest.mark.parametrize(("real", "value"), [(np.float32, 2), (np.float64, 1)])
def test_only_the_fallback_uses_them(real: type, value: int) -> None:
    """float64 is what everything is compared with: it runs the definitions."""

    def fill(node: object, inputs: object, outputs: Any) -> None:
        outputs[0][...] = 1

    def prepare(node: object, inputs: object, outputs: Any, work: Workspace) -> Any:
        return lambda: outputs[0].fill(2)

    g = Graph()
    y = g.temp("y", (3,))
    g.add(Op("fill", fill, lambda n, limits: [], list, list, prepare), [], [y])
    g.output("y", y)
    assert NumpyDevice(real).compile(g).run({})["y"].tolist() == [value] * 3


def test_workspace_gives_the_same_memory_for_the_same_name_and_shape() -> None:
    work = Workspace()
    x = work.array("x", 2, 3)
    assert x is work.array("x", 2, 3) and x.dtype == np.float32
    assert not any(np.shares_memory(x, y) for y in (work.array("x", 3, 2), work.array("y", 2, 3)))


@pytest.mark.parametrize("swiglu", [False, True])
def test_a_row_does_not_depend_on_the_few_beside_it(
    swiglu: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_numpy, "BLOCK_WORDS", 64 * 256)  # several blocks of weights
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((FEW_ROWS, 256), (300, 256)))
    norm = rng.uniform(0.5, 1.5, 256).astype(np.float32)

    def product(x: NDArray[np.float32]) -> NDArray[np.float32]:
        y = np.full((len(x), 150 if swiglu else 300), np.nan, np.float32)
        prepared_linear(x, [w], y, Workspace(), norm=norm, squares=None, residual=None, eps=1e-6, swiglu=swiglu)()
        return y

    y = product(x)
    for i in range(FEW_ROWS):
        np.testing.assert_array_equal(product(x[i : i + 1]), y[i : i + 1])
    for n in range(2, FEW_ROWS):
        np.testing.assert_array_equal(product(x[:n]), y[:n])
    if not swiglu:
        want = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) * norm @ w.T
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_rms_of_rows_without_a_length() -> None:
    """What the definition gives, without an exception: 0 / 0 without eps, NaN for what is no number."""
    x, y = np.array([[0, 0], [np.nan, 1], [3, 4]], np.float32), np.zeros((3, 2), np.float32)
    rms_rows_to(x, 0.0, np.ones(2, np.float32), y)
    assert np.isnan(y[:2]).all()
    np.testing.assert_allclose(y[2], np.array([3, 4]) / np.sqrt(12.5), rtol=1e-6)
    rms_rows_to(x[:1], 1e-6, np.ones(2, np.float32), y[:1])
    assert y[0].tolist() == [0, 0]
