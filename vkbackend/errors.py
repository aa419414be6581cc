"""The exceptions of the public surface. Each message says what was wrong, where, the numbers, and what to do."""

from __future__ import annotations


class VkBackendError(Exception):
    """Base of every error that vkbackend raises on purpose."""


class DeviceError(VkBackendError):
    """No device, lost device, out of memory, or a limit exceeded: names the limit, the need and the device."""


class ModelError(VkBackendError):
    """A file, tensor or key is wrong: names it."""


class ContextError(VkBackendError):
    """Positions, capacity or token ids are wrong; the context is as it was before the call."""
