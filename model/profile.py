"""Where the time of one step goes: device timestamps around every level of its graph."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vkbackend.device.dispatching import DispatchProgram
from vkbackend.errors import DeviceError
from vkbackend.graph import Graph, Role
from vkbackend.launch import Launch
from vkbackend.model.loader import Model
from vkbackend.model.qwen35 import StepShape

WARM_UP = 3  # runs before the timed ones


@dataclass(frozen=True)
class LevelTime:
    """One level (dispatches between two barriers): its ops and kernels, median seconds, bytes its products move.

    `n_bytes` counts the weights, x and y of matrix products, the least that they have to move; 0 for other ops.
    `weights` names the matrices that are read, each by the first of its tensors.
    """

    ops: tuple[str, ...]
    kernels: tuple[str, ...]
    seconds: float
    n_bytes: int
    weights: tuple[str, ...] = ()


def profile_step(model: Model, n_tokens: int, n_past: int, repetitions: int) -> list[LevelTime]:
    """The levels of one greedy step of n_tokens after n_past others, in their order. Contents are arbitrary.

    Raises `DeviceError` on the NumPy device, which has no levels.
    """
    bound = n_past + n_tokens
    context = model.context(n_ctx=bound)
    graph = context.graph(StepShape(n_tokens, 1, bound, "last", None, True))
    program = model.device.compile(graph, timestamps=True)
    if not isinstance(program, DispatchProgram):
        raise DeviceError(f"{model.device.info.name}: has no timestamps; use a Vulkan device (see: vkbackend devices)")
    feeds = {"tokens": np.zeros(n_tokens, np.int32), "step": np.array([[n_past], [0]], np.int32)}
    runs = []
    for i in range(WARM_UP + repetitions):
        program.run(feeds)
        if i >= WARM_UP:
            runs.append(program.level_seconds())
    matrices = _matrices(graph)
    return [
        LevelTime(
            tuple(dict.fromkeys(launch.label for launch in level)),
            tuple(dict.fromkeys(launch.kernel.name for launch in level)),
            statistics.median(seconds),
            sum(launch.n_bytes for launch in level),
            tuple(dict.fromkeys(name for launch in level if (name := _matrix_of(launch, matrices)))),
        )
        for level, seconds in zip(program.plan.levels, zip(*runs, strict=True), strict=True)
    ]


def _matrices(graph: Graph) -> dict[tuple[int, int], str]:
    """(buffer, first word in it) of every weight matrix in the graph, with the name of the first tensor in it."""
    weights = [t.storage for n in graph.nodes for t in n.inputs if t.storage.role is Role.BOUND and t.ndim > 1]
    return {(id(w.buffer), w.base): w.label for w in weights if w.label.endswith(".weight")}


def _matrix_of(launch: Launch, matrices: Mapping[tuple[int, int], str]) -> str:
    """The weight matrix that a launch reads: kernels of products have it first, among buffers and words."""
    return matrices.get((id(launch.buffers[0]), launch.push[0]), "") if launch.buffers and launch.push else ""
