"""What the Vulkan loader says of each physical device: limits that Kompute does not report, optional features.

Uses the `vulkan` package (cffi bindings) with an instance of its own that is destroyed again; devices come in
the loader's order, which is also Kompute's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vkbackend.device.base import DeviceInfo, Features, Limits
from vkbackend.device.vulkan_features import Supported, supported
from vkbackend.errors import DeviceError

_SUBGROUP_BASIC, _SUBGROUP_SHUFFLE = 0x1, 0x10
_STAGE_COMPUTE = 0x20
_HEAP_LOCAL = 0x1
_KINDS = {1: "gpu", 2: "gpu", 3: "gpu", 4: "cpu", 0: "gpu"}
_KOMPUTE_MAX_PUSH = 128  # what Vulkan guarantees; the kernels' own limit too
_KOMPUTE_MAX_BUFFER = (4 << 30) - 4096  # Kompute counts bytes of a tensor in 32 bits
_MAX_BUFFER = (4 << 30) - 4  # kernels count words of a buffer in 32 bits, drivers a binding's bytes
_INSTANCE_VERSION = (1, 3)  # the newest version whose rules this package follows; older loaders and devices do


@dataclass(frozen=True)
class PhysicalDevice:
    """One physical device: its info, the length of a timestamp tick in nanoseconds (0: no timestamps), its optional
    features, what names a pipeline cache that its driver can read, and its driver as a VkDriverId (0: unknown)."""

    info: DeviceInfo
    timestamp_ns: float
    optional: Supported
    extensions: frozenset[str]
    cache_name: str
    max_bindings: int
    driver_id: int = 0


def uses_subgroups(limits: Limits) -> bool:
    """Whether kernels may use their subgroup variant: shuffles reported for compute, room for a team of 8 lanes."""
    return limits.subgroup_shuffle and limits.subgroup_size >= 8


def vulkan_devices(prefix: str) -> list[PhysicalDevice]:
    """Every physical device, named `<prefix>:<index>`. Raises `DeviceError` without a Vulkan loader.

    With the prefix "kompute" the limits are Kompute's (no optional features, buffers below 4 GiB).
    """
    vk = load_vulkan()
    instance = create_instance(vk)
    try:
        found = physical_devices(vk, instance)
    finally:
        vk.vkDestroyInstance(instance, None)
    return [_through_kompute(d, i) if prefix == "kompute" else d for i, d in enumerate(found)]


def load_vulkan() -> Any:
    """The `vulkan` package. Raises `DeviceError` when it or the loader's library is missing."""
    try:
        import vulkan as vk
    except (ImportError, OSError) as error:
        raise DeviceError(
            f"no Vulkan loader here ({error}); install one (Debian: apt install libvulkan1 mesa-vulkan-drivers) "
            "and the package vulkan (make setup does both)"
        ) from error
    return vk


def create_instance(vk: Any) -> Any:
    """A VkInstance without layers of its own (VK_INSTANCE_LAYERS works). Raises `DeviceError` without a driver."""
    app = vk.VkApplicationInfo(
        pApplicationName="vkbackend",
        applicationVersion=1,
        pEngineName="vkbackend",
        engineVersion=1,
        apiVersion=_packed(*_INSTANCE_VERSION),
    )
    try:
        return vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=app), None)
    except Exception as error:
        raise DeviceError(
            f"the Vulkan loader found no driver ({type(error).__name__}); install your GPU's driver, or a CPU one "
            "(Debian: apt install mesa-vulkan-drivers)"
        ) from error


def physical_devices(vk: Any, instance: Any) -> list[PhysicalDevice]:
    """Describes every physical device of an instance as `vulkan:<index>`."""
    try:
        handles = vk.vkEnumeratePhysicalDevices(instance)
        return [_describe(vk, instance, handle, f"vulkan:{i}") for i, handle in enumerate(handles)]
    except vk.VkError as error:
        raise DeviceError(f"listing Vulkan devices failed: {type(error).__name__}") from error


def _packed(major: int, minor: int) -> int:
    return major << 22 | minor << 12


def _through_kompute(found: PhysicalDevice, index: int) -> PhysicalDevice:
    limits = replace(
        found.info.limits,
        max_push_bytes=min(found.info.limits.max_push_bytes, _KOMPUTE_MAX_PUSH),
        max_buffer_bytes=_KOMPUTE_MAX_BUFFER,
        features=Features(),
    )
    return replace(found, info=replace(found.info, name=f"kompute:{index}", limits=limits))


def _describe(vk: Any, instance: Any, handle: Any, name: str) -> PhysicalDevice:
    props = vk.vkGetPhysicalDeviceProperties(handle)
    raw = props.limits
    number = int(props.apiVersion)
    version = (number >> 22 & 0x7F, number >> 12 & 0x3FF)
    extensions = frozenset(e.extensionName for e in vk.vkEnumerateDeviceExtensionProperties(handle, None))
    subgroup_size, operations, stages = 1, 0, 0
    max_buffer = _MAX_BUFFER
    optional = Supported(frozenset(), (), Features())
    if version >= (1, 1):
        subgroup, max_buffer = _properties_1_1(vk, handle, version, extensions)
        subgroup_size = int(subgroup.subgroupSize)
        operations, stages = int(subgroup.supportedOperations), int(subgroup.supportedStages)
        optional = supported(vk, instance, handle, version, extensions)
    memory, free = local_memory(vk, handle, extensions)
    need = _SUBGROUP_BASIC | _SUBGROUP_SHUFFLE
    limits = Limits(
        max_push_bytes=int(raw.maxPushConstantsSize),
        max_groups=tuple(int(raw.maxComputeWorkGroupCount[i]) for i in range(3)),  # type: ignore[arg-type]
        max_invocations=min(int(raw.maxComputeWorkGroupInvocations), int(raw.maxComputeWorkGroupSize[0])),
        max_shared_bytes=int(raw.maxComputeSharedMemorySize),
        max_storage_range=int(raw.maxStorageBufferRange),
        max_buffer_bytes=max_buffer,
        subgroup_size=subgroup_size,
        # Not told by a driver without subgroup size control: then as few as any has.
        min_subgroup_size=optional.features.subgroup_sizes[0] or min(subgroup_size, 8),
        subgroup_shuffle=bool(stages & _STAGE_COMPUTE) and operations & need == need,
        features=optional.features,
    )
    info = DeviceInfo(
        name=name,
        description=str(props.deviceName),
        kind=_KINDS.get(int(props.deviceType), "gpu"),
        limits=limits,
        memory=memory,
        driver=f"0x{int(props.driverVersion):x}",
        api_version=f"{version[0]}.{version[1]}.{number & 0xFFF}",
        memory_free=free,
    )
    uuid = bytes(props.pipelineCacheUUID).hex()
    return PhysicalDevice(
        info=info,
        timestamp_ns=float(raw.timestampPeriod) if raw.timestampComputeAndGraphics else 0.0,
        optional=optional,
        extensions=extensions,
        cache_name=f"{props.vendorID:04x}-{props.deviceID:04x}-{props.driverVersion:08x}-{uuid}",
        max_bindings=min(int(raw.maxPerStageDescriptorStorageBuffers), int(raw.maxDescriptorSetStorageBuffers)),
        driver_id=_driver_id(vk, handle, version, extensions),
    )


def _properties_1_1(vk: Any, handle: Any, version: tuple[int, int], extensions: frozenset[str]) -> tuple[Any, int]:
    """The subgroup properties and the largest buffer in bytes."""
    subgroup = vk.VkPhysicalDeviceSubgroupProperties()
    third = vk.VkPhysicalDeviceMaintenance3Properties(pNext=subgroup)
    fourth = None
    if version >= (1, 3) or "VK_KHR_maintenance4" in extensions:
        fourth = vk.VkPhysicalDeviceMaintenance4Properties(pNext=third)
    vk.vkGetPhysicalDeviceProperties2(handle, vk.VkPhysicalDeviceProperties2(pNext=third if fourth is None else fourth))
    # A driver that leaves a maximum at 0 does not know it.
    sizes = [int(third.maxMemoryAllocationSize), int(fourth.maxBufferSize) if fourth is not None else 0]
    return subgroup, min([_MAX_BUFFER, *(size for size in sizes if size)])


def _driver_id(vk: Any, handle: Any, version: tuple[int, int], extensions: frozenset[str]) -> int:
    if version < (1, 2) and (version < (1, 1) or "VK_KHR_driver_properties" not in extensions):
        return 0
    found = vk.VkPhysicalDeviceDriverProperties()
    vk.vkGetPhysicalDeviceProperties2(handle, vk.VkPhysicalDeviceProperties2(pNext=found))
    return int(found.driverID)


def local_memory(vk: Any, handle: Any, extensions: frozenset[str]) -> tuple[int, int]:
    """(bytes of the largest device-local heap, bytes this process may still use of it, or 0 when unknown)."""
    memory = vk.vkGetPhysicalDeviceMemoryProperties(handle)
    local = [i for i in range(memory.memoryHeapCount) if memory.memoryHeaps[i].flags & _HEAP_LOCAL]
    if not local:
        return 0, 0
    largest = max(local, key=lambda i: int(memory.memoryHeaps[i].size))
    free = 0
    if "VK_EXT_memory_budget" in extensions:
        budget = vk.VkPhysicalDeviceMemoryBudgetPropertiesEXT()
        vk.vkGetPhysicalDeviceMemoryProperties2(handle, vk.VkPhysicalDeviceMemoryProperties2(pNext=budget))
        free = max(0, int(budget.heapBudget[largest]) - int(budget.heapUsage[largest]))
    return int(memory.memoryHeaps[largest].size), free
