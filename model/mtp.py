"""The multi-token-prediction block: one attention block that sees the next token and the trunk's hidden row.

For a token x at position p and the hidden row h of the token before it, the block computes
`c = eh_proj [rms(embed(x), enorm); rms(h, hnorm)]`, one ordinary block over c with a KV cache of its own, and
logits through shared_head_norm and the head: the prediction of the token at position p + 1. Its own hidden row can be
fed back to draft further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkbackend.errors import ContextError, ModelError
from vkbackend.graph import Graph, Tensor
from vkbackend.model.batch import Batch
from vkbackend.model.context import Context, DecodeOutput, single_sequence
from vkbackend.model.gguf import GGUFFile
from vkbackend.model.hparams import HParams
from vkbackend.model.memory import Memory
from vkbackend.model.qwen35 import (
    AttentionKeys,
    BlockKeys,
    HeadKeys,
    StepShape,
    attention_mixer,
    feed_forward,
    finish,
    request_block,
)
from vkbackend.model.weights import Matrix, WeightLoader, check_shape
from vkbackend.ops.embed_rows import embed_rows
from vkbackend.ops.linear import linear
from vkbackend.ops.rms_norm import rms_norm


@dataclass(frozen=True)
class MtpKeys:
    """Where the block's weights are; `head` holds the table, norm and output that its own logits go through."""

    hp: HParams
    block: BlockKeys
    enorm: str
    hnorm: str
    eh_proj: Matrix
    head: HeadKeys


def request_mtp(loader: WeightLoader, file: GGUFFile, hp: HParams) -> MtpKeys:
    """Asks the loader for the first MTP block of a file. Raises `ModelError` when it has none."""
    if hp.n_nextn == 0:
        raise ModelError(f"{file.path}: {hp.arch}.nextn_predict_layers is 0: this file has no MTP block")
    b = f"blk.{hp.n_main}.nextn."

    def first_of(*names: str) -> str:
        return next((n for n in names if n in file.tensors), names[-1])

    table = first_of(b + "embed_tokens.weight", "token_embd.weight")
    output = first_of(b + "shared_head_head.weight", "output.weight", "token_embd.weight")
    norm = first_of(b + "shared_head_norm.weight", "output_norm.weight")
    check_shape(file, b + "eh_proj.weight", (hp.n_embd, 2 * hp.n_embd))
    for name in (table, output):
        check_shape(file, name, (hp.n_vocab, hp.n_embd))
    return MtpKeys(
        hp=hp,
        block=request_block(loader, file, hp, hp.n_main),
        enorm=loader.vector(file, b + "enorm.weight", (hp.n_embd,)),
        hnorm=loader.vector(file, b + "hnorm.weight", (hp.n_embd,)),
        eh_proj=loader.matrix(file, (b + "eh_proj.weight",)),
        head=HeadKeys(
            table=loader.matrix(file, (table,)),
            norm=loader.vector(file, norm, (hp.n_embd,)),
            output=loader.matrix(file, (output,)),
        ),
    )


def build_mtp(loader: WeightLoader, keys: MtpKeys, memory: Memory, shape: StepShape) -> Graph:
    """The graph of one MTP step. Inputs: tokens [n_rows], hidden [n_rows, n_embd], step [2, n_seqs]."""
    g = Graph()
    tokens = g.input("tokens", (shape.n_rows,), "i32")
    hidden = g.input("hidden", (shape.n_rows, keys.hp.n_embd))
    step = g.input("step", (2, shape.n_seqs), "i32")
    x = mtp_rows(g, loader, keys, memory, tokens, hidden, step, shape)
    finish(g, keys.hp, loader, keys.head, x, shape)
    return g


def mtp_rows(
    g: Graph,
    loader: WeightLoader,
    keys: MtpKeys,
    memory: Memory,
    tokens: Tensor,
    hidden: Tensor,
    step: Tensor,
    shape: StepShape,
) -> Tensor:
    """The block's rows [n_rows, n_embd] for tokens i32 [n_rows], each with the hidden row of the token before it."""
    hp = keys.hp
    both = g.temp("embedding and hidden", (shape.n_rows, 2 * hp.n_embd))
    embedding = embed_rows(g, tokens, loader.parts(keys.head.table))
    rms_norm(g, embedding, loader.tensor(keys.enorm, hp.n_embd), hp.rms_eps, out=both.narrow(1, 0, hp.n_embd))
    rms_norm(g, hidden, loader.tensor(keys.hnorm, hp.n_embd), hp.rms_eps, out=both.narrow(1, hp.n_embd, hp.n_embd))
    x = linear(g, both, loader.parts(keys.eh_proj))
    assert isinstance(keys.block.mixer, AttentionKeys)
    x = attention_mixer(g, hp, loader, keys.block.attn_norm, keys.block.mixer, memory.kv[0], x, step, shape)
    return feed_forward(g, hp, loader, keys.block, x)


class MtpContext(Context):
    """Decodes rows of (token id, hidden row) with the MTP block; its logits predict the token after next.

    Made by `model.mtp_context(...)`. `hidden` in and out is of the kind the context was made with.
    """

    def decode(  # type: ignore[override]
        self,
        tokens: Sequence[int],
        hidden: NDArray[np.float32] | None = None,
        seq: int = 0,
        pos: int | None = None,
        logits: str = "all",
        greedy: bool = False,
    ) -> DecodeOutput:
        """tokens [n] ids, hidden float32 [n, n_embd]: for each token the hidden row of the token before it."""
        return self.decode_batch(single_sequence(tokens, seq, pos, logits), greedy, hidden)

    def decode_batch(
        self, batch: Batch, greedy: bool = False, hidden: NDArray[np.float32] | None = None
    ) -> DecodeOutput:
        """Rows of several sequences, each with its hidden row. Raises `ContextError` when either is missing."""
        rows = self._check(batch)
        if hidden is None:
            raise ContextError("MTP decode: hidden rows are missing; give float32 [n_tokens, n_embd] beside the tokens")
        given = np.asarray(hidden, np.float32)
        if given.shape != (len(rows.tokens), self._n_embd):
            raise ContextError(
                f"MTP decode: hidden has shape {given.shape}; {(len(rows.tokens), self._n_embd)} is needed"
            )
        return self._run(rows, greedy, {"hidden": given})
