"""The direct Vulkan device: the same graphs and shaders as Kompute, with real barriers and cheap submissions.

Barriers stand between levels only; pipelines depend on kernel and specialisation constants only; a submission
reuses its fence. Measured against Kompute: docs/kompute.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from vkbackend.device.base import Array, Buffer, DeviceInfo, Words
from vkbackend.device.dispatching import Command, DispatchProgram, HostRegion, RegionPool, check_allocation
from vkbackend.device.probe import local_memory, uses_subgroups
from vkbackend.device.vulkan_memory import (
    HOST,
    TOUCHED,
    USE,
    WORK,
    WRITTEN,
    Memory,
    VulkanBuffer,
    VulkanHostRegion,
    as_words,
)
from vkbackend.device.vulkan_pipelines import DescriptorSet, Pipeline, PipelineKey, Pipelines
from vkbackend.device.vulkan_session import Job, Session
from vkbackend.errors import DeviceError
from vkbackend.graph import F32, Graph

_BIND_COMPUTE = 1  # VK_PIPELINE_BIND_POINT_COMPUTE
_STAGE_COMPUTE = 0x20  # of a shader, in push constants
_AT_BOTTOM = 0x2000  # VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT
_RESULT_64_WAIT = 0x1 | 0x2


class VulkanRecording:
    """A recorded command buffer. One `run` is one submission and one wait."""

    def __init__(self, device: VulkanDevice, job: Job, queries: Any, n_queries: int) -> None:
        self._device = device  # a program that is still used keeps its device open
        self._session = device.session
        self._job = job
        self._queries = queries
        self._n_queries = n_queries

    def run(self) -> None:
        self._session.run(self._job)

    def level_seconds(self) -> list[float]:
        """Device time of each level of the last run."""
        session = self._session
        if not self._n_queries:
            raise DeviceError(f"{session.info.name}: this program has no timestamps; compile it with timestamps=True")
        session.settle()
        ticks = session.ffi.new("uint64_t[]", self._n_queries)
        n_bytes = 8 * self._n_queries
        session.check(
            session.lib.vkGetQueryPoolResults(
                session.device, self._queries, 0, self._n_queries, n_bytes, ticks, 8, _RESULT_64_WAIT
            ),
            "reading timestamps",
        )
        mask = (1 << session.timestamp_bits) - 1
        return [(b - a & mask) * session.found.timestamp_ns * 1e-9 for a, b in pairwise(ticks)]


class VulkanDevice:
    """One physical device driven through Vulkan itself. Raises `DeviceError` when it can not be opened.

    `subgroups=False` takes the shared-memory variant of every kernel. `unified=False` stages all copies even
    where host and device share memory; both are for tests.
    """

    holds_packed_weights = True

    def __init__(self, index: int = 0, subgroups: bool = True, unified: bool | None = None) -> None:
        self.session = session = Session(index)
        # Also when nobody calls close(): at garbage collection or at exit, whichever is first.
        weakref.finalize(self, session.close)
        found = session.info
        self.subgroups = subgroups and uses_subgroups(found.limits)
        self.info: DeviceInfo = replace(found, limits=replace(found.limits, subgroup_shuffle=self.subgroups))
        self.max_burst = 16 if found.kind == "gpu" else 1  # a CPU driver's steps are long, its submissions cheap
        self.memory = Memory(session, unified)
        self.pipelines = Pipelines(session, self.subgroups)
        self.pool = RegionPool(self)

    # ---- memory

    @property
    def allocated_bytes(self) -> int:
        """Bytes of device and host memory that this device holds now."""
        return self.memory.n_bytes

    @property
    def free_bytes(self) -> int | None:
        """What this process may still take of the device's memory (VK_EXT_memory_budget)."""
        session = self.session
        session.require_usable()
        return local_memory(session.vk, session.physical, session.found.extensions)[1] or None

    def allocate(self, n_words: int, dtype: str = F32, label: str = "") -> VulkanBuffer:
        check_allocation(n_words, label, self.info)
        return self.memory.buffer(n_words, label)

    def host_region(self, n_words: int, label: str) -> VulkanHostRegion:
        check_allocation(n_words, label, self.info)
        return self.memory.host_region(n_words, label)

    def upload(self, buffer: Buffer, offset: int, data: Array) -> None:
        words = as_words(data)
        self.memory.upload(self._checked(buffer, offset, words.size), offset, words)

    def download(self, buffer: Buffer, offset: int, n_words: int) -> Words:
        return self.memory.download(self._checked(buffer, offset, n_words), offset, n_words)

    def fill(self, buffer: Buffer, offset: int, n_words: int, word: int) -> None:
        self.memory.fill(self._checked(buffer, offset, n_words), offset, n_words, word)

    def copy(self, source: Buffer, source_at: int, target: Buffer, target_at: int, n_words: int) -> None:
        from_buffer = self._checked(source, source_at, n_words)
        self.memory.copy(from_buffer, source_at, self._checked(target, target_at, n_words), target_at, n_words)

    def _checked(self, buffer: Any, offset: int, n_words: int) -> VulkanBuffer:
        if offset < 0 or n_words < 0 or offset + n_words > buffer.n_words:
            raise DeviceError(
                f"{self.info.name}: words [{offset}, {offset + n_words}) are outside a buffer of {buffer.n_words} words"
            )
        return _on_device(buffer)

    # ---- programs

    def compile(self, graph: Graph, poison: bool = False, timestamps: bool = False) -> DispatchProgram:
        return DispatchProgram(self, graph, poison, timestamps)

    def record(
        self,
        levels: Sequence[Sequence[Command]],
        inputs: HostRegion,
        outputs: HostRegion,
        timestamps: bool,
        used: tuple[int, int] | None = None,
    ) -> VulkanRecording:
        """Records levels with one barrier between two of them. `used`: the words of both regions to copy (all)."""
        session, memory = self.session, self.memory
        if timestamps and not (session.found.timestamp_ns and session.timestamp_bits):
            raise DeviceError(f"{self.info.name}: this device has no timestamps; compile with timestamps=False")
        n_in, n_out = used or (inputs.n_words, outputs.n_words)
        with session.lock:
            session.require_usable()
            self.pipelines.prepare(_key(command) for level in levels for command in level)
            job = Job(session)
            n_queries = len(levels) + 1 if timestamps else 0
            queries = self._query_pool(job, n_queries)
            job.references += [inputs, outputs]
            job.begin()
            if n_queries:
                session.lib.vkCmdResetQueryPool(job.commands, queries, 0, n_queries)
            _record_region(memory, job, inputs, n_in, to_device=True)
            memory.barrier(job, WORK, USE)
            self._stamp(job, queries, 0)
            bound: tuple[Pipeline | None, DescriptorSet | None] = (None, None)
            for i, level in enumerate(levels):
                if i > 0:
                    memory.barrier(job, WRITTEN, TOUCHED)
                for command in level:
                    bound = self._record_dispatch(job, command, bound)
                self._stamp(job, queries, i + 1)
            if _is_staged(outputs) and n_out:
                memory.barrier(job, WORK, USE)
                _record_region(memory, job, outputs, n_out, to_device=False)
            memory.barrier(job, WORK, HOST)
            job.end()
            return VulkanRecording(self, job, queries, n_queries)

    def _record_dispatch(
        self, job: Job, command: Command, bound: tuple[Pipeline | None, DescriptorSet | None]
    ) -> tuple[Pipeline, DescriptorSet]:
        """Records one dispatch; binds only what the dispatch before did not."""
        ffi, lib = self.session.ffi, self.session.lib
        pipeline = self.pipelines.get(_key(command))
        descriptors = self.pipelines.descriptors([_on_device(b) for b in command.buffers])
        last_pipeline, last_descriptors = bound
        if pipeline is not last_pipeline:
            lib.vkCmdBindPipeline(job.commands, _BIND_COMPUTE, pipeline.handle)
        same_layout = last_pipeline is not None and pipeline.layout == last_pipeline.layout
        if descriptors is not last_descriptors or not same_layout:
            job.references.append(descriptors)
            handle = ffi.new("VkDescriptorSet*", descriptors.handle)
            lib.vkCmdBindDescriptorSets(job.commands, _BIND_COMPUTE, pipeline.layout, 0, 1, handle, 0, ffi.NULL)
        if command.push:
            words = ffi.new("uint32_t[]", command.push)
            lib.vkCmdPushConstants(job.commands, pipeline.layout, _STAGE_COMPUTE, 0, 4 * len(command.push), words)
        lib.vkCmdDispatch(job.commands, *command.groups)
        return pipeline, descriptors

    def _query_pool(self, job: Job, n_queries: int) -> Any:
        session = self.session
        ffi, lib, device = session.ffi, session.lib, session.device
        if not n_queries:
            return None
        info = ffi.new(
            "VkQueryPoolCreateInfo*",
            {
                "sType": session.vk.VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO,
                "queryType": session.vk.VK_QUERY_TYPE_TIMESTAMP,
                "queryCount": n_queries,
            },
        )
        pool = ffi.new("VkQueryPool*")
        session.check(lib.vkCreateQueryPool(device, info, ffi.NULL, pool), "making a query pool")
        session.own(job, lambda: lib.vkDestroyQueryPool(device, pool[0], ffi.NULL))
        return pool[0]

    def _stamp(self, job: Job, queries: Any, index: int) -> None:
        if queries is not None:
            self.session.lib.vkCmdWriteTimestamp(job.commands, _AT_BOTTOM, queries, index)

    def close(self) -> None:
        """Frees everything and keeps the pipeline cache for the next time. May be called again."""
        self.session.close()


def _key(command: Command) -> PipelineKey:
    return PipelineKey(command.kernel, command.spec, len(command.buffers), len(command.push))


def _on_device(buffer: Any) -> VulkanBuffer:
    found = buffer.device if isinstance(buffer, VulkanHostRegion) else buffer
    assert isinstance(found, VulkanBuffer), "a buffer of another device"
    return found


def _is_staged(region: HostRegion) -> bool:
    return isinstance(region, VulkanHostRegion) and region.staging is not None


def _record_region(memory: Memory, job: Job, region: HostRegion, n_words: int, to_device: bool) -> None:
    """Records the copy between the two sides of a host region, where it has two."""
    if isinstance(region, VulkanHostRegion) and region.staging is not None and n_words:
        source, target = (region.staging, region.device) if to_device else (region.device, region.staging)
        memory.record_copy(source, 0, target, 0, n_words, job)
