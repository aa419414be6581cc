"""The direct Vulkan device, with its memory mapped where the driver allows it and with copies through staging."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vkbackend.device.vulkan import VulkanDevice


@pytest.fixture(params=["unified", "staged"])
def direct(request: pytest.FixtureRequest) -> Iterator[VulkanDevice]:
    opened = VulkanDevice(0, unified=None if request.param == "unified" else False)
    yield opened
    opened.close()
