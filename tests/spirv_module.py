"""What tests look at in compiled kernels, and whether a dispatch gives a kernel what it takes."""

from __future__ import annotations

import struct

from vkbackend.ops.op import Kernel
from vkbackend.shaders.compiler import spirv


class Module:
    """The few things of a SPIR-V module that tests look at (numbers: the SPIR-V specification, unified1)."""

    def __init__(self, code: bytes) -> None:
        words = struct.unpack(f"<{len(code) // 4}I", code)
        assert words[0] == 0x07230203
        self.version = (words[1] >> 16 & 0xFF, words[1] >> 8 & 0xFF)
        self.instructions: list[tuple[int, tuple[int, ...]]] = []
        at = 5
        while at < len(words):
            length = words[at] >> 16
            self.instructions.append((words[at] & 0xFFFF, words[at + 1 : at + length]))
            at += length
        self.capabilities = {operands[0] for code, operands in self.instructions if code == 17}
        self._constants = {operands[1]: operands[2] for code, operands in self.instructions if code == 43}
        self._types = {operands[0]: (code, operands[1:]) for code, operands in self.instructions if 19 <= code <= 33}
        self._offsets = {o[:2]: o[3] for code, o in self.instructions if code == 72 and o[2] == 35}
        self._strides = {o[0]: o[2] for code, o in self.instructions if code == 71 and o[1] == 6}

    def push_bytes(self) -> int:
        """Bytes of the push-constant block (0 without one)."""
        sizes = [0]
        for kind, operands in self._types.values():
            if kind == 32 and operands[0] == 9:  # a pointer to storage class PushConstant
                sizes.append(self._size(operands[1]))
        return max(sizes)

    def _size(self, type_id: int) -> int:
        kind, operands = self._types[type_id]
        if kind in (21, 22):  # int, float: bits
            return operands[0] // 8
        if kind == 23:  # vector
            return self._size(operands[0]) * operands[1]
        if kind == 28:  # array
            return self._strides[type_id] * self._constants[operands[1]]
        if kind == 30:  # struct
            return max(self._offsets[type_id, i] + self._size(member) for i, member in enumerate(operands))
        raise AssertionError(f"type {kind} in a push-constant block")

    def spec_ids(self) -> set[int]:
        """Ids of its specialisation constants."""
        return {o[2] for code, o in self.instructions if code == 71 and o[1] == 1}

    def local_size(self) -> tuple[int, ...]:
        return next(o[2:5] for code, o in self.instructions if code == 16 and o[1] == 17)

    def bindings(self) -> set[int]:
        return {o[2] for code, o in self.instructions if code == 71 and o[1] == 33}


def check_fit(kernel: Kernel, n_push: int, n_spec: int, n_binds: int, subgroup: bool = True) -> None:
    """The push constants, specialisation constants and bindings of a dispatch are as many as its kernel has.

    A push block longer than what is pushed would read what the dispatch before left there.
    """
    module = Module(spirv(kernel, subgroup))
    assert module.push_bytes() == 4 * n_push, f"{kernel}: {n_push} words pushed, a block of {module.push_bytes()} bytes"
    assert module.spec_ids() <= set(range(n_spec)), f"{kernel}: {n_spec} constants given, it has {module.spec_ids()}"
    assert module.bindings() == set(range(n_binds)), f"{kernel}: {n_binds} bindings given, it has {module.bindings()}"
