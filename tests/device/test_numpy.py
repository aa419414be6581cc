"""The NumPy device: memory of either precision, ranges, and walks over graphs."""

from __future__ import annotations

import numpy as np
import pytest

from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import DeviceError
from vkbackend.graph import I32, Graph, bound
from vkbackend.ops.op import Op
from vkbackend.ops.rms_norm import rms_norm

REALS = [np.float32, np.float64]


@pytest.mark.parametrize("real", REALS)
def test_upload_download_fill_copy_at_odd_offsets(real: type, rng: np.random.Generator) -> None:
    device = NumpyDevice(real)
    buffer, other = device.allocate(101), device.allocate(50)
    device.fill(buffer, 0, 101, 0)
    want = np.zeros(101, np.float32)
    a, b = (rng.standard_normal(n).astype(np.float32) for n in (37, 5))
    device.upload(buffer, 13, a)
    device.upload(buffer, 90, b.view(np.uint32))  # words of floats
    device.fill(buffer, 51, 7, int(np.float32(2.5).view(np.uint32)))
    want[13:50], want[90:95], want[51:58] = a, b, 2.5
    np.testing.assert_array_equal(device.download(buffer, 0, 101).view(np.float32), want)
    device.copy(buffer, 13, other, 1, 49)
    np.testing.assert_array_equal(device.download(other, 1, 49).view(np.float32), want[13:62])
    device.copy(buffer, 90, buffer, 3, 5)
    np.testing.assert_array_equal(device.download(buffer, 3, 5).view(np.float32), b)


def test_integers_keep_their_bits() -> None:
    device = NumpyDevice(np.float64)
    buffer = device.allocate(4, I32)
    device.upload(buffer, 0, np.array([1, -2], np.int32))
    device.upload(buffer, 2, np.array([3, 0xFFFFFFFF], np.uint32))
    assert device.download(buffer, 0, 4).view(np.int32).tolist() == [1, -2, 3, -1]


def test_downloads_are_copies() -> None:
    device = NumpyDevice()
    buffer = device.allocate(3)
    device.upload(buffer, 0, np.ones(3, np.float32))
    device.download(buffer, 0, 3)[:] = 0
    assert buffer.data.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("offset", "n"), [(0, 11), (10, 1), (-1, 2), (3, -1), (11, 0)])
def test_ranges_outside_a_buffer_are_refused(offset: int, n: int) -> None:
    device = NumpyDevice()
    buffer, large = device.allocate(10), device.allocate(100)
    device.fill(buffer, 0, 10, 0)
    message = rf"numpy: words \[{offset}, {offset + n}\) are outside a buffer of 10 words"
    with pytest.raises(DeviceError, match=message):
        device.download(buffer, offset, n)
    with pytest.raises(DeviceError, match=message):
        device.fill(buffer, offset, n, 1)
    if n >= 0:
        with pytest.raises(DeviceError, match=message):
            device.copy(buffer, offset, large, 0, n)
        with pytest.raises(DeviceError, match=message):
            device.copy(large, 0, buffer, offset, n)
        with pytest.raises(DeviceError, match=message):
            device.upload(buffer, offset, np.ones(n, np.float32))
    assert buffer.data.tolist() == [0] * 10


def test_packed_weights_are_refused() -> None:
    device = NumpyDevice()
    g = Graph()
    w = bound("blk.0.ffn_up.weight", device.allocate(72), 0, (8, 32), "q8_0", 72)
    rms_norm(g, g.input("x", (1, 4)), g.input("w", (4,)), 1e-6)
    g.nodes[0] = type(g.nodes[0])(g.nodes[0].op, (w,), (), None)
    with pytest.raises(DeviceError, match=r"'blk\.0\.ffn_up\.weight' holds packed q8_0 words"):
        device.compile(g)
    with pytest.raises(DeviceError, match="dtype 'q8_0' has no array type"):
        device.allocate(4, "q8_0")


@pytest.mark.parametrize("real", REALS)
def test_a_graph_is_computed_in_the_devices_precision(real: type, rng: np.random.Generator) -> None:
    device = NumpyDevice(real)
    g = Graph()
    g.output("y", rms_norm(g, g.input("x", (3, 40)), g.input("w", (40,)), 1e-6))
    x, w = rng.standard_normal((3, 40)), rng.standard_normal(40)
    out = device.compile(g).run({"x": x, "w": w})["y"]
    assert out.dtype == real
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w
    np.testing.assert_allclose(out, want, rtol=1e-14 if real is np.float64 else 1e-5)


def test_state_stays_in_its_buffer_and_unwritten_results_are_poisoned() -> None:
    device = NumpyDevice()
    buffer = device.allocate(6)
    device.fill(buffer, 0, 6, 0)
    g = Graph()
    state, y, i = bound("state", buffer, 2, (2, 2)), g.temp("y", (3,)), g.temp("i", (2,), I32)

    def add_one(node: object, inputs: object, outputs: list[np.ndarray]) -> None:  # type: ignore[type-arg]
        outputs[0][...] += 1
        outputs[1][0] = 5

    g.add(Op("add_one", add_one, lambda n, limits: [], list, list), [state], [state.permute(1, 0), y])  # type: ignore[arg-type]
    g.output("y", y)
    g.output("i", i)
    program = device.compile(g)
    for n in (1, 2):
        out = program.run({})
        assert buffer.data.tolist() == [0, 0, n, n, n, n]
    assert out["y"][0] == 5 and np.isnan(out["y"][1:]).all()
    assert out["i"].tolist() == [-1, -1]


def test_an_allocation_that_does_not_fit_says_so() -> None:
    with pytest.raises(DeviceError, match=r"allocating \d+ bytes for the kv cache failed"):
        NumpyDevice().allocate(1 << 52, label="the kv cache")
