"""Devices of a test: direct Vulkan, its memory mapped where the driver allows it or copied through staging; Kompute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.vulkan import VulkanDevice


@pytest.fixture(params=["unified", "staged"])
def direct(request: pytest.FixtureRequest) -> Iterator[VulkanDevice]:
    opened = VulkanDevice(0, unified=None if request.param == "unified" else False)
    yield opened
    opened.close()


@pytest.fixture
def fresh(kompute: KomputeDevice) -> Iterator[KomputeDevice]:
    """A device of this test's own (where there is one at all)."""
    device = KomputeDevice(0)
    yield device
    device.close()
