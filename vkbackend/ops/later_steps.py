"""Step values of consecutive single-token decodes, for graphs that hold several steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import I32, Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check

KERNEL = Kernel("later_steps", 32)


def later_steps(g: Graph, step: Tensor, n_steps: int) -> Tensor:
    """step i32 [2, n_seqs] (n_past, slots) for each of n_steps single-token decodes: [n_steps, 2, n_seqs]."""
    fits = step.ndim == 2 and step.shape[0] == 2 and step.dtype == I32
    check(fits, "later_steps", f"step must be i32 [2, n_seqs], got {step.dtype} {step.shape}")
    y = g.temp("later_steps", (n_steps, *step.shape), I32)
    g.add(OP, [step], [y])
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    outputs[0][...] = inputs[0]
    outputs[0][:, 0] += np.arange(len(outputs[0]), dtype=np.int32)[:, None]


def _lower(node: Node, limits: Limits) -> Lowering:
    (step,), (y,) = node.inputs, node.outputs
    push = (At(step), step.strides[0], At(y), y.shape[0], y.shape[2])
    return [[Dispatch(KERNEL, (Bind(step, "r"), Bind(y, "w")), push, (1, 1, 1))]]


def _cases() -> list[Case]:
    def case(n_steps: int, n_seqs: int) -> Case:
        def build(b: CaseBuilder) -> None:
            b.output(later_steps(b.graph, b.input(b.rng.integers(0, 1000, (2, n_seqs))), n_steps))

        return Case(f"n_steps={n_steps} n_seqs={n_seqs}", build)

    return [case(1, 1), case(16, 1), case(5, 3)]


OP = Op("later_steps", _reference, _lower, lambda: [KERNEL], _cases)
