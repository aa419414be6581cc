"""Where buffers lie: large ones in an allocation of their own, small ones together in blocks.

A driver allows a few thousand allocations in all, and rounds each up to pages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vkbackend.device.vulkan_session import Session

BLOCK_BYTES = 4 << 20
SMALL_BYTES = 1 << 20  # buffers below this share blocks


@dataclass(eq=False)
class Block:
    """One VkDeviceMemory. `free` are the byte ranges [start, end) that no buffer has, in order, never adjacent."""

    memory: Any
    n_bytes: int
    free_it: Callable[[], None]
    free: list[tuple[int, int]] = field(default_factory=list)
    mapping: Any = None  # a cffi pointer to its first byte, once mapped

    def take(self, n_bytes: int, alignment: int) -> int:
        """The start of a free range of that size, now taken; -1 when there is none."""
        for i, (start, end) in enumerate(self.free):
            at = -(-start // alignment) * alignment
            if at + n_bytes <= end:
                self.free[i : i + 1] = [(a, b) for a, b in ((start, at), (at + n_bytes, end)) if a < b]
                return at
        return -1

    def give_back(self, start: int, n_bytes: int) -> None:
        """Frees a range that was taken."""
        merged: list[tuple[int, int]] = []
        for a, b in sorted([*self.free, (start, start + n_bytes)]):
            if merged and merged[-1][1] == a:
                merged[-1] = (merged[-1][0], b)
            else:
                merged.append((a, b))
        self.free = merged


@dataclass(frozen=True, eq=False)
class Piece:
    """Memory for one buffer: bytes [offset, offset + n_bytes) of a block; `own`: the block is its alone."""

    block: Block
    offset: int
    n_bytes: int
    own: bool


class Blocks:
    """Finds memory for buffers and takes it back."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shared: dict[int, list[Block]] = {}  # by memory type
        # Buffers end in garbage collections, which may come in the middle of `take`: they only queue up here.
        self._returned: deque[Piece] = deque()
        self._lock = threading.RLock()

    def take(self, memory_type: int, n_bytes: int, alignment: int) -> tuple[int, Piece | None]:
        """Memory of one type: (0, piece), or the VkResult that the driver refused with."""
        if n_bytes >= SMALL_BYTES:
            code, block = self._allocate(memory_type, n_bytes)
            return code, Piece(block, 0, n_bytes, True) if block else None
        with self._lock:
            self._settle()
            blocks = self._shared.setdefault(memory_type, [])
            for block in blocks:
                if (at := block.take(n_bytes, alignment)) >= 0:
                    return 0, Piece(block, at, n_bytes, False)
            code, new = self._allocate(memory_type, BLOCK_BYTES)
            if new is None:
                return code, None
            new.free = [(0, BLOCK_BYTES)]
            blocks.append(new)
            return 0, Piece(new, new.take(n_bytes, alignment), n_bytes, False)

    def give_back(self, piece: Piece) -> None:
        """Takes memory back; a block without buffers goes back to the driver when memory is next asked for."""
        if piece.own:
            piece.block.free_it()
        else:
            self._returned.append(piece)

    def pointer(self, piece: Piece) -> Any:
        """The host's address of a piece, whose memory must be host visible. Raises `DeviceError`."""
        session, block = self._session, piece.block
        ffi = session.ffi
        with self._lock:
            if block.mapping is None:
                address = ffi.new("void**")
                code = session.lib.vkMapMemory(session.device, block.memory, 0, block.n_bytes, 0, address)
                session.check(code, f"mapping {block.n_bytes} bytes")
                block.mapping = ffi.cast("char*", address[0])
            return block.mapping + piece.offset

    def _settle(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            piece.block.give_back(piece.offset, piece.n_bytes)
        for blocks in self._shared.values():
            for block in [b for b in blocks if b.free == [(0, b.n_bytes)]]:
                blocks.remove(block)
                block.free_it()

    def _allocate(self, memory_type: int, n_bytes: int) -> tuple[int, Block | None]:
        session = self._session
        ffi, lib, device = session.ffi, session.lib, session.device
        info = ffi.new(
            "VkMemoryAllocateInfo*",
            {
                "sType": session.vk.VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO,
                "allocationSize": n_bytes,
                "memoryTypeIndex": memory_type,
            },
        )
        out = ffi.new("VkDeviceMemory*")
        code = int(lib.vkAllocateMemory(device, info, ffi.NULL, out))
        if code:
            return code, None
        key = session.keep(lambda: lib.vkFreeMemory(device, out[0], ffi.NULL))
        return 0, Block(out[0], n_bytes, lambda: session.end(key))
