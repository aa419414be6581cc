"""Failing cases as files: everything somebody else needs to see a driver's wrong numbers, or to run them again.

A file is an .npz: `about` (JSON: op, case, device, driver, limits, dispatches, what was wrong), `input0`, `input1`...
(all that the case drew), `got_*` and `want_*` (the device's results and the float64 reference's), `spirv_*` (kernels).
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vkbackend.device.base import Array, Device
from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import VkBackendError
from vkbackend.graph import Graph, Tensor
from vkbackend.launch import Launch
from vkbackend.ops import all_ops
from vkbackend.ops.case import Case, CaseBuilder, CaseResult, compare, run_built
from vkbackend.schedule import plan
from vkbackend.shaders.compiler import spirv


@dataclass
class RecordingBuilder(CaseBuilder):
    """Keeps the arrays that a case draws; with `given`, the case gets those instead."""

    drawn: list[Array] = field(default_factory=list)
    given: list[Array] | None = None

    def input(self, data: Array) -> Tensor:
        return super().input(self._keep(data))

    def state(self, data: Array | None, shape: Any = None) -> Tensor:
        return super().state(None if data is None else self._keep(data), shape)

    def weight(self, data: Array, fmt: str = "f32") -> Tensor:
        return super().weight(self._keep(data), fmt)

    def _keep(self, data: Array) -> Array:
        if self.given is not None:
            found = self.given[len(self.drawn)] if len(self.drawn) < len(self.given) else None
            if found is None or found.shape != np.shape(data):
                raise VkBackendError(
                    f"repro: input {len(self.drawn)} of this case has shape {np.shape(data)} here, the file has "
                    f"{'none' if found is None else found.shape}; use the version that wrote it"
                )
            data = found
        self.drawn.append(np.asarray(data))
        return data


def write_repro(path: Path, op: str, case: Case, device: Device, variant: str, seed: int) -> CaseResult:
    """Runs a case once more and writes what went in and came out. Raises `OSError` when the file can not be written."""
    result, builder, got, want = _both(case, device, seed, None)
    about = {
        "op": op,
        "case": case.label,
        "variant": variant,
        "seed": seed,
        "device": asdict(device.info),
        "nmse": str(result.nmse),
        "max_nmse": case.max_nmse,
        "problem": result.problem,
        "dispatches": [_describe(launch) for launch in _launches(builder.graph, device)],
    }
    arrays: dict[str, Array] = {f"input{i}": data for i, data in enumerate(builder.drawn)}
    arrays |= {f"got_{name}": data for name, data in got.items()}
    arrays |= {f"want_{name}": data for name, data in want.items()}
    if device.holds_packed_weights:
        for launch in _launches(builder.graph, device):
            code = spirv(launch.kernel, device.info.limits.subgroup_shuffle)
            arrays[f"spirv_{launch.kernel.name}"] = np.frombuffer(code, np.uint8)
    with path.open("wb") as file:  # np.savez would add a suffix to a mere name
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)
    return result


@dataclass(frozen=True)
class Repro:
    """A file's case and inputs."""

    op: str
    case: Case
    variant: str
    seed: int
    inputs: list[Array]


def read_repro(path: Path) -> Repro:
    """Raises `VkBackendError` when this is no such file, or of a case that is not here any more."""
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            names = [name for name in file.files if name.startswith("input")]
            inputs = [file[f"input{i}"] for i in range(len(names))]
            op, label, variant, seed = (about[key] for key in ("op", "case", "variant", "seed"))
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise VkBackendError(f"{path} is no file that test-ops --repro wrote ({error})") from error
    cases = [case for known in all_ops() if known.name == op for case in known.cases() if case.label == label]
    if not cases:
        raise VkBackendError(f"{path} is of {op}, case '{label}', which this version does not have")
    return Repro(op, cases[0], str(variant), int(seed), inputs)


def replay(repro: Repro, device: Device) -> CaseResult:
    """Runs a file's case on a device, with the inputs of the file."""
    return _both(repro.case, device, repro.seed, repro.inputs)[0]


def _both(
    case: Case, device: Device, seed: int, given: list[Array] | None
) -> tuple[CaseResult, RecordingBuilder, dict[str, Array], dict[str, Array]]:
    reference = NumpyDevice(np.float64)
    want = run_built(case, RecordingBuilder(reference, np.random.default_rng(seed), given=given))
    builder = RecordingBuilder(device, np.random.default_rng(seed), given=given)
    got = run_built(case, builder)
    return compare(case, got, want), builder, got, want


def _launches(graph: Graph, device: Device) -> Iterator[Launch]:
    if device.holds_packed_weights:
        for level in plan(graph, device.info.limits).levels:
            yield from level


def _describe(launch: Launch) -> str:
    return (
        f"{launch.label}: {launch.kernel.name}.comp, workgroups {launch.groups} of {launch.kernel.local_size}, "
        f"defines {list(launch.kernel.defines)}, constants {list(launch.spec)}, push {list(launch.push)}"
    )
