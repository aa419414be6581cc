"""Devices: `open_device("kompute:0")`, `devices()`. Everything that depends on a device is in this package."""

from __future__ import annotations

import importlib.util
import warnings

from vkbackend.device.base import Buffer, Device, DeviceInfo, Limits, Program
from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import DeviceError

__all__ = ["Buffer", "Device", "DeviceInfo", "Limits", "Program", "devices", "note", "open_device"]


def devices() -> list[DeviceInfo]:
    """Every device that `open_device` takes: all through Kompute, all through Vulkan itself, and NumPy.

    Kompute's are left out where the package kp is missing; NumPy is always there.
    """
    from vkbackend.device.probe import vulkan_devices

    found: list[DeviceInfo] = []
    try:
        if importlib.util.find_spec("kp") is not None:
            found += [d.info for d in vulkan_devices("kompute")]
        found += [d.info for d in vulkan_devices("vulkan")]
    except DeviceError:
        pass
    return [*found, NumpyDevice().info]


def open_device(name: str = "auto") -> Device:
    """Opens a device by name: "auto", "kompute" or "kompute:N", "vulkan" or "vulkan:N", "numpy", "null".

    "kompute:N:relaxed" is the same device without barriers between levels: faster, and right on every driver tried, but
    nothing in Vulkan promises it (docs/kompute.md).
    "kompute:N:unchained" runs every level as a dispatch of its own also where chains are faster (vkbackend/chains.py).
    "auto" takes the first GPU through Kompute, else the first through Vulkan itself, else the NumPy fallback (a CPU
    Vulkan driver is slower than NumPy). Raises `DeviceError` for an unknown name or a device that does not open.
    """
    kind, _, index = name.partition(":")
    index, _, option = index.partition(":")
    if option and (kind != "kompute" or option not in ("relaxed", "unchained")):
        raise DeviceError(f"device '{name}' has an unknown option; there are kompute:N:relaxed and kompute:N:unchained")
    if kind == "auto" and not index:
        return _auto()
    if kind == "numpy" and not index:
        return NumpyDevice()
    if kind == "null" and not index:
        from vkbackend.device.null import NullDevice

        return NullDevice()
    if kind == "kompute" and (not index or index.isdigit()):
        from vkbackend.device.kompute import KomputeDevice

        return KomputeDevice(int(index or 0), relaxed=option == "relaxed", chains=option != "unchained")
    if kind == "vulkan" and (not index or index.isdigit()):
        from vkbackend.device.vulkan import VulkanDevice

        return VulkanDevice(int(index or 0))
    raise DeviceError(f"device '{name}' is unknown; use auto, kompute:N, vulkan:N or numpy (see: vkbackend devices)")


def note(info: DeviceInfo) -> str:
    """What a user should know of the device in use, empty for a GPU: that it is none, why, and what to do."""
    from vkbackend.device.probe import vulkan_devices

    if info.kind == "gpu":
        return ""
    if info.kind == "cpu":
        return f"{info.name} is a CPU driver, not a GPU ({info.description}); NumPy is often faster: --device numpy"
    try:
        found = vulkan_devices("vulkan")
    except DeviceError as error:
        return f"running on NumPy: {error}"
    gpus = [d.info for d in found if d.info.kind == "gpu"]
    if gpus:
        return f"running on NumPy, though {gpus[0].name} ({gpus[0].description}) is there"
    cpus = f", only CPU drivers ({', '.join(d.info.description for d in found)})" if found else ""
    return f"running on NumPy: no GPU was found{cpus}; install your GPU's Vulkan driver if there is one"


def _auto() -> Device:
    gpus = [info for info in devices() if info.kind == "gpu"]
    for prefix in ("kompute", "vulkan"):
        for info in gpus:
            if info.name.startswith(prefix):
                try:
                    return open_device(info.name)
                except DeviceError as error:
                    warnings.warn(f"auto: passed over {info.name}: {error}", RuntimeWarning, stacklevel=3)
    return NumpyDevice()
