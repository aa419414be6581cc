"""The direct device under Vulkan's validation layer, where that is installed: not one message."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "validate.py"
FULL = bool(os.environ.get("VKBACKEND_FULL"))

# A chain of two dispatches without any barrier: what the test below would see if barriers were missing.
NO_BARRIERS = """
import numpy as np
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.device.vulkan_memory import Memory
from vkbackend.graph import Graph
from vkbackend.ops.rms_norm import rms_norm
Memory.barrier = lambda *_: None
device = VulkanDevice(0)
g = Graph()
x, w = g.input("x", (3, 8)), g.input("w", (8,))
g.output("y", rms_norm(g, rms_norm(g, x, w, 1e-6), w, 1e-6))
device.compile(g).run({"x": np.ones((3, 8)), "w": np.ones(8)})
device.close()
"""


@pytest.fixture(scope="module")
def validate() -> Any:
    spec = importlib.util.spec_from_file_location("validate_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not module.layer_is_there():
        pytest.skip("the validation layer is not installed (Debian: vulkan-validationlayers)")
    return module


def test_the_direct_device_gives_no_message(validate: Any) -> None:
    command = [sys.executable, str(SCRIPT), *([] if FULL else ["--cases", "1"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "exit status 0, 0 messages" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("cases, 18 texts") == 3


def test_missing_barriers_would_be_told(validate: Any) -> None:
    status, counts, _ = validate.under_the_layer([sys.executable, "-c", NO_BARRIERS])
    assert status == 0 and any(name.startswith("SYNC-HAZARD") for name in counts), counts


def test_wrong_calls_would_be_told(validate: Any) -> None:
    code = (
        "from vkbackend.device.vulkan import VulkanDevice\n"
        "device = VulkanDevice(0)\n"
        "a = device.allocate(64)\n"
        "a.n_words = 128\n"  # a lie: copies then run past the end
        "device.memory._once(lambda job: device.memory.record_copy(a, 0, a, 64, 64, job))\n"
        "device.close()\n"
    )
    counts = validate.under_the_layer([sys.executable, "-c", code])[1]
    assert any(name.startswith("VUID-vkCmdCopyBuffer") for name in counts), counts
