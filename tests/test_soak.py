"""scripts/soak.py, in short: texts stay right and memory stays flat; and a leak or a wrong text would be told."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "soak.py"
FULL = bool(os.environ.get("VKBACKEND_FULL"))

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")


@pytest.fixture(scope="module")
def soak() -> Any:
    spec = importlib.util.spec_from_file_location("soak_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_script"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["numpy", "vulkan:0"])
def test_a_short_run(device: str, soak: Any, seed: int, request: pytest.FixtureRequest) -> None:
    if device != "numpy":
        request.getfixturevalue("vulkan")
    n = 2000 if FULL else {"numpy": 80, "vulkan:0": 40}[device]
    report = soak.soak(device, n, 20 * n if FULL else 6 * n, seed, lines=10)
    end = report.figures[-1]
    assert report.wrong == [] and report.compared > n and end.generations >= n
    flat = [f for f in report.figures if f.generations >= 0.5 * end.generations]
    assert {f.device_bytes for f in flat} == {end.device_bytes} and end.device_bytes > 0
    assert {f.files for f in flat} == {end.files}
    if FULL:
        assert report.problems() == []


def test_growth_and_wrong_texts_are_told(soak: Any) -> None:
    first = soak.Figures(0.0, 500, 5000, 100 << 20, 4096, 7, 20, 90, 5, 2)
    end = replace(first, generations=1000, tokens=10000)
    assert soak.Report([first, end]).problems() == []
    for name in ("device_bytes", "pipelines", "objects", "files", "threads"):
        (problem,) = soak.Report([first, replace(end, **{name: getattr(end, name) + 1})]).problems()
        assert problem.startswith(f"{name} grew")
    assert "RSS grew" in soak.Report([first, replace(end, rss=109 << 20)]).problems()[0]
    assert soak.Report([first, replace(end, rss=109 << 20, programs=21)]).problems() == []  # a late recording
    late = replace(end, files=6, objects=94, programs=21)
    assert soak.Report([first, late]).problems() == []
    assert soak.Report([first, replace(late, files=7)]).problems()[0].startswith("files grew")
    assert soak.Report([first, end], wrong=["text 7 differs"]).problems() == ["text 7 differs"]


def test_a_wrong_token_is_found(soak: Any, tmp_path: Path) -> None:
    run = soak.Soak("numpy", tmp_path, 3)
    run.first_texts(6)
    run.expected[1][2][3] = 63 - run.expected[1][2][3]
    run.all_texts()
    assert len(run.report.wrong) == 2  # through the plain and the speculative session
    assert all("model random, prompt 2: token 3 is" in line for line in run.report.wrong)
