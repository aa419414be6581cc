"""Memory of the direct Vulkan device: buffers, host regions, and copies between host and device.

On devices whose local memory the host can map with its caches (integrated GPUs, CPU drivers: "unified"), every
buffer is mapped and copies are NumPy's. Elsewhere buffers are device-local and everything goes through two
staging buffers, so that the host fills one while the device empties the other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from vkbackend.device.base import Array, Words
from vkbackend.device.vulkan_blocks import Blocks, Piece
from vkbackend.device.vulkan_session import Job, Session
from vkbackend.errors import DeviceError

STAGING_WORDS = 4 << 20  # two of 16 MiB

LOCAL, VISIBLE, COHERENT, CACHED = 0x1, 0x2, 0x4, 0x8
_LAZY = 0x10
_USAGE = 0x1 | 0x2 | 0x20  # transfer source, transfer target, storage buffer
_OUT_OF_MEMORY = (-1, -2, -10)
_NO_MEMORY_TYPE = -8  # VK_ERROR_FEATURE_NOT_PRESENT: Vulkan promises that this does not happen

STAGE_COMPUTE, STAGE_TRANSFER, STAGE_HOST = 0x800, 0x1000, 0x4000
SHADER_READ, SHADER_WRITE = 0x20, 0x40
TRANSFER_READ, TRANSFER_WRITE = 0x800, 0x1000
HOST_READ = 0x2000


@dataclass(eq=False)
class VulkanBuffer:
    """A VkBuffer and its memory. `mapped` are its words where the host can see them."""

    handle: Any
    n_words: int
    mapped: Words | None = None


class VulkanHostRegion:
    """A device buffer and the host's words for it. One memory when `staging` is None, else copied by recordings."""

    def __init__(self, session: Session, device: VulkanBuffer, staging: VulkanBuffer | None) -> None:
        mapped = device.mapped if staging is None else staging.mapped
        assert mapped is not None
        self._session = session
        self._mapped: Words = mapped
        self.device = device
        self.staging = staging

    @property
    def n_words(self) -> int:
        return self.device.n_words

    @property
    def words(self) -> Words:
        """The host's words. Raises `DeviceError` when the device was closed or lost."""
        self._session.settle()
        return self._mapped


class Memory:
    """Makes buffers and moves words in and out of them."""

    def __init__(self, session: Session, unified: bool | None = None) -> None:
        self._session = session
        properties = session.vk.vkGetPhysicalDeviceMemoryProperties(session.physical)
        self._types = [int(properties.memoryTypes[i].propertyFlags) for i in range(properties.memoryTypeCount)]
        can_unify = any(flags & 0xF == LOCAL | VISIBLE | COHERENT | CACHED for flags in self._types)
        self.unified = can_unify and unified is not False
        self.n_bytes = 0
        self._blocks = Blocks(session)
        self._slots: list[_Slot] = []

    # ---- buffers

    def buffer(self, n_words: int, label: str) -> VulkanBuffer:
        """Device memory with undefined contents. Raises `DeviceError` when it does not fit."""
        wanted = LOCAL | VISIBLE | COHERENT | CACHED if self.unified else LOCAL
        return self._buffer(n_words, label, [wanted], mapped=self.unified)

    def host_buffer(self, n_words: int, label: str) -> VulkanBuffer:
        """Host memory that the device can copy from and to, mapped; cached where possible, as it is also read."""
        return self._buffer(n_words, label, [VISIBLE | COHERENT | CACHED, VISIBLE | COHERENT], mapped=True)

    def host_region(self, n_words: int, label: str) -> VulkanHostRegion:
        """A zeroed region that recordings copy in or out."""
        device = self.buffer(n_words, label)
        region = VulkanHostRegion(
            self._session, device, None if self.unified else self.host_buffer(n_words, f"{label}, host side")
        )
        region.words[:] = 0
        return region

    def _buffer(self, n_words: int, label: str, wanted: list[int], mapped: bool) -> VulkanBuffer:
        session = self._session
        session.require_usable()
        ffi, lib, vk, device = session.ffi, session.lib, session.vk, session.device
        n_bytes = 4 * n_words
        info = ffi.new(
            "VkBufferCreateInfo*",
            {"sType": vk.VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO, "size": n_bytes, "usage": _USAGE, "sharingMode": 0},
        )
        out = ffi.new("VkBuffer*")
        code = lib.vkCreateBuffer(device, info, ffi.NULL, out)
        if code:
            raise self._failed(code, n_bytes, label)
        handle = out[0]
        needs = ffi.new("VkMemoryRequirements*")
        lib.vkGetBufferMemoryRequirements(device, handle, needs)
        code, piece = self._allocate(needs, wanted)
        if piece is None:
            lib.vkDestroyBuffer(device, handle, ffi.NULL)
            raise self._failed(code, n_bytes, label)
        self.n_bytes += piece.n_bytes

        def destroy() -> None:
            self.n_bytes -= piece.n_bytes
            lib.vkDestroyBuffer(device, handle, ffi.NULL)
            self._blocks.give_back(piece)

        buffer = VulkanBuffer(handle, n_words)
        session.own(buffer, destroy)
        code = lib.vkBindBufferMemory(device, handle, piece.block.memory, piece.offset)
        session.check(code, f"binding the memory of {label}")
        if mapped:
            buffer.mapped = np.frombuffer(ffi.buffer(self._blocks.pointer(piece), n_bytes), np.uint32)
        return buffer

    def _allocate(self, needs: Any, wanted: list[int]) -> tuple[int, Piece | None]:
        """Tries every fitting memory type, best first, then once more after unused buffers were collected."""
        usable = [(i, f) for i, f in enumerate(self._types) if needs.memoryTypeBits >> i & 1 and not f & _LAZY]
        order = list(dict.fromkeys(i for need in wanted for i, flags in usable if flags & need == need))
        code = _NO_MEMORY_TYPE
        for attempt in range(2 if order else 0):
            if attempt == 1:
                self._session.settle()
                gc.collect()
            for i in order:
                code, piece = self._blocks.take(i, int(needs.size), int(needs.alignment))
                if code not in _OUT_OF_MEMORY:
                    return code, piece
        return code, None

    def _failed(self, code: int, n_bytes: int, label: str) -> DeviceError:
        total = self._session.info.memory
        doing = (
            f"allocating {n_bytes} bytes for {label or 'a buffer'} (this process holds {self.n_bytes} bytes there, "
            f"the device's memory has {total})"
        )
        error = self._session.error(code, doing)
        if code not in _OUT_OF_MEMORY:
            return error
        return DeviceError(f"{error}; use a smaller n_ctx, n_seq_max or n_ubatch, or a smaller quantisation")

    # ---- moving words

    def upload(self, buffer: VulkanBuffer, offset: int, words: Words) -> None:
        with self._session.lock:
            self._session.settle()
            if buffer.mapped is not None:
                buffer.mapped[offset : offset + words.size] = words
                return
            parts = _parts(words.size)
            slots = self._get_slots()
            for i, (start, n) in enumerate(parts):
                slot = slots[i % 2]
                slot.wait()
                slot.words[:n] = words[start : start + n]
                slot.start(partial(self.record_copy, slot.buffer, 0, buffer, offset + start, n))
            for slot in slots:
                slot.wait()

    def download(self, buffer: VulkanBuffer, offset: int, n_words: int) -> Words:
        with self._session.lock:
            self._session.settle()
            if buffer.mapped is not None:
                return buffer.mapped[offset : offset + n_words].copy()
            out = np.empty(n_words, np.uint32)
            parts = _parts(n_words)
            slots = self._get_slots()
            for i in range(len(parts) + 1):
                if i < len(parts):
                    slot, (start, n) = slots[i % 2], parts[i]
                    slot.start(partial(self.record_copy, buffer, offset + start, slot.buffer, 0, n))
                if i > 0:  # while the device copies part i, the host takes part i - 1
                    slot, (start, n) = slots[(i - 1) % 2], parts[i - 1]
                    slot.wait()
                    out[start : start + n] = slot.words[:n]
            return out

    def fill(self, buffer: VulkanBuffer, offset: int, n_words: int, word: int) -> None:
        if n_words == 0:
            return
        with self._session.lock:
            self._session.settle()
            if buffer.mapped is not None:
                buffer.mapped[offset : offset + n_words] = word
                return
            fill = self._session.lib.vkCmdFillBuffer
            self._once(lambda job: fill(job.commands, buffer.handle, 4 * offset, 4 * n_words, word))

    def copy(self, source: VulkanBuffer, source_at: int, target: VulkanBuffer, target_at: int, n_words: int) -> None:
        if n_words == 0:
            return
        with self._session.lock:
            self._session.settle()
            if source.mapped is not None and target.mapped is not None:
                target.mapped[target_at : target_at + n_words] = source.mapped[source_at : source_at + n_words]
                return
            self._once(partial(self.record_copy, source, source_at, target, target_at, n_words))

    def record_copy(
        self, source: VulkanBuffer, source_at: int, target: VulkanBuffer, target_at: int, n_words: int, job: Job
    ) -> None:
        """Records a copy of words; barriers are the caller's."""
        region = self._session.ffi.new(
            "VkBufferCopy*", {"srcOffset": 4 * source_at, "dstOffset": 4 * target_at, "size": 4 * n_words}
        )
        self._session.lib.vkCmdCopyBuffer(job.commands, source.handle, target.handle, 1, region)

    def barrier(self, job: Job, after: tuple[int, int], before: tuple[int, int]) -> None:
        """Records one global memory barrier; both sides are (stages, accesses)."""
        ffi, vk = self._session.ffi, self._session.vk
        memory = ffi.new(
            "VkMemoryBarrier*",
            {"sType": vk.VK_STRUCTURE_TYPE_MEMORY_BARRIER, "srcAccessMask": after[1], "dstAccessMask": before[1]},
        )
        self._session.lib.vkCmdPipelineBarrier(
            job.commands, after[0], before[0], 0, 1, memory, 0, ffi.NULL, 0, ffi.NULL
        )

    def _once(self, record: Callable[[Job], Any]) -> None:
        slot = self._get_slots()[0]
        slot.start(record)
        slot.wait()

    def _get_slots(self) -> list[_Slot]:
        if not self._slots:
            self._slots = [_Slot(self._session, self) for _ in range(2)]
        return self._slots


WORK = (STAGE_COMPUTE | STAGE_TRANSFER, SHADER_WRITE | TRANSFER_WRITE)  # whatever wrote before
USE = (STAGE_COMPUTE | STAGE_TRANSFER, SHADER_READ | SHADER_WRITE | TRANSFER_READ | TRANSFER_WRITE)  # whatever follows
HOST = (STAGE_HOST, HOST_READ)
# Between two levels there are dispatches only; naming no more stages than that lets a driver do no more than that.
WRITTEN = (STAGE_COMPUTE, SHADER_WRITE)
TOUCHED = (STAGE_COMPUTE, SHADER_READ | SHADER_WRITE)


class _Slot:
    """A staging buffer and the job that copies from or to it."""

    def __init__(self, session: Session, memory: Memory) -> None:
        self._session = session
        self._memory = memory
        self._job = Job(session)
        self._running = False
        self.buffer = memory.host_buffer(STAGING_WORDS, "staging")
        assert self.buffer.mapped is not None
        self.words: Words = self.buffer.mapped

    def start(self, record: Callable[[Job], Any]) -> None:
        self._job.begin()
        self._memory.barrier(self._job, WORK, USE)
        record(self._job)
        self._memory.barrier(self._job, WORK, HOST)
        self._job.end()
        self._session.submit(self._job)
        self._running = True

    def wait(self) -> None:
        if self._running:
            self._running = False
            self._session.finish(self._job)


def _parts(n_words: int) -> list[tuple[int, int]]:
    """(start, length) of the pieces that fit a staging buffer."""
    return [(at, min(STAGING_WORDS, n_words - at)) for at in range(0, n_words, STAGING_WORDS)]


def as_words(data: Array) -> Words:
    """The raw 32-bit words of a float32, int32 or uint32 array."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint32)
