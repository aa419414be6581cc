"""A token drawn from every row of logits: top-k, top-p, min-p, temperature, and a random number of its own.

The arithmetic, and why it gives the same token wherever it is done, is in vkbackend/draw.py. Three levels: the best
logit; a rough sort of the row into bins by distance from it, and the bins in which the filters cut; the tokens of those
bins, among which the last workgroup of a row finds the drawn one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vkbackend.device.base import Limits
from vkbackend.draw import MOST_TOKENS, N_WORDS, draw, settings_words
from vkbackend.graph import I32, Graph, Node, Tensor
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Array, At, Bind, Dispatch, Kernel, Lowering, Op, check, counters, scratch, spread

BEST, BINS = Kernel("sample", 128, ("BEST",)), Kernel("sample", 128, ("BINS",))
PICK, PICK_WIDE = Kernel("sample", 128, ("PICK",)), Kernel("sample", 512, ("PICK",))
SPAN = 2048  # logits one workgroup looks at
HEADER, N_BINS, N_COUNTERS = 8, 512, 4  # of a row, as in the shader


def sample(g: Graph, x: Tensor, settings: Tensor, n_past: Tensor, out: Tensor | None = None) -> Tensor:
    """A token from every row of logits x [n_rows, n], i32 [n_rows].

    settings i32 [6]: of `draw.settings_words`. n_past i32 [1]: the position of row 0's own token; row i draws the
    token at position n_past + i + 1, with that position's random number. A row with NaN or without a finite greatest
    logit gives -1. `out`, a contiguous view of that shape, receives the result in place of a fresh tensor.
    """
    check(x.ndim == 2 and x.strides[1] == 1, "sample", f"x must be rows of contiguous numbers, got shape {x.shape}")
    check(x.shape[1] <= MOST_TOKENS, "sample", f"{x.shape[1]} tokens; at most {MOST_TOKENS} are supported")
    y = g.temp("sample", (x.shape[0],), I32) if out is None else out
    for name, t, n in (("settings", settings, N_WORDS), ("n_past", n_past, 1), ("out", y, x.shape[0])):
        fits = t.shape == (n,) and t.dtype == I32 and t.is_contiguous
        check(fits, "sample", f"{name} must be i32 ({n},), got {t.dtype} {t.shape}")
    g.add(OP, [x, settings, n_past], [y])
    return y


def _reference(node: Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    x, settings, n_past = inputs
    for i, logits in enumerate(x):
        outputs[0][i] = draw(logits.astype(np.float32), settings, int(n_past[0]) + i + 1)


def _lower(node: Node, limits: Limits) -> Lowering:
    (x, settings, n_past), (y,) = node.inputs, node.outputs
    n_rows, n = x.shape
    n_spans = -(-n // SPAN)
    work = scratch("sample work", (n_rows, HEADER + 2 * N_BINS + n), I32)
    state = counters("sample counters", n_rows * N_COUNTERS)
    at = (At(settings), At(n_past), At(work), At(state), At(y))
    push = (At(x), x.strides[0], n, n_rows, SPAN, n_spans, *at)
    binds = (Bind(x, "r"), Bind(settings, "r"), Bind(n_past, "r"), Bind(work, "rw"), Bind(state, "rw"), Bind(y, "w"))
    groups = spread(n_rows * n_spans, limits.max_groups[0])
    pick = PICK_WIDE if limits.max_invocations >= PICK_WIDE.local_size else PICK
    return [[Dispatch(kernel, binds, push, groups)] for kernel in (BEST, BINS, pick)]


def _cases() -> list[Case]:
    def case(n_rows: int, n: int, kind: str = "", scale: float = 3.0, pad: int = 0, **settings: Any) -> Case:
        def build(b: CaseBuilder) -> None:
            x = b.normal(n_rows, n + pad, scale=scale)
            if kind == "ties":
                x = np.round(x)
            if kind == "equal":
                x[:] = x[:, :1]
            if kind == "impossible":
                x[b.rng.random(x.shape) < 0.7] = -np.inf
                x[:, n // 2] = 1.0
            if kind == "unusable":
                x[1, n // 3], x[2], x[3, 0] = np.nan, -np.inf, np.inf
            words = settings_words(int(b.rng.integers(1 << 62)), **({"temperature": 1.0} | settings))
            n_past = b.rng.integers(0, 1000, 1)
            logits = b.input(x).narrow(1, 0, n)
            b.output(sample(b.graph, logits, b.input(words), b.input(n_past)))

        given = " ".join(f"{name}={value}" for name, value in settings.items())
        return Case(" ".join(f"n_rows={n_rows} n={n} scale={scale} {kind} {given}".split()), build)

    usual: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    sizes = [case(rows, n, pad=rows, **usual) for rows, n in ((1, 1), (3, 7), (16, 1024), (2, 4097), (1, 248320))]
    alone = [
        case(4, 5000), case(4, 5000, top_k=300), case(4, 5000, top_p=0.9), case(4, 5000, min_p=0.1),
        case(4, 5000, top_k=300, top_p=0.5), case(4, 5000, top_p=0.999, min_p=0.001), case(3, 2049, top_k=9000),
    ]  # fmt: skip
    extremes = [
        case(5, 3000, temperature=1e-30), case(5, 3000, temperature=1e6), case(5, 3000, temperature=50.0, top_p=0.9),
        case(5, 3000, top_k=1), case(5, 3000, top_p=1e-6), case(5, 3000, top_p=1e-15), case(5, 3000, min_p=1.0),
        case(5, 3000, scale=1e-4), case(5, 3000, scale=1e4), case(5, 3000, scale=1e36), case(1, 248320, scale=0.5),
    ]  # fmt: skip
    kinds = [
        case(5, 3000, kind, **settings)
        for kind in ("ties", "equal", "impossible", "unusable")
        for settings in ({}, {"top_k": 50}, {"top_p": 0.7}, {"top_k": 900, "top_p": 0.9, "min_p": 1e-4})
    ]
    return [*sizes, *alone, *extremes, *kinds]


OP = Op("sample", _reference, _lower, lambda: [BEST, BINS, PICK, PICK_WIDE], _cases)
