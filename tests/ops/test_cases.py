"""Every case of every op: on NumPy in float32, and on Vulkan in both variants of the shaders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vkbackend.device.base import Limits
from vkbackend.device.kompute import KomputeDevice
from vkbackend.graph import Node
from vkbackend.ops import all_ops
from vkbackend.ops.case import Case, CaseBuilder, run_case
from vkbackend.ops.op import Lowering, Op

CASES = [(op, case) for op in all_ops() for case in op.cases()]
IDS = [f"{op.name}: {case.label}" for op, case in CASES]


@pytest.mark.parametrize("device", ["numpy_device", "kompute", "kompute_shared"])
@pytest.mark.parametrize(("op", "case"), CASES, ids=IDS)
def test_case(op: Op, case: Case, device: str, seed: int, request: pytest.FixtureRequest) -> None:
    result = run_case(case, request.getfixturevalue(device), seed)
    assert result.ok, result


@pytest.mark.parametrize("op", all_ops(), ids=lambda op: op.name)
def test_cases_fail_when_the_kernels_do_nothing(op: Op, kompute: KomputeDevice, seed: int) -> None:
    """The check itself: an op that lowers to nothing must not pass its own cases."""

    def nothing(node: Node, limits: Limits) -> Lowering:
        return []

    case = op.cases()[0]

    def build(b: CaseBuilder) -> None:
        case.build(b)
        if b.device is kompute:
            b.graph.nodes = [replace(n, op=replace(n.op, lower=nothing)) for n in b.graph.nodes]

    assert not run_case(replace(case, build=build), kompute, seed).ok
