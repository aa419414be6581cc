"""Devices: `open_device("kompute:0")`, `devices()`. Everything that depends on a device is in this package."""

from __future__ import annotations

from vkbackend.device.base import Buffer, Device, DeviceInfo, Limits, Program
from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import DeviceError

__all__ = ["Buffer", "Device", "DeviceInfo", "Limits", "Program", "devices", "open_device"]


def devices() -> list[DeviceInfo]:
    """Every device that `open_device` takes, best first choice of its kind first; NumPy is always there."""
    from vkbackend.device.probe import vulkan_devices

    found: list[DeviceInfo] = []
    try:
        found += [d.info for d in vulkan_devices("kompute")]
    except DeviceError:
        pass
    return [*found, NumpyDevice().info]


def open_device(name: str = "auto") -> Device:
    """Opens a device by name: "auto", "kompute" or "kompute:N", "numpy", "null".

    "auto" takes the first GPU through Kompute, else the NumPy fallback (a CPU Vulkan driver is slower than
    NumPy). Raises `DeviceError` for an unknown name or a device that does not open.
    """
    kind, _, index = name.partition(":")
    if kind == "auto":
        return _auto()
    if kind == "numpy" and not index:
        return NumpyDevice()
    if kind == "null" and not index:
        from vkbackend.device.null import NullDevice

        return NullDevice()
    if kind == "kompute" and (not index or index.isdigit()):
        from vkbackend.device.kompute import KomputeDevice

        return KomputeDevice(int(index or 0))
    raise DeviceError(f"device '{name}' is unknown; use auto, kompute:N or numpy (see: vkbackend devices)")


def _auto() -> Device:
    for info in devices():
        if info.kind == "gpu" and info.name.startswith("kompute"):
            return open_device(info.name)
    return NumpyDevice()
