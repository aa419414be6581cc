"""`delta_net_mixer` as the NumPy fallback runs it: up to 16 tokens of a sequence at a time, in scratch arrays.

A token reads the state S once for both of its products, S k before the update and S q in place of the product with the
new state: (d S + delta k^T) q = d S q + delta (k q).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.device.base import Array
from vkbackend.device.numpy_parts import Run, Workspace, sigmoid_to, silu_to

SPAN = 16  # tokens: as many as the conv ring has columns for beside those that they read


def prepared_mixer(
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    work: Workspace,
    *,
    n_tokens: int,
    n_k_heads: int,
    part: int,
    eps: float,
    grouped: bool,
) -> Run:
    """Operands in the order of `delta_net_mixer`; `part` is the number of state rows that one of its squares sums."""
    step = inputs[10]
    spans = [
        (s, first, _Span(inputs, outputs, work, s * n_tokens + first, min(SPAN, n_tokens - first), n_k_heads, grouped))
        for s in range(step.shape[1])
        for first in range(0, n_tokens, SPAN)
    ]

    def run() -> None:
        n_past, slots = step.tolist()
        for s, first, span in spans:
            span.run(n_past[s] + first, slots[s], eps, part)

    return run


class _Span:
    """Views and scratch for n tokens of one sequence, from row `at` of the batch on.

    Heads are (k head, member) when grouped, else (member, k head), so that k and q broadcast over the members.
    """

    def __init__(
        self,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        work: Workspace,
        at: int,
        n: int,
        n_k: int,
        grouped: bool,
    ) -> None:
        qkv, z, alpha, beta, conv_w, dt_bias, a, norm_w, _, _, _ = inputs
        y, squares, conv_ring, state_ring = outputs
        n_v, dv, dk = state_ring.shape[2:]
        heads = (n_k, n_v // n_k) if grouped else (n_v // n_k, n_k)
        k_heads = (n_k, 1) if grouped else (1, n_k)
        rows = slice(at, at + n)
        conv_dim, taps = conv_w.shape

        def scratch(name: str, *shape: int) -> Array:
            return work.array(f"mixer: {name}", *shape)

        self.n, self.dk, self.dv = n, dk, dv
        self.x, self.taps, self.conv_ring = qkv[rows], conv_w.T, conv_ring
        self.window = scratch("window", taps - 1 + n, conv_dim)
        self.raw, self.mixed = scratch("raw", n, conv_dim), scratch("mixed", n, conv_dim)

        self.qk = self.mixed[:, : 2 * n_k * dk].reshape(n, 2, n_k, dk)
        self.v = self.mixed[:, 2 * n_k * dk :].reshape(n, *heads, dv)
        self.products = scratch("products", n, 2, n_k, dk)
        self.lengths, self.k_q = scratch("lengths", n, 2, n_k, 1), scratch("k q", n, n_k)
        by_head = self.qk.transpose(0, 2, 1, 3).reshape(n, *k_heads, 2, dk)
        # Of each token: rows q and k [2, dk] of every k head, the same as columns, and k q.
        self.tokens = list(zip(by_head, by_head.swapaxes(-1, -2), self.k_q.reshape(n, *k_heads, 1), strict=True))

        self.alpha, self.beta = alpha[rows].reshape(n, *heads), beta[rows].reshape(n, *heads)
        self.dt_bias, self.a = dt_bias.reshape(heads), a.reshape(heads)
        self.decay, self.rate = scratch("decay", n, *heads), scratch("rate", n, *heads)

        self.states = state_ring.reshape(*state_ring.shape[:2], *heads, dv, dk)
        self.seen = scratch("state times q and k", *heads, dv, 2)
        self.update = scratch("update", *heads, dv, dk)
        # With the rows q and k, one matrix product makes delta k^T: twice as fast as an outer product.
        self.zero_delta = scratch("0 and delta", *heads, dv, 2)
        self.zero_delta[...] = 0
        self.delta = self.zero_delta[..., 1]

        self.o, self.o2 = scratch("o", n, *heads, dv), scratch("o squared", n, *heads, dv)
        self.z, self.gate = z[rows].reshape(n, *heads, dv), scratch("gate", n, *heads, dv)
        self.norm_w = norm_w
        self.y, self.squares = y[rows].reshape(n, *heads, dv), squares[rows].reshape(n, *heads, -1)

    def run(self, past: int, slot: int, eps: float, part: int) -> None:
        """Mixes the tokens, the first of which has position `past`, and updates the rings of `slot`."""
        self._conv(past, self.conv_ring[slot])
        self._norm(eps)
        self._gates()
        states = self.states[slot]
        for t in range(self.n):
            self._token(t, states[(past + t - 1) % len(states)] if past + t else None, states[(past + t) % len(states)])
        np.multiply(self.o, self.o, out=self.o2)
        np.add.reduceat(self.o2, range(0, self.dv, part), axis=-1, out=self.squares)
        silu_to(self.z, self.gate)
        np.multiply(self.gate, self.norm_w, out=self.gate)
        np.multiply(self.o, self.gate, out=self.y)

    def _conv(self, past: int, ring: Array) -> None:
        """mixed = SiLU of the causal conv; the raw columns go to the ring."""
        window, n_columns, before = self.window, len(ring), len(self.taps) - 1
        for j in range(before):
            p = past - before + j
            window[j] = ring[p % n_columns] if p >= 0 else 0
        window[before:] = self.x
        for t in range(self.n):
            ring[(past + t) % n_columns] = self.x[t]
        np.multiply(window[: self.n], self.taps[0], out=self.raw)
        for j in range(1, before + 1):
            np.multiply(window[j : j + self.n], self.taps[j], out=self.mixed)
            np.add(self.raw, self.mixed, out=self.raw)
        silu_to(self.raw, self.mixed)

    def _norm(self, eps: float) -> None:
        """q and k to their directions, q scaled by 1 / sqrt(dk)."""
        np.multiply(self.qk, self.qk, out=self.products)
        np.add.reduce(self.products, axis=-1, keepdims=True, out=self.lengths)
        np.add(self.lengths, eps, out=self.lengths)
        np.multiply(self.lengths[:, 0], self.dk, out=self.lengths[:, 0])
        np.sqrt(self.lengths, out=self.lengths)
        np.divide(self.qk, self.lengths, out=self.qk)
        np.multiply(self.qk[:, 0], self.qk[:, 1], out=self.products[:, 0])
        np.add.reduce(self.products[:, 0], axis=-1, out=self.k_q)

    def _gates(self) -> None:
        np.add(self.alpha, self.dt_bias, out=self.decay)
        np.logaddexp(0, self.decay, out=self.decay)
        np.multiply(self.decay, self.a, out=self.decay)
        np.exp(self.decay, out=self.decay)
        sigmoid_to(self.beta, self.rate)

    def _token(self, t: int, old: Array | None, new: Array) -> None:
        """The delta rule for one token: state `old` (None: zero) to `new`, which may be the same memory; o[t]."""
        rows, columns, k_q = self.tokens[t]
        rate, delta, o = self.rate[t][..., None], self.delta, self.o[t]
        if old is None:
            np.multiply(self.v[t], rate, out=delta)
            np.matmul(self.zero_delta, rows, out=new)
            np.multiply(delta, k_q, out=o)
            return
        decay = self.decay[t][..., None, None]
        np.matmul(old, columns, out=self.seen)
        np.multiply(self.seen, decay, out=self.seen)
        np.subtract(self.v[t], self.seen[..., 1], out=delta)
        np.multiply(delta, rate, out=delta)
        np.matmul(self.zero_delta, rows, out=self.update)
        np.multiply(old, decay, out=new)
        np.add(new, self.update, out=new)
        np.multiply(delta, k_q, out=o)
        np.add(o, self.seen[..., 0], out=o)
