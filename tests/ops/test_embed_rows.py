"""embed_rows: exact values, tokens outside the table, dispatches spread over two axes, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vkbackend.device.base import Device
from vkbackend.device.kompute import KomputeDevice
from vkbackend.errors import VkBackendError
from vkbackend.graph import F32, I32, Graph
from vkbackend.ops import embed_rows as eager_embed_rows
from vkbackend.ops.case import CaseBuilder
from vkbackend.ops.embed_rows import embed_rows
from vkbackend.ops.linear import FORMATS
from vkbackend.packing import format_named, pack_matrix


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("device", ["kompute", "kompute_shared"])
def test_rows_are_exactly_what_the_format_decodes_to(
    device: str, fmt: str, request: pytest.FixtureRequest, rng: np.random.Generator
) -> None:
    opened: Device = request.getfixturevalue(device)
    cols = 3 * max(format_named(fmt).block, 32)
    table = (rng.standard_normal((37, cols)) * 3).astype(np.float32)
    tokens = rng.integers(0, 37, 50).astype(np.int32)
    b = CaseBuilder(opened, rng)
    parts = [b.weight(table[:20], fmt), b.weight(table[20:], fmt)]
    b.output(embed_rows(b.graph, b.input(tokens), parts))
    got = opened.compile(b.graph, poison=True).run(b.feeds)["out0"]
    values = np.concatenate([pack_matrix(part, fmt)[1] for part in (table[:20], table[20:])])
    np.testing.assert_array_equal(got, values[tokens])


def test_tokens_outside_the_table_write_nothing(kompute: KomputeDevice, rng: np.random.Generator) -> None:
    table = rng.standard_normal((6, 32)).astype(np.float32)
    tokens = np.array([-1, 0, 6, 5, 2**31 - 1, -(2**31), 3], np.int32)
    got = eager_embed_rows(tokens, [table[:4], table[4:]], device=kompute)
    inside = (tokens >= 0) & (tokens < 6)
    np.testing.assert_array_equal(got[inside], table[tokens[inside]])
    assert np.isnan(got[~inside]).all(), "poison was overwritten"


def test_more_tokens_than_one_axis_allows(rng: np.random.Generator, kompute: KomputeDevice) -> None:
    table = rng.standard_normal((8, 16)).astype(np.float32)
    tokens = rng.integers(0, 8, 11).astype(np.int32)
    usual = kompute.info
    kompute.info = replace(usual, limits=replace(usual.limits, max_groups=(3, 65535, 65535)))
    try:
        got = eager_embed_rows(tokens, [table], device=kompute)
    finally:
        kompute.info = usual
    np.testing.assert_array_equal(got, table[tokens])


def test_builder_errors() -> None:
    g = Graph()
    table, tokens = g.temp("table", (4, 32)), g.input("tokens", (3,), I32)
    with pytest.raises(VkBackendError, match="tokens must be i32"):
        embed_rows(g, g.input("floats", (3,), F32), [table])
    with pytest.raises(VkBackendError, match="tokens must be i32"):
        embed_rows(g, g.input("square", (3, 1), I32), [table])
    with pytest.raises(VkBackendError, match="no table"):
        embed_rows(g, tokens, [])
    with pytest.raises(VkBackendError, match="differ in their columns"):
        embed_rows(g, tokens, [table, g.temp("other", (4, 16))])
