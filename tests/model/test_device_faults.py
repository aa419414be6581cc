"""Devices that fail: what is said, what is kept, and that the next text is right."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device.faulty import FaultyDevice
from synthetic import write_model

import vkbackend as vkb
from vkbackend.device.base import Limits
from vkbackend.device.null import NullDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.errors import DeviceError
from vkbackend.model import context as context_module
from vkbackend.model import loader
from vkbackend.model.burst import PlainBurst
from vkbackend.model.context import MEASURED_RUNS
from vkbackend.model.loader import Model, load
from vkbackend.spec.generate import Session

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("faults") / "tiny.gguf", seed=5, n_main=2, head="perfect")


@pytest.fixture
def device() -> FaultyDevice:
    return FaultyDevice(NumpyDevice())


@pytest.fixture
def model(path: Path, device: FaultyDevice) -> Model:
    return load(path, device=device)  # type: ignore[arg-type]


# ---- memory


def test_weights_larger_than_the_budget_are_refused_before_they_are_allocated(path: Path) -> None:
    device = NullDevice()
    device.free_bytes = 1000
    with pytest.raises(
        DeviceError, match=r"null .*: the weights need \d{6,} bytes, 1000 are free; use a smaller quant"
    ):
        load(path, device=device)
    assert not [b for b in device.buffers if "arena" in b.label]


def test_a_context_larger_than_the_budget_is_refused_before_anything_is_allocated(path: Path) -> None:
    device = NullDevice()
    model = load(path, device=device)
    n = len(device.buffers)
    device.free_bytes = 100_000
    with pytest.raises(DeviceError, match=r"KV cache and states of a context need \d+ bytes, 100000 are free.*n_ctx"):
        model.context(n_ctx=4096)
    assert len(device.buffers) == n
    model.context(n_ctx=16)


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_refused_allocation_leaves_nothing_behind(path: Path, fails_at: int) -> None:
    """The driver refuses some way into a context or a load: what was made before goes back."""
    real = NumpyDevice()
    # Limits so small that a context takes several buffers.
    device = FaultyDevice(real, limits=Limits(max_storage_range=1 << 17))
    model = load(path, device=device)  # type: ignore[arg-type]
    before = real.allocated_bytes
    device.fail_in["allocate"] = fails_at
    with pytest.raises(DeviceError):
        model.context(n_ctx=1024)
    gc.collect()
    assert real.allocated_bytes == before and not device.fail_in
    assert model.context(n_ctx=64).decode(PROMPT).logits.shape == (1, 64)
    device.fail_in["allocate"] = fails_at
    with pytest.raises(DeviceError):
        load(path, device=device)  # type: ignore[arg-type]
    gc.collect()
    assert real.allocated_bytes <= before


# ---- a device that is lost


def test_every_failing_run_leaves_a_context_that_works(model: Model, device: FaultyDevice) -> None:
    """Whichever run of a speculative text fails, it is a DeviceError, and the session's next text is right."""
    want = vkb.generate(model, PROMPT, 24, n_ctx=64, ignore_eos=True).tokens
    session = Session(model, vkb.DraftMTP(2), n_ctx=64)
    failed = 0
    for n in range(0, 40, 3):
        device.fail_in["run"] = n
        stream = session.stream(PROMPT, 24, ignore_eos=True)
        try:
            stream.result()
            assert "run" in device.fail_in
        except DeviceError as error:
            assert "the device was lost" in str(error)
            assert stream.tokens == want[: len(stream.tokens)]
            failed += 1
        device.fail_in.clear()
        assert session.stream(PROMPT, 24, ignore_eos=True).result().tokens == want
    assert failed >= 5


def automatic(monkeypatch: pytest.MonkeyPatch, device: FaultyDevice) -> None:
    """Makes "auto" choose a device; others open as ever."""
    real = loader.open_device
    monkeypatch.setattr(loader, "open_device", lambda name: device if name == "auto" else real(name))


@pytest.mark.parametrize("spec", [None, vkb.DraftMTP(2)], ids=["plain", "speculative"])
@pytest.mark.parametrize("sampling", [None, vkb.Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("runs", "bursts"), [(0, 1), (1, 1), (6, 1), (3, 4)])
def test_auto_goes_on_with_numpy(
    path: Path,
    runs: int,
    bursts: int,
    sampling: vkb.Sampling | None,
    spec: vkb.DraftMTP | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The text is that of an undisturbed run: the faulty device computes with NumPy too."""
    want = vkb.generate(load(path, device="numpy"), PROMPT, 20, sampling, spec, n_ctx=64, ignore_eos=True)
    device = FaultyDevice(NumpyDevice(), name="kompute:0", kind="gpu")
    device.max_burst = bursts
    automatic(monkeypatch, device)
    model = load(path)
    assert model.device.info.name == "kompute:0"
    device.fail_in["run"] = runs
    stream = vkb.stream(model, PROMPT, 20, sampling, spec, n_ctx=64, ignore_eos=True)
    with caplog.at_level(logging.WARNING, "vkbackend"):
        got = stream.result()
    assert got.tokens == want.tokens and got.text == want.text
    assert got.stats.steps == want.stats.steps  # NumPy drafts as well
    assert stream.device.name == "numpy" and "run" not in device.fail_in
    assert "kompute:0: the device was lost" in caplog.text and "Going on with NumPy" in caplog.text


def test_a_device_that_was_named_is_not_replaced(path: Path, model: Model, device: FaultyDevice) -> None:
    device.fail_in["run"] = 3
    with pytest.raises(DeviceError, match="the device was lost"):
        vkb.generate(model, PROMPT, 20, n_ctx=64, ignore_eos=True)


def test_auto_loads_on_numpy_what_the_device_refuses(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = FaultyDevice(NumpyDevice(), name="kompute:0", kind="gpu")
    device.fail_in["allocate"], device.error = 0, "out of device memory"
    automatic(monkeypatch, device)
    with caplog.at_level(logging.WARNING, "vkbackend"):
        model = load(path)
    assert model.device.info.name == "numpy" and model.fallback is None
    assert "kompute:0: out of device memory. Loading on NumPy instead" in caplog.text


# ---- a device below what the model needs


@pytest.mark.parametrize(
    ("limits", "needs"),
    [
        (Limits(max_push_bytes=16), r"needs \d+ bytes of push constants, the device allows 16"),
        (Limits(max_groups=(4, 1, 1)), r"needs \d+ workgroups along .*, the device allows 1\.\.[41]"),
        (Limits(max_invocations=32), r"needs \d+ invocations in a workgroup, the device allows 32"),
    ],
)
def test_a_device_below_what_the_model_needs(path: Path, limits: Limits, needs: str) -> None:
    device = NullDevice(limits)
    context = load(path, device=device).context(n_ctx=64)
    with pytest.raises(DeviceError, match=rf"\.comp\) on null: {needs}"):
        context.decode(PROMPT)
    assert context.seq_pos_max(0) == -1 and device.recordings == []


# ---- watchdogs


class Clock:
    """Time that passes only while programs run: `per_row` seconds for each row."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def slow(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a model on a "GPU" that takes a given time per row; returns (model, rows of every run)."""

    def make(per_row: float, kind: str = "gpu") -> tuple[Model, list[int]]:
        clock, rows = Clock(), []
        monkeypatch.setattr(context_module, "perf_counter", clock)
        device = FaultyDevice(NumpyDevice(), name="kompute:0", kind=kind)
        compile_graph = device.compile

        def timed(graph: Any, *args: Any) -> Any:
            program = compile_graph(graph, *args)
            n_rows = graph.inputs["tokens"].shape[0]
            run = program.run

            def timed_run(feeds: Any) -> Any:
                rows.append(n_rows)
                clock.now += n_rows * per_row
                return run(feeds)

            program.run = timed_run  # type: ignore[method-assign]
            return program

        device.compile = timed  # type: ignore[method-assign]
        return load(path, device=device, n_ubatch=256), rows  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize(
    ("per_row", "most", "measured"), [(1e-4, 256, [32]), (0.004, 64, [32, 64]), (0.2, 32, [32])]
)
def test_prompts_are_cut_to_what_a_slow_gpu_does_in_time(
    slow: Any, per_row: float, most: int, measured: list[int]
) -> None:
    model, rows = slow(per_row)
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, 64, 256)]
    first = model.context(n_ctx=512).decode(prompt).logits
    # Batches for their time, a few times each as idle cards wake up slowly, then the prompt.
    runs = [n for n in measured for _ in range(MEASURED_RUNS)]
    assert rows[: len(runs)] == runs and sum(rows[len(runs) :]) == 256
    assert max(rows[len(runs) :]) == most
    rows.clear()
    again = model.context(n_ctx=512).decode(prompt).logits  # the pace is the model's: measured once, cut alike
    assert sum(rows) == 256 and max(rows) == most
    np.testing.assert_array_equal(first, again)


def test_a_batch_that_is_slow_for_its_size_does_not_cut_prompts(slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = slow(0.001)
    clock: Any = context_module.perf_counter
    compile_graph = model.device.compile

    def slow_when_small(graph: Any, *args: Any) -> Any:  # 32 rows take as long as 128 would
        program = compile_graph(graph, *args)
        run, n_rows = program.run, graph.inputs["tokens"].shape[0]

        def timed(feeds: Any) -> Any:
            clock.now += max(0, 128 - n_rows) * 0.001
            return run(feeds)

        program.run = timed
        return program

    monkeypatch.setattr(model.device, "compile", slow_when_small)
    model.context(n_ctx=512).decode([1] * 256)
    assert rows == [*[32] * MEASURED_RUNS, *[64] * MEASURED_RUNS, *[128] * MEASURED_RUNS, 256]


def test_short_prompts_and_cpus_are_not_measured(slow: Any) -> None:
    model, rows = slow(10.0)
    model.context(n_ctx=512).decode([1] * 48)
    assert sum(rows) == 48
    model, rows = slow(10.0, kind="cpu")
    model.context(n_ctx=512).decode([1] * 256)
    assert rows == [256]


def test_bursts_follow_the_time_of_a_round(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FaultyDevice(NumpyDevice())
    device.max_burst = 16
    model = load(path, device=device)  # type: ignore[arg-type]
    context = model.context(n_ctx=256)
    burst = model.burst(context)
    assert isinstance(burst, PlainBurst)
    context.decode(PROMPT)
    context.last_run_s = 0.2
    assert burst.rounds(16) == 2  # a round is taken for as long as the prompt's last submission
    burst.begin(1, None)
    clock = iter([0.0, 0.03 * 2])
    monkeypatch.setattr("vkbackend.model.burst.perf_counter", lambda: next(clock))
    burst.run(2)
    assert burst.rounds(16) == 16
    clock = iter([0.0, 1.7 * 16])
    burst.run(16)
    assert burst.rounds(16) == 1


# ---- Vulkan itself


def test_free_memory_is_what_the_driver_says(vulkan: VulkanDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    free = vulkan.free_bytes
    assert free is None or 0 < free <= vulkan.info.memory
    monkeypatch.setattr("vkbackend.device.vulkan.local_memory", lambda *_: (1 << 30, 12345))
    assert vulkan.free_bytes == 12345
