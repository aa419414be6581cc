"""The file that keeps a driver's compiled pipelines."""

from __future__ import annotations

from pathlib import Path

import pytest

from vkbackend.device.copy import FILL_WORDS
from vkbackend.device.dispatching import Command
from vkbackend.device.probe import vulkan_devices
from vkbackend.device.vulkan import VulkanDevice

pytestmark = pytest.mark.usefixtures("needs_vulkan")


def run_a_kernel(device: VulkanDevice) -> None:
    buffer = device.allocate(8)
    inputs, outputs = device.pool.host("inputs", 1), device.pool.host("outputs", 1)
    fill = Command("fill", FILL_WORDS, (buffer,), (0, 8, 5), (4, 1, 1), ())
    device.record([[fill]], inputs, outputs, False).run()
    assert device.download(buffer, 0, 8).tolist() == [5] * 8


def test_the_cache_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))

    def use() -> bytes:
        device = VulkanDevice(0)
        run_a_kernel(device)
        data: bytes = bytes(device.pipelines.cache_data())
        device.close()
        return data

    data = use()
    (path,) = (tmp_path / "pipelines").iterdir()
    found = vulkan_devices("vulkan")[0]
    assert path.name == f"{found.cache_name}.bin"
    assert path.read_bytes()[32:] == data
    assert use() == data
    for damaged in (b"", b"not a cache", path.read_bytes()[:-1], path.read_bytes()[:-1] + b"\xff"):
        path.write_bytes(damaged)
        use()
        assert path.read_bytes()[32:] == data  # ignored, then written anew
    VulkanDevice(0).close()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_cache_folder_that_can_not_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path / "file"))
    device = VulkanDevice(0)
    run_a_kernel(device)
    device.close()
