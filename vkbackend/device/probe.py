"""What the Vulkan loader says of each physical device: limits that Kompute does not report.

Uses the `vulkan` package (cffi bindings) with an instance of its own that is destroyed again; devices come in
the loader's order, which is also Kompute's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vkbackend.device.base import DeviceInfo, Limits
from vkbackend.errors import DeviceError

_SUBGROUP_BASIC, _SUBGROUP_ARITHMETIC = 0x1, 0x4
_STAGE_COMPUTE = 0x20
_KINDS = {1: "gpu", 2: "gpu", 3: "gpu", 4: "cpu", 0: "gpu"}


@dataclass(frozen=True)
class VulkanDevice:
    """One physical device: its info and the length of a timestamp tick in nanoseconds (0: no timestamps)."""

    info: DeviceInfo
    timestamp_ns: float


def uses_subgroups(limits: Limits) -> bool:
    """Whether kernels may use their subgroup variant: arithmetic reported for compute, 8 to 128 lanes."""
    return limits.subgroup_arithmetic and 8 <= limits.subgroup_size <= 128


def vulkan_devices(prefix: str) -> list[VulkanDevice]:
    """Every physical device, named `<prefix>:<index>`. Raises `DeviceError` without a Vulkan loader."""
    try:
        import vulkan as vk
    except (ImportError, OSError) as error:
        raise DeviceError(
            f"no Vulkan loader here ({error}); install one (Debian: apt install libvulkan1 mesa-vulkan-drivers) "
            "and the package vulkan (make setup does both)"
        ) from error
    app = vk.VkApplicationInfo(
        pApplicationName="vkbackend", applicationVersion=1, pEngineName="vkbackend", engineVersion=1, apiVersion=_version(1, 1)
    )
    try:
        instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=app), None)
    except Exception as error:
        raise DeviceError(
            f"the Vulkan loader found no driver ({type(error).__name__}); install your GPU's driver, or a CPU one "
            "(Debian: apt install mesa-vulkan-drivers)"
        ) from error
    try:
        handles = vk.vkEnumeratePhysicalDevices(instance)
        return [_describe(vk, handle, f"{prefix}:{i}") for i, handle in enumerate(handles)]
    except vk.VkError as error:
        raise DeviceError(f"listing Vulkan devices failed: {type(error).__name__}") from error
    finally:
        vk.vkDestroyInstance(instance, None)


def _version(major: int, minor: int) -> int:
    return major << 22 | minor << 12


def _describe(vk: Any, handle: Any, name: str) -> VulkanDevice:
    props = vk.vkGetPhysicalDeviceProperties(handle)
    raw = props.limits
    subgroup_size, operations, stages = 1, 0, 0
    if props.apiVersion >= _version(1, 1):
        subgroup = vk.VkPhysicalDeviceSubgroupProperties()
        vk.vkGetPhysicalDeviceProperties2(handle, vk.VkPhysicalDeviceProperties2(pNext=subgroup))
        subgroup_size = int(subgroup.subgroupSize)
        operations, stages = int(subgroup.supportedOperations), int(subgroup.supportedStages)
    memory = vk.vkGetPhysicalDeviceMemoryProperties(handle)
    heaps = [memory.memoryHeaps[i] for i in range(memory.memoryHeapCount)]
    local = [int(h.size) for h in heaps if h.flags & 1]
    need = _SUBGROUP_BASIC | _SUBGROUP_ARITHMETIC
    limits = Limits(
        max_push_bytes=min(int(raw.maxPushConstantsSize), 128),
        max_groups=tuple(int(raw.maxComputeWorkGroupCount[i]) for i in range(3)),  # type: ignore[arg-type]
        max_invocations=min(int(raw.maxComputeWorkGroupInvocations), int(raw.maxComputeWorkGroupSize[0])),
        max_shared_bytes=int(raw.maxComputeSharedMemorySize),
        max_storage_range=int(raw.maxStorageBufferRange),
        max_buffer_bytes=(4 << 30) - 4096,  # Kompute counts bytes of a tensor in 32 bits
        subgroup_size=subgroup_size,
        subgroup_arithmetic=bool(stages & _STAGE_COMPUTE) and operations & need == need,
    )
    version = int(props.apiVersion)
    info = DeviceInfo(
        name=name,
        description=str(props.deviceName),
        kind=_KINDS.get(int(props.deviceType), "gpu"),
        limits=limits,
        memory=max(local, default=0),
        driver=f"0x{int(props.driverVersion):x}",
        api_version=f"{version >> 22}.{version >> 12 & 0x3FF}.{version & 0xFFF}",
    )
    return VulkanDevice(info, float(raw.timestampPeriod) if raw.timestampComputeAndGraphics else 0.0)
