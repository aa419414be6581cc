"""The exceptions of the public surface. Each message says what was wrong, where, the numbers, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Set, Sized
from numbers import Integral


class VkBackendError(Exception):
    """Base of every error that vkbackend raises on purpose."""


class DeviceError(VkBackendError):
    """No device, lost device, out of memory, or a limit exceeded: names the limit, the need and the device."""


class ModelError(VkBackendError):
    """A file, tensor or key is wrong: names it."""


class ContextError(VkBackendError):
    """Positions, capacity or token ids are wrong; the context is as it was before the call."""


def quoted(text: str) -> str:
    """A name out of a file for a message of one line: in quotes, cut short, unprintable characters escaped."""
    text = text[:100]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)[:100]
    return f"'{text}'"


def shown(value: object) -> str:
    """A value for a message of one line: long texts cut short, long arrays by their length, a dict as what it is."""
    if isinstance(value, str):
        return quoted(value) if len(value) <= 100 else f"{quoted(value)}... ({len(value)} characters)"
    if not isinstance(value, Sized) or getattr(value, "ndim", 1) == 0:  # an array without axes has no length
        return repr(value)
    if isinstance(value, Mapping | Set | bytes):
        return f"of type {type(value).__name__}, length {len(value)}"
    values = getattr(value, "tolist", lambda: value)() if len(value) <= 8 else None
    short = isinstance(values, list) and all(isinstance(v, bool | int | float) for v in values)
    return repr(values) if short else f"an array of {len(value)}"


def is_whole(value: object) -> bool:
    """Whether an argument is a whole number, Python's or NumPy's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
