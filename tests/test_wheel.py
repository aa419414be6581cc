"""The wheel: SPIR-V of every kernel, sources and the demo model are in it, under the packages' names."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from vkbackend.device.copy import COPY_WORDS, FILL_WORDS
from vkbackend.ops import all_ops
from vkbackend.shaders.compiler import content_hash

ROOT = Path(__file__).resolve().parents[1]


def test_wheel_ships_compiled_kernels(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for kernel in [COPY_WORDS, FILL_WORDS, *(k for op in all_ops() for k in op.kernels())]:
        for subgroup in (False, True):
            assert f"vkbackend/shaders/spv/{kernel.name}-{content_hash(kernel, subgroup)}.spv" in names
    for name in (
        "model/data/demo-qwen35-mtp-q8_0.gguf",
        "shaders/include/lanes.glsl",
        "spec/verify.py",
        "cli/__init__.py",
    ):
        assert f"vkbackend/{name}" in names
