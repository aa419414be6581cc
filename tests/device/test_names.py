"""Device names: which there are, what opens, what is refused."""

from __future__ import annotations

import pytest

import vkbackend.device as devices_module
from vkbackend.device import DeviceInfo, Limits, devices, open_device
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.probe import vulkan_devices
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.errors import DeviceError
from vkbackend.ops import all_ops
from vkbackend.ops.case import run_case


@pytest.mark.parametrize(
    "name", ["cuda", "kompute:x", "kompute:0:fast", "numpy:0:relaxed", "vulkan:0:strict", "numpy:1"]
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="device"):
        open_device(name)


@pytest.mark.usefixtures("needs_vulkan")
def test_relaxed_gives_the_same_results(seed: int) -> None:
    relaxed, strict = open_device("kompute:0:relaxed"), open_device("kompute:0:strict")
    assert isinstance(relaxed, KomputeDevice) and isinstance(strict, KomputeDevice)
    assert relaxed.relaxed and not strict.relaxed
    ops = {op.name: op for op in all_ops()}
    for name in ("argmax", "linear", "attention"):  # each has cases of several levels
        for case in ops[name].cases()[-3:]:
            assert run_case(case, relaxed, seed) == run_case(case, strict, seed)
    relaxed.close()
    strict.close()


@pytest.mark.usefixtures("needs_vulkan")
def test_the_list_names_both_ways_and_numpy() -> None:
    names = [info.name for info in devices()]
    n = len(vulkan_devices("vulkan"))
    assert [name for name in names if name.startswith("vulkan")] == [f"vulkan:{i}" for i in range(n)]
    assert names[-1] == "numpy"
    assert all(not d.info.limits.features.storage16 for d in vulkan_devices("kompute"))


@pytest.mark.usefixtures("needs_vulkan")
def test_open_by_name() -> None:
    for name in ("vulkan", "vulkan:0"):
        device = open_device(name)
        assert device.info.name == "vulkan:0" and device.holds_packed_weights
        device.close()
    for name in ("vulkan:x", "vulkan:-1", "auto:1"):
        with pytest.raises(DeviceError, match="unknown"):
            open_device(name)


def test_auto_prefers_kompute_then_vulkan_then_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def infos(*kinds: str) -> list[DeviceInfo]:
        return [
            DeviceInfo(f"{way}:{i}", "", kind, Limits())
            for way in ("kompute", "vulkan")
            for i, kind in enumerate(kinds)
        ]

    opened: list[str] = []
    real = devices_module.open_device

    def fake(name: str) -> object:
        opened.append(name)
        if name.startswith(broken):
            raise DeviceError("does not open")
        return name

    monkeypatch.setattr(devices_module, "open_device", fake)
    monkeypatch.setattr(devices_module, "devices", lambda: infos("cpu", "gpu"))
    broken: tuple[str, ...] = ()
    assert real("auto") == "kompute:1"  # type: ignore[comparison-overlap]
    broken = ("kompute",)
    with pytest.warns(RuntimeWarning, match="passed over kompute:1: does not open"):
        assert real("auto") == "vulkan:1"  # type: ignore[comparison-overlap]
    monkeypatch.setattr(devices_module, "devices", lambda: infos("cpu"))
    assert real("auto").info.name == "numpy"


@pytest.mark.usefixtures("needs_vulkan")
def test_an_unknown_index_lists_the_devices() -> None:
    with pytest.raises(DeviceError, match=r"vulkan:99: there is no such Vulkan device; found \d+: vulkan:0 \("):
        VulkanDevice(99)
