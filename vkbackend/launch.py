"""Placed dispatches: what a plan is made of."""

from __future__ import annotations

from dataclasses import dataclass

from vkbackend.device.base import Buffer
from vkbackend.ops.op import Kernel

ARENA, INPUTS, OUTPUTS = "arena", "inputs", "outputs"
Place = Buffer | str  # a device buffer, or one of the three regions that belong to the program


@dataclass(frozen=True, eq=False)
class Launch:
    """One placed dispatch: what to run, on which buffers, with which words. `label` and `n_bytes` are for timings."""

    label: str
    kernel: Kernel
    buffers: tuple[Place, ...]
    push: tuple[int, ...]
    groups: tuple[int, int, int]
    spec: tuple[int, ...]
    n_bytes: int = 0
