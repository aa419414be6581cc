"""Every case of every op: on NumPy in float32, and on Vulkan in both variants of the shaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from vkbackend.device.base import Array, Device, Limits
from vkbackend.device.numpy import NumpyBuffer, NumpyDevice, NumpyProgram
from vkbackend.graph import Graph, Node
from vkbackend.ops import all_ops
from vkbackend.ops.case import Case, CaseBuilder, run_case
from vkbackend.ops.op import Dispatch, Lowering, Op

CASES = [(op, case) for op in all_ops() for case in op.cases()]
IDS = [f"{op.name}: {case.label}" for op, case in CASES]

# Where one dispatch of several may be missing without a trace, and why.
NOT_ALL_NEEDED = {
    **dict.fromkeys(
        [i for i in IDS if i.startswith("embed_rows")],
        "each dispatch serves a part of the table, and random ids need not meet them all",
    ),
}


@pytest.mark.parametrize("device", ["numpy_device", "kompute", "kompute_shared"])
@pytest.mark.parametrize(("op", "case"), CASES, ids=IDS)
def test_case(op: Op, case: Case, device: str, seed: int, request: pytest.FixtureRequest) -> None:
    result = run_case(case, request.getfixturevalue(device), seed)
    assert result.ok, result


# ---- the check itself


def keeping(case: Case, device: Device, keep: Callable[[int], bool]) -> tuple[Case, list[Dispatch]]:
    """The case with only some of its dispatches, by their place, and the list that they will be put in when it runs."""
    found: list[Dispatch] = []

    def build(b: CaseBuilder) -> None:
        case.build(b)
        if b.device is not device:
            return

        def lowering(op: Op) -> Callable[[Node, Limits], Lowering]:
            def lower(node: Node, limits: Limits) -> Lowering:
                kept: Lowering = []
                for stage in op.lower(node, limits):
                    kept.append([d for i, d in enumerate(stage, len(found)) if keep(i)])
                    found.extend(stage)
                return kept

            return lower

        b.graph.nodes = [replace(n, op=replace(n.op, lower=lowering(n.op))) for n in b.graph.nodes]

    return replace(case, build=build), found


@pytest.mark.parametrize(("op", "case"), CASES, ids=IDS)
def test_a_case_fails_when_a_dispatch_is_missing(op: Op, case: Case, kompute: Device, seed: int) -> None:
    """All of them, and each alone: a check that does not notice would not notice a broken kernel either."""
    without_any, dispatches = keeping(case, kompute, lambda i: False)
    assert not run_case(without_any, kompute, seed).ok and dispatches
    if len(dispatches) == 1 or f"{op.name}: {case.label}" in NOT_ALL_NEEDED:
        return
    for missing in range(len(dispatches)):
        without_one, _ = keeping(case, kompute, missing.__ne__)
        kernel = dispatches[missing].kernel.name
        assert not run_case(without_one, kompute, seed).ok, f"dispatch {missing} ({kernel}) is not missed"


def test_a_case_with_all_its_dispatches_passes(kompute: Device, seed: int) -> None:
    """What the test above leaves out makes the difference, not how it does so."""
    for op, case in CASES[:: len(CASES) // 20]:
        whole, dispatches = keeping(case, kompute, lambda i: True)
        assert run_case(whole, kompute, seed).ok and dispatches, f"{op.name}: {case.label}"


def test_the_exceptions_are_cases() -> None:
    assert set(NOT_ALL_NEEDED) <= set(IDS)


def made_up(b: CaseBuilder) -> None:
    """A float result, an integer result with one row that nothing writes, and a state that is half rewritten."""
    y, i, state = b.graph.temp("y", (3, 8)), b.graph.temp("i", (4,), "i32"), b.state(b.normal(2, 8))
    x = b.input(b.normal(3, 8))

    def reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        outputs[0][:2], outputs[1][...], outputs[2][1] = 2 * inputs[0][:2], [3, 1, 4, 1], inputs[0][0]

    b.graph.add(Op("made_up", reference, lambda n, limits: [], list, list), [x], [y, i, state])
    b.output(y)
    b.output(i)


def change(results: dict[str, Array], state: Array, what: str) -> None:
    if what == "a small error":
        results["out0"][:2] *= np.float32(1.0005)  # squared: 2.5e-7
    elif what == "one value":
        results["out0"][1, 7] += np.float32(0.01)
    elif what == "not written":
        results["out0"][0, 3] = np.nan
    elif what == "written too much":
        results["out0"][2, 0] = 0
    elif what == "one integer":
        results["out1"][2] += 1
    elif what == "a state":
        state[1, 2] += np.float32(0.01)
    elif what == "a state beside":
        state[0, 7] = 0


CHANGES = [
    "a small error", "one value", "not written", "written too much", "one integer", "a state", "a state beside",
]  # fmt: skip


@pytest.mark.parametrize("what", ["nothing", *CHANGES])
def test_a_case_notices(what: str, seed: int) -> None:
    states: list[NumpyBuffer] = []

    class Changed(NumpyDevice):
        def allocate(self, n_words: int, dtype: str = "f32", label: str = "") -> NumpyBuffer:
            states.append(super().allocate(n_words, dtype, label))
            return states[-1]

        def compile(self, graph: Graph, poison: bool = False, timestamps: bool = False) -> NumpyProgram:
            program = super().compile(graph, poison, timestamps)
            honest = program.run

            def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
                results = honest(feeds)
                change(results, states[0].data.reshape(2, 8), what)
                return results

            program.run = run  # type: ignore[method-assign]
            return program

    result = run_case(Case("made up", made_up), Changed(), seed)
    assert result.ok == (what == "nothing"), result
