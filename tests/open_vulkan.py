"""Opens the Vulkan devices of the tests. Only a machine without Vulkan skips them, and CI never does."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import pytest

from vkbackend.device.probe import vulkan_devices
from vkbackend.errors import DeviceError

AnyDevice = TypeVar("AnyDevice")


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def need_vulkan() -> None:
    """Skips the test where Vulkan has no device; in CI that is an error."""
    try:
        if not vulkan_devices("vulkan"):
            raise DeviceError("the Vulkan loader found no device")
    except DeviceError as error:
        if in_ci():
            raise
        pytest.skip(f"no Vulkan device here: {error}")


def open_or_skip(make: Callable[[], AnyDevice]) -> AnyDevice:
    """A device made by `make`. An error while making it is a failed test: the device is there and must open."""
    need_vulkan()
    return make()
