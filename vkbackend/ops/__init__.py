"""All ops, found by looking at this package's modules, and each callable alone on any device.

`vkbackend.ops.rms_norm(x, w, eps=1e-6, device="numpy")` takes and returns NumPy arrays; graph builders are the
functions inside the modules: `from vkbackend.ops.rms_norm import rms_norm`.
"""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from pathlib import Path
from typing import Any

from vkbackend.errors import VkBackendError
from vkbackend.ops.eager import eager
from vkbackend.ops.op import Op


def all_ops() -> list[Op]:
    """Every op of this package, by name."""
    return [_module(name).OP for name in op_names()]


def op_names() -> list[str]:
    """The names of this package's op modules: those that define `OP`; the others hold parts of ops."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if hasattr(_module(m.name), "OP"))


def _module(name: str) -> Any:
    """A module of this package. Raises `VkBackendError` saying where it fails: every command meets a mistake in one."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [(f.filename, f.lineno) for f in frames if str(Path(f.filename).parent) in __path__]
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, SyntaxError):
            places, what = [(error.filename or "", error.lineno)], f"{type(error).__name__}: {error.msg}"
        file, line = places[-1]
        raise VkBackendError(
            f"ops/{Path(file).name}, line {line}: can not be imported: {what}; correct or remove the file"
        ) from error


# Importing a module sets it as an attribute of its package; the callable takes that place afterwards.
for _name in op_names():
    globals()[_name] = eager(_module(_name), _name)
