"""A qwen35moe model rewritten as the qwen3next model that computes the same: v heads grouped, rows packed."""

from __future__ import annotations

import numpy as np
from gguf_content import Content, Stored, stored
from numpy.typing import NDArray


def as_qwen3next(content: Content, packed_in: bool = False) -> Content:
    """packed_in: qkv and z in one `ssm_in`, as older files have it."""
    n_k, n_v, dk = content["ssm.group_count"], content["ssm.time_step_rank"], content["ssm.state_size"]
    dv, r = content["ssm.inner_size"] // n_v, n_v // n_k
    keys = n_k * dk
    # Tiled order has v head j of k head g at j * n_k + g, grouped order at g * r + j.
    heads = np.arange(n_v).reshape(r, n_k).T.reshape(-1)
    values = (heads[:, None] * dv + np.arange(dv)).reshape(-1)  # rows of the heads
    channels = np.concatenate([np.arange(2 * keys), 2 * keys + values])
    out = content.with_arch("qwen3next")
    for b in [n.removesuffix("ssm_a") for n in content.tensors if n.endswith(".ssm_a")]:
        t = out.tensors
        for name, order in (("ssm_a", heads), ("ssm_dt.bias", heads), ("ssm_conv1d.weight", channels)):
            t[b + name] = t[b + name].rows(order)
        columns = t[b + "ssm_out.weight"]
        t[b + "ssm_out.weight"] = stored(columns.values()[:, values], columns.type.name)
        alpha, beta = (t.pop(b + f"ssm_{n}.weight").rows(heads) for n in ("alpha", "beta"))
        t[b + "ssm_ba.weight"] = packed(n_k, beta, alpha)
        qkv, gate = t.pop(b + "attn_qkv.weight").rows(channels), t.pop(b + "attn_gate.weight").rows(values)
        if packed_in:
            q, k, v = (qkv.rows(slice(*at)) for at in ((0, keys), (keys, 2 * keys), (2 * keys, None)))
            t[b + "ssm_in.weight"] = packed(n_k, q, k, v, gate)
        else:
            t[b + "attn_qkv.weight"], t[b + "attn_gate.weight"] = qkv, gate
    return out


def packed(n_groups: int, *matrices: Stored) -> Stored:
    """The rows of every group: its share of the first matrix, then of the second, and so on."""
    shares: list[NDArray[np.generic]] = [m.data.reshape(n_groups, -1, m.data.shape[-1]) for m in matrices]
    return Stored(np.concatenate(shares, axis=1).reshape(-1, matrices[0].data.shape[-1]), matrices[0].type)
