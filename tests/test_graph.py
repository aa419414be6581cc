"""Views against NumPy's, and what graphs refuse."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vkbackend.device.null import NullBuffer
from vkbackend.errors import VkBackendError
from vkbackend.graph import Graph, Role, Storage, Tensor, bound, row_major

Words = NDArray[np.int64]


def words_of(t: Tensor) -> Words:
    """The storage word of every element, an array of the view's shape."""
    n = t.storage.n_words
    return np.lib.stride_tricks.as_strided(np.arange(n)[t.offset :], t.shape, [8 * s for s in t.strides])


def random_shape(rng: random.Random, size: int) -> tuple[int, ...]:
    """Axes whose product is `size`, ones among them."""
    shape = []
    while size > 1:
        n = rng.choice([d for d in range(2, size + 1) if size % d == 0])
        shape.append(n)
        size //= n
    shape += [1] * rng.randrange(3)
    rng.shuffle(shape)
    return tuple(shape) or (1,)


def whole(*shape: int) -> Tensor:
    return Graph().temp("t", shape)


@given(st.integers(0, 2**32 - 1))
def test_views_hold_the_elements_that_numpy_views_hold(seed: int) -> None:
    rng = random.Random(seed)
    t = whole(*random_shape(rng, rng.choice([1, 12, 36, 48, 60])))
    want: Words = np.arange(t.size).reshape(t.shape)
    for _ in range(6):
        kind = rng.randrange(3)
        if kind == 0:
            axis = rng.randrange(t.ndim)
            start = rng.randrange(t.shape[axis])
            length = rng.randint(1, t.shape[axis] - start)
            t = t.narrow(axis - rng.choice([0, t.ndim]), start, length)
            want = want[(slice(None),) * axis + (slice(start, start + length),)]
        elif kind == 1:
            axes = rng.sample(range(t.ndim), t.ndim)
            t, want = t.permute(*axes), want.transpose(axes)
        else:
            shape = random_shape(rng, t.size)
            same = want.view()
            try:
                same.shape = shape  # NumPy's own test of whether the elements can stay where they are
            except AttributeError:
                with pytest.raises(VkBackendError, match="would have to move data"):
                    t.reshape(*shape)
                continue
            t, want = t.reshape(*shape), same
        assert t.shape == want.shape
        np.testing.assert_array_equal(words_of(t), want)
        assert t.span() == (want.min(), want.max() + 1)
        assert t.size == want.size and t.is_contiguous == want.flags.c_contiguous


def test_row_major() -> None:
    assert row_major((2, 3, 5)) == (15, 5, 1)
    assert row_major(()) == ()


def test_reshape_to_another_size_is_refused() -> None:
    with pytest.raises(VkBackendError, match=r"'t' from \(2, 6\) .* to \(5,\)"):
        whole(2, 6).reshape(5)


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 6), (5, 1), (2, -1)])
def test_slices_outside_are_refused(start: int, length: int) -> None:
    with pytest.raises(VkBackendError, match=rf"slice \[{start}, {start + length}\) of axis 1 of 't'.*0\.\.5"):
        whole(3, 5).narrow(-1, start, length)


def test_views_share_the_storage() -> None:
    t = whole(4, 6)
    assert t.narrow(1, 2, 3).reshape(4, 3, 1).permute(1, 0, 2).storage is t.storage


def test_a_packed_tensor_spans_its_whole_storage() -> None:
    t = bound("w", NullBuffer(1000), 64, (8, 32), "q8_0", n_words=72)
    assert t.is_packed and t.span() == (0, 72) and t.storage.base == 64
    plain = bound("b", NullBuffer(100), 4, (3, 5))
    assert not plain.is_packed and plain.storage.n_words == 15 and plain.storage.role is Role.BOUND


def test_an_empty_view_spans_nothing() -> None:
    t = whole(4, 6).narrow(0, 2, 0)
    assert t.size == 0 and t.span() == (12, 12)


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "float"])
def test_only_f32_and_i32_are_computed(dtype: str) -> None:
    with pytest.raises(VkBackendError, match=f"'x': dtype '{dtype}'"):
        Graph().temp("x", (2,), dtype)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (-1,)])
def test_empty_axes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(VkBackendError, match=r"'x': shape .* empty axis"):
        Graph().input("x", shape)


def test_inputs_have_names_of_their_own() -> None:
    g = Graph()
    first = g.input("x", (2,))
    with pytest.raises(VkBackendError, match="'x' is defined twice"):
        g.input("x", (3,))
    assert g.inputs == {"x": first}


def test_outputs_are_results() -> None:
    g = Graph()
    t = g.temp("t", (4, 3))
    g.output("all", t)
    g.output("half", t.narrow(0, 2, 2))  # a second view of the same result
    assert t.storage.role is Role.OUTPUT and list(g.outputs) == ["all", "half"]
    with pytest.raises(VkBackendError, match="output 'y' is a view of the input storage 'x'"):
        g.output("y", g.input("x", (2,)))
    with pytest.raises(VkBackendError, match="output 'y' is a view of the bound storage 'w'"):
        g.output("y", bound("w", NullBuffer(8), 0, (2,)))
    assert list(g.outputs) == ["all", "half"]


def test_tensors_and_storages_are_told_apart_by_identity() -> None:
    a, b = Storage("s", 4, "f32", Role.TEMP), Storage("s", 4, "f32", Role.TEMP)
    assert a != b and Tensor(a, 0, (4,), (1,), "f32") != Tensor(a, 0, (4,), (1,), "f32")
