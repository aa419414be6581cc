"""`rope_attention` as the NumPy fallback runs it: norm and rotation of q and k together, then token by token.

A token sees exactly its own keys, so nothing is masked and its result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.device.base import Array
from vkbackend.device.numpy_parts import Run, Workspace, sigmoid_to
from vkbackend.ops.rope_kv_write import cos_sin


def prepared_attention(
    inputs: Sequence[Array], outputs: Sequence[Array], work: Workspace, n_tokens: int, eps: float
) -> Run:
    """Operands in the order of `rope_attention`."""
    qg, k, v, q_norm, k_norm, table, _, _, step = inputs
    y, k_cache, v_cache = outputs
    n_rows, n_head, head_dim = qg.shape[0], qg.shape[1], qg.shape[2] // 2
    n_kv, half = k.shape[1], table.shape[0]

    def scratch(name: str, *shape: int) -> Array:
        return work.array(f"attention: {name}", *shape)

    heads, squares = (scratch(name, n_rows, n_head + n_kv, head_dim) for name in ("heads", "squares"))
    lengths = scratch("lengths", n_rows, n_head + n_kv, 1)
    turned_a, turned_b = (scratch(name, n_rows, n_head + n_kv, half) for name in ("turned a", "turned b"))
    a, b = heads[..., :half], heads[..., half : 2 * half]
    q, new_k = heads[:, :n_head], heads[:, n_head:]
    queries = q.reshape(n_rows, n_kv, n_head // n_kv, 1, head_dim)
    gate, raw_q, raw_gate = scratch("gate", n_rows, n_head, head_dim), qg[..., :head_dim], qg[..., head_dim:]
    results = y.reshape(n_rows, n_head, head_dim)
    tokens = np.arange(n_tokens)

    def normalise() -> None:
        np.copyto(q, raw_q)
        np.copyto(new_k, k)
        np.multiply(heads, heads, out=squares)
        np.add.reduce(squares, axis=-1, keepdims=True, out=lengths)
        np.divide(lengths, head_dim, out=lengths)
        np.add(lengths, eps, out=lengths)
        np.sqrt(lengths, out=lengths)
        np.divide(heads, lengths, out=heads)
        np.multiply(q, q_norm, out=q)
        np.multiply(new_k, k_norm, out=new_k)

    def turn() -> None:
        cos, sin = (f.astype(np.float32) for f in cos_sin((step[0][:, None] + tokens).reshape(-1), table))
        np.multiply(a, sin, out=turned_b)
        np.multiply(b, sin, out=turned_a)
        np.multiply(a, cos, out=a)
        np.multiply(b, cos, out=b)
        np.subtract(a, turned_a, out=a)
        np.add(b, turned_b, out=b)

    def attend(row: int, keys: Array, values: Array) -> None:
        """keys, values [n_kv, n_keys, head_dim]. One matrix-vector product a head: fast at any number of keys."""
        p = np.matmul(queries[row], keys.swapaxes(1, 2)[:, None])  # [n_kv, group, 1, n_keys]
        np.multiply(p, head_dim**-0.5, out=p)
        np.subtract(p, np.maximum.reduce(p, axis=-1, keepdims=True), out=p)
        np.exp(p, out=p)
        mixed = np.matmul(p, values[:, None])
        np.divide(mixed, np.add.reduce(p, axis=-1, keepdims=True), out=mixed)
        np.multiply(mixed.reshape(n_head, head_dim), gate[row], out=results[row])

    def run() -> None:
        normalise()
        turn()
        sigmoid_to(raw_gate, gate)
        for s, (past, slot) in enumerate(zip(*step.tolist(), strict=True)):
            rows = slice(s * n_tokens, (s + 1) * n_tokens)
            k_cache[slot, past : past + n_tokens] = new_k[rows]
            v_cache[slot, past : past + n_tokens] = v[rows]
            keys, values = k_cache[slot].swapaxes(0, 1), v_cache[slot].swapaxes(0, 1)
            for t in range(n_tokens):
                n = past + t + 1
                attend(s * n_tokens + t, keys[:, :n], values[:, :n])

    return run
