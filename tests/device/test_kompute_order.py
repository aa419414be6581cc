"""Dispatches that wait for each other without a barrier: what sees it, and what happens where they do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from open_vulkan import open_or_skip

from vkbackend.device import kompute as kompute_module
from vkbackend.device.dispatching import Command
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.kompute_order import GROUPS, RUN_STEPS, TRIAL_STEPS, WITNESS, Witness, push
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.errors import DeviceError
from vkbackend.graph import Graph
from vkbackend.ops.add import add


def _relaxed() -> KomputeDevice:
    return open_or_skip(lambda: KomputeDevice(0, relaxed=True))


def _steps(device: VulkanDevice, in_levels: bool) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The witness's words after many steps on the direct device, with and without barriers."""
    words = device.allocate(2 * GROUPS)
    device.fill(words, 0, 2 * GROUPS, 0)
    commands = [Command("step", WITNESS, (words,), push(i), (GROUPS, 1, 1), ()) for i in range(TRIAL_STEPS)]
    levels = [[c] for c in commands] if in_levels else [commands]
    device.record(levels, device.pool.host("inputs", 1), device.pool.host("outputs", 1), False).run()
    return device.download(words, 0, GROUPS)


def test_steps_with_barriers_count_right(vulkan: VulkanDevice) -> None:
    assert (_steps(vulkan, True) == TRIAL_STEPS).all()


def test_missing_barriers_are_seen(vulkan: VulkanDevice) -> None:
    if vulkan.info.kind == "cpu":
        pytest.skip("CPU drivers run one dispatch after the other anyway")
    for _ in range(20):
        assert (_steps(vulkan, False) != TRIAL_STEPS).any()


def _program(device: KomputeDevice) -> tuple[Any, dict[str, Any]]:
    g = Graph()
    x = g.input("x", (2, 4))
    g.output("y", add(g, add(g, x, x), x))
    return device.compile(g), {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}


def test_every_run_is_watched() -> None:
    device = _relaxed()
    program, feeds = _program(device)
    witness = device._witness
    assert witness is not None and device.relaxed
    for run in range(1, 4):
        np.testing.assert_array_equal(program.run(feeds)["y"], 3 * feeds["x"])
        assert witness.count == TRIAL_STEPS + run * RUN_STEPS
    witness.words[5] -= 2  # what a step leaves that read old values
    sequence = device._manager.sequence()
    sequence.record(device._kp.OpTensorSyncDevice([witness.tensor]))
    sequence.eval()
    for _ in range(2):  # and so from then on
        with pytest.raises(DeviceError, match=r"kompute:0: dispatches did not wait.*kompute:0:strict"):
            program.run(feeds)
    device.close()


def test_a_trial_that_can_not_run_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Witness, sequence: Any, steps: int) -> None:
        raise RuntimeError("vk::Queue::submit: ErrorDeviceLost")

    _relaxed().close()
    monkeypatch.setattr(Witness, "record", lost)
    with pytest.raises(DeviceError, match=r"kompute:0: trying whether.*ErrorDeviceLost; kompute:0:strict"):
        KomputeDevice(0, relaxed=True)


def _witness(words: list[int], count: int) -> Witness:
    return Witness("kompute:0", None, None, np.array(words * GROUPS, np.uint32), None, count)


def test_what_a_witness_takes_for_right() -> None:
    top = (1 << 32) - RUN_STEPS
    assert _witness([RUN_STEPS], 0).holds(RUN_STEPS)
    assert _witness([0], top).holds(RUN_STEPS)  # around 2^32
    assert _witness([3 * RUN_STEPS], 0).holds(RUN_STEPS)  # after two runs that were interrupted
    for wrong in (0, RUN_STEPS - 2, RUN_STEPS + 2, 2 * RUN_STEPS - 1):
        assert not _witness([wrong], 0).holds(RUN_STEPS)
    assert not _witness([RUN_STEPS, RUN_STEPS - 2], 0).holds(RUN_STEPS)
    late = _witness([RUN_STEPS - 2], 0)
    assert not late.holds(RUN_STEPS)
    late.words += RUN_STEPS
    assert not late.holds(RUN_STEPS)


@pytest.mark.parametrize("waits", [True, False])
def test_only_drivers_that_were_seen_to_wait(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default only those, and only after the trial; by name on any, after the trial too."""
    found = kompute_module.vulkan_devices("kompute")
    if not found:
        pytest.skip("no Vulkan device here")
    monkeypatch.setattr(Witness, "holds", lambda self, steps: waits)
    for driver_id, default in ((4, waits), (13, False), (0, False)):
        devices = [dataclasses.replace(d, driver_id=driver_id) for d in found]
        monkeypatch.setattr(kompute_module, "vulkan_devices", lambda _, devices=devices: devices)
        for relaxed, want in ((None, default), (False, False), (True, waits)):
            device = KomputeDevice(0, relaxed=relaxed)
            assert device.relaxed == want, (driver_id, relaxed)
            device.close()
