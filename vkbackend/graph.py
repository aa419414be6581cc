"""Graphs of ops over tensors: what model code builds and every device runs.

A `Tensor` is a view (offset, shape, strides) on a `Storage`; a `Graph` is the list of `Node`s in the order
in which the model wrote them. Nothing here knows a device: `schedule.py` turns a graph into dispatches, the
NumPy device walks it as it stands.

Everything is addressed in 4-byte words, the one element size that plain Vulkan 1.1 storage buffers have:
float32 and int32 elements are one word each, packed weights are planes of words (see `quants.py`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vkbackend.errors import VkBackendError

if TYPE_CHECKING:
    from vkbackend.device.base import Buffer
    from vkbackend.ops.op import Op

F32 = "f32"
I32 = "i32"


class Role(enum.Enum):
    """Who owns a storage's memory and how long it lives."""

    TEMP = "temp"  # placed by the scheduler in the activation arena, alive between two levels
    INPUT = "input"  # written by the host before every run
    OUTPUT = "output"  # read by the host after every run
    COUNTER = "counter"  # zero when a run starts; a dispatch leaves it zero again
    BOUND = "bound"  # weights and state: a region of a device buffer that outlives the graph


@dataclass(eq=False)
class Storage:
    """A run of words that views share. `buffer` and `base` (word offset in it) are set for BOUND storages only."""

    label: str
    n_words: int
    dtype: str
    role: Role
    buffer: Buffer | None = None
    base: int = 0


@dataclass(frozen=True, eq=False)
class Tensor:
    """A view on a storage.

    `shape` and `strides` count elements; `offset` counts words from the storage's start. `dtype` is "f32",
    "i32", or the name of a packed weight format ("q8_0", ...), in which case the tensor is a matrix
    [rows, cols], its strides are meaningless and it can not be sliced.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_packed(self) -> bool:
        return self.dtype not in (F32, I32)

    @property
    def is_contiguous(self) -> bool:
        """True when the elements lie in row-major order without gaps."""
        return all(s == t or n == 1 for s, t, n in zip(self.strides, row_major(self.shape), self.shape, strict=True))

    def span(self) -> tuple[int, int]:
        """First word and one past the last word this view can touch, relative to its storage."""
        if self.is_packed:
            return self.offset, self.storage.n_words
        if self.size == 0:
            return self.offset, self.offset
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.offset, self.offset + reach + 1

    def narrow(self, axis: int, start: int, length: int) -> Tensor:
        """The slice [start, start + length) along one axis, sharing memory."""
        axis %= self.ndim
        if not (start >= 0 and length >= 0 and start + length <= self.shape[axis]):
            raise VkBackendError(
                f"slice [{start}, {start + length}) of axis {axis} of '{self.storage.label}': "
                f"allowed are 0..{self.shape[axis]} (shape {self.shape})"
            )
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return replace(self, offset=self.offset + start * self.strides[axis], shape=shape)

    def reshape(self, *shape: int) -> Tensor:
        """The same elements under another shape; splits or joins axes without moving data.

        A strided view can be reshaped as long as every new axis lies inside one old axis or joins axes that
        are contiguous with each other. Anything else raises `VkBackendError`.
        """
        strides = _reshape_strides(self.shape, self.strides, shape)
        if strides is None:
            raise VkBackendError(
                f"reshape of '{self.storage.label}' from {self.shape} (strides {self.strides}) to {shape} would have "
                "to move data; make it contiguous first"
            )
        return replace(self, shape=tuple(shape), strides=strides)

    def permute(self, *axes: int) -> Tensor:
        """The same elements with axes in another order (a view)."""
        return replace(self, shape=tuple(self.shape[a] for a in axes), strides=tuple(self.strides[a] for a in axes))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous row-major array, in elements."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _reshape_strides(shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...] | None:
    if math.prod(shape) != math.prod(new):
        return None
    # Merge old axes into maximal contiguous runs (length, stride), then cut the runs into the new axes.
    runs: list[tuple[int, int]] = []
    for n, s in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == n * s:
            runs[-1] = (runs[-1][0] * n, s)
        else:
            runs.append((n, s))
    out: list[int] = []
    left, stride = runs.pop() if runs else (1, 1)
    for n in reversed(new):
        if n > 1 and left == 1 and runs:
            left, stride = runs.pop()
        if n > 1 and left % n:
            return None
        out.append(stride)
        if n > 1:
            left //= n
            stride *= n
    return tuple(reversed(out)) if left == 1 and not runs else None


@dataclass(frozen=True, eq=False)
class Node:
    """One op in a graph: its inputs, its outputs (in-place outputs are views of inputs) and its settings."""

    op: Op
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attrs: Any


@dataclass
class Graph:
    """Ops in program order, with named inputs (host to device) and outputs (device to host)."""

    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def input(self, name: str, shape: Sequence[int], dtype: str = F32) -> Tensor:
        """A tensor that the host writes before every run."""
        tensor = _fresh(name, shape, dtype, Role.INPUT)
        if name in self.inputs:
            raise VkBackendError(f"graph input '{name}' is defined twice; give each input its own name")
        self.inputs[name] = tensor
        return tensor

    def temp(self, label: str, shape: Sequence[int], dtype: str = F32) -> Tensor:
        """A fresh contiguous tensor for an op's result; the scheduler gives it memory."""
        return _fresh(label, shape, dtype, Role.TEMP)

    def output(self, name: str, tensor: Tensor) -> None:
        """Names a result that the host reads after every run. The tensor must be computed by this graph."""
        if tensor.storage.role not in (Role.TEMP, Role.OUTPUT):
            raise VkBackendError(
                f"graph output '{name}' is a view of the {tensor.storage.role.value} storage "
                f"'{tensor.storage.label}'; only results of ops can be outputs"
            )
        tensor.storage.role = Role.OUTPUT
        self.outputs[name] = tensor

    def add(self, op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], attrs: Any = None) -> None:
        """Appends a node. Ops call this from their builder after checking shapes."""
        self.nodes.append(Node(op, tuple(inputs), tuple(outputs), attrs))


def bound(label: str, buffer: Buffer, base: int, shape: Sequence[int], dtype: str = F32, n_words: int = -1) -> Tensor:
    """A tensor over a region of a device buffer: a weight, the KV cache, the recurrent ring.

    `base` is the region's first word in the buffer; `n_words` is needed for packed dtypes only.
    """
    words = math.prod(shape) if n_words < 0 else n_words
    storage = Storage(label, words, dtype, Role.BOUND, buffer, base)
    return Tensor(storage, 0, tuple(shape), row_major(shape), dtype)


def _fresh(label: str, shape: Sequence[int], dtype: str, role: Role) -> Tensor:
    if dtype not in (F32, I32):
        raise VkBackendError(f"tensor '{label}': dtype {dtype!r} can not be computed; allowed are 'f32' and 'i32'")
    if any(n < 1 for n in shape):
        raise VkBackendError(f"tensor '{label}': shape {tuple(shape)} has an empty axis; every axis must be >= 1")
    storage = Storage(label, math.prod(shape), dtype, role)
    return Tensor(storage, 0, tuple(shape), row_major(shape), dtype)


def overlaps(a: Tensor, b: Tensor) -> bool:
    """True when two views of one storage (or of one buffer) may share a word."""
    a0, a1 = (a.storage.base + w for w in a.span())
    b0, b1 = (b.storage.base + w for w in b.span())
    if a1 <= b0 or b1 <= a0:
        return False
    rows_a, rows_b = _rows(a), _rows(b)
    if rows_a is None or rows_b is None or rows_a[0] != rows_b[0]:
        return True
    # Both are rows of equal pitch (column slices of one matrix): they are apart when their columns are.
    pitch, width_a = rows_a
    width_b = rows_b[1]
    start_a, start_b = a0 % pitch, b0 % pitch
    if start_a + width_a > pitch or start_b + width_b > pitch:
        return True
    return start_a < start_b + width_b and start_b < start_a + width_a


def _rows(t: Tensor) -> tuple[int, int] | None:
    """(row pitch, row width) in words of a view whose outermost axis steps over rows that do not overlap."""
    if t.is_packed or t.ndim < 2 or t.shape[0] == 1:
        return None
    width = 1 + sum((n - 1) * s for n, s in zip(t.shape[1:], t.strides[1:], strict=True))
    return (t.strides[0], width) if width <= t.strides[0] else None
