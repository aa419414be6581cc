"""docs/adding-an-op.md works as it stands: its op is found, passes on every device, and its example runs."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import vkbackend.ops
from vkbackend.cli import main
from vkbackend.device.base import Limits
from vkbackend.device.null import NullDevice
from vkbackend.errors import VkBackendError
from vkbackend.graph import Graph
from vkbackend.ops.case import CaseBuilder, run_case
from vkbackend.ops.eager import eager
from vkbackend.shaders import compiler

DOC = Path(__file__).resolve().parents[1] / "docs" / "adding-an-op.md"
FILE = re.compile(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = "layer_norm"


def files() -> dict[str, str]:
    """The files that the page holds, by the path it gives for them."""
    return dict(FILE.findall(DOC.read_text()))


@pytest.fixture
def op_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's files as if they lay in the package's folders."""
    shaders, ops = tmp_path / "shaders", tmp_path / "ops"
    ops.mkdir()
    shaders.mkdir()
    for entry in compiler.SOURCE_DIR.iterdir():
        if f"shaders/{entry.name}" in files():
            continue  # of a reader who followed the page: not to be written through the link
        if entry.suffix == ".comp" or entry.name == "include":
            (shaders / entry.name).symlink_to(entry)
    for path, text in files().items():
        home = {"shaders": shaders, "vkbackend/ops": ops}[str(Path(path).parent)]
        (home / Path(path).name).write_text(text)
    monkeypatch.setattr(compiler, "SOURCE_DIR", shaders)
    monkeypatch.setattr(vkbackend.ops, "__path__", [*vkbackend.ops.__path__, str(ops)])
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path / "cache"))
    compiler._sources.cache_clear()
    real = sys.modules.get(f"vkbackend.ops.{NAME}")  # of a reader who followed the page
    module = importlib.import_module(f"vkbackend.ops.{NAME}")
    monkeypatch.setattr(vkbackend.ops, NAME, eager(module, NAME))  # as the package does when it is imported
    yield module
    if real is None:
        sys.modules.pop(f"vkbackend.ops.{NAME}")
    compiler._sources.cache_clear()


def test_the_page_holds_one_shader_and_one_module() -> None:
    assert sorted(files()) == [f"shaders/{NAME}.comp", f"vkbackend/ops/{NAME}.py"]
    # Where a reader followed the page, the module beside the other ops is imported: it must be the page's.
    for path, text in files().items():
        file = DOC.parents[1] / path
        assert not file.exists() or file.read_text() == text, f"{path} hides that of {DOC.name}: delete it"


def test_the_op_is_found_by_itself(op_module: ModuleType) -> None:
    assert NAME in vkbackend.ops.op_names()
    assert op_module.OP in vkbackend.ops.all_ops()


@pytest.mark.parametrize("device", ["numpy_device", "kompute", "kompute_shared"])
def test_its_cases_pass(op_module: ModuleType, device: str, seed: int, request: pytest.FixtureRequest) -> None:
    results = [run_case(case, request.getfixturevalue(device), seed) for case in op_module.OP.cases()]
    assert len(results) >= 5 and all(r.ok for r in results), results


def test_both_variants_give_the_same_bits(op_module: ModuleType, seed: int, request: pytest.FixtureRequest) -> None:
    for case in op_module.OP.cases():
        outputs = []
        for name in ("kompute", "kompute_shared"):
            builder = CaseBuilder(request.getfixturevalue(name), np.random.default_rng(seed))
            case.build(builder)
            outputs.append(builder.device.compile(builder.graph).run(builder.feeds)["out0"])
        np.testing.assert_array_equal(outputs[0], outputs[1])


def test_it_keeps_the_promises_of_an_op(op_module: ModuleType) -> None:
    op = op_module.OP
    device = NullDevice()
    for case in op.cases():
        builder = CaseBuilder(device, np.random.default_rng(0))
        case.build(builder)
        device.compile(builder.graph)
        for node in builder.graph.nodes:
            assert all(d.kernel in op.kernels() for stage in op.lower(node, Limits()) for d in stage)
    g = Graph()
    with pytest.raises(VkBackendError, match=r"layer_norm: b must have shape \(4,\) to match x, got \(3,\)"):
        op_module.layer_norm(g, g.temp("x", (2, 4)), g.temp("w", (4,)), g.temp("b", (3,)), 1e-5)


def test_the_command_on_the_page(op_module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert "vkbackend test-ops --op layer_norm" in DOC.read_text()
    assert main(["test-ops", "--op", NAME, "--device", "numpy"]) == 0
    assert "5 of 5 cases passed" in capsys.readouterr().out


def test_the_example_by_hand(op_module: ModuleType) -> None:
    (block,) = re.findall(r"By hand.*?```python\n(.*?)^```$", DOC.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(block, str(DOC), "exec"), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import numpy as np\n\nX = np.nonsense\n", "line 3: can not be imported: AttributeError: module"),
        ("import nonsense_that_is_nowhere\n", "line 1: can not be imported: ModuleNotFoundError: No mod"),
        ("def op(:\n", "line 1: can not be imported: SyntaxError: invalid syntax"),
    ],
)
def test_a_mistake_in_an_op_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    (tmp_path / "before.py").write_text("import vkbackend.ops.broken\n")  # imported first, and not at fault
    monkeypatch.setattr(vkbackend.ops, "__path__", [*vkbackend.ops.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    assert main(["test-ops", "--device", "numpy"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"vkbackend test-ops: ops/broken.py, {message}") and err.count("\n") == 1
    assert err.endswith("; correct or remove the file\n")


def test_files_that_the_page_names_are_there() -> None:
    named = re.findall(r"\b((?:docs|tests|shaders|vkbackend|model|spec)/[\w/.-]+\.\w+)", DOC.read_text())
    assert {"docs/design.md", "tests/ops/test_cases.py"} <= set(named)
    missing = [name for name in sorted(set(named) - set(files())) if not (DOC.parents[1] / name).exists()]
    assert not missing
