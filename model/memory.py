"""What a context remembers: KV caches and the recurrent ring, both indexed by position.

The state after position p lies in ring slot p mod (1 + n_rs_seq), the KV row of position p in row p, the raw
conv column of position p in column p mod C. So rollback moves nothing: `seq_rm` of a tail lowers the number of
tokens, and the next step finds its state by that number. What must be known is how far back the ring is still
whole; `SequenceState.first_state` keeps that, and `rollback_depth` and `seq_rm` both read it from there.
"""

from __future__ import annotations

import enum
import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkbackend.device.base import Buffer, Device, check_memory
from vkbackend.errors import ContextError, DeviceError
from vkbackend.graph import Tensor, bound
from vkbackend.ops.delta_net_mixer import conv_ring_columns

ALIGN = 64  # words
_REMEDY = "use a smaller n_ctx, n_seq_max or n_rs_seq"


class SeqRm(enum.Enum):
    """What kinds of removal a context can do."""

    NO = "no"  # none
    PART = "part"  # any tail: plain attention
    FULL = "full"  # whole sequences only: recurrent, no snapshots
    PART_BOUNDED = "part_bounded"  # tails of at most n_rs_seq tokens: recurrent with snapshots


@dataclass(frozen=True)
class MemoryShape:
    """Sizes of the memories of one context. The two layer counts say how many layers have which memory."""

    n_attention: int
    n_recurrent: int
    n_seq_max: int
    n_ctx: int
    n_rs_seq: int
    n_head_kv: int
    head_dim: int
    n_v_heads: int = 0
    head_v_dim: int = 0
    head_k_dim: int = 0
    conv_dim: int = 0
    conv_kernel: int = 1

    @property
    def n_slots(self) -> int:
        """Snapshot slots per sequence: the current state and n_rs_seq older ones."""
        return 1 + self.n_rs_seq

    @property
    def n_columns(self) -> int:
        """Columns of the conv ring per sequence."""
        return conv_ring_columns(self.n_rs_seq, self.conv_kernel)


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one attention layer: each [n_seq_max, n_ctx, n_head_kv, head_dim]."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class RecurrentRing:
    """One recurrent layer: conv columns [n_seq_max, C, conv_dim] and states [n_seq_max, R, n_v_heads, dv, dk]."""

    conv: Tensor
    state: Tensor


@dataclass
class SequenceState:
    """Tokens in the sequence, and the oldest position whose recurrent state the ring still holds."""

    n_past: int = 0
    first_state: int = 0


class Memory:
    """The device memory of a context and the bookkeeping of its sequences."""

    def __init__(self, device: Device, shape: MemoryShape) -> None:
        self.shape = shape
        self._device = device
        self.seqs = [SequenceState() for _ in range(shape.n_seq_max)]
        kv = (shape.n_seq_max, shape.n_ctx, shape.n_head_kv, shape.head_dim)
        conv = (shape.n_seq_max, shape.n_columns, shape.conv_dim)
        state = (shape.n_seq_max, shape.n_slots, shape.n_v_heads, shape.head_v_dim, shape.head_k_dim)
        wanted: list[tuple[str, tuple[int, ...]]] = [("kv cache", kv)] * (2 * shape.n_attention)
        wanted += [("conv ring", conv), ("recurrent ring", state)] * shape.n_recurrent
        regions = _regions(device, wanted)
        self.kv = [KVCache(*regions[2 * i : 2 * i + 2]) for i in range(shape.n_attention)]
        rest = regions[2 * shape.n_attention :]
        self.rings = [RecurrentRing(*rest[2 * i : 2 * i + 2]) for i in range(shape.n_recurrent)]

    # ---- bookkeeping

    @property
    def kind(self) -> SeqRm:
        if not self.shape.n_recurrent:
            return SeqRm.PART
        return SeqRm.PART_BOUNDED if self.shape.n_rs_seq else SeqRm.FULL

    def advance(self, seq: int, n_tokens: int) -> None:
        """Notes that n_tokens more were decoded: the ring keeps the states of the last 1 + n_rs_seq of them."""
        s = self.seqs[seq]
        s.n_past += n_tokens
        s.first_state = max(s.first_state, s.n_past - self.shape.n_slots)

    def rollback_depth(self, seq: int) -> int:
        """The most tokens that can be removed from the end one by one (clearing everything always works)."""
        s = self.seqs[seq]
        if not self.shape.n_recurrent:
            return s.n_past
        kept = s.n_past if s.first_state == 0 else s.n_past - 1 - s.first_state
        return min(kept, self.shape.n_rs_seq)

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        """Removes positions [p0, p1); p1 < 0 means to the end. False, and no change, where it can not be done."""
        s = self.seqs[seq]
        p0 = max(p0, 0)
        end = s.n_past if p1 < 0 else min(p1, s.n_past)
        if p0 >= end:
            return True  # nothing there: distance 0
        if end < s.n_past:
            return False  # from the middle: later tokens depend on what would go
        if p0 == 0:
            self.seqs[seq] = SequenceState()
            return True
        if s.n_past - p0 > self.rollback_depth(seq):
            return False
        s.n_past = p0
        return True

    # ---- copies

    def copy(self, src: int, dst: int) -> None:
        """Makes dst an independent copy of src, its older states included. A failure leaves dst empty."""
        if src == dst:
            return
        n_past = self.seqs[src].n_past
        self.seqs[dst] = SequenceState()
        for tensor, per_token in self._tensors():
            n = tensor.strides[0] if per_token is None else n_past * per_token
            if n:
                base, step = tensor.storage.base, tensor.strides[0]
                buffer = _buffer(tensor)
                self._device.copy(buffer, base + src * step, buffer, base + dst * step, n)
        self.seqs[dst] = SequenceState(n_past, self.seqs[src].first_state)

    def _tensors(self) -> list[tuple[Tensor, int | None]]:
        """Every memory tensor, with its words per token where rows are tokens (KV), else None (rings)."""
        per_token = self.shape.n_head_kv * self.shape.head_dim
        out: list[tuple[Tensor, int | None]] = [(t, per_token) for c in self.kv for t in (c.k, c.v)]
        return out + [(t, None) for r in self.rings for t in (r.conv, r.state)]

    # ---- checkpoints

    def save(self, seq: int) -> bytes:
        """The sequence's current state as bytes: KV rows, the newest recurrent state, the live conv columns."""
        s = self.seqs[seq]
        live = [self._device.download(_buffer(t), t.storage.base + start, n) for t, start, n in self._live(seq)]
        payload = b"".join(words.tobytes() for words in live)
        header = _HEADER.pack(_MAGIC, *self._fingerprint(), s.n_past)
        return header + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(header))) + payload

    def restore(self, seq: int, data: bytes) -> None:
        """Puts a saved state into a sequence. Its rollback depth is 0 until new tokens are decoded."""
        start = _HEADER.size + _CHECKSUM.size
        if len(data) < start:
            raise ContextError(f"state_set: {len(data)} bytes are too few for a saved state (at least {start})")
        magic, *rest = _HEADER.unpack_from(data)
        if magic != _MAGIC or tuple(rest[:-1]) != self._fingerprint():
            raise ContextError("state_set: these bytes were not saved by a context of this model's shape")
        n_past = rest[-1]
        if n_past > self.shape.n_ctx:
            raise ContextError(f"state_set: the saved state has {n_past} tokens, this context holds {self.shape.n_ctx}")
        before = self.seqs[seq]
        self.seqs[seq] = SequenceState(n_past, max(0, n_past - 1))
        live = self._live(seq)
        need = start + 4 * sum(n for _, _, n in live)
        if len(data) != need:
            self.seqs[seq] = before
            raise ContextError(f"state_set: {len(data)} bytes given, a state of {n_past} tokens has {need}")
        checksum = zlib.crc32(data[start:], zlib.crc32(data[: _HEADER.size]))
        if checksum != _CHECKSUM.unpack_from(data, _HEADER.size)[0]:
            self.seqs[seq] = before
            raise ContextError("state_set: the bytes do not match their checksum: they were changed after state_get")
        words: NDArray[np.uint32] = np.frombuffer(data, np.uint32, offset=start)
        at = 0
        try:
            for tensor, first, n in live:
                self._device.upload(_buffer(tensor), tensor.storage.base + first, words[at : at + n])
                at += n
        except DeviceError as error:
            self.seqs[seq] = SequenceState()
            raise DeviceError(f"{error}; sequence {seq} was half replaced: cleared") from error

    def _live(self, seq: int) -> list[tuple[Tensor, int, int]]:
        """(tensor, first word, words) of everything the next token of a sequence can read."""
        n_past = self.seqs[seq].n_past
        if n_past == 0:
            return []
        out = []
        for tensor, per_token in self._tensors():
            base = seq * tensor.strides[0]
            if per_token is not None:
                out.append((tensor, base, n_past * per_token))
                continue
            n_rows, row = tensor.shape[1], tensor.strides[1]
            # Of the state ring only the newest slot, of the conv ring the columns under the kernel's window.
            n_live = 1 if tensor.ndim == 5 else min(self.shape.conv_kernel - 1, n_past)
            for position in range(n_past - n_live, n_past):
                out.append((tensor, base + position % n_rows * row, row))
        return out

    def _fingerprint(self) -> tuple[int, ...]:
        s = self.shape
        return (
            s.n_attention, s.n_recurrent, s.n_head_kv, s.head_dim, s.n_v_heads, s.head_v_dim, s.head_k_dim, s.conv_dim,
            s.conv_kernel,
        )  # fmt: skip


_MAGIC = 0x53424B56  # "VKBS"
_HEADER = struct.Struct("<11I")
_CHECKSUM = struct.Struct("<I")  # CRC-32 of the header and of everything behind the checksum


def _buffer(tensor: Tensor) -> Buffer:
    assert tensor.storage.buffer is not None
    return tensor.storage.buffer


def _regions(device: Device, wanted: list[tuple[str, tuple[int, ...]]]) -> list[Tensor]:
    """One tensor per wanted shape, packed into as few buffers as the device's limits allow."""
    capacity = min(device.info.limits.max_storage_range, device.info.limits.max_buffer_bytes) // 4
    sizes: list[int] = []
    homes: list[tuple[int, int]] = []
    for _, shape in wanted:
        need = -(-math.prod(shape) // ALIGN) * ALIGN
        if not sizes or sizes[-1] + need > capacity:
            sizes.append(0)
        homes.append((len(sizes) - 1, sizes[-1]))
        sizes[-1] += need
    check_memory(device, 4 * sum(sizes), "the KV cache and states of a context", _REMEDY)
    buffers = [device.allocate(n, label=f"context memory {i}") for i, n in enumerate(sizes)]
    return [
        bound(label, buffers[home], base, shape) for (label, shape), (home, base) in zip(wanted, homes, strict=True)
    ]
