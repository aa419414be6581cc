"""What an op is: one record of plain functions, and the dispatches it lowers to.

Each module in this package defines one op as a constant `OP`, a builder function of the module's own name
(checks shapes, appends a node, returns tensors), a NumPy reference, a lowering and a case list. The package
finds its modules by itself, so adding an op touches no other file: see docs/adding-an-op.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vkbackend.errors import VkBackendError
from vkbackend.graph import I32, Graph, Node, Role, Storage, Tensor

if TYPE_CHECKING:
    from vkbackend.device.base import Limits
    from vkbackend.device.numpy_parts import Run, Workspace
    from vkbackend.ops.case import Case

Array = NDArray[Any]


@dataclass(frozen=True)
class Kernel:
    """A compute shader and its compile-time settings.

    `name` is the file `shaders/<name>.comp`; `defines` are NAME or NAME=VALUE strings; `local_size` reaches the
    shader as LOCAL_SIZE (workgroups are one-dimensional). The device adds SUBGROUP where it uses the subgroup
    variant: every kernel must also build and pass without it.
    """

    name: str
    local_size: int = 128
    defines: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class At:
    """Push-constant value: the word offset of a tensor in the buffer it ends up in (plus `plus` words)."""

    tensor: Tensor
    plus: int = 0


PushValue = int | float | At


@dataclass(frozen=True, eq=False)
class Bind:
    """One binding of a dispatch: the buffer that holds `tensor`, read ("r"), written ("w") or both ("rw")."""

    tensor: Tensor
    access: str


@dataclass(frozen=True, eq=False)
class Dispatch:
    """One kernel launch before memory is placed.

    `binds[i]` is bound at binding i (several binds may end up in one buffer). `push` becomes 32-bit words: ints
    as uint32 (negative ones as two's complement), floats by bit pattern, `At` as word offsets. `spec` are uint32
    specialisation constants 0, 1, 2... `also` lists tensors touched through one of the bindings beyond the
    bound ones, so that the scheduler sees the hazard. `n_bytes`: the least that it moves, 0: not counted.

    Two of them may be joined (`fusion.py`): one that only rearranges a tensor names it in `follows`; `absorb`, given
    that one, is this dispatch with the other's work done as well, or None if it can not do it.
    """

    kernel: Kernel
    binds: tuple[Bind, ...]
    push: tuple[PushValue, ...]
    groups: tuple[int, int, int]
    spec: tuple[int, ...] = ()
    also: tuple[Bind, ...] = ()
    n_bytes: int = 0
    follows: Tensor | None = None
    absorb: Callable[[Dispatch], Dispatch | None] | None = None


Stage = list[Dispatch]  # dispatches that do not depend on each other
Lowering = list[Stage]  # stages run one after the other


@dataclass(frozen=True)
class Op:
    """An operation: name, NumPy reference, lowering to dispatches, kernels for the build, and test cases.

    reference(node, inputs, outputs): fills the output arrays from the input arrays, both given as NumPy views
        of the node's tensors in the device's real type (float32, or float64 when it is the reference). In-place
        outputs are views of the same memory as the inputs.
    lower(node, limits): the dispatches; may make scratch tensors with `scratch`.
    kernels(): every kernel the lowering can ask for, so that wheels can ship compiled SPIR-V.
    cases(): the list that unit tests and `vkbackend test-ops` share.
    prepare(node, inputs, outputs, workspace): only where the reference is too slow for the NumPy fallback: what the
        float32 device calls at every run in its place, with views and scratch arrays made once.
    """

    name: str
    reference: Callable[[Node, Sequence[Array], Sequence[Array]], None]
    lower: Callable[[Node, Limits], Lowering]
    kernels: Callable[[], list[Kernel]]
    cases: Callable[[], list[Case]]
    prepare: Callable[[Node, Sequence[Array], Sequence[Array], Workspace], Run] | None = None


def scratch(label: str, shape: Sequence[int], dtype: str = "f32") -> Tensor:
    """A temporary for use between the stages of one lowering."""
    return Graph().temp(label, shape, dtype)


def counters(label: str, n: int) -> Tensor:
    """n words, i32 [n], that are zero before the dispatch and that it has to leave zero: to find out who comes last.

    Workgroups that finish together add 1 to a word when their part is in memory; the last one joins the parts, sets
    the word to zero and saves a level (shaders/include/last.glsl).
    """
    return Tensor(Storage(label, n, I32, Role.COUNTER), 0, (n,), (1,), I32)


def spread(n: int, limit: int = 65535) -> tuple[int, int, int]:
    """Workgroup counts that cover n workgroups within a per-axis limit.

    The kernel finds its index as `gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x` (WORKGROUP_INDEX in
    include/common.glsl) and must ignore indices >= n.
    """
    if n <= limit:
        return (n, 1, 1)
    rows = -(-n // limit)
    return (-(-n // rows), rows, 1)


def push_word(value: int | float) -> int:
    """The uint32 that carries a push-constant value."""
    if isinstance(value, float):
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return int(value) & 0xFFFFFFFF


def check(ok: bool, op: str, what: str) -> None:
    """Raises `VkBackendError` with the op's name in front: for shape checks in builders."""
    if not ok:
        raise VkBackendError(f"{op}: {what}")


def silu(x: Array) -> Array:
    """x * sigmoid(x), for references; written so that exp never overflows."""
    return x * sigmoid(x)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), for references; written so that exp never overflows."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1 / (1 + e), e / (1 + e)), x.dtype)
