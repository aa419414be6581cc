"""Joining dispatches: done where one tensor's maker can do the next one's work, and not where that would be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vkbackend.fusion import Step, fuse
from vkbackend.graph import Tensor
from vkbackend.ops.op import Bind, Dispatch, Kernel, scratch

WHOLE, PART = scratch("whole", (4, 32)), scratch("part", (4, 16))
RESULT, OTHER = scratch("result", (4, 8)), scratch("other", (4, 8))


def dispatch(name: str, reads: list[Tensor], writes: list[Tensor]) -> Dispatch:
    binds = (*(Bind(t, "r") for t in reads), *(Bind(t, "w") for t in writes))
    return Dispatch(Kernel(name), binds, (), (1, 1, 1))


def maker(tensor: Tensor = WHOLE) -> Dispatch:
    alone = dispatch("maker", [], [tensor])

    def absorb(after: Dispatch) -> Dispatch:
        return replace(alone, kernel=Kernel("both"), binds=(*alone.binds, *after.binds[1:]), absorb=None)

    return replace(alone, absorb=absorb)


def follower(tensor: Tensor = WHOLE, result: Tensor = RESULT, also: tuple[Tensor, ...] = ()) -> Dispatch:
    return replace(dispatch("follower", [tensor, *also], [result]), follows=tensor)


def fused(*dispatches: Dispatch) -> list[str]:
    return [s.dispatch.kernel.name for s in fuse([Step("op", i, d) for i, d in enumerate(dispatches)])]


def test_a_follower_goes_into_the_maker() -> None:
    reader = dispatch("reader", [RESULT], [OTHER])
    steps = fuse([Step("a", 0, maker()), Step("b", 1, follower()), Step("c", 2, reader)])
    assert [(s.label, s.stage, s.dispatch.kernel.name) for s in steps] == [("a", 0, "both"), ("c", 2, "reader")]
    assert [b.tensor for b in steps[0].dispatch.binds] == [WHOLE, RESULT]


def test_what_neither_offers_nor_asks_stays() -> None:
    assert fused(replace(maker(), absorb=None), follower()) == ["maker", "follower"]
    assert fused(maker(), replace(follower(), follows=None)) == ["maker", "follower"]
    assert fused(replace(maker(), absorb=lambda after: None), follower()) == ["maker", "follower"]
    assert fused(follower(), maker()) == ["follower", "maker"]


def test_a_maker_takes_one_follower() -> None:
    assert fused(maker(), follower(), follower(result=OTHER)) == ["both", "follower"]


def test_readers_between_do_not_matter() -> None:
    assert fused(maker(), dispatch("reader", [WHOLE], [OTHER]), follower()) == ["both", "reader"]


@pytest.mark.parametrize(
    "between",
    [
        dispatch("changes it", [], [WHOLE]),
        dispatch("changes a part", [], [WHOLE.narrow(1, 4, 2)]),
        dispatch("writes where the result goes", [], [RESULT]),
        dispatch("reads where the result goes", [RESULT], []),
        dispatch("writes what is read too", [], [PART]),
    ],
    ids=lambda d: str(d.kernel.name),
)
def test_others_that_touch_its_tensors_do(between: Dispatch) -> None:
    names = fused(maker(), between, follower(also=(PART,)))
    assert names == ["maker", between.kernel.name, "follower"]


@pytest.mark.parametrize(
    "sibling",
    [
        dispatch("writes what is read too", [], [PART]),
        dispatch("reads where the result goes", [RESULT], []),
        dispatch("writes a part of it", [], [WHOLE.narrow(0, 0, 1)]),
    ],
    ids=lambda d: str(d.kernel.name),
)
def test_others_of_the_makers_stage_do_too(sibling: Dispatch) -> None:
    steps = [Step("a", 0, sibling), Step("b", 0, maker()), Step("c", 1, follower(also=(PART,)))]
    assert [s.dispatch.kernel.name for s in fuse(steps)] == [sibling.kernel.name, "maker", "follower"]
    earlier = [replace(steps[0], stage=-1), *steps[1:]]
    assert [s.dispatch.kernel.name for s in fuse(earlier)] == [sibling.kernel.name, "both"]


def test_tensors_bound_in_no_binding_count() -> None:
    unbound = replace(follower(), also=(Bind(PART, "r"),))
    assert fused(maker(), unbound) == ["both"]
    assert fused(maker(), dispatch("writer", [], [PART]), unbound) == ["maker", "writer", "follower"]


def test_the_tensor_must_be_the_same_view() -> None:
    assert fused(maker(WHOLE.narrow(1, 0, 16)), follower()) == ["maker", "follower"]
    assert fused(maker(), follower(WHOLE.narrow(1, 0, 16))) == ["maker", "follower"]
    assert fused(maker(WHOLE.narrow(0, 0, 2)), follower(WHOLE.narrow(0, 2, 2))) == ["maker", "follower"]
    assert fused(maker(WHOLE.narrow(1, 0, 16)), follower(WHOLE.narrow(1, 0, 16))) == ["both"]
