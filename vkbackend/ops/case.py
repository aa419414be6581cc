"""Test cases of ops, shared by pytest, `vkbackend test-ops` and `vkbackend bench --ops`.

A case builds a small graph through a `CaseBuilder`. The runner builds it twice from the same random seed, on
the device under test and on the float64 NumPy device, runs both, and compares every output and every piece of
state that the graph could have written, unwritten (poisoned) places included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vkbackend.device.base import Array, Buffer, Device
from vkbackend.device.numpy import NumpyDevice
from vkbackend.graph import F32, I32, Graph, Tensor, bound
from vkbackend.packing import pack_matrix

POISON = 0x7FC0DEAD  # a quiet NaN with a payload that no arithmetic produces


@dataclass(frozen=True)
class Case:
    """One row of an op's table. `build` makes the graph; results may differ by `max_nmse` from float64."""

    label: str
    build: Callable[[CaseBuilder], None]
    max_nmse: float = 1e-7


@dataclass
class CaseBuilder:
    """Makes the tensors of a case on one device; a case must draw all its numbers from `rng`."""

    device: Device
    rng: np.random.Generator
    graph: Graph = field(default_factory=Graph)
    feeds: dict[str, Array] = field(default_factory=dict)
    states: list[tuple[str, Buffer, int]] = field(default_factory=list)

    def input(self, data: Array) -> Tensor:
        """A host-written input: float arrays become f32, integer arrays i32."""
        name = f"in{len(self.feeds)}"
        is_float = np.asarray(data).dtype.kind == "f"
        self.feeds[name] = np.asarray(data, np.float32 if is_float else np.int32)
        return self.graph.input(name, data.shape, F32 if is_float else I32)

    def state(self, data: Array | None, shape: Sequence[int] | None = None) -> Tensor:
        """Persistent float memory that the graph may update in place. `None`: poisoned, of the given shape."""
        if data is None:
            assert shape is not None
            n = int(np.prod(shape))
            words = np.full(n, POISON, np.uint32)
        else:
            shape, n = data.shape, data.size
            words = np.ascontiguousarray(data, np.float32).reshape(-1).view(np.uint32)
        name = f"state{len(self.states)}"
        buffer = self.device.allocate(n, label=name)
        self.device.upload(buffer, 0, words)
        self.states.append((name, buffer, n))
        return bound(name, buffer, 0, shape)

    def weight(self, data: Array, fmt: str = F32) -> Tensor:
        """A weight matrix [rows, cols] rounded to a GGUF type ("f32", "f16", "bf16", "q8_0", ...)."""
        return self.weights([(data, fmt)])[0]

    def weights(self, matrices: Sequence[tuple[Array, str]]) -> list[Tensor]:
        """Several weight matrices in one buffer, as a model has them."""
        packed = self.device.holds_packed_weights
        pieces: list[Array] = []
        for data, fmt in matrices:
            words, values = pack_matrix(np.asarray(data, np.float32), fmt)
            flat = words if packed else values.reshape(-1).view(np.uint32)
            pieces.append(np.pad(flat, (0, -flat.size % 64)))
        buffer = self.device.allocate(sum(p.size for p in pieces), label="weights")
        self.device.upload(buffer, 0, np.concatenate(pieces))
        starts = np.cumsum([0, *(p.size for p in pieces)])
        return [
            bound("weight", buffer, int(start), data.shape, fmt if packed else F32, piece.size)
            for (data, fmt), piece, start in zip(matrices, pieces, starts, strict=False)
        ]

    def output(self, tensor: Tensor) -> None:
        self.graph.output(f"out{len(self.graph.outputs)}", tensor)

    def normal(self, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        """Gaussian float32 numbers."""
        return (self.rng.standard_normal(shape) * scale).astype(np.float32)

    def uniform(self, low: float, high: float, *shape: int) -> NDArray[np.float32]:
        """Uniform float32 numbers in [low, high)."""
        return self.rng.uniform(low, high, shape).astype(np.float32)


@dataclass(frozen=True)
class CaseResult:
    """What a case showed: the worst NMSE over its results, or why it failed."""

    label: str
    nmse: float
    max_nmse: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and self.nmse <= self.max_nmse


def run_case(case: Case, device: Device, seed: int) -> CaseResult:
    """Runs a case on a device and on the float64 reference with the same random numbers."""
    want = run_built(case, CaseBuilder(NumpyDevice(np.float64), np.random.default_rng(seed)))
    return compare(case, run_built(case, CaseBuilder(device, np.random.default_rng(seed))), want)


def compare(case: Case, got: Mapping[str, Array], want: Mapping[str, Array]) -> CaseResult:
    """Judges a device's results and states by the reference's."""
    worst = 0.0
    for name, reference in want.items():
        result = got[name]
        if reference.dtype.kind == "i":
            if not np.array_equal(result, reference):
                n = int(np.count_nonzero(result != reference))
                return CaseResult(case.label, np.inf, case.max_nmse, f"{name}: {n} of {result.size} integers differ")
            continue
        unwritten, expected = np.isnan(result), np.isnan(reference)
        if not np.array_equal(unwritten, expected):
            n = int(np.count_nonzero(unwritten != expected))
            return CaseResult(
                case.label, np.inf, case.max_nmse, f"{name}: {n} of {result.size} values are NaN on one side only"
            )
        worst = max(worst, nmse(result[~expected], reference[~expected]))
    return CaseResult(case.label, worst, case.max_nmse)


def run_built(case: Case, builder: CaseBuilder) -> dict[str, Array]:
    """Builds a case with this builder and runs it; every output and state by name."""
    device = builder.device
    case.build(builder)
    results = dict(device.compile(builder.graph, poison=True).run(builder.feeds))
    for name, buffer, n in builder.states:
        data = getattr(buffer, "data", None) if isinstance(device, NumpyDevice) else None
        results[name] = device.download(buffer, 0, n).view(np.float32) if data is None else np.asarray(data).copy()
    return results


def nmse(got: Array, want: Array) -> float:
    """Sum of squared errors over the sum of squares of the wanted values, in float64; 0 for empty arrays."""
    want64, got64 = np.asarray(want, np.float64), np.asarray(got, np.float64)
    error = float(np.sum((got64 - want64) ** 2))
    power = float(np.sum(want64**2))
    return error / power if power > 0 else error
