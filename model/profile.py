"""Where the time of one step goes: device timestamps around every level of its graph."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from vkbackend.device.dispatching import DispatchProgram
from vkbackend.errors import DeviceError
from vkbackend.model.loader import Model
from vkbackend.model.qwen35 import StepShape

WARM_UP = 3  # runs before the timed ones


@dataclass(frozen=True)
class LevelTime:
    """One level (dispatches between two barriers): its ops and kernels, median seconds, bytes its products move.

    `n_bytes` counts the weights, x and y of matrix products, the least that they have to move; 0 for other ops.
    """

    ops: tuple[str, ...]
    kernels: tuple[str, ...]
    seconds: float
    n_bytes: int


def profile_step(model: Model, n_tokens: int, n_past: int, repetitions: int) -> list[LevelTime]:
    """The levels of one greedy step of n_tokens after n_past others, in their order. Contents are arbitrary.

    Raises `DeviceError` on the NumPy device, which has no levels.
    """
    bound = n_past + n_tokens
    context = model.context(n_ctx=bound)
    program = model.device.compile(context.graph(StepShape(n_tokens, 1, bound, "last", None, True)), timestamps=True)
    if not isinstance(program, DispatchProgram):
        raise DeviceError(f"{model.device.info.name}: has no timestamps; use a Vulkan device (see: vkbackend devices)")
    feeds = {"tokens": np.zeros(n_tokens, np.int32), "step": np.array([[n_past], [0]], np.int32)}
    runs = []
    for i in range(WARM_UP + repetitions):
        program.run(feeds)
        if i >= WARM_UP:
            runs.append(program.level_seconds())
    return [
        LevelTime(
            tuple(dict.fromkeys(launch.label for launch in level)),
            tuple(dict.fromkeys(launch.kernel.name for launch in level)),
            statistics.median(seconds),
            sum(launch.n_bytes for launch in level),
        )
        for level, seconds in zip(program.plan.levels, zip(*runs, strict=True), strict=True)
    ]
