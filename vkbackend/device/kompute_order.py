"""Whether dispatches through Kompute wait for those before them without what stands for a barrier between levels.

Kompute records a barrier from transfers to shaders before each dispatch, and none from shaders to shaders. Drivers may
wait for earlier dispatches there too: NVIDIA's does, always as far as was seen, but Vulkan promises it to nobody. The
substitute, a transfer of one word, takes 7.6 us a level there (docs/kompute.md). So on drivers in `SEEN_TO_WAIT` it is
left out, if a trial of many dispatches comes out right when the device is opened; and every submission ends with a few
such dispatches, recorded as all others are, whose result is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vkbackend.device.base import Words
from vkbackend.errors import DeviceError
from vkbackend.ops.op import Kernel

WITNESS = Kernel("order_witness", local_size=32)  # binding: words; push: see Witness
SEEN_TO_WAIT = frozenset({4})  # VkDriverId: NVIDIA's own
GROUPS, TURNS = 64, 200  # workgroups of a step; how long some of them take, about 2 us
RUN_STEPS, TRIAL_STEPS = 4, 256  # even: the last step writes where the first one reads


@dataclass
class Witness:
    """Words that count the steps of `order_witness.comp`. A step that does not wait for the one before spoils them.

    `device`: its name. `tensor`: an eDevice tensor of 2 GROUPS words; `words`: its host side. `algorithm` binds
    it to the kernel.
    """

    device: str
    kp: Any
    tensor: Any
    words: Words
    algorithm: Any
    count: int = 0

    def record(self, sequence: Any, steps: int) -> None:
        """The steps and the copy to the host, at the end of a sequence."""
        for step in range(steps):
            sequence.record(self.kp.OpAlgoDispatch(self.algorithm, np.array(push(step), np.uint32)))
        sequence.record(self.kp.OpTensorSyncLocal([self.tensor]))

    def holds(self, steps: int) -> bool:
        """After a run: whether every step waited, in it and in all runs before it.

        Steps that do not wait count too little. Whole runs more than were looked at are runs that ended in Ctrl-C.
        """
        self.count = (self.count + steps) & 0xFFFFFFFF
        seen = self.words[:GROUPS]
        more = (int(seen[0]) - self.count) & 0xFFFFFFFF
        if not (seen == seen[0]).all() or more % RUN_STEPS or more >= 1 << 31:
            return False
        self.count = int(seen[0])
        return True

    def check(self) -> None:
        """Raises `DeviceError` when a step of the last run did not wait."""
        if not self.holds(RUN_STEPS):
            raise DeviceError(
                f"{self.device}: dispatches did not wait for those before them; what this run has computed is lost: "
                f"open the device as {self.device}:strict"
            )

    def try_out(self, new_sequence: Callable[[], Any]) -> bool:
        """Whether the device's dispatches wait: true when many do. Raises `DeviceError` when they do not run."""
        sequence = new_sequence()
        try:
            sequence.record(self.kp.OpTensorSyncDevice([self.tensor]))
            self.record(sequence, TRIAL_STEPS)
            self.words[:] = self.count
            sequence.eval()
            return self.holds(TRIAL_STEPS)
        except RuntimeError as error:
            raise DeviceError(
                f"{self.device}: trying whether dispatches wait for each other failed: {error}; "
                f"{self.device}:strict does without"
            ) from error
        finally:
            sequence.destroy()


def push(step: int) -> tuple[int, int, int, int]:
    """Push constants of a step: where it reads, where it writes, how long some workgroups take, 0."""
    return (step % 2 * GROUPS, (step + 1) % 2 * GROUPS, TURNS, 0)
