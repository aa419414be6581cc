"""Work per submission: halved until it is expected to stay within the target."""

from __future__ import annotations

import numpy as np
import pytest

from vkbackend.device.pace import TARGET_S, Pace


def test_nothing_measured_means_no_limit() -> None:
    assert Pace().most(512) == 512


@pytest.mark.parametrize("n", [1, 16, 48, 512])
def test_the_largest_half_that_fits(n: int, rng: np.random.Generator) -> None:
    for seconds in 10 ** rng.uniform(-5, 1, 200):
        pace = Pace()
        pace.note(4, 4 * seconds)
        most = pace.most(n)
        halves = [n // 2**i for i in range(10) if n // 2**i >= 1]
        fitting = [h for h in halves if h * pace.seconds <= TARGET_S]
        assert most == (max(fitting) if fitting else 1)


def test_the_last_measurement_counts() -> None:
    pace = Pace()
    pace.note(1, 10.0)  # a first run, with compilation and a cold card
    assert pace.most(16) == 1
    pace.note(16, 0.016)
    assert pace.most(16) == 16
