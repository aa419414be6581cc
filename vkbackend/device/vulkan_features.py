"""The optional Vulkan features that kernels may use: which there are, and the structures that switch them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vkbackend.device.base import Features, MatrixShape

_COMPONENTS = ("f16", "f32", "f64", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64")
_SCOPE_SUBGROUP = 3
_CORE = ("shaderInt16", "shaderInt64")  # members of VkPhysicalDeviceFeatures itself
_MATRICES = "VK_KHR_cooperative_matrix"


@dataclass(frozen=True)
class _Struct:
    """A feature structure, the version that made it core, its extension before that, and the members wanted."""

    name: str
    type_name: str
    core: tuple[int, int]
    extension: str
    members: tuple[str, ...]


_STRUCTS = (
    _Struct(
        "VkPhysicalDevice16BitStorageFeatures",
        "16BIT_STORAGE_FEATURES",
        (1, 1),
        "VK_KHR_16bit_storage",
        ("storageBuffer16BitAccess",),
    ),
    _Struct(
        "VkPhysicalDevice8BitStorageFeatures",
        "8BIT_STORAGE_FEATURES",
        (1, 2),
        "VK_KHR_8bit_storage",
        ("storageBuffer8BitAccess",),
    ),
    _Struct(
        "VkPhysicalDeviceShaderFloat16Int8Features",
        "SHADER_FLOAT16_INT8_FEATURES",
        (1, 2),
        "VK_KHR_shader_float16_int8",
        ("shaderFloat16", "shaderInt8"),
    ),
    _Struct(
        "VkPhysicalDeviceVulkanMemoryModelFeatures",
        "VULKAN_MEMORY_MODEL_FEATURES",
        (1, 2),
        "VK_KHR_vulkan_memory_model",
        ("vulkanMemoryModel", "vulkanMemoryModelDeviceScope"),
    ),
    _Struct(
        "VkPhysicalDeviceSubgroupSizeControlFeatures",
        "SUBGROUP_SIZE_CONTROL_FEATURES",
        (1, 3),
        "VK_EXT_subgroup_size_control",
        ("subgroupSizeControl", "computeFullSubgroups"),
    ),
    _Struct(
        "VkPhysicalDeviceShaderIntegerDotProductFeatures",
        "SHADER_INTEGER_DOT_PRODUCT_FEATURES",
        (1, 3),
        "VK_KHR_shader_integer_dot_product",
        ("shaderIntegerDotProduct",),
    ),
    _Struct(
        "VkPhysicalDeviceCooperativeMatrixFeaturesKHR",
        "COOPERATIVE_MATRIX_FEATURES_KHR",
        (9, 9),
        _MATRICES,
        ("cooperativeMatrix",),
    ),
)


@dataclass(frozen=True)
class Supported:
    """What one physical device supports: the members that are true and the extensions that go with them."""

    members: frozenset[str]
    extensions: tuple[str, ...]
    features: Features

    def chain(self, vk: Any) -> tuple[Any, list[Any]]:
        """VkPhysicalDeviceFeatures2 that switches all of it on, for VkDeviceCreateInfo.pNext; and what it points to."""
        kept = [s for s in _STRUCTS if self.members & set(s.members)]
        root, links = _chain(vk, kept)
        for struct, link in zip(kept, links, strict=True):
            for member in self.members & set(struct.members):
                setattr(link, member, 1)
        for member in self.members & set(_CORE):
            setattr(root.features, member, 1)
        return root, links


def supported(vk: Any, instance: Any, physical: Any, version: tuple[int, int], extensions: frozenset[str]) -> Supported:
    """Asks a physical device (Vulkan 1.1 at least) which of the optional features it has."""
    known = [s for s in _STRUCTS if version >= s.core or s.extension in extensions]
    root, links = _chain(vk, known)
    vk.lib.vkGetPhysicalDeviceFeatures2(physical, root)
    members = {m for m in _CORE if getattr(root.features, m)}
    for struct, link in zip(known, links, strict=True):
        members |= {m for m in struct.members if getattr(link, m)}
    needed = tuple(s.extension for s in known if version < s.core and members & set(s.members))
    return Supported(frozenset(members), needed, _features(vk, instance, physical, members))


def _chain(vk: Any, structs: list[_Struct]) -> tuple[Any, list[Any]]:
    links: list[Any] = []
    for s in reversed(structs):
        kind = getattr(vk, f"VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_{s.type_name}")
        links.append(vk.ffi.new(f"{s.name}*", {"sType": kind, "pNext": links[-1] if links else vk.ffi.NULL}))
    kind = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2
    root = vk.ffi.new("VkPhysicalDeviceFeatures2*", {"sType": kind, "pNext": links[-1] if links else vk.ffi.NULL})
    return root, links[::-1]


def _features(vk: Any, instance: Any, physical: Any, members: set[str]) -> Features:
    return Features(
        storage8="storageBuffer8BitAccess" in members,
        storage16="storageBuffer16BitAccess" in members,
        int8="shaderInt8" in members,
        int16="shaderInt16" in members,
        int64="shaderInt64" in members,
        float16="shaderFloat16" in members,
        integer_dot="shaderIntegerDotProduct" in members and _has_fast_dots(vk, physical),
        memory_model="vulkanMemoryModel" in members,
        full_subgroups="computeFullSubgroups" in members,
        subgroup_sizes=_subgroup_sizes(vk, physical) if "subgroupSizeControl" in members else (0, 0),
        matrix_shapes=_matrix_shapes(vk, instance, physical) if "cooperativeMatrix" in members else (),
    )


def _subgroup_sizes(vk: Any, physical: Any) -> tuple[int, int]:
    sizes = vk.VkPhysicalDeviceSubgroupSizeControlProperties()
    vk.vkGetPhysicalDeviceProperties2(physical, vk.VkPhysicalDeviceProperties2(pNext=sizes))
    if not sizes.requiredSubgroupSizeStages & vk.VK_SHADER_STAGE_COMPUTE_BIT:
        return (0, 0)
    return int(sizes.minSubgroupSize), int(sizes.maxSubgroupSize)


def _has_fast_dots(vk: Any, physical: Any) -> bool:
    """Whether four products of signed bytes are one instruction; without it a driver makes them of many."""
    dots = vk.VkPhysicalDeviceShaderIntegerDotProductProperties()
    vk.vkGetPhysicalDeviceProperties2(physical, vk.VkPhysicalDeviceProperties2(pNext=dots))
    return bool(dots.integerDotProduct4x8BitPackedSignedAccelerated)


def _matrix_shapes(vk: Any, instance: Any, physical: Any) -> tuple[MatrixShape, ...]:
    name = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
    address = vk.lib.vkGetInstanceProcAddr(instance, name.encode())
    if address == vk.ffi.NULL:
        return ()
    ask = vk.ffi.cast(f"PFN_{name}", address)
    count = vk.ffi.new("uint32_t*")
    ask(physical, count, vk.ffi.NULL)
    rows = vk.ffi.new("VkCooperativeMatrixPropertiesKHR[]", count[0])
    for row in rows:
        row.sType = vk.VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR
    ask(physical, count, rows)

    def component(number: int) -> str:
        return _COMPONENTS[number] if number < len(_COMPONENTS) else f"type{number}"

    return tuple(
        MatrixShape(
            int(r.MSize),
            int(r.NSize),
            int(r.KSize),
            component(r.AType),
            component(r.BType),
            component(r.CType),
            component(r.ResultType),
        )
        for r in rows
        if r.scope == _SCOPE_SUBGROUP
    )
