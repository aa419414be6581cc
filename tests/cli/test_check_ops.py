"""`vkbackend test-ops` as the tool of bug reports: worst case first, failing cases as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run

from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import VkBackendError
from vkbackend.ops import all_ops
from vkbackend.ops.case import run_case
from vkbackend.repro import read_repro, replay, write_repro


class BadDriver(NumpyDevice):
    """Runs everything, and gets one number of one result wrong."""

    def __init__(self, op: str, at: int = 0) -> None:
        super().__init__()
        self._bad, self._at = op, at

    def compile(self, graph: Any, poison: bool = False, timestamps: bool = False) -> Any:
        program = super().compile(graph, poison, timestamps)
        if any(node.op.name == self._bad for node in graph.nodes):
            run = program.run

            def wrong(feeds: Any) -> Any:
                out = run(feeds)
                first = next(iter(out.values())).reshape(-1)
                first[self._at % first.size] += 1
                return out

            program.run = wrong  # type: ignore[method-assign]
        return program


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose "numpy" device gets swiglu wrong."""
    import vkbackend.device

    real = vkbackend.device.open_device
    monkeypatch.setattr(
        "vkbackend.device.open_device", lambda name: BadDriver("swiglu") if name == "numpy" else real(name)
    )


def test_the_worst_case_comes_first(run: Run, bad: None) -> None:
    status, out, err = run("test-ops", "--device", "numpy", "--op", "rms_norm", "--op", "swiglu", "--json")
    got = json.loads(out)
    assert status == 1 and got["info"]["name"] == "numpy" and got["info"]["limits"]["max_push_bytes"] == 128
    shares = [r["nmse"] / r["max_nmse"] for r in got["results"]]
    assert shares == sorted(shares, reverse=True) and got["results"][0]["op"] == "swiglu"
    assert [r["ok"] for r in got["results"]] == sorted(r["ok"] for r in got["results"])
    status, out, err = run("test-ops", "--device", "numpy", "--op", "rms_norm", "--op", "swiglu")
    worst = out[out.index("WORST CASES") :].splitlines()[1]
    assert status == 1 and worst.startswith("swiglu") and "vkbackend" in out.splitlines()[0]


def test_the_header_names_driver_and_limits(run: Run) -> None:
    import vkbackend as vkb

    if not any(d.name == "vulkan:0" for d in vkb.devices()):
        pytest.skip("no Vulkan device here")
    status, out, _ = run("test-ops", "--device", "vulkan:0", "--op", "add", "--variant", "shared")
    info = next(d for d in vkb.devices() if d.name == "vulkan:0")
    assert status == 0
    for part in (info.description, info.driver, info.api_version, str(info.limits.max_shared_bytes)):
        assert part in "\n".join(out.splitlines()[:4])


def test_a_failing_case_is_written_and_fails_again(run: Run, bad: None, tmp_path: Path) -> None:
    path = tmp_path / "wrong"
    status, out, err = run("test-ops", "--device", "numpy", "--op", "swiglu", "--repro", path, "--seed", 5)
    assert status == 1 and str(path) in err
    first = next(line for line in out.splitlines() if line.startswith("FAILED"))
    label = first.split("] ", 1)[1].split(": NMSE")[0]
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        assert (about["op"], about["case"], about["seed"]) == ("swiglu", label, 5)
        assert about["device"]["name"] == "numpy"
        got, want = file["got_out0"], file["want_out0"]
        assert np.isfinite(got).all() and (np.abs(got - want) > 0.5).sum() == 1 and want.dtype == np.float64
        assert "input0" in file.files
    status, out, _ = run("test-ops", "--device", "numpy", "--replay", path)
    assert status == 1 and "FAILED" in out and label in out


def test_nothing_is_written_when_nothing_fails(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "none.npz"
    status, out, _ = run("test-ops", "--device", "numpy", "--op", "swiglu", "--repro", path)
    assert status == 0 and not path.exists() and "was not written" in out


def test_a_replay_uses_the_inputs_of_the_file(run: Run, tmp_path: Path) -> None:
    """Not those that the seed would give: numbers that only a bad device got wrong must come back as they were."""
    op = next(op for op in all_ops() if op.name == "rms_norm")
    path = tmp_path / "x.npz"
    assert write_repro(path, op.name, op.cases()[0], NumpyDevice(), "reference", 1).ok
    with np.load(path) as file:
        arrays = dict(file)
    arrays["input0"] = np.full_like(arrays["input0"], np.inf)
    np.savez(path, **arrays)
    repro = read_repro(path)
    assert np.isinf(repro.inputs[0]).all()
    seen: list[Any] = []

    class Spy(NumpyDevice):
        def compile(self, graph: Any, poison: bool = False, timestamps: bool = False) -> Any:
            program = super().compile(graph, poison, timestamps)
            run_it = program.run
            program.run = lambda feeds: seen.append(feeds["in0"]) or run_it(feeds)  # type: ignore[method-assign]
            return program

    with np.errstate(invalid="ignore"):
        replay(repro, Spy())
    assert len(seen) == 1 and np.isinf(seen[0]).all()


@pytest.mark.parametrize("name", ["linear", "delta_net_mixer", "rope_kv_write"])
def test_weights_and_states_are_part_of_the_file(name: str, kompute: KomputeDevice, tmp_path: Path, seed: int) -> None:
    """Through a dispatching device, the kernels are too, and the results are those of a plain run."""
    op = next(op for op in all_ops() if op.name == name)
    case = op.cases()[0]
    written = write_repro(tmp_path / "x", op.name, case, kompute, "subgroup", seed)
    again = replay(read_repro(tmp_path / "x"), kompute)
    assert written.nmse == again.nmse == run_case(case, kompute, seed).nmse and written.ok
    with np.load(tmp_path / "x") as file:
        about = json.loads(str(file["about"]))
        assert about["dispatches"] and all("workgroups" in line for line in about["dispatches"])
        codes = [file[n].tobytes() for n in file.files if n.startswith("spirv_")]
    assert codes and all(code[:4] == b"\x03\x02\x23\x07" for code in codes)


@pytest.mark.parametrize("damage", ["text", "cut", "other", "unknown"])
def test_other_files_are_refused(damage: str, run: Run, tmp_path: Path) -> None:
    op = next(op for op in all_ops() if op.name == "add")
    path = tmp_path / "x.npz"
    write_repro(path, "add", op.cases()[0], NumpyDevice(), "reference", 1)
    if damage == "text":
        path.write_text("no archive")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    else:
        with np.load(path) as file:
            arrays = dict(file)
        about = json.loads(str(arrays["about"]))
        if damage == "unknown":
            about["case"] = "no such case"
            arrays["about"] = np.array(json.dumps(about))
        else:
            del arrays["about"]
        np.savez(path, **arrays)
    with pytest.raises(VkBackendError, match=r"x\.npz"):
        read_repro(path)
    status, _, err = run("test-ops", "--replay", path)
    assert status == 1 and "x.npz" in err and len(err.splitlines()) == 1


def test_inputs_of_another_shape_are_refused(tmp_path: Path) -> None:
    op = next(op for op in all_ops() if op.name == "add")
    path = tmp_path / "x.npz"
    write_repro(path, "add", op.cases()[0], NumpyDevice(), "reference", 1)
    repro = read_repro(path)
    repro.inputs[1] = repro.inputs[1][:, :-1]
    with pytest.raises(VkBackendError, match="input 1 of this case has shape"):
        replay(repro, NumpyDevice())
