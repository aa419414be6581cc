"""Every module can be the first one that is imported: a cycle of imports shows only to some who use the library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

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


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="only make setup's own .venv promises this")
def test_beside_the_clone(tmp_path: Path) -> None:
    """A program in the folder that holds the clone: the clone's folder, vkbackend, must not pass for the package."""
    (tmp_path / "vkbackend").symlink_to(ROOT)
    (tmp_path / "app.py").write_text(
        "import vkbackend, vkbackend.model, vkbackend.spec\nprint(vkbackend.load.__module__, vkbackend.__file__)"
    )
    for how in (["app.py"], ["-c", "import app"]):
        done = subprocess.run([sys.executable, *how], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"run make setup again: {done.stderr}"
        module, file = done.stdout.split()
        assert module == "vkbackend.model.loader" and Path(file).resolve() == ROOT / "vkbackend" / "__init__.py"
