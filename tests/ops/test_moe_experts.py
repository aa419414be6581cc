"""moe_experts, moe_route, moe_group: independence of the batch, work shapes of other devices, bad rows, errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from open_vulkan import open_or_skip

from vkbackend.device.base import Device, Limits
from vkbackend.device.kompute import KomputeDevice
from vkbackend.errors import VkBackendError
from vkbackend.graph import Graph, Tensor
from vkbackend.ops import moe_route as eager_route
from vkbackend.ops.case import Case, CaseBuilder, run_case
from vkbackend.ops.linear import MAX_ROWS
from vkbackend.ops.moe_experts import OP, moe_experts
from vkbackend.ops.moe_group import moe_group
from vkbackend.ops.moe_route import moe_route

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Setup:
    """Sizes and formats of experts; `used` of `n_expert` for each row."""

    n_embd: int
    n_ff: int
    used: int
    n_expert: int
    above: str
    below: str


SETUPS = [Setup(512, 64, 3, 8, "q8_0", "f16"), Setup(256, 256, 5, 6, "q4_k", "q6_k")]


def device_with(**changed: object) -> KomputeDevice:
    """A device of its own whose lowerings see other limits."""
    device = open_or_skip(lambda: KomputeDevice(0, True))
    device.info = replace(device.info, limits=replace(device.info.limits, **changed))  # type: ignore[arg-type]
    return device


@pytest.fixture(scope="module", params=[(8, 32768), (32, 32768), (32, 8192)], ids=["cpu", "gpu", "small gpu"])
def any_shape(request: pytest.FixtureRequest) -> Iterator[KomputeDevice]:
    """Work shaped as for a CPU driver and as for GPUs: rows split over teams; x in shared memory where it fits."""
    device = device_with(subgroup_size=request.param[0], max_shared_bytes=request.param[1])
    yield device
    device.close()


def outputs(
    device: Device, s: Setup, seed: int, pick: slice, n_rows: int = MAX_ROWS, bad: float | None = None
) -> Floats:
    """Rows `pick` of n_rows rows, computed as a batch of their own; `bad` spoils row 1 and its router logits."""
    b = CaseBuilder(device, np.random.default_rng(seed))
    x, router, shared = b.normal(n_rows, s.n_embd), b.normal(n_rows, s.n_expert + 1), b.normal(n_rows, s.n_embd)
    if bad is not None:
        x[1, 5] = router[1, 0] = router[1, s.n_expert - 1] = bad
    norm = b.input(b.uniform(0.5, 1.5, s.n_embd))
    gate = [b.weight(b.normal(s.n_expert * 2 * s.n_ff, s.n_embd, scale=s.n_embd**-0.5), s.above)]
    down = [b.weight(b.normal(s.n_expert * s.n_embd, s.n_ff, scale=s.n_ff**-0.5), s.below)]
    both = b.input(router[pick])
    y = moe_experts(
        b.graph, b.input(x[pick]), norm, both.narrow(1, 0, s.n_expert), b.input(shared[pick]),
        both.narrow(1, s.n_expert, 1), gate, down, n_used=s.used, n_ff=s.n_ff, eps=1e-6,
    )  # fmt: skip
    b.output(y)
    result: Floats = device.compile(b.graph, poison=True).run(b.feeds)["out0"]
    return result


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_rows_do_not_depend_on_the_batch(setup: Setup, any_shape: KomputeDevice, seed: int) -> None:
    together = outputs(any_shape, setup, seed, slice(0, MAX_ROWS))
    assert np.isfinite(together).all()
    for pick in (slice(3, 4), slice(11, 16)):
        alone = outputs(any_shape, setup, seed, pick)
        np.testing.assert_array_equal(alone.view(np.uint32), together[pick].view(np.uint32), f"rows {pick}")


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_both_variants_give_the_same_bits(
    setup: Setup, kompute: KomputeDevice, kompute_shared: KomputeDevice, seed: int
) -> None:
    results = [outputs(d, setup, seed, slice(0, 5)).view(np.uint32) for d in (kompute, kompute_shared)]
    np.testing.assert_array_equal(*results)


def test_shared_memory_changes_no_bit(seed: int) -> None:
    """x prepared once for a workgroup, or by every lane for itself."""
    results = []
    for n_bytes in (32768, 8192):
        device = device_with(subgroup_size=32, max_shared_bytes=n_bytes)
        results.append(outputs(device, SETUPS[0], seed, slice(0, 2)).view(np.uint32))
        device.close()
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("case", [c for c in OP.cases() if "160" in c.label or "n_embd=768" in c.label], ids=str)
def test_cases_in_the_work_shapes_of_a_gpu(case: Case, seed: int) -> None:
    device = device_with(subgroup_size=32)
    result = run_case(case, device, seed)
    device.close()
    assert result.ok, result


@pytest.mark.parametrize("n_rows", [3, 20])
def test_more_workgroups_than_one_axis_allows(n_rows: int, seed: int) -> None:
    device = device_with(max_groups=(3, 65535, 65535))
    label = "n_rows=2 n_embd=64 3 of 5x96 f32" if n_rows <= MAX_ROWS else "n_rows=20 n_embd=64 3 of 5x96 f16"
    result = run_case(next(c for c in OP.cases() if c.label.startswith(label)), device, seed)
    device.close()
    assert result.ok, result


@pytest.mark.parametrize("n_rows", [3, 20])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_spoils_only_itself(n_rows: int, bad: float, kompute: KomputeDevice, seed: int) -> None:
    clean, dirty = (outputs(kompute, SETUPS[0], seed, slice(0, n_rows), n_rows, b) for b in (None, bad))
    others = np.arange(n_rows) != 1
    assert not np.isfinite(dirty[1]).any()
    np.testing.assert_array_equal(dirty[others], clean[others])


def test_routes_of_odd_logits(kompute: KomputeDevice) -> None:
    """NaN is never better than a number, infinities and ties are in order, every choice is an expert."""
    nan, inf = np.nan, np.inf
    logits = np.array([[nan, 1, nan, 0], [nan] * 4, [-inf, 2, -inf, 2], [0, 0, 0, 0], [1, inf, 3, -inf]], np.float32)
    for device in ("numpy", kompute):
        ids, weights = eager_route(logits, 2, device=device)
        assert ids.tolist() == [[1, 3], [0, 1], [1, 3], [0, 1], [1, 2]]
        np.testing.assert_allclose(weights[2:4], 0.5)


# ---- errors


def t(*shape: int) -> Tensor:
    return Graph().temp("t", shape)


GOOD = {
    "x": t(3, 32), "norm": t(32), "logits": t(3, 4), "shared": t(3, 32), "shared_gate": t(3, 1),
    "gate": [t(64, 32), t(192, 32)], "down": [t(128, 32)], "n_used": 2, "n_ff": 32, "eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": t(32, 3).permute(1, 0)}, "contiguous numbers"),
        ({"norm": t(31)}, r"norm must have shape \(32,\), got \(31,\)"),
        ({"logits": t(2, 4)}, r"logits must have shape \(3, 4\), got \(2, 4\)"),
        ({"n_used": 5}, r"n_used is 5; 1 .. 4 experts"),
        ({"n_used": 0}, r"n_used is 0; 1 .. 4 experts"),
        ({"logits": t(3, 1025)}, "1025 experts; at most 1024"),
        ({"shared": t(3, 31)}, r"shared must have shape \(3, 32\)"),
        ({"shared_gate": t(3, 2)}, r"shared_gate must have shape \(3, 1\)"),
        ({"gate": [t(64, 32)]}, r"gate has parts \[\(64, 32\)\]; 4 experts of 64 rows, 32 columns"),
        ({"gate": [t(96, 32), t(160, 32)]}, r"gate has parts"),  # an expert cut in two
        ({"gate": [t(128, 32)], "up": [t(96, 32)]}, r"up has parts \[\(96, 32\)\]; 4 experts of 32 rows"),
        ({"down": [t(128, 16)]}, r"down has parts \[\(128, 16\)\]; 4 experts of 32 rows, 32 columns"),
        ({"down": []}, r"down has parts \[\]"),
    ],
)
def test_builder_errors(changed: dict[str, object], message: str) -> None:
    moe_experts(Graph(), **GOOD)  # type: ignore[arg-type]
    with pytest.raises(VkBackendError, match=message):
        moe_experts(Graph(), **(GOOD | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_embd", "n_ff", "message"), [(40, 32, "x .* multiple of 16 columns"), (32, 24, "n_ff is 24; a multiple of 16")]
)
def test_lowering_errors(n_embd: int, n_ff: int, message: str) -> None:
    g = Graph()
    moe_experts(
        g, t(3, n_embd), t(n_embd), t(3, 4), t(3, n_embd), t(3, 1), [t(8 * n_ff, n_embd)], [t(4 * n_embd, n_ff)],
        n_used=2, n_ff=n_ff, eps=1e-6,
    )  # fmt: skip
    with pytest.raises(VkBackendError, match=message):
        OP.lower(g.nodes[0], Limits())


def test_errors_of_route_and_group() -> None:
    with pytest.raises(VkBackendError, match="moe_route: logits must be contiguous"):
        moe_route(Graph(), t(4, 3).permute(1, 0), 1)
    ids = Graph().temp("ids", (3, 2), "i32")
    for bad, message in (((t(3, 2), 4, 8), "ids f32"), ((ids, 0, 8), "0 experts"), ((ids, 4, 0), "tile is 0")):
        with pytest.raises(VkBackendError, match=f"moe_group: {message}"):
            moe_group(Graph(), *bad)
