"""The blockwise form of `delta_net_mixer`, for prompts: dispatches that serve tokens 0..n_done-1 of a long batch.

Token by token, the delta rule is a long chain of small steps. Over a block of tokens it can be written with matrix
products (Yang, Kautz, Hatamizadeh 2024, section 3.3). With S the state [dv, dk] before the block, d(j, i) the product
of the decays after token j up to token i, and d(i) that from the block's beginning:

    L[i, j] = beta_i d(j, i) k_i . k_j for j < i, else 0
    T       = (I + L)^-1 diag(beta)
    delta   = T (v_i - d(i) S k_i)    what the tokens add: S becomes d(end) S + sum over j of d(j, end) delta_j k_j^T
    M[i, j] = d(j, i) q_i . k_j for j <= i, else 0
    o_i     = d(i) S q_i + sum over j of M[i, j] delta_j

`delta_net_prepare` makes k, q, v, T, M and the decays of all blocks at once, `delta_net_scan` carries the state over
the blocks, `delta_net_finish` completes the outputs of all blocks at once. Every decay is the exponential of the sum of
just the gates it spans: never above 1, and exact where the gates before it were large.
"""

from __future__ import annotations

from vkbackend.device.base import Limits
from vkbackend.graph import Node, Tensor
from vkbackend.ops.op import At, Bind, Dispatch, Kernel, Lowering, scratch, spread

PREPARE = Kernel("delta_net_prepare", 128)
SCAN = Kernel("delta_net_scan", 128)
FINISH = Kernel("delta_net_finish", 128)
BLOCK = 16  # tokens
SCAN_ROWS = 16  # state rows of a workgroup of the scan
SHARED_BYTES = 32 << 10  # the scan needs a little less
WORTH_BLOCKS = 2 * BLOCK  # below, two more levels cost as much as they save


def n_by_blocks(n_tokens: int, n_slots: int, limits: Limits) -> int:
    """How many of a sequence's n_tokens new tokens go by blocks; the rest goes token by token.

    The scan writes the state after its last token only: the n_slots - 1 tokens after that bring the ring's other slots.
    """
    n = n_tokens - (n_slots - 1)
    return n if n >= WORTH_BLOCKS and limits.max_shared_bytes >= SHARED_BYTES else 0


def block_stages(node: Node, n_done: int, limits: Limits) -> Lowering:
    """Stages that mix tokens 0..n_done-1 of each sequence of a `delta_net_mixer` node, and write the state after them.

    The conv ring is read in the first stage only.
    """
    qkv, z, alpha, beta, conv_w, dt_bias, a, norm_w, conv_ring, state_ring, step = node.inputs
    y, squares, at = *node.outputs[:2], node.attrs
    n_slots, n_v_heads, dv, dk = state_ring.shape[1:]
    n_seqs, n_tokens, n_blocks = step.shape[1], at.n_tokens, -(-n_done // BLOCK)
    padded_dv = -(-dv // SCAN_ROWS) * SCAN_ROWS
    keys = scratch("delta_net keys", (n_seqs, n_blocks, at.n_k_heads, dk, 2 * BLOCK))  # k and q by columns
    values = scratch("delta_net values", (n_seqs, n_blocks, n_v_heads, BLOCK, padded_dv))
    mixing = scratch("delta_net mixing", (n_seqs, n_blocks, n_v_heads, 2 * BLOCK * (BLOCK + 1)))  # T, decays, M
    updates = scratch("delta_net updates", (n_seqs, n_blocks, n_v_heads, BLOCK, padded_dv))  # delta

    def groups(n: int) -> tuple[int, int, int]:
        return spread(n, limits.max_groups[0])

    prepare = Dispatch(
        PREPARE,
        (Bind(qkv, "r"), Bind(conv_w, "r"), Bind(step, "r"), Bind(conv_ring, "r"), Bind(keys, "w")),
        (
            At(qkv), At(alpha), At(beta), qkv.strides[0], At(conv_w), At(dt_bias), At(a), At(step), step.strides[0],
            At(conv_ring), conv_ring.shape[1], At(keys), At(values), At(mixing), n_tokens, n_done, n_blocks, n_seqs,
            at.n_k_heads, n_v_heads, dv, padded_dv, float(at.eps), int(at.grouped),
        ),
        groups(n_seqs * n_blocks * at.n_k_heads),
        spec=(dk, conv_w.shape[1]),
        also=(*(Bind(t, "r") for t in (alpha, beta, dt_bias, a)), Bind(values, "w"), Bind(mixing, "w")),
    )  # fmt: skip
    y_done = tokens_of(y, n_seqs, 0, n_done)
    scan = Dispatch(
        SCAN,
        (Bind(keys, "r"), Bind(step, "r"), Bind(state_ring, "rw"), Bind(updates, "w"), Bind(y_done, "w")),
        (
            At(keys), At(values), At(mixing), At(step), step.strides[0], At(state_ring), n_slots, At(updates), At(y),
            n_tokens, n_done, n_blocks, n_seqs, at.n_k_heads, n_v_heads, dv, padded_dv, int(at.grouped),
        ),
        groups(n_seqs * n_v_heads * padded_dv // SCAN_ROWS),
        spec=(dk,),
        also=(Bind(values, "r"), Bind(mixing, "r")),
    )  # fmt: skip
    squares_done = tokens_of(squares, n_seqs, 0, n_done)
    finish = Dispatch(
        FINISH,
        (Bind(z, "r"), Bind(norm_w, "r"), Bind(mixing, "r"), Bind(y_done, "rw"), Bind(squares_done, "w")),
        (
            At(z), z.strides[0], At(norm_w), At(mixing), At(updates), At(y), At(squares), n_tokens, n_done, n_blocks,
            n_seqs, n_v_heads, dv, padded_dv, squares.shape[2],
        ),
        groups(n_seqs * n_blocks * n_v_heads),
        also=(Bind(updates, "r"),),
    )  # fmt: skip
    return [[prepare], [scan], [finish]]


def tokens_of(rows: Tensor, n_seqs: int, first: int, end: int) -> Tensor:
    """Tokens [first, end) of every sequence in a contiguous result [n_seqs * n_tokens, ...]: [n_seqs, words]."""
    width = rows.size // rows.shape[0]
    return rows.reshape(n_seqs, rows.size // n_seqs).narrow(1, first * width, (end - first) * width)
