"""All ops, found by looking at this package's modules, and each callable alone on any device.

`vkbackend.ops.rms_norm(x, w, eps=1e-6, device="numpy")` takes and returns NumPy arrays; graph builders are the
functions inside the modules: `from vkbackend.ops.rms_norm import rms_norm`.
"""

from __future__ import annotations

import importlib
import pkgutil

from vkbackend.ops.eager import eager
from vkbackend.ops.op import Op

_NOT_OPS = {"op", "case", "eager", "delta_net_blocks", "linear_prompt"}


def all_ops() -> list[Op]:
    """Every op of this package, by name."""
    return [importlib.import_module(f"{__name__}.{name}").OP for name in op_names()]


def op_names() -> list[str]:
    """The names of this package's op modules."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_OPS)


# Importing a module sets it as an attribute of its package; the callable takes that place afterwards.
for _name in op_names():
    globals()[_name] = eager(importlib.import_module(f"{__name__}.{_name}"), _name)
