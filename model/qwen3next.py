"""qwen3next files, whose recurrent layers pack rows by k head, presented in qwen35's layout.

With r = n_v_heads / n_k_heads, `ssm_ba.weight` holds per k head r beta rows and then r alpha rows. Older files have
`ssm_in.weight` in place of attn_qkv and attn_gate: per k head its q, its k, then the v and the z of its r v heads.
Rows are quantised each by itself, so taking them apart changes no weight. v heads stay grouped by k head.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.errors import ModelError
from vkbackend.model.gguf import GGUFFile, RowRuns, TensorInfo
from vkbackend.model.hparams import HParams


def unpacked(file: GGUFFile, hp: HParams) -> GGUFFile:
    """The file with every packed tensor replaced by those that qwen35 has: views of rows, nothing is read.

    Raises `ModelError` naming the tensor whose shape does not fit the metadata.
    """
    r = hp.n_v_heads // hp.n_k_heads
    q, k = hp.head_k_dim, 2 * hp.head_k_dim  # where q's and k's rows of a k head end
    v = k + r * hp.head_v_dim
    z = v + r * hp.head_v_dim
    layouts: dict[str, dict[str, tuple[tuple[int, int], ...]]] = {
        "ssm_ba.weight": {"ssm_beta.weight": ((0, r),), "ssm_alpha.weight": ((r, 2 * r),)},
        "ssm_in.weight": {"attn_qkv.weight": ((0, q), (q, k), (k, v)), "attn_gate.weight": ((v, z),)},
    }
    tensors: dict[str, TensorInfo] = {}
    for name, info in file.tensors.items():
        block, _, kind = name.rpartition(".ssm_")
        layout = layouts.get("ssm_" + kind) if block else None
        if layout is None:
            tensors[name] = info
            continue
        group_rows = max(end for runs in layout.values() for _, end in runs)
        wanted = (hp.n_k_heads * group_rows, hp.n_embd)
        if info.shape != wanted:
            raise ModelError(f"{file.path}: tensor '{name}' has shape {info.shape}; the metadata ask for {wanted}")
        for part, runs in layout.items():
            rows = hp.n_k_heads * sum(end - first for first, end in runs)
            nbytes = info.nbytes // wanted[0] * rows if info.nbytes >= 0 else -1
            tensors[f"{block}.{part}"] = replace(
                info,
                name=f"{block}.{part}",
                shape=(rows, hp.n_embd),
                nbytes=nbytes,
                runs=RowRuns(hp.n_k_heads, group_rows, runs),
            )
    return replace(file, tensors=tensors)
