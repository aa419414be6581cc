"""Device names: what opens, what is refused."""

from __future__ import annotations

import pytest

from vkbackend.device import open_device
from vkbackend.device.kompute import KomputeDevice
from vkbackend.errors import DeviceError
from vkbackend.ops import all_ops
from vkbackend.ops.case import run_case


@pytest.mark.parametrize(
    "name", ["cuda", "kompute:x", "kompute:0:fast", "numpy:0:relaxed", "vulkan:0:relaxed", "numpy:1"]
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="device"):
        open_device(name)


def test_relaxed_records_no_barrier_and_gives_the_same_results(kompute: KomputeDevice, seed: int) -> None:
    relaxed = open_device("kompute:0:relaxed")
    ops = {op.name: op for op in all_ops()}
    for name in ("argmax", "linear", "attention"):  # each has cases of several levels
        for case in ops[name].cases()[-3:]:
            assert run_case(case, relaxed, seed) == run_case(case, kompute, seed)
    relaxed.close()
