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

# A copy past the end of a buffer; then another instance, which opens the log again.
WRONG = """
from vkbackend.device.vulkan import VulkanDevice
device = VulkanDevice(0)
a = device.allocate(64)
a.n_words = 128  # a lie
device.memory._once(lambda job: device.memory.record_copy(a, 0, a, 64, 64, job))
device.close()
VulkanDevice(0).close()
"""

# Two dispatches of one level, on words of their own.
ONE_LEVEL = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent / "device")!r})
from vulkan_commands import copy_command, recorded
from vkbackend.device.vulkan import VulkanDevice
device = VulkanDevice(0)
buffer = device.allocate(16)
device.fill(buffer, 0, 16, 3)
recorded(device, [[copy_command(buffer, 0, buffer, 4, 4), copy_command(buffer, 8, buffer, 12, 4)]]).run()
assert device.download(buffer, 0, 16).tolist() == [3] * 16
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
    counts = validate.under_the_layer([sys.executable, "-c", WRONG])[1]
    assert any(name.startswith("VUID-vkCmdCopyBuffer") for name in counts), counts


def test_a_command_with_one_dispatch_a_level(validate: Any) -> None:
    def hazards(code: str, order: str) -> bool:
        status, counts, log = validate.under_the_layer([sys.executable, "-c", code], order)
        assert status == 0 and all(name.startswith("SYNC-HAZARD") for name in counts), log
        return bool(counts)

    kompute = "from vkbackend.device.kompute import KomputeDevice\nKomputeDevice(0).close()\n"  # which is not watched
    assert hazards(ONE_LEVEL, "")  # what shares a level and a buffer is one to the layer
    for order in ("forwards", "backwards"):
        assert not hazards(ONE_LEVEL + kompute, order)
        assert hazards(NO_BARRIERS, order)


def test_messages_are_listed_by_test(validate: Any, tmp_path: Path) -> None:
    wrong = WRONG.replace("\n", "\n    ")
    (tmp_path / "test_made.py").write_text(f"def test_a():\n    pass\n\n\ndef test_b():\n    {wrong}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)]
    status, counts, log = validate.under_the_layer(command, "forwards")
    by_test = validate.by_test(log)
    assert status == 0 and {test for test, _ in by_test} == {"test_made.py::test_b"}, log
    assert sum(by_test.values()) == sum(counts.values()) > 0
