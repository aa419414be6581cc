"""Wheels ship compiled SPIR-V: every kernel is compiled first. All else is in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def compile_shaders() -> None:
    """Runs vkbackend.shaders.build on the source tree, under the packages' imported names."""
    with tempfile.TemporaryDirectory() as work:
        tree = Path(work) / "vkbackend"
        tree.mkdir()
        for entry in (ROOT / "vkbackend").iterdir():
            (tree / entry.name).symlink_to(entry)
        for package in ("model", "spec", "shaders"):
            (tree / package).symlink_to(ROOT / package)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([work, *sys.path])}
        subprocess.run([sys.executable, "-m", "vkbackend.shaders.build"], cwd=work, env=env, check=True)


class BuildWithShaders(build_py):
    """build_py, with the kernels compiled first (editable installs compile on use)."""

    def run(self) -> None:
        if not self.editable_mode:
            compile_shaders()
        super().run()


setup(cmdclass={"build_py": BuildWithShaders})
