"""The fixtures themselves: a device that does not work fails its tests, CI never skips, seeds repeat a run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vkbackend.device.kompute import KomputeDevice

TESTS = Path(__file__).parent
NO_DRIVER = {"VK_DRIVER_FILES": "/nowhere.json", "VK_ICD_FILENAMES": "/nowhere.json"}

USES_A_DEVICE = """
def test_it(kompute, kompute_shared, vulkan):
    assert kompute.info.name
"""

# The device is there, but what it reads is not what was written.
LIES = """
from vkbackend.device.kompute import KomputeDevice

honest = KomputeDevice.download
KomputeDevice.download = lambda self, *args: honest(self, *args) + 1

def test_it(kompute):
    pass
"""


def run(folder: Path, text: str, **env: str) -> tuple[int, str]:
    """Runs one test file below this project's conftest.py, in a process of its own."""
    for name in ("conftest.py", "open_vulkan.py"):
        shutil.copy(TESTS / name, folder / name)
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    clean = {k: v for k, v in os.environ.items() if k not in ("CI", "VKBACKEND_SEED", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, cwd=folder, env={**clean, **env}, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_without_a_driver_device_tests_are_skipped_with_the_reason(tmp_path: Path) -> None:
    for ci in ("", "false", "0"):
        code, text = run(tmp_path, USES_A_DEVICE, **NO_DRIVER, CI=ci)
        assert code == 0 and "1 skipped" in text, text
        assert re.search(r"SKIPPED.*no Vulkan device here: .*(found no d|no Vulkan loader)", text), text


def test_in_ci_they_fail(tmp_path: Path) -> None:
    for ci in ("true", "1"):
        code, text = run(tmp_path, USES_A_DEVICE, **NO_DRIVER, CI=ci)
        assert code != 0 and "1 error" in text and "skipped" not in text, text


def test_a_device_that_does_not_work_is_no_reason_to_skip(tmp_path: Path, kompute: KomputeDevice) -> None:
    code, text = run(tmp_path, LIES)
    assert code != 0 and "1 error" in text and "reads back other values" in text, text


@pytest.mark.parametrize("given", [None, "123"])
def test_a_failing_test_shows_its_seed(tmp_path: Path, given: str | None) -> None:
    text = "def test_it(rng):\n    raise AssertionError(f'drew {rng.integers(1 << 40)}')\n"
    env = {} if given is None else {"VKBACKEND_SEED": given}
    _, first = run(tmp_path, text, **env)
    (seed,) = re.findall(r"^seed (\d+)$", first, re.MULTILINE)
    assert given in (None, seed)
    _, again = run(tmp_path, text, VKBACKEND_SEED=seed)
    assert set(re.findall(r"drew (\d+)", again)) == set(re.findall(r"drew (\d+)", first)) != set()
