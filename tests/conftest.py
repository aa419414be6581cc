"""Devices and random numbers for all tests."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import numpy as np
import pytest

from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.errors import DeviceError


def _open(make: type[KomputeDevice] | type[VulkanDevice], subgroups: bool) -> KomputeDevice | VulkanDevice:
    try:
        return make(0, subgroups)
    except DeviceError as error:
        if os.environ.get("CI"):
            raise  # CI must test the Vulkan devices, not skip them
        pytest.skip(f"no Vulkan device here: {error}")


@pytest.fixture(scope="session")
def kompute() -> Iterator[KomputeDevice]:
    """The first Kompute device, with the subgroup variants of the shaders."""
    device = _open(KomputeDevice, True)
    yield device
    device.close()


@pytest.fixture(scope="session")
def kompute_shared() -> Iterator[KomputeDevice]:
    """The same with the shared-memory variants."""
    device = _open(KomputeDevice, False)
    yield device
    device.close()


@pytest.fixture(scope="session")
def vulkan() -> Iterator[VulkanDevice]:
    """The first device through direct Vulkan."""
    device = _open(VulkanDevice, True)
    yield device
    device.close()


@pytest.fixture(scope="session")
def numpy_device() -> NumpyDevice:
    return NumpyDevice()


@pytest.fixture
def seed() -> int:
    """A fresh seed, shown when the test fails; VKBACKEND_SEED repeats a run."""
    value = int(os.environ.get("VKBACKEND_SEED") or secrets.randbelow(1 << 31))
    print(f"seed {value}")
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
