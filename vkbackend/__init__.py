"""vkbackend: Qwen3.5-family models from GGUF files on any Vulkan GPU, with speculative decoding.

    import vkbackend as vkb
    model = vkb.load("model.gguf")
    print(vkb.generate(model, "Once upon a time", spec=vkb.DraftMTP()).text)

Names are imported when they are first used: importing the package does nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vkbackend import ops
    from vkbackend.device import Device, DeviceInfo, devices, open_device
    from vkbackend.errors import ContextError, DeviceError, ModelError, VkBackendError
    from vkbackend.model.batch import Batch
    from vkbackend.model.context import Context, DecodeOutput
    from vkbackend.model.loader import Model, load
    from vkbackend.model.memory import SeqRm
    from vkbackend.model.mtp import MtpContext
    from vkbackend.spec.draft_mtp import DraftMTP
    from vkbackend.spec.generate import Generation, Session, TextStream, generate, stream
    from vkbackend.spec.sampling import Sampler, Sampling, distribution
    from vkbackend.spec.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Context",
    "ContextError",
    "DecodeOutput",
    "Device",
    "DeviceError",
    "DeviceInfo",
    "DraftMTP",
    "Generation",
    "Model",
    "ModelError",
    "MtpContext",
    "Sampler",
    "Sampling",
    "SeqRm",
    "Session",
    "Stats",
    "TextStream",
    "VkBackendError",
    "devices",
    "distribution",
    "generate",
    "load",
    "open_device",
    "ops",
    "stream",
]

_HOMES = {
    "device": ("Device", "DeviceInfo", "devices", "open_device"),
    "errors": ("ContextError", "DeviceError", "ModelError", "VkBackendError"),
    "model.batch": ("Batch",),
    "model.context": ("Context", "DecodeOutput"),
    "model.loader": ("Model", "load"),
    "model.memory": ("SeqRm",),
    "model.mtp": ("MtpContext",),
    "spec.draft_mtp": ("DraftMTP",),
    "spec.generate": ("Generation", "Session", "TextStream", "generate", "stream"),
    "spec.sampling": ("Sampler", "Sampling", "distribution"),
    "spec.stats": ("Stats",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module("vkbackend.ops")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'vkbackend' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"vkbackend.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
