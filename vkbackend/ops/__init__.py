"""All ops, found by looking at this package's modules, and each callable alone on any device.

`vkbackend.ops.rms_norm(x, w, eps=1e-6, device="numpy")` takes and returns NumPy arrays; graph builders are the
functions inside the modules: `from vkbackend.ops.rms_norm import rms_norm`.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from vkbackend.ops.eager import eager
from vkbackend.ops.op import Op


def all_ops() -> list[Op]:
    """Every op of this package, by name."""
    return [_module(name).OP for name in op_names()]


def op_names() -> list[str]:
    """The names of this package's op modules: those that define `OP`; the others hold parts of ops."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if hasattr(_module(m.name), "OP"))


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


# Importing a module sets it as an attribute of its package; the callable takes that place afterwards.
for _name in op_names():
    globals()[_name] = eager(_module(_name), _name)
