"""`load`: from a GGUF file to a `Model` on a device, from which contexts are made."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vkbackend.device import Device, open_device
from vkbackend.device.pace import Pace
from vkbackend.errors import ContextError, DeviceError, ModelError, is_whole, quoted, shown
from vkbackend.model.burst import Burst, DraftBurst, PlainBurst
from vkbackend.model.context import Context
from vkbackend.model.gguf import GGUFFile
from vkbackend.model.hparams import HParams, read_hparams
from vkbackend.model.memory import Memory, MemoryShape
from vkbackend.model.mtp import MtpContext, MtpKeys, build_mtp, request_mtp
from vkbackend.model.qwen3next import unpacked
from vkbackend.model.qwen35 import HIDDEN_KINDS, Trunk, build_trunk, request_block, request_head
from vkbackend.model.split import open_model
from vkbackend.model.tokenizer import Tokenizer
from vkbackend.model.weights import WeightLoader
from vkbackend.quants import ALL_FORMATS

log = logging.getLogger("vkbackend")


class Model:
    """Weights on a device, with hyper-parameters and tokenizer. Made by `load`; immutable afterwards.

    `arch`, `hparams`, `tokenizer`, `has_mtp`, `device`; `weight_bytes` is what the weights take on the device.
    """

    def __init__(
        self,
        device: Device,
        hparams: HParams,
        tokenizer: Tokenizer,
        loader: WeightLoader,
        trunk: Trunk | None,
        mtp: MtpKeys | None,
        n_ubatch: int,
        weight_bytes: int,
    ) -> None:
        self.device = device
        self.hparams = hparams
        self.tokenizer = tokenizer
        self.n_ubatch = n_ubatch
        self.weight_bytes = weight_bytes
        self.fallback: Callable[[], Model] | None = None  # the same on NumPy, for when an "auto" device fails
        self._pace = Pace()
        self._loader = loader
        self._trunk = trunk
        self._mtp = mtp

    @property
    def arch(self) -> str:
        return self.hparams.arch

    @property
    def has_mtp(self) -> bool:
        """Whether an MTP block is loaded, from the file itself or from a draft file."""
        return self._mtp is not None

    def context(self, n_ctx: int = 4096, n_seq_max: int = 1, n_rs_seq: int = 0, hidden: str | None = None) -> Context:
        """A fresh context over the trunk.

        n_ctx: tokens each sequence can hold. n_seq_max: sequences. n_rs_seq: tokens of a sequence that can be
        rolled back (each costs one more copy of the recurrent state). hidden: None, "pre_norm" or "post_norm" rows
        with every decode. Raises `ContextError` for bad numbers, `DeviceError` when the memory does not fit.
        """
        if self._trunk is None:
            raise ModelError(
                "this file holds an MTP block only (mtp-*.gguf); load the main model with this file as --model-draft "
                "(draft= in Python)"
            )
        n_ctx, n_seq_max, n_rs_seq = check_sizes(n_ctx, n_seq_max, n_rs_seq)
        if hidden is not None:
            _check_hidden(hidden)
        hp = self.hparams
        n_recurrent = sum(hp.recurrent[: hp.n_main])
        if n_rs_seq and not n_recurrent:
            log.warning("n_rs_seq=%d is clamped to 0: %s has no recurrent layers", n_rs_seq, hp.arch)
            n_rs_seq = 0
        shape = MemoryShape(
            n_attention=hp.n_main - n_recurrent,
            n_recurrent=n_recurrent,
            n_seq_max=n_seq_max,
            n_ctx=n_ctx,
            n_rs_seq=n_rs_seq,
            n_head_kv=hp.n_head_kv,
            head_dim=hp.head_dim,
            n_v_heads=hp.n_v_heads,
            head_v_dim=hp.head_v_dim,
            head_k_dim=hp.head_k_dim,
            conv_dim=hp.conv_dim,
            conv_kernel=hp.conv_kernel,
        )
        memory = Memory(self.device, shape)
        build = partial(build_trunk, self._trunk, memory)
        return Context(self.device, memory, build, hp.n_vocab, hp.n_embd, self.n_ubatch, hidden, self._pace)

    def mtp_context(self, n_ctx: int = 4096, n_seq_max: int = 1, hidden: str = "post_norm") -> MtpContext:
        """A fresh context over the MTP block. `hidden`: the kind of hidden row that goes in and comes out."""
        if self._mtp is None:
            raise ModelError(
                f"this model has no MTP block ({self.arch}.nextn_predict_layers is 0); load a file that has one, or "
                "give a separate mtp-*.gguf as --model-draft (draft= in Python)"
            )
        n_ctx, n_seq_max, _ = check_sizes(n_ctx, n_seq_max)
        _check_hidden(hidden)
        hp = self._mtp.hp
        shape = MemoryShape(1, 0, n_seq_max, n_ctx, 0, hp.n_head_kv, hp.head_dim)
        memory = Memory(self.device, shape)
        build = partial(build_mtp, self._loader, self._mtp, memory)
        return MtpContext(self.device, memory, build, hp.n_vocab, hp.n_embd, self.n_ubatch, hidden)

    def burst(self, context: Context, mtp: MtpContext | None = None, n_drafts: int = 0) -> Burst | None:
        """Decoding of sequence 0 by several steps in one submission, plain or (with `mtp`) speculative.

        None where that brings nothing (NumPy, CPU drivers) or is not possible ("pre_norm" drafts).
        """
        assert self._trunk is not None
        if self.device.max_burst <= 1:
            return None
        if mtp is None:
            return PlainBurst(self.device, self._trunk, context)
        if mtp.hidden != "post_norm" or self._mtp is None or context.n_rs_seq < n_drafts:
            return None
        return DraftBurst(self.device, self._trunk, self._mtp, context, mtp, n_drafts)

    def close(self) -> None:
        """Frees the device with everything on it. Contexts of this model must not be used afterwards."""
        self.device.close()


def load(
    path: str | Path,
    device: str | Device = "auto",
    draft: str | Path | None = None,
    n_ubatch: int = 512,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Loads a GGUF file, or all parts of a split one given any of them, onto a device.

    device: a name as in `vkb.devices()`, "auto", or an open device. draft: a separate file with the MTP block.
    n_ubatch: most prompt tokens in one submission. progress: called with (done_bytes, total_bytes).
    With "auto", a device that fails while the weights are loaded, or later while `generate` runs, is replaced by NumPy
    with a warning. Raises `ModelError` naming the file and the key or tensor, or `DeviceError`.
    """
    if not is_whole(n_ubatch) or n_ubatch < 1:
        raise ContextError(f"n_ubatch is {shown(n_ubatch)}; a whole number of at least 1 is needed")
    n_ubatch = int(n_ubatch)
    if not isinstance(device, str) and not hasattr(device, "compile"):
        raise DeviceError(
            f"device is {shown(device)}; 'auto', a name such as 'kompute:0' (see: vkbackend devices) or an open device "
            "is needed"
        )
    file = open_model(path)
    _refuse_scales(file)
    hp = read_hparams(file)
    if hp.arch == "qwen3next":
        file = unpacked(file, hp)
    tokenizer = Tokenizer.from_gguf(file)
    opened = open_device(device) if isinstance(device, str) else device
    replaceable = device == "auto" and opened.info.kind != "reference"
    try:
        model = _load_on(opened, file, hp, tokenizer, draft, n_ubatch, progress)
    except BaseException as error:
        if isinstance(device, str):
            opened.close()
        if not replaceable or not isinstance(error, DeviceError):
            raise
        log.warning("%s. Loading on NumPy instead", error)
        return load(path, "numpy", draft, n_ubatch, progress)
    if replaceable:
        model.fallback = partial(load, path, "numpy", draft, n_ubatch)
    return model


def _load_on(
    device: Device,
    file: GGUFFile,
    hp: HParams,
    tokenizer: Tokenizer,
    draft: str | Path | None,
    n_ubatch: int,
    progress: Callable[[int, int], None] | None,
) -> Model:
    loader = WeightLoader(device)
    trunk = None
    if "blk.0.attn_norm.weight" in file.tensors:
        blocks = tuple(request_block(loader, file, hp, i) for i in range(hp.n_main))
        trunk = Trunk(hp, loader, blocks, request_head(loader, file, hp))
    mtp_file, mtp_hp = _mtp_source(file, hp, draft)
    mtp = request_mtp(loader, mtp_file, mtp_hp) if mtp_file is not None else None
    weight_bytes = loader.load(progress)
    return Model(device, hp, tokenizer, loader, trunk, mtp, n_ubatch, weight_bytes)


def _refuse_scales(file: GGUFFile) -> None:
    """Raises `ModelError` for a file whose matrices are to be multiplied by tensors of their own (NVFP4, FP8)."""
    for name in file.tensors:
        if name.endswith(".scale"):
            raise ModelError(
                f"{file.path}: tensor {quoted(name)} scales another one, which is not done here; use a file in one of "
                + ", ".join(f.name for f in ALL_FORMATS.values())
            )


def _mtp_source(file: GGUFFile, hp: HParams, draft: str | Path | None) -> tuple[GGUFFile | None, HParams]:
    if draft is None:
        has_block = hp.n_nextn > 0 and f"blk.{hp.n_main}.nextn.eh_proj.weight" in file.tensors
        return (file if has_block else None), hp
    other = open_model(draft)
    _refuse_scales(other)
    draft_hp = read_hparams(other)
    for name in ("n_embd", "n_vocab"):
        mine, theirs = getattr(hp, name), getattr(draft_hp, name)
        if mine != theirs:
            raise ModelError(f"{draft}: {name} is {theirs}, the main model has {mine}; the draft file must match it")
    return other, draft_hp


def check_sizes(n_ctx: int, n_seq_max: int = 1, n_rs_seq: int = 0) -> tuple[int, int, int]:
    """The sizes of a context as Python's numbers. Raises `ContextError` for what is no whole number, or too small."""
    for name, value, least in (("n_ctx", n_ctx, 1), ("n_seq_max", n_seq_max, 1), ("n_rs_seq", n_rs_seq, 0)):
        if not is_whole(value) or value < least:
            raise ContextError(f"context: {name} is {shown(value)}; a whole number of at least {least} is needed")
    return int(n_ctx), int(n_seq_max), int(n_rs_seq)  # NumPy's would overflow, and Kompute crashes on them


def _check_hidden(hidden: str) -> None:
    if hidden not in HIDDEN_KINDS:
        raise ContextError(f"context: hidden is {hidden!r}; allowed are {', '.join(HIDDEN_KINDS)}")
