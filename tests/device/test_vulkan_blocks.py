"""Small buffers share allocations: ranges never overlap, and everything goes back."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vkbackend.device.vulkan import VulkanDevice
from vkbackend.device.vulkan_blocks import BLOCK_BYTES, SMALL_BYTES, Block, Blocks, Piece


def test_ranges_of_a_block_against_a_bitmap(rng: np.random.Generator) -> None:
    n = 512
    block = Block(None, n, lambda: None, [(0, n)])
    owner = np.zeros(n, bool)
    taken: list[tuple[int, int]] = []
    refused = 0
    for _ in range(2000):
        if taken and rng.random() < 0.48:
            start, size = taken.pop(int(rng.integers(len(taken))))
            block.give_back(start, size)
            owner[start : start + size] = False
        else:
            size, alignment = int(rng.integers(1, 60)), 1 << int(rng.integers(0, 6))
            start = block.take(size, alignment)
            fits = any(not owner[at : at + size].any() for at in range(0, n - size + 1, alignment))
            assert (start >= 0) == fits
            if start < 0:
                refused += 1
                continue
            assert start % alignment == 0 and start + size <= n and not owner[start : start + size].any()
            owner[start : start + size] = True
            taken.append((start, size))
        edges = np.flatnonzero(np.diff(np.concatenate([[True], owner, [True]]).astype(int)))
        assert block.free == [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
    assert refused > 10
    for start, size in taken:
        block.give_back(start, size)
    assert block.free == [(0, n)]


class Counting:
    """A session whose driver counts allocations and refuses beyond a number of them."""

    def __init__(self, most: int) -> None:
        self.live: dict[int, int] = {}
        self.n = 0
        self.device = None
        self.ffi = SimpleNamespace(new=lambda kind, value=None: value or [0], NULL=None)
        self.vk = SimpleNamespace(VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO=5)
        self.most = most

        def allocate(device: Any, info: Any, _: Any, out: Any) -> int:
            if len(self.live) == self.most:
                return -2
            self.n += 1
            out[0] = self.n
            self.live[self.n] = info["allocationSize"]
            return 0

        self.lib = SimpleNamespace(vkAllocateMemory=allocate, vkFreeMemory=lambda d, m, _: self.live.pop(m))
        self.keys: dict[int, Any] = {}

    def keep(self, destroy: Any) -> int:
        self.keys[len(self.keys)] = destroy
        return len(self.keys) - 1

    def end(self, key: int) -> None:
        self.keys[key]()


def taken(blocks: Blocks, n_bytes: int, memory_type: int = 0) -> Piece:
    code, piece = blocks.take(memory_type, n_bytes, 64)
    assert code == 0 and piece is not None
    return piece


def test_small_ones_share_and_large_ones_do_not() -> None:
    session = Counting(most=4)
    blocks = Blocks(session)  # type: ignore[arg-type]
    small = [taken(blocks, 1000) for _ in range(100)]
    assert list(session.live.values()) == [BLOCK_BYTES] and len({p.offset for p in small}) == 100
    assert taken(blocks, 1000, memory_type=1).block is not small[0].block
    large = taken(blocks, SMALL_BYTES)
    assert large.own and list(session.live.values()) == [BLOCK_BYTES, BLOCK_BYTES, SMALL_BYTES]
    filling = [taken(blocks, SMALL_BYTES - 64) for _ in range(4)]  # more than the first block has left
    assert len(session.live) == 4
    assert blocks.take(0, SMALL_BYTES, 64) == (-2, None)  # the driver's refusal comes through
    blocks.give_back(large)
    assert len(session.live) == 3  # at once
    for piece in [*small, *filling]:
        blocks.give_back(piece)
    assert len(session.live) == 3  # with the next request: a garbage collection must not touch the lists
    taken(blocks, 10)
    assert list(session.live.values()) == [BLOCK_BYTES, BLOCK_BYTES]  # of each type the one in use


@pytest.mark.parametrize("unified", [None, False])
def test_neighbours_in_a_block_keep_their_words(
    vulkan: VulkanDevice, unified: bool | None, rng: np.random.Generator
) -> None:
    device = VulkanDevice(0, unified=unified)
    sizes = [int(n) for n in rng.integers(1, 3000, 60)]
    data = [rng.integers(0, 1 << 32, n, dtype=np.uint32) for n in sizes]
    buffers = [device.allocate(n) for n in sizes]
    for i in rng.permutation(60):
        device.upload(buffers[i], 0, data[i])
    del buffers[10:30]
    gc.collect()
    more = [device.allocate(n) for n in sizes[10:30]]
    for buffer in more:
        device.fill(buffer, 0, buffer.n_words, 7)
    for buffer, words in zip(buffers, data[:10] + data[30:], strict=True):
        np.testing.assert_array_equal(device.download(buffer, 0, buffer.n_words), words)
    device.close()
