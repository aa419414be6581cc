"""The direct Vulkan device when something fails: memory, a lost or hung device, limits; closing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device.vulkan_commands import Faulty, fill_command, recorded

from vkbackend.device import vulkan_session
from vkbackend.device.copy import FILL_WORDS
from vkbackend.device.dispatching import Command
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.errors import DeviceError

pytestmark = pytest.mark.usefixtures("needs_vulkan")


@pytest.fixture
def device(direct: VulkanDevice) -> VulkanDevice:
    return direct

# ---- errors


def test_out_of_memory_names_everything(device: VulkanDevice) -> None:
    session, lib, codes = device.session, device.session.lib, [-2] * 20
    session.lib = Faulty(lib, vkAllocateMemory=lambda *args: codes.pop())
    with pytest.raises(DeviceError) as caught:
        device.allocate(1000, label="KV cache of layer 3")
    text = str(caught.value)
    for part in ("KV cache of layer 3", "4000 bytes", session.info.description, "out of device memory", "n_ctx"):
        assert part in text
    refusals = [-2]  # the first try only: after collecting garbage there is room
    session.lib = Faulty(
        lib, vkAllocateMemory=lambda *args: refusals.pop() if refusals else lib.vkAllocateMemory(*args)
    )
    assert device.allocate(1000).n_words == 1000
    assert not refusals


def test_buffers_over_the_limit_are_refused(device: VulkanDevice) -> None:
    limits = device.info.limits
    too_many = min(limits.max_buffer_bytes, limits.max_storage_range) // 4 + 1
    with pytest.raises(DeviceError, match=f"weights needs {4 * too_many} bytes"):
        device.allocate(too_many, label="weights")


@pytest.mark.parametrize("function", ["vkQueueSubmit", "vkWaitForFences"])
def test_a_lost_device_says_so(device: VulkanDevice, function: str) -> None:
    buffer = device.allocate(8)
    recording = recorded(device, [[fill_command(buffer, 0, 8, 1)]])
    device.session.lib = Faulty(device.session.lib, **{function: lambda *args: -4})
    with pytest.raises(DeviceError, match=r"device was lost while .*smaller n_ubatch"):
        recording.run()
    calls: list[Callable[[], object]] = [
        recording.run,
        lambda: device.allocate(8),
        lambda: device.download(buffer, 0, 8),
        lambda: device.pool.host("inputs", 1).words,
        lambda: recorded(device, [[fill_command(buffer, 0, 8, 1)]]),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match="was lost earlier"):
            call()


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_a_device_that_hangs_is_given_up(device: VulkanDevice, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a GPU gets a time limit; nothing waits for it afterwards, nor does close()."""
    session, lib = device.session, device.session.lib
    buffer = device.allocate(8)
    recording = recorded(device, [[fill_command(buffer, 0, 8, 1)]])
    recording.run()
    waits: list[int] = []

    def never(*args: Any) -> int:
        waits.append(1)
        return 2 if kind == "gpu" or len(waits) < 20 else int(lib.vkWaitForFences(*args))

    def fail(*_: Any) -> int:
        raise AssertionError("waited for a device that hangs")

    monkeypatch.setattr(vulkan_session, "WAIT_LIMIT_S", 0.0)
    monkeypatch.setattr(session, "info", replace(session.info, kind=kind))
    if kind == "cpu":
        session.lib = Faulty(lib, vkWaitForFences=never)
        recording.run()
        assert len(waits) == 20
        return
    session.lib = Faulty(lib, vkWaitForFences=never, vkQueueWaitIdle=fail, vkDeviceWaitIdle=fail)
    with pytest.raises(DeviceError, match=r"did not finish within 0 s; the device hangs.*smaller n_ubatch"):
        recording.run()
    for call in (recording.run, lambda: device.download(buffer, 0, 8)):
        with pytest.raises(DeviceError, match="hung earlier"):
            call()
    lib.vkDeviceWaitIdle(session.device)  # it does not hang really; only close() must not count on that
    device.close()


def test_too_many_bindings_are_refused(device: VulkanDevice) -> None:
    n = device.session.found.max_bindings + 1
    if n > 5000:
        pytest.skip(f"this device binds {n - 1} buffers")
    buffer = device.allocate(8)
    command = Command("fill", FILL_WORDS, (buffer,) * n, (0, 1, 0), (1, 1, 1), ())
    with pytest.raises(DeviceError, match=f"fill_words.comp binds {n} buffers, the device allows {n - 1}"):
        recorded(device, [[command]])


# ---- closing


def test_close_twice_and_use_afterwards(device: VulkanDevice) -> None:
    buffer = device.allocate(8)
    recording = recorded(device, [[fill_command(buffer, 0, 8, 1)]], timestamps=True)
    recording.run()
    region = device.pool.host("inputs", 1)
    device.close()
    device.close()
    assert device.allocated_bytes == 0
    calls: list[Callable[[], object]] = [
        recording.run,
        recording.level_seconds,
        lambda: device.allocate(8),
        lambda: device.upload(buffer, 0, np.zeros(8, np.uint32)),
        lambda: region.words,
        lambda: recorded(device, [[fill_command(buffer, 0, 8, 1)]]),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match="is closed"):
            call()


def test_opening_and_closing_leaks_nothing() -> None:
    def cycle(unified: bool | None) -> None:
        device = VulkanDevice(0, unified=unified)
        buffer = device.allocate(1 << 18)
        device.upload(buffer, 0, np.ones(1 << 18, np.uint32))
        recorded(device, [[fill_command(buffer, 0, 8, 1)]]).run()
        device.close()
        assert not device.session._cleanups

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    for _ in range(4):
        cycle(None)
        cycle(False)
    before = resident(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    n = 10
    for _ in range(n):
        cycle(None)
        cycle(False)
    after = resident(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    assert after[1:] == before[1:], "file descriptors, threads"
    # Each cycle touches 2 MiB or more of buffers; the CPU driver itself keeps a few KiB.
    assert after[0] - before[0] < n * (1 << 20), f"{after[0] - before[0]} bytes more after {2 * n} cycles"
