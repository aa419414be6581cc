"""Which kernel a long product goes to, and x in two halves for cooperative matrices, which CPU drivers do not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from vkbackend.device.base import Array, Features, Limits
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.null import NullDevice
from vkbackend.graph import Node
from vkbackend.ops.case import CaseBuilder
from vkbackend.ops.linear import linear
from vkbackend.ops.linear_prompt import MATRIX, _split_halves
from vkbackend.ops.op import Lowering, Op

FULL = Features(float16=True, memory_model=True, subgroup_sizes=(32, 32), matrix_shapes=(MATRIX,))
GPU = Limits(max_invocations=1024, max_shared_bytes=48 << 10, subgroup_size=32, subgroup_shuffle=True, features=FULL)


def kernels(limits: Limits, fmts: Sequence[str], n_rows: int = 40, n_in: int = 256) -> list[str]:
    b = CaseBuilder(NullDevice(limits), np.random.default_rng(0))
    parts = [b.weight(b.normal(64, n_in), fmt) for fmt in fmts]
    linear(b.graph, b.input(b.normal(n_rows, n_in)), parts, norm=b.input(b.normal(n_in)), eps=1e-6)
    node = b.graph.nodes[-1]
    return [d.kernel.name for stage in node.op.lower(node, limits) for d in stage]


def test_matrices_are_used_where_a_device_has_them() -> None:
    assert kernels(GPU, ["q8_0", "q4_k"]) == ["split_halves", "linear_matrix", "linear_matrix"]
    assert kernels(GPU, ["f16"]) == ["split_halves", "linear_matrix"]


@pytest.mark.parametrize(
    "features",
    [
        Features(),
        replace(FULL, matrix_shapes=()),
        replace(FULL, matrix_shapes=(replace(MATRIX, c="f16", result="f16"),)),
        replace(FULL, float16=False),
        replace(FULL, memory_model=False),
        replace(FULL, subgroup_sizes=(32, 64)),
    ],
    ids=["none", "no matrices", "f16 sums", "no f16", "no memory model", "subgroups of 64"],
)
def test_and_nowhere_else(features: Features) -> None:
    assert kernels(replace(GPU, features=features), ["q8_0"]) == ["rms_norm", "linear_blocks"]


def test_formats_that_two_halves_do_not_hold_go_the_other_way() -> None:
    assert kernels(GPU, ["f32"]) == ["rms_norm", "linear_blocks"]
    mixed = kernels(GPU, ["q8_0", "bf16"])
    assert mixed == ["split_halves", "rms_norm", "linear_matrix", "linear_blocks"]


def test_decode_batches_never_use_them() -> None:
    assert kernels(GPU, ["q8_0"], n_rows=16) == ["linear_rows"]


@pytest.mark.parametrize("n", [96, 1024, 2592])
@pytest.mark.parametrize("before", ["", "norm", "groups"])
def test_x_in_two_halves(device: KomputeDevice, rng: np.random.Generator, before: str, n: int) -> None:
    n_rows = 5
    scales = np.array([1.0, 1e-12, 1e12, 3e4, 0.0])[:, None]  # one row of zeros
    x = rng.standard_normal((n_rows, n)) * scales
    norm_w, squares = rng.uniform(0.5, 1.5, n), rng.uniform(1, 50, (n_rows, n // 32, 2))

    b = CaseBuilder(device, rng)
    norm = b.input(norm_w) if before == "norm" else None
    groups = b.input(squares) if before == "groups" else None
    inputs = [b.input(x), *(t for t in (norm, groups) if t is not None)]
    y = b.graph.temp("halves", (n_rows * (n + n // 16 + 1),))

    def lower(node: Node, limits: Limits) -> Lowering:
        return [[_split_halves(inputs[0], norm, groups, y, 1e-6, limits)]]

    def reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        raise AssertionError("not for the reference device")

    b.graph.add(Op("split_halves", reference, lower, list, list), inputs, [y])
    b.output(y)
    got = device.compile(b.graph, poison=True).run(b.feeds)["out0"]

    x = x.astype(np.float32).astype(np.float64)
    if before == "norm":
        x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6) * norm_w.astype(np.float32)
    if before == "groups":
        mean = squares.astype(np.float32).astype(np.float64).sum(axis=2) / 32
        x = x / np.repeat(np.sqrt(mean + 1e-6), 32, axis=1)
    columns, rest = got[: n_rows * n], got[n_rows * n :]
    words = columns.view(np.uint32).reshape(n_rows, n // 32, 2, 16)  # [row, 32 columns, larger and smaller, words]
    high, low = np.moveaxis(words.view(np.float16).reshape(n_rows, n // 32, 2, 32), 2, 0).astype(np.float64)
    sums, factor = rest[:-n_rows].reshape(n_rows, n // 16), rest[-n_rows:].astype(np.float64)
    largest = np.abs(x).max(axis=1)
    used = largest > 0
    scaled = largest[used] / factor[used]
    assert ((scaled >= 1 - 1e-6) & (scaled < 2 + 1e-6)).all() and (np.frexp(factor[used])[0] == 0.5).all()
    values = (high + low).reshape(n_rows, n)
    error = np.abs(values * factor[:, None] - x).max(axis=1)
    assert (error <= 1e-6 * largest).all(), error
    np.testing.assert_allclose(sums, values.reshape(n_rows, n // 16, 16).sum(axis=2), atol=1e-5)


@pytest.mark.parametrize(
    ("n_out", "n_in", "n_rows", "tiles", "parts"),
    [
        (18432, 2560, 512, (4, 2), 1),  # enough workgroups
        (2560, 9216, 512, (4, 2), 3),  # 80 of 132 that run at once: 240 in two rounds, each a third as long
        (1024, 3584, 512, (4, 2), 4),
        (1024, 3584, 64, (2, 1), 4),
        (2560, 256, 512, (4, 2), 1),  # too few columns to share
        (64, 64, 40, (2, 1), 1),
    ],
)
def test_workgroups_share_columns_where_they_are_few(
    n_out: int, n_in: int, n_rows: int, tiles: tuple[int, int], parts: int
) -> None:
    b = CaseBuilder(NullDevice(GPU), np.random.default_rng(0))
    weights = b.weight(b.normal(n_out, n_in), "q8_0")
    linear(b.graph, b.input(b.normal(n_rows, n_in)), [weights])
    product = b.graph.nodes[-1].op.lower(b.graph.nodes[-1], GPU)[-1][0]
    assert product.spec == (*tiles, parts)
    n_tiles = -(-n_out // (32 * tiles[0])) * -(-n_rows // (64 * tiles[1]))
    assert product.groups == (n_tiles * parts, 1, 1)
    written = [bind.tensor.shape for bind in product.binds[3:5] if bind.access == "rw"]
    assert written == ([(n_tiles * parts, 2048 * tiles[0] * tiles[1]), (n_tiles,)] if parts > 1 else [])


def test_little_workgroup_memory_means_small_tiles() -> None:
    b = CaseBuilder(NullDevice(GPU), np.random.default_rng(0))
    linear(b.graph, b.input(b.normal(512, 512)), [b.weight(b.normal(2560, 512), "q8_0")])
    limits = replace(GPU, max_shared_bytes=32 << 10)
    assert b.graph.nodes[-1].op.lower(b.graph.nodes[-1], limits)[-1][0].spec == (2, 1, 1)
