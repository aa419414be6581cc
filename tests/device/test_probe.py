"""What is learnt of physical devices, and what is said where there are none."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vkbackend.device import devices, note, open_device, probe
from vkbackend.device.base import DeviceInfo, Features, Limits
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.probe import PhysicalDevice, create_instance, load_vulkan, uses_subgroups, vulkan_devices
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.errors import DeviceError


@pytest.mark.parametrize(
    ("shuffle", "size", "uses"), [(True, 8, True), (True, 64, True), (True, 4, False), (False, 32, False)]
)
def test_subgroup_kernels_need_shuffles_and_room_for_a_team(shuffle: bool, size: int, uses: bool) -> None:
    assert uses_subgroups(Limits(subgroup_shuffle=shuffle, subgroup_size=size)) is uses


def test_devices_report_at_least_what_vulkan_guarantees(vulkan: VulkanDevice) -> None:
    for i, device in enumerate(vulkan_devices("vulkan")):
        least, info = Limits(), device.info
        assert info.name == f"vulkan:{i}" and info.description and info.kind in ("gpu", "cpu")
        assert info.limits.max_push_bytes >= least.max_push_bytes
        assert all(n >= m for n, m in zip(info.limits.max_groups, least.max_groups, strict=True))
        assert info.limits.max_invocations >= least.max_invocations
        assert info.limits.max_shared_bytes >= least.max_shared_bytes
        assert info.limits.max_storage_range >= 1 << 27
        assert info.limits.subgroup_size >= info.limits.min_subgroup_size >= 1 and info.memory > 0
        assert info.memory_free >= 0
        assert device.timestamp_ns >= 0 and device.max_bindings >= 4
        assert "/" not in device.cache_name


def test_through_kompute_there_are_no_optional_features(kompute: KomputeDevice) -> None:
    both = zip(vulkan_devices("kompute"), vulkan_devices("vulkan"), strict=True)
    for i, (device, direct) in enumerate(both):
        limits = device.info.limits
        assert device.info.name == f"kompute:{i}" and device.info.description == direct.info.description
        assert limits.max_push_bytes == 128 and limits.features == Features()
        assert limits.max_buffer_bytes < 1 << 32
        assert limits.max_groups == direct.info.limits.max_groups


def test_kompute_never_gets_more_push_bytes_than_the_device_has() -> None:
    found = vulkan_devices_stub(Limits(max_push_bytes=100, features=Features(int8=True)))
    assert probe._through_kompute(found, 3).info.limits.max_push_bytes == 100
    wide = vulkan_devices_stub(Limits(max_push_bytes=256))
    assert probe._through_kompute(wide, 3).info.limits.max_push_bytes == 128


def vulkan_devices_stub(limits: Limits) -> PhysicalDevice:
    from vkbackend.device.vulkan_features import Supported

    info = replace(SOME_INFO, limits=limits)
    return PhysicalDevice(info, 1.0, Supported(frozenset(), (), Features()), frozenset(), "x", 8)


SOME_INFO = DeviceInfo("vulkan:3", "a GPU", "gpu", Limits())


@pytest.mark.parametrize("kind", ["kompute", "vulkan"])
def test_without_the_vulkan_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vulkan", None)
    with pytest.raises(DeviceError, match=r"no Vulkan loader here .*libvulkan1.*make setup"):
        vulkan_devices(kind)


def test_without_a_driver() -> None:
    class NoDriver:
        def __getattr__(self, name: str) -> Any:
            return lambda **_: None

        def vkCreateInstance(self, *_: Any) -> Any:
            raise RuntimeError("VkErrorIncompatibleDriver")

    with pytest.raises(DeviceError, match=r"found no driver \(RuntimeError\); install your GPU's driver"):
        create_instance(NoDriver())


def test_the_instance_goes_even_when_listing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = []
    fake = SimpleNamespace(vkDestroyInstance=lambda instance, _: gone.append(instance))
    monkeypatch.setattr(probe, "load_vulkan", lambda: fake)
    monkeypatch.setattr(probe, "create_instance", lambda vk: "the instance")

    def fail(vk: Any, instance: Any) -> Any:
        raise DeviceError("listing Vulkan devices failed")

    monkeypatch.setattr(probe, "physical_devices", fail)
    with pytest.raises(DeviceError, match="listing"):
        vulkan_devices("vulkan")
    assert gone == ["the instance"]


def test_a_lost_device_while_listing_is_a_device_error(vulkan: VulkanDevice) -> None:
    vk = load_vulkan()

    class Lost:
        VkError = vk.VkError

        def vkEnumeratePhysicalDevices(self, instance: Any) -> Any:
            raise vk.VkErrorDeviceLost

    with pytest.raises(DeviceError, match="listing Vulkan devices failed: VkErrorDeviceLost"):
        probe.physical_devices(Lost(), None)


def test_limits_that_a_driver_does_not_know_are_not_taken_as_zero() -> None:
    class Answers:
        """A driver that reports 0 for the largest allocation and 1 GiB for the largest buffer."""

        def __getattr__(self, name: str) -> Any:
            return lambda **fields: SimpleNamespace(maxMemoryAllocationSize=0, maxBufferSize=1 << 30, **fields)

        def vkGetPhysicalDeviceProperties2(self, handle: Any, props: Any) -> None:
            pass

    assert probe._properties_1_1(Answers(), None, (1, 3), frozenset())[1] == 1 << 30
    assert probe._properties_1_1(Answers(), None, (1, 1), frozenset())[1] == probe._MAX_BUFFER


def info(kind: str, name: str = "vulkan:0") -> DeviceInfo:
    return replace(SOME_INFO, kind=kind, name=name, description=f"some {kind}")


@pytest.mark.parametrize(
    ("used", "found", "says"),
    [
        (info("gpu"), [], r"^$"),
        (info("cpu"), [info("cpu")], r"vulkan:0 is a CPU driver, not a GPU \(some cpu\).*--device numpy"),
        (info("reference", "numpy"), [], r"on NumPy: no GPU was found; install"),
        (info("reference", "numpy"), [info("cpu")], r"no GPU was found, only CPU drivers \(some cpu\); install"),
        (info("reference", "numpy"), [info("cpu"), info("gpu", "vulkan:1")], r"though vulkan:1 \(some gpu\) is there"),
        (info("reference", "numpy"), None, r"on NumPy: no Vulkan loader here"),
    ],
)
def test_what_is_noted_of_the_device_in_use(
    used: DeviceInfo, found: list[DeviceInfo] | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(prefix: str) -> list[PhysicalDevice]:
        if found is None:
            raise DeviceError("no Vulkan loader here")
        return [replace(vulkan_devices_stub(Limits()), info=i) for i in found]

    monkeypatch.setattr(probe, "vulkan_devices", listed)
    assert re.search(says, note(used))


@pytest.mark.parametrize("kind", ["kompute", "vulkan"])
def test_a_loader_without_devices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, it is an error that says what to install; "auto" takes NumPy."""
    monkeypatch.setattr(probe, "physical_devices", lambda vk, instance: [])
    monkeypatch.setattr("vkbackend.device.vulkan_session.physical_devices", lambda vk, instance: [])
    with pytest.raises(DeviceError, match=rf"{kind}:0: there is no such Vulkan device; found 0: none, install"):
        open_device(f"{kind}:0")
    opened = open_device("auto")
    assert opened.info.name == "numpy" and [d.name for d in devices()] == ["numpy"]


def test_auto_without_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vulkan", None)
    assert open_device("auto").info.name == "numpy"
    with pytest.raises(DeviceError, match=r"no Vulkan loader here .*make setup"):
        open_device("kompute:0")
