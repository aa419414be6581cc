"""The Kompute device when something is wrong: what it refuses, what Kompute and Vulkan raise, use after closing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vkbackend.device import kompute as module
from vkbackend.device.base import Words
from vkbackend.device.copy import FILL_WORDS
from vkbackend.device.kompute import KomputeDevice, KomputeRecording
from vkbackend.errors import DeviceError


@pytest.mark.parametrize("wrong", ["one bit", "all zero", "shifted"])
def test_the_self_test_finds_wrong_reads(monkeypatch: pytest.MonkeyPatch, kompute: KomputeDevice, wrong: str) -> None:
    honest = KomputeDevice.download

    def lying(self: KomputeDevice, buffer: Any, offset: int, n_words: int) -> Words:
        words = honest(self, buffer, offset, n_words)
        if wrong == "one bit":
            words[n_words // 3] ^= 1
        elif wrong == "all zero":
            words[:] = 0
        else:
            words = np.roll(words, 1)
        return words

    monkeypatch.setattr(KomputeDevice, "download", lying)
    with pytest.raises(DeviceError, match=r"kompute:0: Kompute reads back other values.*numpy<2"):
        KomputeDevice(0)


def test_numpy_2_is_refused(monkeypatch: pytest.MonkeyPatch, kompute: KomputeDevice) -> None:
    monkeypatch.setattr(np, "__version__", "2.1.0")
    with pytest.raises(DeviceError, match=r"NumPy 2\.1\.0: pip install 'numpy<2'"):
        KomputeDevice(0)


def test_without_kp_the_error_tells_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kp", None)
    with pytest.raises(DeviceError, match=r"package kp .*make setup"):
        KomputeDevice(0)


@pytest.mark.parametrize("index", [-1, 99])
def test_an_unknown_index_lists_the_devices(kompute: KomputeDevice, index: int) -> None:
    with pytest.raises(DeviceError, match=rf"kompute:{index}: .*found \d+: kompute:0 \("):
        KomputeDevice(index)


def test_no_device_at_all(monkeypatch: pytest.MonkeyPatch, kompute: KomputeDevice) -> None:
    monkeypatch.setattr(module, "vulkan_devices", lambda prefix: [])
    with pytest.raises(DeviceError, match="found 0: none, install a Vulkan driver"):
        KomputeDevice(0)


def test_too_large_a_buffer_is_refused_before_kompute_sees_it(
    kompute: KomputeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("Kompute was asked")

    monkeypatch.setattr(kompute, "_tensor", fail)
    limits = kompute.info.limits
    most = min(limits.max_storage_range, limits.max_buffer_bytes)
    with pytest.raises(DeviceError, match=rf"the kv cache needs {most // 4 * 4 + 4} bytes.*allows 1\.\.{most}"):
        kompute.allocate(most // 4 + 1, label="the kv cache")


def test_what_kompute_raises_is_told_as_a_device_error(fresh: KomputeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def is_init(self) -> bool:
            return True

        def __getattr__(self, name: str) -> Any:
            def fail(*_: Any) -> Any:
                raise RuntimeError(f"{name} failed")

            return fail

    with pytest.raises(DeviceError, match="running a recording failed: eval failed"):
        KomputeRecording(Failing(), [], [], 1.0).run()
    manager = fresh._manager
    monkeypatch.setattr(fresh, "_manager", Failing())
    with pytest.raises(DeviceError, match="kompute:0: allocating 400 bytes for the ring failed: tensor_t failed"):
        fresh.allocate(100, label="the ring")
    with pytest.raises(DeviceError, match=r"pipeline for fill_words\.comp failed: algorithm failed"):
        fresh._algorithm(FILL_WORDS, [], (9,), (1, 1, 1), (0,))
    monkeypatch.setattr(fresh, "_manager", manager)


@pytest.mark.parametrize(
    ("vulkan_says", "advice"),
    [("ErrorDeviceLost", "smaller n_ubatch, and open it again"), ("ErrorOutOfDeviceMemory", "smaller n_ctx")],
)
def test_errors_of_vulkan_come_with_advice(
    vulkan_says: str, advice: str, fresh: KomputeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(f"vk::Something: {vulkan_says}")

    with pytest.raises(DeviceError, match=f"{vulkan_says}; .*{advice}"):
        KomputeRecording(SimpleNamespace(eval=fail, is_init=lambda: True), [], [], 1.0).run()
    manager = fresh._manager
    monkeypatch.setattr(fresh, "_manager", SimpleNamespace(tensor_t=fail))
    with pytest.raises(
        DeviceError, match=rf"40 bytes for the ring failed: .*{vulkan_says}; .*{advice}.* \(this .* holds"
    ):
        fresh.allocate(10, label="the ring")
    monkeypatch.setattr(fresh, "_manager", manager)


def test_a_failing_copy_is_a_device_error(fresh: KomputeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    x = fresh.allocate(8)

    class Lost:
        """A manager whose sequences fail when they are run."""

        def __getattr__(self, name: str) -> Any:
            return getattr(manager, name)

        def sequence(self, *_: Any) -> Any:
            def fail() -> None:
                raise RuntimeError("vk::Queue::submit: ErrorDeviceLost")

            return SimpleNamespace(record=lambda op: None, eval=fail, destroy=lambda: None)

    manager = fresh._manager
    monkeypatch.setattr(fresh, "_manager", Lost())
    for call in (lambda: fresh.download(x, 0, 8), lambda: fresh.fill(x, 0, 8, 1)):
        with pytest.raises(DeviceError, match=r"kompute:0 \(.*\): copying failed: .*ErrorDeviceLost"):
            call()
    monkeypatch.setattr(fresh, "_manager", manager)
    fresh.fill(x, 0, 8, 5)
    assert fresh.download(x, 0, 8).tolist() == [5] * 8


def test_using_a_closed_device_is_an_error(kompute: KomputeDevice) -> None:
    device = KomputeDevice(0)
    buffer, region = device.allocate(8), device.host_region(8, "region")
    outputs = device.host_region(8, "outputs")
    recording = device.record([], region, outputs, False)
    recording.run()
    device.close()
    calls: list[Callable[[], object]] = [
        recording.run,
        recording.level_seconds,
        lambda: device.allocate(8),
        lambda: device.host_region(8, "another"),
        lambda: device.upload(buffer, 0, np.zeros(8, np.uint32)),
        lambda: device.download(buffer, 0, 8),
        lambda: device.fill(buffer, 0, 8, 1),
        lambda: region.words,
        lambda: device.record([], region, outputs, False),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match="is closed"):
            call()
    device.close()
