"""How much workgroup memory a compiled kernel takes, read from its SPIR-V: drivers need not check it, and few do.

Array lengths may be built from specialisation constants, so those are computed as the driver would. Instruction
layouts are those of the SPIR-V specification, chapter 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from vkbackend.device.base import DeviceInfo
from vkbackend.errors import DeviceError
from vkbackend.ops.op import Kernel
from vkbackend.shaders.compiler import spirv

_WORKGROUP, _SPEC_ID = 4, 1  # storage class, decoration
_MASK = 0xFFFFFFFF
_OPERATIONS: dict[int, Callable[..., int]] = {  # of OpSpecConstantOp, on uint32
    128: lambda a, b: a + b & _MASK,
    130: lambda a, b: a - b & _MASK,
    132: lambda a, b: a * b & _MASK,
    134: lambda a, b: a // b if b else 0,
    137: lambda a, b: a % b if b else 0,
    169: lambda condition, a, b: a if condition else b,
    170: lambda a, b: int(a == b),
    171: lambda a, b: int(a != b),
    172: lambda a, b: int(a > b),
    174: lambda a, b: int(a >= b),
    176: lambda a, b: int(a < b),
    178: lambda a, b: int(a <= b),
    194: lambda a, b: a >> b,
    196: lambda a, b: a << b & _MASK,
    199: lambda a, b: a & b,
}


@functools.cache
def shared_bytes(kernel: Kernel, subgroup: bool, spec: tuple[int, ...] = ()) -> int:
    """Bytes of workgroup memory of one variant under specialisation constants 0, 1, 2..."""
    return module_shared_bytes(spirv(kernel, subgroup), spec)


def module_shared_bytes(code: bytes, spec: Sequence[int]) -> int:
    """The same for a SPIR-V module."""
    words = memoryview(code).cast("I")
    spec_ids: dict[int, int] = {}  # result id -> constant id
    values: dict[int, int] = {}
    sizes: dict[int, int] = {}  # of types, in bytes
    pointees: dict[int, int] = {}  # pointer type -> type, workgroup memory only
    total, at = 0, 5
    while at < len(words):
        n, op = words[at] >> 16, words[at] & 0xFFFF
        a = words[at + 1 : at + n].tolist()
        if op == 71 and a[1] == _SPEC_ID:  # OpDecorate
            spec_ids[a[0]] = a[2]
        elif op in (20, 21, 22):  # OpTypeBool, OpTypeInt, OpTypeFloat
            sizes[a[0]] = 4 if op == 20 else a[1] // 8
        elif op in (23, 24):  # OpTypeVector, OpTypeMatrix
            sizes[a[0]] = sizes[a[1]] * a[2]
        elif op == 28:  # OpTypeArray
            sizes[a[0]] = sizes.get(a[1], 0) * values[a[2]]
        elif op == 30:  # OpTypeStruct
            sizes[a[0]] = sum(sizes.get(member, 0) for member in a[1:])
        elif op == 32 and a[1] == _WORKGROUP:  # OpTypePointer
            pointees[a[0]] = a[2]
        elif op == 43:  # OpConstant
            values[a[1]] = a[2]
        elif op in (41, 42, 48, 49):  # OpConstantTrue, -False, OpSpecConstantTrue, -False
            values[a[1]] = int(op in (41, 48))
        elif op == 50:  # OpSpecConstant
            index = spec_ids.get(a[1], len(spec))
            values[a[1]] = spec[index] if index < len(spec) else a[2]
        elif op == 52 and a[2] in _OPERATIONS and all(i in values for i in a[3:]):  # OpSpecConstantOp
            values[a[1]] = _OPERATIONS[a[2]](*(values[i] for i in a[3:]))
        elif op == 59 and a[2] == _WORKGROUP:  # OpVariable
            total += sizes[pointees[a[0]]]
        elif op == 54:  # OpFunction: declarations end here
            break
        at += n
    return total


def check_shared(kernel: Kernel, subgroup: bool, spec: tuple[int, ...], info: DeviceInfo) -> None:
    """Raises `DeviceError` when a kernel takes more workgroup memory than the device has."""
    need, allowed = shared_bytes(kernel, subgroup, spec), info.limits.max_shared_bytes
    if need > allowed:
        raise DeviceError(
            f"{kernel.name}.comp on {info.name} ({info.description}): needs {need} bytes of workgroup memory, the "
            f"device has {allowed}; use another device"
        )
