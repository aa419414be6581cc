"""Every op module keeps the promises that `ops/op.py` makes for it."""

from __future__ import annotations

import importlib
import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spirv_module import check_fit

import vkbackend.ops
from vkbackend.device.base import Features, Limits
from vkbackend.device.copy import COPY_WORDS, FILL_WORDS
from vkbackend.device.kompute_order import WITNESS
from vkbackend.device.null import NullDevice
from vkbackend.ops import all_ops, op_names
from vkbackend.ops.case import CaseBuilder
from vkbackend.ops.linear_prompt import MATRIX
from vkbackend.ops.op import Op, push_word, spread
from vkbackend.shaders.compiler import SOURCE_DIR

NAMES = op_names()
# What lowerings look at: a device of no more than Vulkan's guarantees, a CPU driver, large GPUs.
LIMITS = {
    "least": Limits(),
    "cpu": Limits(max_invocations=1024, subgroup_size=8, subgroup_shuffle=True),
    "gpu": Limits(max_invocations=1024, subgroup_size=32, subgroup_shuffle=True, max_shared_bytes=49152),
    "all features": Limits(
        max_invocations=1024, subgroup_size=32, min_subgroup_size=32, subgroup_shuffle=True, max_shared_bytes=49152,
        features=Features(
            float16=True, integer_dot=True, memory_model=True, subgroup_sizes=(32, 32), matrix_shapes=(MATRIX,)
        ),
    ),
    "narrow": Limits(max_groups=(7, 65535, 65535)),
}


def test_ops_are_found() -> None:
    assert {"linear", "attention", "delta_net_mixer", "rms_norm"} <= set(NAMES)
    assert [op.name for op in all_ops()] == NAMES == sorted(set(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_a_module_has_its_op_and_its_builder(name: str) -> None:
    module = importlib.import_module(f"vkbackend.ops.{name}")
    assert isinstance(module.OP, Op) and module.OP.name == name
    builder = getattr(module, name)
    assert inspect.isfunction(builder) and builder.__module__ == module.__name__
    assert next(iter(inspect.signature(builder).parameters)) in ("g", "graph")
    assert builder.__doc__ and module.__doc__
    eager = getattr(vkbackend.ops, name)
    assert eager is not module and eager.__doc__ == builder.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_cases_have_labels_of_their_own(name: str) -> None:
    labels = [case.label for case in importlib.import_module(f"vkbackend.ops.{name}").OP.cases()]
    assert labels and len(labels) == len(set(labels))


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_lowerings_ask_for_listed_kernels_within_the_limits(
    name: str, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vkbackend.ops.linear_dots.ENOUGH_WEIGHTS", 0)
    op = importlib.import_module(f"vkbackend.ops.{name}").OP
    assert len(set(op.kernels())) == len(op.kernels())
    shipped = {k for o in all_ops() for k in o.kernels()}  # a lowering may use other ops' kernels
    device = NullDevice(limits)
    n_dispatches = 0
    for case in op.cases():
        builder = CaseBuilder(device, np.random.default_rng(0))
        case.build(builder)
        device.compile(builder.graph)  # checks every launch against the limits
        for node in builder.graph.nodes:
            for dispatch in [d for stage in node.op.lower(node, limits) for d in stage]:
                n_dispatches += 1
                if node.op is op:
                    check_fit(dispatch.kernel, len(dispatch.push), len(dispatch.spec), len(dispatch.binds))
                    assert dispatch.kernel in shipped, f"{case.label}: {dispatch.kernel} is in no kernels()"
                assert all(0 <= s <= 0xFFFFFFFF for s in dispatch.spec)
                assert {b.access for b in (*dispatch.binds, *dispatch.also)} <= {"r", "w", "rw"}
    assert n_dispatches


@given(n=st.integers(1, 1 << 32), limit=st.integers(1, 65535))
def test_spread_covers_all_workgroups_and_few_more(n: int, limit: int) -> None:
    x, y, z = spread(n, limit)
    assert z == 1 and 1 <= x <= limit
    assert n <= x * y < n + y  # less than one surplus workgroup in each row
    assert y == -(-n // limit)  # as few rows as can be


@pytest.mark.parametrize(
    ("value", "word"),
    [(0, 0), (7, 7), (-1, 0xFFFFFFFF), (-(1 << 31), 1 << 31), (1.0, 0x3F800000), (-0.0, 1 << 31), (0.0, 0)],
)
def test_push_words_carry_integers_and_floats(value: float, word: int) -> None:
    assert push_word(value) == word


def test_every_shader_file_belongs_to_a_kernel() -> None:
    used = {k.name for op in all_ops() for k in op.kernels()} | {COPY_WORDS.name, FILL_WORDS.name, WITNESS.name}
    assert {path.stem for path in SOURCE_DIR.glob("*.comp")} == used


@pytest.mark.parametrize("name", NAMES)
def test_written_bindings_are_not_declared_readonly(name: str) -> None:
    """What a dispatch writes, the scheduler must know as written: outputs of a node appear with "w"."""
    op = importlib.import_module(f"vkbackend.ops.{name}").OP
    device = NullDevice()
    for case in op.cases():
        builder = CaseBuilder(device, np.random.default_rng(0))
        case.build(builder)
        for node in (n for n in builder.graph.nodes if n.op is op):
            dispatches = [d for stage in node.op.lower(node, Limits()) for d in stage]
            written = {b.tensor.storage for d in dispatches for b in (*d.binds, *d.also) if "w" in b.access}
            touched = {b.tensor.storage for d in dispatches for b in (*d.binds, *d.also)}
            assert {t.storage for t in node.outputs} <= written
            assert {t.storage for t in node.inputs} <= touched
