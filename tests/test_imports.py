"""Every module can be the first one that is imported: a cycle of imports shows only to some who use the library."""

from __future__ import annotations

import subprocess
import sys

EACH_FIRST = """
import importlib, pkgutil, sys
import vkbackend.model, vkbackend.spec
found = []
for package in (vkbackend, vkbackend.model, vkbackend.spec):
    found += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
names = sorted({name for name in found if not name.endswith("__main__")})
for name in names:
    for loaded in [m for m in sys.modules if m.partition(".")[0] == "vkbackend"]:
        del sys.modules[loaded]
    importlib.import_module(name)
print(len(names))
"""


def test_each_module_first() -> None:
    done = subprocess.run([sys.executable, "-c", EACH_FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 90
