"""rope_kv_write: angles at far positions, independence of the batch, guarded writes, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vkbackend.device.base import Device
from vkbackend.device.kompute import KomputeDevice
from vkbackend.errors import VkBackendError
from vkbackend.graph import Graph, Tensor
from vkbackend.ops.case import POISON, CaseBuilder, nmse
from vkbackend.ops.rope_kv_write import rope_kv_write, rope_table

Floats = NDArray[np.float32]
FREQ_BASE = 1e7
EPS = 1e-6


@pytest.fixture(params=["numpy_device", "kompute", "kompute_shared"])
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = request.getfixturevalue(request.param)
    return found


@dataclass(frozen=True)
class Shape:
    n_head: int
    n_kv: int
    head_dim: int
    n_rot: int

    @property
    def width(self) -> int:
        return (2 * self.n_head + 2 * self.n_kv) * self.head_dim


def _add(g: Graph, x: Tensor, norms: Tensor, table: Tensor, caches: list[Tensor], step: Tensor, shape: Shape) -> Tensor:
    """The op on one projection x [n_rows, width]: q with gates, then k, then v."""
    n_rows, d = x.shape[0], shape.head_dim
    w, kv = 2 * shape.n_head * d, shape.n_kv * d
    return rope_kv_write(
        g,
        x.narrow(1, 0, w).reshape(n_rows, shape.n_head, 2 * d),
        x.narrow(1, w, kv).reshape(n_rows, shape.n_kv, d),
        x.narrow(1, w + kv, kv).reshape(n_rows, shape.n_kv, d),
        norms.narrow(0, 0, 1).reshape(d),
        norms.narrow(0, 1, 1).reshape(d),
        table,
        caches[0],
        caches[1],
        step,
        n_tokens=n_rows // step.shape[1],
        eps=EPS,
    )


def _run(
    device: Device, shape: Shape, x: Floats, norms: Floats, step: list[list[int]], n_ctx: int, n_slots: int = 1
) -> tuple[Floats, Floats]:
    """q [n_rows, n_head, head_dim] and the caches [2, n_slots, n_ctx, n_kv, head_dim], poisoned where not written."""
    b = CaseBuilder(device, np.random.default_rng(0))
    caches = [b.state(None, (n_slots, n_ctx, shape.n_kv, shape.head_dim)) for _ in range(2)]
    inputs = b.input(x), b.input(norms), b.input(rope_table(shape.n_rot, FREQ_BASE))
    b.output(_add(b.graph, *inputs, caches, b.input(np.array(step)), shape))
    q = device.compile(b.graph, poison=True).run(b.feeds)["out0"]
    words = [device.download(buffer, 0, n) for _, buffer, n in b.states]
    return np.asarray(q, np.float32), np.stack(words).view(np.float32).reshape(2, *caches[0].shape)


def _numbers(rng: np.random.Generator, shape: Shape, n_rows: int) -> tuple[Floats, Floats]:
    x = rng.standard_normal((n_rows, shape.width)).astype(np.float32)
    return x, rng.uniform(0.5, 1.5, (2, shape.head_dim)).astype(np.float32)


def _parts(x: Floats, shape: Shape) -> tuple[Floats, Floats, Floats]:
    """q without its gates, k and v of a projection: [n_rows, heads, head_dim]."""
    d, n_rows = shape.head_dim, x.shape[0]
    qg, k, v = np.split(x, [2 * shape.n_head * d, (2 * shape.n_head + shape.n_kv) * d], axis=1)
    return qg.reshape(n_rows, -1, 2 * d)[:, :, :d], k.reshape(n_rows, -1, d), v.reshape(n_rows, -1, d)


def _definition(x: Floats, w: Floats, position: int, n_rot: int) -> NDArray[np.float64]:
    """RMS norm and rotation of heads x [n, head_dim] in float64, pair by pair."""
    y: NDArray[np.float64] = x.astype(np.float64)
    y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + EPS) * w
    for j in range(n_rot // 2):
        angle = position * FREQ_BASE ** (-2.0 * j / n_rot)
        a, b = y[:, j].copy(), y[:, j + n_rot // 2].copy()
        y[:, j] = a * np.cos(angle) - b * np.sin(angle)
        y[:, j + n_rot // 2] = a * np.sin(angle) + b * np.cos(angle)
    return y


# ---- values


@pytest.mark.parametrize("position", [0, 1, 4095, 100_003, 262_143])
def test_angles_against_the_definition(position: int, device: Device, rng: np.random.Generator) -> None:
    """Every pair turns by the exact angle, to float32's precision, however far the position."""
    shape = Shape(2, 1, 64, 32)
    x, norms = _numbers(rng, shape, 1)
    q, caches = _run(device, shape, x, norms, [[position], [0]], position + 1)
    x_q, x_k, x_v = _parts(x, shape)
    assert nmse(q[0], _definition(x_q[0], norms[0], position, shape.n_rot)) < 1e-12
    assert nmse(caches[0, 0, position], _definition(x_k[0], norms[1], position, shape.n_rot)) < 1e-12
    np.testing.assert_array_equal(caches[1, 0, position], x_v[0])


def test_rotation_keeps_length(device: Device, rng: np.random.Generator) -> None:
    shape = Shape(4, 2, 32, 32)
    x, _ = _numbers(rng, shape, 8)
    norms = np.ones((2, 32), np.float32)
    q, _ = _run(device, shape, x, norms, [[77_777], [0]], 77_800)
    np.testing.assert_allclose(np.sum(q.astype(np.float64) ** 2, axis=-1), 32, rtol=1e-4)


def test_scores_depend_on_distance_only(kompute: KomputeDevice, rng: np.random.Generator) -> None:
    """What RoPE is for: q at p against k at p - 5 gives one product wherever p is."""
    shape = Shape(1, 1, 64, 64)
    x, norms = _numbers(rng, shape, 1)
    products = []
    for p in (5, 1_005, 200_005):
        q, _ = _run(kompute, shape, x, norms, [[p], [0]], p + 1)
        _, caches = _run(kompute, shape, x, norms, [[p - 5], [0]], p + 1)
        products.append(float(q[0, 0].astype(np.float64) @ caches[0, 0, p - 5, 0].astype(np.float64)))
    np.testing.assert_allclose(products, products[0], atol=64 * 1e-5)


# ---- rows and their places


@pytest.mark.parametrize("shape", [Shape(4, 2, 64, 16), Shape(8, 1, 256, 64), Shape(2, 2, 100, 100)], ids=str)
def test_rows_do_not_depend_on_the_batch(shape: Shape, kompute: KomputeDevice, rng: np.random.Generator) -> None:
    x, norms = _numbers(rng, shape, 16)
    together, caches = _run(kompute, shape, x, norms, [[30], [0]], 50)
    for n, at in ((1, 0), (1, 15), (2, 7), (5, 3)):
        q, part = _run(kompute, shape, x[at : at + n], norms, [[30 + at], [0]], 50)
        np.testing.assert_array_equal(q.view(np.uint32), together[at : at + n].view(np.uint32))
        written = slice(30 + at, 30 + at + n)
        np.testing.assert_array_equal(part[:, 0, written].view(np.uint32), caches[:, 0, written].view(np.uint32))
    pair, both = _run(kompute, shape, np.concatenate([x[8:], x[:8]]), norms, [[2, 30], [1, 0]], 50, n_slots=2)
    np.testing.assert_array_equal(pair[8:].view(np.uint32), together[:8].view(np.uint32))
    np.testing.assert_array_equal(both[:, 0, 30:38].view(np.uint32), caches[:, 0, 30:38].view(np.uint32))


def test_both_variants_give_the_same_bits(
    kompute: KomputeDevice, kompute_shared: KomputeDevice, rng: np.random.Generator
) -> None:
    shape = Shape(4, 2, 256, 64)
    x, norms = _numbers(rng, shape, 3)
    one, two = (_run(d, shape, x, norms, [[9_000], [0]], 9_010) for d in (kompute, kompute_shared))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_nothing_else_is_written(device: Device, rng: np.random.Generator) -> None:
    shape = Shape(2, 2, 32, 8)
    x, norms = _numbers(rng, shape, 6)
    _, caches = _run(device, shape, x, norms, [[4, 0], [2, 0]], 12, n_slots=3)
    written = np.zeros((3, 12), bool)
    written[2, 4:7] = written[0, 0:3] = True
    poisoned = caches.view(np.uint32) == POISON
    assert poisoned[:, ~written].all() and not poisoned[:, written].any()


def test_writes_past_the_cache_are_dropped(kompute: KomputeDevice, rng: np.random.Generator) -> None:
    """Positions 6..9 of a cache of 8 rows: two rows are written, the next sequence's memory is not touched."""
    shape = Shape(2, 1, 32, 16)
    x, norms = _numbers(rng, shape, 4)
    _, caches = _run(kompute, shape, x, norms, [[6], [0]], 8, n_slots=2)
    poisoned = caches.view(np.uint32) == POISON
    assert poisoned[:, 0, :6].all() and not poisoned[:, 0, 6:].any() and poisoned[:, 1].all()


def test_gates_and_bad_rows_reach_nothing_else(kompute: KomputeDevice, rng: np.random.Generator) -> None:
    shape = Shape(4, 2, 64, 32)
    x, norms = _numbers(rng, shape, 5)
    clean, clean_caches = _run(kompute, shape, x, norms, [[10], [0]], 20)
    gates = x[:, : 2 * 4 * 64].reshape(5, 4, 128)[:, :, 64:]
    gates[:] = np.nan
    x[2] = np.nan
    q, caches = _run(kompute, shape, x, norms, [[10], [0]], 20)
    others = np.arange(5) != 2
    assert np.isnan(q[2]).all() and np.isnan(caches[:, 0, 12]).all()
    np.testing.assert_array_equal(q[others], clean[others])
    np.testing.assert_array_equal(caches[:, 0, 10:15][:, others], clean_caches[:, 0, 10:15][:, others])


# ---- errors


def _tensors(changed: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "norms": (2, 32),
        "table": (8, 2),
        "k_cache": (2, 20, 2, 32),
        "v_cache": (2, 20, 2, 32),
        "step": (2, 1),
        **changed,
    }
    return {name: Graph().temp(name, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norms": (2, 16)}, r"norms must have shape \(32,\)"),
        ({"table": (17, 2)}, "34 rotated dims do not fit a head of 32"),
        ({"k_cache": (2, 20, 1, 32)}, r"caches \(2, 20, 1, 32\) do not fit k \(3, 2, 32\)"),
        ({"v_cache": (2, 21, 2, 32)}, r"do not fit k"),
        ({"step": (2, 2)}, "3 rows are not 2 sequences of 1"),
    ],
)
def test_builder_errors(changed: dict[str, tuple[int, ...]], message: str) -> None:
    t = _tensors(changed)
    norms = t["norms"]
    d = norms.shape[1]
    x = Graph().temp("x", (3, Shape(2, 2, 32, 16).width))
    with pytest.raises(VkBackendError, match=message):
        rope_kv_write(
            Graph(),
            x.narrow(1, 0, 128).reshape(3, 2, 64),
            x.narrow(1, 128, 64).reshape(3, 2, 32),
            x.narrow(1, 192, 64).reshape(3, 2, 32),
            norms.narrow(0, 0, 1).reshape(d),
            norms.narrow(0, 1, 1).reshape(d),
            t["table"], t["k_cache"], t["v_cache"], t["step"],
            n_tokens=3 // t["step"].shape[1], eps=EPS,
        )  # fmt: skip


def test_views_must_be_of_one_projection_and_dense() -> None:
    t = _tensors({})
    g = Graph()
    norm = t["norms"].narrow(0, 0, 1).reshape(32)
    x = g.temp("x", (3, 256))
    qg, k = x.narrow(1, 0, 128).reshape(3, 2, 64), x.narrow(1, 128, 64).reshape(3, 2, 32)
    rest: list[Any] = [norm, norm, t["table"], t["k_cache"], t["v_cache"], t["step"]]
    with pytest.raises(VkBackendError, match="views of one projection"):
        rope_kv_write(g, qg, k, g.temp("v", (3, 2, 32)), *rest, n_tokens=3, eps=EPS)
    apart = x.reshape(3, 2, 128).narrow(2, 0, 32)
    with pytest.raises(VkBackendError, match=r"row of k must lie one after the other, its strides are \(256, 128, 1\)"):
        rope_kv_write(g, qg, apart, k, *rest, n_tokens=3, eps=EPS)


def test_table_is_exact() -> None:
    """The 64-bit fractions against Python's integers: the frequency of pair 0 is 1 / (2 pi) turns."""
    words = rope_table(16, FREQ_BASE).view(np.uint32)
    assert words.shape == (8, 2)
    got = [(int(high) << 32 | int(low)) / 2.0**64 for high, low in words]
    want = [FREQ_BASE ** (-j / 8) / (2 * np.pi) for j in range(8)]
    np.testing.assert_allclose(got, want, rtol=1e-12)
