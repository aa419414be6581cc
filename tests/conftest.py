"""Devices and random numbers for all tests."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from open_vulkan import need_vulkan, open_or_skip

from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.device.vulkan import VulkanDevice


@pytest.fixture(scope="session")
def needs_vulkan() -> None:
    """For tests that open Vulkan devices themselves."""
    need_vulkan()


@pytest.fixture(scope="session")
def kompute() -> Iterator[KomputeDevice]:
    """The first Kompute device, with the subgroup variants of the shaders."""
    device = open_or_skip(lambda: KomputeDevice(0, subgroups=True))
    yield device
    device.close()


@pytest.fixture(scope="session")
def kompute_shared() -> Iterator[KomputeDevice]:
    """The same with the shared-memory variants."""
    device = open_or_skip(lambda: KomputeDevice(0, subgroups=False))
    yield device
    device.close()


@pytest.fixture(params=["kompute", "kompute_shared"])
def device(request: pytest.FixtureRequest) -> KomputeDevice:
    """Both Kompute devices, one after the other."""
    found: KomputeDevice = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def vulkan() -> Iterator[VulkanDevice]:
    """The first device through direct Vulkan."""
    device = open_or_skip(lambda: VulkanDevice(0, subgroups=True))
    yield device
    device.close()


@pytest.fixture(scope="session")
def dots_device() -> Iterator[VulkanDevice]:
    """Direct Vulkan whose lowerings are told of a GPU with dot products of bytes (vkbackend/ops/linear_dots.py)."""
    device = open_or_skip(lambda: VulkanDevice(0, subgroups=True))
    limits = device.info.limits
    features = replace(limits.features, integer_dot=True)
    limits = replace(limits, subgroup_size=max(32, limits.subgroup_size), features=features)
    device.info = replace(device.info, limits=limits)
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
