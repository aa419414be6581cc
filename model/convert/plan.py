"""Which rows of which checkpoint tensors make up each tensor of the GGUF file, and how their values change.

Every transform of this family is a choice of rows, a choice of columns, or a function of single values. So a tensor
is described, not computed: `write.py` makes it in pieces of bounded size. Names and transforms: the project's own
description of the format, checked against files of the reference converter; Qwen3-Next's packing: transformers'
Qwen3NextGatedDeltaNet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkbackend.errors import ModelError
from vkbackend.model.convert.checkpoint import StoredTensor
from vkbackend.model.convert.config import Config

Values = Callable[[NDArray[np.float32]], NDArray[np.float32]]
Runs = tuple[tuple[int, int], ...]
_TRUNKS = ("model.language_model.", "model.", "language_model.model.")
_NOT_TEXT = ("model.visual.", "visual.")


@dataclass(frozen=True)
class Piece:
    """Runs of rows [start, stop) of one checkpoint tensor, in the order in which they are written."""

    source: str
    runs: Runs


@dataclass(frozen=True)
class Planned:
    """One tensor of the file: its pieces one after the other, then `columns` of every row, then `values` of them.

    exact: stays float32 whatever type the file has.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    columns: NDArray[np.intp] | None = None
    values: Values | None = None
    exact: bool = False


def plan(
    config: Config, tensors: Mapping[str, StoredTensor], n_nextn: int, mtp_only: bool, where: str
) -> list[Planned]:
    """Every tensor of the file, in its order.

    n_nextn: MTP blocks to take along; their tensors are ignored when 0. mtp_only: no trunk layers. where: what error
    messages begin with. Raises `ModelError` for tensors that are missing, of another shape, or unknown.
    """
    b = _Builder(config, tensors, where)
    trunk = b.trunk_prefix()
    b.copy("token_embd.weight", trunk + "embed_tokens.weight", config.n_vocab, config.n_embd)
    b.norm("output_norm.weight", trunk + "norm.weight", config.n_embd)
    if not config.tied:
        b.copy("output.weight", "lm_head.weight", config.n_vocab, config.n_embd)
    b.ignore(*_NOT_TEXT, *(["lm_head."] if config.tied else []), *([] if n_nextn else ["mtp."]))
    for i in range(0 if mtp_only else config.n_main):
        _block(b, f"blk.{i}.", f"{trunk}layers.{i}.", config.recurrent[i])
    if mtp_only:
        b.ignore(trunk + "layers.")
    for j in range(n_nextn):
        _mtp_block(b, f"blk.{config.n_main + j}.", f"mtp.layers.{j}.")
    b.refuse_leftovers()
    return b.planned


class _Builder:
    """Collects planned tensors and checks what they are made from."""

    def __init__(self, config: Config, tensors: Mapping[str, StoredTensor], where: str) -> None:
        self.config, self.tensors, self.where = config, tensors, where
        self.planned: list[Planned] = []
        self.used: set[str] = set()
        self.ignored: list[str] = []

    def trunk_prefix(self) -> str:
        for prefix in _TRUNKS:
            if prefix + "embed_tokens.weight" in self.tensors:
                return prefix
        raise ModelError(f"{self.where}: there is no tensor 'model.embed_tokens.weight'")

    def ignore(self, *prefixes: str) -> None:
        self.ignored += prefixes

    def refuse_leftovers(self) -> None:
        """A tensor that nothing was made of means something that this converter does not know."""
        left = [
            n
            for n in self.tensors
            if n not in self.used and not n.startswith(tuple(self.ignored)) and not n.endswith("rotary_emb.inv_freq")
        ]
        if left:
            raise ModelError(
                f"{self.where}: {len(left)} tensors are unknown here, the first is '{left[0]}'; a file without them "
                "would be another model"
            )

    def check(self, source: str, *shape: int) -> str:
        """The name, once it is known to be there in that shape."""
        tensor = self.tensors.get(source)
        if tensor is None:
            raise ModelError(f"{self.where}: there is no tensor '{source}'")
        if tensor.shape != shape:
            raise ModelError(
                f"{self.where}: '{source}' has shape {list(tensor.shape)}; {list(shape)} is needed, as config.json says"
            )
        self.used.add(source)
        return source

    def whole(self, source: str, *shape: int) -> Piece:
        self.check(source, *shape)
        return Piece(source, ((0, self.tensors[source].n_rows),))

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        pieces: Sequence[Piece],
        columns: NDArray[np.intp] | None = None,
        values: Values | None = None,
        exact: bool = False,
    ) -> None:
        self.planned.append(Planned(name, shape, tuple(pieces), columns, values, exact))

    def copy(self, name: str, source: str, *shape: int, exact: bool = False) -> None:
        self.add(name, shape, [self.whole(source, *shape)], exact=exact)

    def norm(self, name: str, source: str, n: int) -> None:
        """A norm's weight; the checkpoint holds its difference from 1."""
        self.add(name, (n,), [self.whole(source, n)], values=lambda x: x + np.float32(1))


def _block(b: _Builder, to: str, of: str, recurrent: bool) -> None:
    c = b.config
    b.norm(to + "attn_norm.weight", of + "input_layernorm.weight", c.n_embd)
    b.norm(to + "post_attention_norm.weight", of + "post_attention_layernorm.weight", c.n_embd)
    (_delta_net if recurrent else _attention)(b, to, of)
    (_experts if c.is_moe else _ffn)(b, to, of + "mlp.")


def _mtp_block(b: _Builder, to: str, of: str) -> None:
    n = b.config.n_embd
    _block(b, to, of, recurrent=False)
    b.copy(to + "nextn.eh_proj.weight", "mtp.fc.weight", n, 2 * n)
    b.norm(to + "nextn.enorm.weight", "mtp.pre_fc_norm_embedding.weight", n)
    b.norm(to + "nextn.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", n)
    b.norm(to + "nextn.shared_head_norm.weight", "mtp.norm.weight", n)
    for name, source in (("embed_tokens", "mtp.embed_tokens.weight"), ("shared_head_head", "mtp.lm_head.weight")):
        if source in b.tensors:
            b.copy(f"{to}nextn.{name}.weight", source, b.config.n_vocab, n)


def _attention(b: _Builder, to: str, of: str) -> None:
    c, at = b.config, of + "self_attn."
    b.copy(to + "attn_q.weight", at + "q_proj.weight", c.n_head * 2 * c.head_dim, c.n_embd)
    b.copy(to + "attn_k.weight", at + "k_proj.weight", c.n_head_kv * c.head_dim, c.n_embd)
    b.copy(to + "attn_v.weight", at + "v_proj.weight", c.n_head_kv * c.head_dim, c.n_embd)
    b.copy(to + "attn_output.weight", at + "o_proj.weight", c.n_embd, c.n_head * c.head_dim)
    b.norm(to + "attn_q_norm.weight", at + "q_norm.weight", c.head_dim)
    b.norm(to + "attn_k_norm.weight", at + "k_norm.weight", c.head_dim)


def _delta_net(b: _Builder, to: str, of: str) -> None:
    c, at = b.config, of + "linear_attn."
    conv_dim = 2 * c.key_dim + c.value_dim
    # qwen3next keeps v heads grouped by their k head; the others lay them out in tiles: v head h uses k head h % n_k.
    order = range(c.n_v_heads) if c.arch == "qwen3next" else _tiled(c.n_k_heads, c.n_v_heads)
    single, heads = _runs(order, 1), _runs(order, c.head_v_dim)
    if c.arch == "qwen3next":
        _unpack_qkvz(b, to, at)
        b.copy(to + "ssm_ba.weight", at + "in_proj_ba.weight", 2 * c.n_v_heads, c.n_embd)
    else:
        qkv = b.check(at + "in_proj_qkv.weight", conv_dim, c.n_embd)
        rows = Piece(qkv, _conv_rows(c, heads))
        b.add(to + "attn_qkv.weight", (conv_dim, c.n_embd), [rows])
        z = b.check(at + "in_proj_z.weight", c.value_dim, c.n_embd)
        b.add(to + "attn_gate.weight", (c.value_dim, c.n_embd), [Piece(z, heads)])
        for name, source in (("ssm_alpha", "in_proj_a"), ("ssm_beta", "in_proj_b")):
            proj = b.check(f"{at}{source}.weight", c.n_v_heads, c.n_embd)
            b.add(f"{to}{name}.weight", (c.n_v_heads, c.n_embd), [Piece(proj, single)])
    conv = b.check(at + "conv1d.weight", conv_dim, 1, c.conv_kernel)
    b.add(to + "ssm_conv1d.weight", (conv_dim, c.conv_kernel), [Piece(conv, _conv_rows(c, heads))], exact=True)
    dt = b.check(at + "dt_bias", c.n_v_heads)
    b.add(to + "ssm_dt.bias", (c.n_v_heads,), [Piece(dt, single)])
    a = b.check(at + "A_log", c.n_v_heads)
    b.add(to + "ssm_a", (c.n_v_heads,), [Piece(a, single)], values=_decay)
    b.copy(to + "ssm_norm.weight", at + "norm.weight", c.head_v_dim)  # the one norm that is not zero-centred
    columns = np.concatenate([np.arange(h * c.head_v_dim, (h + 1) * c.head_v_dim) for h in order])
    out = b.whole(at + "out_proj.weight", c.n_embd, c.value_dim)
    b.add(to + "ssm_out.weight", (c.n_embd, c.value_dim), [out], columns=columns)


def _decay(a_log: NDArray[np.float32]) -> NDArray[np.float32]:
    # By way of float64: correctly rounded, whatever the machine's float32 exp is like.
    return (-np.exp(a_log.astype(np.float64))).astype(np.float32)


def _unpack_qkvz(b: _Builder, to: str, at: str) -> None:
    """Qwen3-Next's in_proj_qkvz: for every k head its q, k, v and z rows. Split into attn_qkv and attn_gate."""
    c = b.config
    v_rows = c.value_dim // c.n_k_heads
    group = 2 * c.head_k_dim + 2 * v_rows
    source = b.check(at + "in_proj_qkvz.weight", c.n_k_heads * group, c.n_embd)

    def part(start: int, n: int) -> Runs:
        return tuple((g * group + start, g * group + start + n) for g in range(c.n_k_heads))

    q, k = part(0, c.head_k_dim), part(c.head_k_dim, c.head_k_dim)
    v, z = part(2 * c.head_k_dim, v_rows), part(2 * c.head_k_dim + v_rows, v_rows)
    b.add(to + "attn_qkv.weight", (2 * c.key_dim + c.value_dim, c.n_embd), [Piece(source, (*q, *k, *v))])
    b.add(to + "attn_gate.weight", (c.value_dim, c.n_embd), [Piece(source, z)])


def _tiled(n_k_heads: int, n_v_heads: int) -> list[int]:
    """The v heads, grouped by k head in the checkpoint, in the order in which the file has them."""
    r = n_v_heads // n_k_heads
    return [group * r + member for member in range(r) for group in range(n_k_heads)]


def _runs(order: Iterable[int], n: int, base: int = 0) -> Runs:
    """Rows of n-row heads in the given order, neighbours joined."""
    runs: list[tuple[int, int]] = []
    for head in order:
        start, stop = base + head * n, base + (head + 1) * n
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return tuple(runs)


def _conv_rows(c: Config, v_heads: Runs) -> Runs:
    """q and k rows as they are, then the v heads'."""
    n = 2 * c.key_dim
    return ((0, n), *((n + start, n + stop) for start, stop in v_heads))


def _ffn(b: _Builder, to: str, at: str) -> None:
    c = b.config
    b.copy(to + "ffn_gate.weight", at + "gate_proj.weight", c.n_ff, c.n_embd)
    b.copy(to + "ffn_up.weight", at + "up_proj.weight", c.n_ff, c.n_embd)
    b.copy(to + "ffn_down.weight", at + "down_proj.weight", c.n_embd, c.n_ff)


def _experts(b: _Builder, to: str, at: str) -> None:
    c = b.config
    n, ff = c.n_expert, c.n_ff_exp
    b.copy(to + "ffn_gate_inp.weight", at + "gate.weight", n, c.n_embd, exact=True)
    if at + "experts.gate_up_proj" in b.tensors:
        fused = b.check(at + "experts.gate_up_proj", n, 2 * ff, c.n_embd)
        gate = [Piece(fused, tuple((2 * e * ff, (2 * e + 1) * ff) for e in range(n)))]
        up = [Piece(fused, tuple(((2 * e + 1) * ff, (2 * e + 2) * ff) for e in range(n)))]
        down = [b.whole(at + "experts.down_proj", n, c.n_embd, ff)]
    else:
        gate = [b.whole(f"{at}experts.{e}.gate_proj.weight", ff, c.n_embd) for e in range(n)]
        up = [b.whole(f"{at}experts.{e}.up_proj.weight", ff, c.n_embd) for e in range(n)]
        down = [b.whole(f"{at}experts.{e}.down_proj.weight", c.n_embd, ff) for e in range(n)]
    b.add(to + "ffn_gate_exps.weight", (n, ff, c.n_embd), gate)
    b.add(to + "ffn_up_exps.weight", (n, ff, c.n_embd), up)
    b.add(to + "ffn_down_exps.weight", (n, c.n_embd, ff), down)
    b.copy(to + "ffn_gate_inp_shexp.weight", at + "shared_expert_gate.weight", 1, c.n_embd, exact=True)
    b.copy(to + "ffn_gate_shexp.weight", at + "shared_expert.gate_proj.weight", c.n_ff_shexp, c.n_embd)
    b.copy(to + "ffn_up_shexp.weight", at + "shared_expert.up_proj.weight", c.n_ff_shexp, c.n_embd)
    b.copy(to + "ffn_down_shexp.weight", at + "shared_expert.down_proj.weight", c.n_embd, c.n_ff_shexp)
