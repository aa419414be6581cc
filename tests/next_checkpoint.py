"""The float32 checkpoint that the fixture `next` was made from. It is not among the fixtures, its golden values are.

The generator of the fixtures drew `moe` and `next` from one stream of random numbers. Outside the gated delta net
layers both have the same tensors. Inside, `moe` draws norm, out_proj, in_proj_qkv, in_proj_z, in_proj_b, in_proj_a,
and `next` draws in_proj_qkvz, in_proj_ba, norm, out_proj: so the numbers of `next` are those of `moe`, elsewhere.
Proof: converted to f16 and q8_0 it gives the fixture's files, and its logits are the golden ones
(convert/test_round_trip.py, test_goldens.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from fixture_paths import fixture
from hf_checkpoint import Tensors, from_gguf, write_safetensors
from numpy.typing import NDArray

from vkbackend.model.convert.checkpoint import open_checkpoint, read_rows

OUT_SCALE = np.float32(0.88)  # of out_proj, against the other matrices


def next_checkpoint(folder: Path) -> Path:
    """Writes the checkpoint into a folder. Skips the test where the fixtures are not."""
    source = open_checkpoint(fixture("hf/moe/model.safetensors").parent)
    moe: Tensors = {n: read_rows(t, n, 0, t.n_rows).reshape(t.shape) for n, t in source.items()}
    rounded = fixture("gguf/next-f16.gguf")
    from_gguf(rounded, folder)  # config.json and the tokenizer; of the tensors names, shapes, and those in float32
    old = open_checkpoint(folder)
    made: Tensors = {}
    for name, t in old.items():
        values = read_rows(t, name, 0, t.n_rows).reshape(t.shape)
        if ".experts." in name:
            made[name] = expert(moe, name)
        elif ".linear_attn." in name and not name.endswith((".A_log", ".dt_bias", ".conv1d.weight")):
            made[name] = values
        else:
            made[name] = moe[name]
            assert moe[name].shape == values.shape
    for prefix in {n.removesuffix("A_log") for n in made if n.endswith("A_log")}:
        made.update(delta_net(moe, made, prefix))
    write_safetensors(folder / "model.safetensors", made)
    return folder


def expert(moe: Tensors, name: str) -> NDArray[np.float32]:
    """One expert's matrix of those that `moe` has stacked, gate above up."""
    at, _, rest = name.partition(".experts.")
    e, part = rest.split(".")[:2]
    if part == "down_proj":
        return np.asarray(moe[f"{at}.experts.down_proj"][int(e)])
    gate, up = np.split(moe[f"{at}.experts.gate_up_proj"][int(e)], 2)
    return gate if part == "gate_proj" else up


def delta_net(moe: Tensors, made: Tensors, prefix: str) -> Tensors:
    """in_proj_qkvz, in_proj_ba and out_proj of a layer. (The norm is float32 in the file.)"""
    drawn = {n: moe[f"{prefix}{n}.weight"].reshape(-1) for n in ("norm", "out_proj")}
    rest = [moe[f"{prefix}in_proj_{n}.weight"].reshape(-1) for n in ("qkv", "z", "b", "a")]
    stream = np.concatenate([normals_of(drawn["norm"]), drawn["out_proj"] / OUT_SCALE, *rest])
    out: Tensors = {}
    at = 0
    for part in ("in_proj_qkvz", "in_proj_ba", "norm", "out_proj"):
        name = f"{prefix}{part}.weight"
        shape, n = made[name].shape, made[name].size
        if part != "norm":
            scale = OUT_SCALE if part == "out_proj" else np.float32(1)
            values = (stream[at : at + n] * scale).reshape(shape)
            # What was scaled may be an ulp off, and then at times on the wrong side of a boundary between f16 values.
            wrong = values.astype(np.float16) != made[name]
            assert wrong.sum() <= 4
            out[name] = np.where(wrong, np.nextafter(values, made[name]), values)
        at += n
    assert at == len(stream)
    return out


def normals_of(norm: NDArray[np.float32], columns: int = 128) -> NDArray[np.float32]:
    """The numbers of a matrix that take the place of a norm's: the norm is uniform in 0.6..1.4, a matrix is normal.

    torch makes 16 normal numbers at a time of 16 uniform ones, by the method of Box and Muller.
    """
    u = ((norm.astype(np.float64) - 0.6) / 0.8).reshape(-1, 2, 8)
    radius, angle = np.sqrt(-2 * np.log1p(-u[:, 0])), 2 * np.pi * u[:, 1]
    values = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
    return np.asarray(values * columns**-0.5, np.float32)
