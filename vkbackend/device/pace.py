"""How much work one submission may hold: desktop drivers end one that runs for about two seconds.

Half a second is aimed at, so that four times slower (a hot card, a longer context) is still no loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkbackend.device.base import DeviceInfo

TARGET_S = 0.5


def is_watched(info: DeviceInfo) -> bool:
    """Whether the driver may end work that takes too long: CPU drivers and NumPy let it take its time."""
    return info.kind == "gpu"


@dataclass
class Pace:
    """Seconds that one unit of work took (a row of a prompt, a round of a burst); 0 while nothing was measured."""

    seconds: float = 0.0

    def note(self, n_units: int, seconds: float) -> None:
        """Takes what a run of n units took for the pace from now on."""
        self.seconds = seconds / n_units

    def most(self, n_units: int) -> int:
        """n, or the largest n / 2^i that is expected to stay within the target; at least 1."""
        while n_units > 1 and n_units * self.seconds > TARGET_S:
            n_units //= 2
        return n_units
