"""Pipelines, descriptor sets and the pipeline cache file of the direct Vulkan device."""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkbackend.device.shared_memory import check_shared
from vkbackend.device.vulkan_memory import VulkanBuffer
from vkbackend.device.vulkan_session import Session
from vkbackend.errors import DeviceError
from vkbackend.ops.op import Kernel
from vkbackend.shaders.compiler import cache_dir, spirv

_STAGE_COMPUTE = 0x20
_STORAGE_BUFFER = 7  # VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
_SETS_IN_POOL = 128
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class PipelineKey:
    """All that a pipeline depends on. Sizes of dispatches and buffers are not part of it."""

    kernel: Kernel
    spec: tuple[int, ...]
    n_bindings: int
    n_push: int


@dataclass(frozen=True, eq=False)
class Pipeline:
    handle: Any
    layout: Any


class DescriptorSet:
    """Buffers bound at 0, 1, 2... Keeps them alive; goes back to its pool when no recording uses it."""

    def __init__(self, handle: Any, buffers: tuple[VulkanBuffer, ...]) -> None:
        self.handle = handle
        self.buffers = buffers


class Pipelines:
    """Makes and keeps pipelines and descriptor sets. Hold the session's lock while calling."""

    def __init__(self, session: Session, subgroups: bool) -> None:
        self._session = session
        self._subgroups = subgroups
        self._set_layouts: dict[int, Any] = {}
        self._layouts: dict[tuple[int, int], Any] = {}
        self._pipelines: dict[PipelineKey, Pipeline] = {}
        self._free_sets: dict[int, list[Any]] = {}
        self._sets: weakref.WeakValueDictionary[tuple[int, ...], DescriptorSet] = weakref.WeakValueDictionary()
        self._path = cache_dir().parent / "pipelines" / f"{session.found.cache_name}.bin"
        self._cache = self._open_cache(_read_checked(self._path))
        self._n_saved = 0
        session.keep(self.save)

    def __len__(self) -> int:
        return len(self._pipelines)

    # ---- pipelines

    def prepare(self, keys: Iterable[PipelineKey]) -> None:
        """Makes the missing pipelines, several at once: drivers take 10 to 100 ms for each."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._pipelines]
        for key in missing:  # layouts first, here: only the compilation runs in threads
            check_shared(key.kernel, self._subgroups, key.spec, self._session.info)
            self._layout(key)
        if len(missing) > 1:
            with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
                made = list(pool.map(self._make, missing))
        else:
            made = [self._make(key) for key in missing]
        self._pipelines.update(zip(missing, made, strict=True))

    def get(self, key: PipelineKey) -> Pipeline:
        """The pipeline of a key that was prepared."""
        return self._pipelines[key]

    def _make(self, key: PipelineKey) -> Pipeline:
        session = self._session
        ffi, lib, vk, device = session.ffi, session.lib, session.vk, session.device
        doing = f"making the pipeline of {key.kernel.name}.comp"
        code = ffi.from_buffer("char[]", spirv(key.kernel, self._subgroups))
        module = ffi.new("VkShaderModule*")
        module_info = ffi.new(
            "VkShaderModuleCreateInfo*",
            {
                "sType": vk.VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO,
                "codeSize": len(code),
                "pCode": ffi.cast("uint32_t*", code),
            },
        )
        session.check(lib.vkCreateShaderModule(device, module_info, ffi.NULL, module), doing)
        values = ffi.new("uint32_t[]", list(key.spec))
        entries = ffi.new(
            "VkSpecializationMapEntry[]",
            [{"constantID": i, "offset": 4 * i, "size": 4} for i in range(len(key.spec))],
        )
        constants = ffi.new(
            "VkSpecializationInfo*",
            {"mapEntryCount": len(entries), "pMapEntries": entries, "dataSize": 4 * len(values), "pData": values},
        )
        main = ffi.new("char[]", b"main")
        layout = self._layouts[key.n_bindings, key.n_push]
        info = ffi.new(
            "VkComputePipelineCreateInfo*",
            {
                "sType": vk.VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO,
                "stage": {
                    "sType": vk.VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO,
                    "stage": _STAGE_COMPUTE,
                    "module": module[0],
                    "pName": main,
                    "pSpecializationInfo": constants if key.spec else ffi.NULL,
                },
                "layout": layout,
                "basePipelineIndex": -1,
            },
        )
        out = ffi.new("VkPipeline*")
        try:
            session.check(lib.vkCreateComputePipelines(device, self._cache, 1, info, ffi.NULL, out), doing)
        finally:
            lib.vkDestroyShaderModule(device, module[0], ffi.NULL)
        session.keep(lambda: lib.vkDestroyPipeline(device, out[0], ffi.NULL))
        return Pipeline(out[0], layout)

    def _layout(self, key: PipelineKey) -> Any:
        shape = (key.n_bindings, key.n_push)
        if shape not in self._layouts:
            session = self._session
            ffi, lib, device = session.ffi, session.lib, session.device
            if key.n_bindings > session.found.max_bindings:
                raise DeviceError(
                    f"{session.info.name} ({session.info.description}): {key.kernel.name}.comp binds {key.n_bindings} "
                    f"buffers, the device allows {session.found.max_bindings}; use another device"
                )
            sets = ffi.new("VkDescriptorSetLayout[]", [self._set_layout(key.n_bindings)])
            push = ffi.new("VkPushConstantRange*", {"stageFlags": _STAGE_COMPUTE, "offset": 0, "size": 4 * key.n_push})
            info = ffi.new(
                "VkPipelineLayoutCreateInfo*",
                {
                    "sType": session.vk.VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO,
                    "setLayoutCount": 1,
                    "pSetLayouts": sets,
                    "pushConstantRangeCount": 1 if key.n_push else 0,
                    "pPushConstantRanges": push,
                },
            )
            out = ffi.new("VkPipelineLayout*")
            session.check(lib.vkCreatePipelineLayout(device, info, ffi.NULL, out), "making a pipeline layout")
            session.keep(lambda: lib.vkDestroyPipelineLayout(device, out[0], ffi.NULL))
            self._layouts[shape] = out[0]
        return self._layouts[shape]

    # ---- descriptor sets

    def descriptors(self, buffers: Sequence[VulkanBuffer]) -> DescriptorSet:
        """The set that binds these buffers whole. It lives as long as someone holds it."""
        # The ids in the key stay valid: a set that is found still holds its buffers.
        key = tuple(id(b) for b in buffers)
        found = self._sets.get(key)
        if found is None:
            free = self._free_sets.setdefault(len(buffers), [])
            if not free:
                free += self._new_sets(len(buffers))
            handle = free.pop()
            self._write(handle, buffers)
            found = DescriptorSet(handle, tuple(buffers))
            self._session.own(found, lambda: free.append(handle))
            self._sets[key] = found
        return found

    def _set_layout(self, n_bindings: int) -> Any:
        if n_bindings not in self._set_layouts:
            session = self._session
            ffi, lib, device = session.ffi, session.lib, session.device
            bindings = ffi.new(
                "VkDescriptorSetLayoutBinding[]",
                [
                    {
                        "binding": i,
                        "descriptorType": _STORAGE_BUFFER,
                        "descriptorCount": 1,
                        "stageFlags": _STAGE_COMPUTE,
                    }
                    for i in range(n_bindings)
                ],
            )
            info = ffi.new(
                "VkDescriptorSetLayoutCreateInfo*",
                {
                    "sType": session.vk.VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO,
                    "bindingCount": n_bindings,
                    "pBindings": bindings,
                },
            )
            out = ffi.new("VkDescriptorSetLayout*")
            session.check(lib.vkCreateDescriptorSetLayout(device, info, ffi.NULL, out), "making a descriptor layout")
            session.keep(lambda: lib.vkDestroyDescriptorSetLayout(device, out[0], ffi.NULL))
            self._set_layouts[n_bindings] = out[0]
        return self._set_layouts[n_bindings]

    def _new_sets(self, n_bindings: int) -> list[Any]:
        """A further pool of sets of one size."""
        session = self._session
        ffi, lib, vk, device = session.ffi, session.lib, session.vk, session.device
        sizes = ffi.new(
            "VkDescriptorPoolSize*", {"type": _STORAGE_BUFFER, "descriptorCount": _SETS_IN_POOL * max(1, n_bindings)}
        )
        pool_info = ffi.new(
            "VkDescriptorPoolCreateInfo*",
            {
                "sType": vk.VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO,
                "maxSets": _SETS_IN_POOL,
                "poolSizeCount": 1,
                "pPoolSizes": sizes,
            },
        )
        pool = ffi.new("VkDescriptorPool*")
        session.check(lib.vkCreateDescriptorPool(device, pool_info, ffi.NULL, pool), "making a descriptor pool")
        session.keep(lambda: lib.vkDestroyDescriptorPool(device, pool[0], ffi.NULL))
        layouts = ffi.new("VkDescriptorSetLayout[]", [self._set_layout(n_bindings)] * _SETS_IN_POOL)
        info = ffi.new(
            "VkDescriptorSetAllocateInfo*",
            {
                "sType": vk.VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO,
                "descriptorPool": pool[0],
                "descriptorSetCount": _SETS_IN_POOL,
                "pSetLayouts": layouts,
            },
        )
        sets = ffi.new("VkDescriptorSet[]", _SETS_IN_POOL)
        session.check(lib.vkAllocateDescriptorSets(device, info, sets), "making descriptor sets")
        return list(sets)

    def _write(self, handle: Any, buffers: Sequence[VulkanBuffer]) -> None:
        session = self._session
        ffi = session.ffi
        infos = ffi.new(
            "VkDescriptorBufferInfo[]", [{"buffer": b.handle, "offset": 0, "range": 4 * b.n_words} for b in buffers]
        )
        write = ffi.new(
            "VkWriteDescriptorSet*",
            {
                "sType": session.vk.VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET,
                "dstSet": handle,
                "dstBinding": 0,
                "descriptorCount": 1,
                "descriptorType": _STORAGE_BUFFER,
            },
        )
        for i in range(len(buffers)):
            write.dstBinding = i
            write.pBufferInfo = infos + i
            session.lib.vkUpdateDescriptorSets(session.device, 1, write, 0, ffi.NULL)

    # ---- the cache file

    def _open_cache(self, data: bytes) -> Any:
        session = self._session
        ffi, lib, device = session.ffi, session.lib, session.device
        initial = ffi.from_buffer("char[]", data)
        info = ffi.new(
            "VkPipelineCacheCreateInfo*",
            {
                "sType": session.vk.VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO,
                "initialDataSize": len(data),
                "pInitialData": initial if data else ffi.NULL,
            },
        )
        out = ffi.new("VkPipelineCache*")
        code = lib.vkCreatePipelineCache(device, info, ffi.NULL, out)
        if code and data:
            return self._open_cache(b"")
        session.check(code, "making a pipeline cache")
        session.keep(lambda: lib.vkDestroyPipelineCache(device, out[0], ffi.NULL))
        return out[0]

    def cache_data(self) -> bytes:
        """What the driver keeps of the pipelines made so far; empty when it can not say."""
        ffi, lib, device = self._session.ffi, self._session.lib, self._session.device
        size = ffi.new("size_t*")
        if lib.vkGetPipelineCacheData(device, self._cache, size, ffi.NULL):
            return b""
        data = ffi.new("char[]", size[0])
        if lib.vkGetPipelineCacheData(device, self._cache, size, data):
            return b""
        return bytes(ffi.buffer(data, size[0]))

    def save(self) -> None:
        """Writes the cache file if pipelines were made since the last time. A full or read-only disk is no error."""
        if len(self._pipelines) == self._n_saved:
            return
        if data := self.cache_data():
            _write_checked(self._path, data)
        self._n_saved = len(self._pipelines)


def _read_checked(path: Path) -> bytes:
    """The data of a cache file, or nothing when it is missing or damaged: drivers trust what they are given."""
    try:
        content = path.read_bytes()
    except OSError:
        return b""
    digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == digest else b""


def _write_checked(path: Path, data: bytes) -> None:
    """Writes in one step, so that another process reads the old file or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(hashlib.sha256(data).digest() + data)
        os.replace(part.name, path)
    except OSError:
        pass
