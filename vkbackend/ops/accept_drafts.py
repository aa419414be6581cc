"""Greedy verification on the device: how many drafts stand, and the step values of the next speculative round.

A round drafts n tokens to follow the last one, at position p, and the trunk decodes all n + 1 of them in one batch;
targets[i] is the trunk's own token after row i. The longest run of drafts that equal their targets stands (Leviathan
et al. 2023, greedy case), and the first target that is not a draft is the next last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.graph import I32, Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, PushValue, check

KERNEL = Kernel("accept_drafts", 32)
FORCED = Kernel("accept_drafts", 32, ("FORCED",))


def accept_drafts(
    g: Graph,
    tokens: Tensor,
    targets: Tensor,
    steps: Tensor,
    accepted: Tensor,
    log: Tensor,
    forced: Tensor | None = None,
) -> None:
    """Finishes a round of n drafts in place. All tensors are i32.

    tokens [n + 1]: the last token and the drafts; tokens[0] becomes the next last token. targets [n + 1]: read.
    steps [n + 1, 2, 1]: (n_past, slot) of a round's decodes: row 0 the MTP block over the last round's targets, rows
    1 .. n - 1 its single drafts, row n the trunk; they become the next round's. accepted [1]: becomes the number of
    drafts that stand. log [n + 2]: becomes that number and the targets, for the host. forced [1]: for measurements
    only, this many drafts stand whatever they are.
    """
    n = tokens.shape[0] - 1
    for name, t, shape in (
        ("tokens", tokens, (n + 1,)),
        ("targets", targets, (n + 1,)),
        ("steps", steps, (n + 1, 2, 1)),
        ("accepted", accepted, (1,)),
        ("log", log, (n + 2,)),
    ):
        fits = t.shape == shape and t.dtype == I32 and t.is_contiguous
        check(fits, "accept_drafts", f"{name} must be i32 {shape}, got {t.dtype} {t.shape}")
    g.add(OP, [tokens, targets, steps, *([] if forced is None else [forced])], [tokens, steps, accepted, log])


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    targets, forced = inputs[1], inputs[3:]
    tokens, steps, accepted, log = outputs
    n = len(tokens) - 1
    differ = np.flatnonzero(tokens[1:] != targets[:-1])
    m = int(forced[0][0]) if forced else int(differ[0]) if len(differ) else n
    past = int(steps[n, 0, 0])
    accepted[0] = m
    log[0], log[1:] = m, targets
    tokens[0] = targets[m]
    steps[1:n, 0, 0] = past + m + 1 + np.arange(1, n)
    steps[0, 0, 0] = past + 1
    steps[n, 0, 0] = past + m + 1


def _lower(node: Node, limits: Limits) -> Lowering:
    tokens, targets, steps, *forced = node.inputs
    accepted, log = node.outputs[2:]
    push: tuple[PushValue, ...] = (At(tokens), At(targets), At(steps), At(accepted), At(log), tokens.shape[0] - 1)
    binds = (Bind(tokens, "rw"), Bind(targets, "r"), Bind(steps, "rw"), Bind(accepted, "w"), Bind(log, "w"))
    if forced:
        return [[Dispatch(FORCED, (*binds, Bind(forced[0], "r")), (*push, At(forced[0])), (1, 1, 1))]]
    return [[Dispatch(KERNEL, binds, (*push, 0), (1, 1, 1))]]


def _cases() -> list[Case]:
    def case(n: int, stand: int, force: int = -1) -> Case:
        def build(b: CaseBuilder) -> None:
            targets = b.rng.integers(0, 1000, n + 1)
            tokens = np.concatenate([b.rng.integers(0, 1000, 1), targets[:-1]])
            if stand < n:
                tokens[1 + stand] += 1
            steps = np.zeros((n + 1, 2, 1), np.int64)
            steps[:, 1] = 3
            steps[n, 0] = 41
            made = [b.graph.temp(name, (size,), I32) for name, size in (("accepted", 1), ("log", n + 2))]
            forced = None if force < 0 else b.input(np.array([force]))
            accept_drafts(b.graph, b.input(tokens), b.input(targets), b.input(steps), made[0], made[1], forced)
            for t in made:
                b.output(t)

        return Case(f"n={n} stand={stand}" + (f" forced={force}" if force >= 0 else ""), build)

    out = [case(n, stand) for n in (1, 3, 5, 15) for stand in sorted({0, 1, n // 2, n})]
    return [*out, case(3, 3, 1), case(4, 0, 4)]


OP = Op("accept_drafts", _reference, _lower, lambda: [KERNEL, FORCED], _cases)
