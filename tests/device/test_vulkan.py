"""The direct Vulkan device: the same bits as Kompute, barriers, copies, lifetimes."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device.vulkan_commands import Faulty, copy_command, fill_command, recorded

from vkbackend.device import vulkan_memory
from vkbackend.device.base import Buffer, Device
from vkbackend.device.vulkan import VulkanDevice, VulkanRecording
from vkbackend.errors import DeviceError
from vkbackend.graph import Graph, bound
from vkbackend.ops import all_ops
from vkbackend.ops.case import Case, CaseBuilder
from vkbackend.ops.op import Op
from vkbackend.ops.rms_norm import rms_norm

pytestmark = pytest.mark.usefixtures("needs_vulkan")


@pytest.fixture
def device(direct: VulkanDevice) -> VulkanDevice:
    return direct


# ---- results


def results(case: Case, device: Device, seed: int) -> dict[str, bytes]:
    """Every output and state of a case, as bytes."""
    builder = CaseBuilder(device, np.random.default_rng(seed))
    case.build(builder)
    found = {k: v.tobytes() for k, v in device.compile(builder.graph, poison=True).run(builder.feeds).items()}
    return found | {name: device.download(buffer, 0, n).tobytes() for name, buffer, n in builder.states}


@pytest.mark.parametrize("subgroups", [True, False], ids=["subgroups", "shared"])
@pytest.mark.parametrize("op", all_ops(), ids=lambda op: op.name)
def test_same_bits_as_kompute(op: Op, subgroups: bool, seed: int) -> None:
    pytest.importorskip("kp")
    from vkbackend.device.kompute import KomputeDevice

    kompute = KomputeDevice(0, subgroups=subgroups)
    direct = [VulkanDevice(0, subgroups=subgroups, unified=unified) for unified in (None, False)]
    for case in op.cases():
        want = results(case, kompute, seed)
        for device in direct:
            got = results(case, device, seed)
            assert got.keys() == want.keys()
            assert [name for name in want if got[name] != want[name]] == [], f"{op.name} {case.label}"
    for device in direct:
        device.close()
    kompute.close()


def test_a_program_runs_again_with_other_inputs(device: VulkanDevice, rng: np.random.Generator) -> None:
    graph = Graph()
    x = graph.input("x", (3, 64))
    w = graph.input("w", (64,))
    graph.output("y", rms_norm(graph, x, w, 1e-6))
    program = device.compile(graph, poison=True)
    for _ in range(3):
        feeds = {"x": rng.standard_normal((3, 64), np.float32), "w": rng.standard_normal(64, np.float32)}
        want = feeds["x"] / np.sqrt(np.mean(feeds["x"].astype(np.float64) ** 2, axis=1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(program.run(feeds)["y"], want * feeds["w"], rtol=1e-5, atol=1e-6)


def test_a_program_keeps_its_device_open() -> None:
    graph = Graph()
    graph.output("y", rms_norm(graph, graph.input("x", (1, 8)), graph.input("w", (8,)), 1e-6))
    program = VulkanDevice(0).compile(graph)
    gc.collect()
    got = program.run({"x": np.full((1, 8), 2.0), "w": np.full(8, 3.0)})["y"]
    np.testing.assert_allclose(got, 3.0, rtol=1e-5)


def test_bound_buffers_of_a_graph_stay_alive(device: VulkanDevice, rng: np.random.Generator) -> None:
    w = rng.standard_normal(64, np.float32)
    buffer = device.allocate(64, label="weight")
    device.upload(buffer, 0, w)
    graph = Graph()
    graph.output("y", rms_norm(graph, graph.input("x", (1, 64)), bound("weight", buffer, 0, (64,)), 0.0))
    program = device.compile(graph)
    del buffer, graph
    gc.collect()
    filler = [device.allocate(64) for _ in range(20)]  # would take the freed memory
    for other in filler:
        device.fill(other, 0, 64, 0x7FC00000)
    np.testing.assert_allclose(program.run({"x": np.ones((1, 64))})["y"][0], w, rtol=1e-5)


# ---- copies


def test_copies_match_numpy(device: VulkanDevice, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan_memory, "STAGING_WORDS", 256)  # most copies then take several pieces, both slots
    sizes = (1, 700, 2000)
    buffers = [device.allocate(n) for n in sizes]
    models = [np.zeros(n, np.uint32) for n in sizes]
    for buffer in buffers:
        device.fill(buffer, 0, buffer.n_words, 0)
    for _ in range(120):
        a, b = (int(i) for i in rng.permutation(3)[:2])
        n = int(rng.integers(0, min(sizes[a], sizes[b]) + 1))
        at_a, at_b = int(rng.integers(0, sizes[a] - n + 1)), int(rng.integers(0, sizes[b] - n + 1))
        match rng.integers(4):
            case 0:
                data = rng.integers(0, 1 << 32, n, np.uint32)
                device.upload(buffers[a], at_a, data)
                models[a][at_a : at_a + n] = data
            case 1:
                device.copy(buffers[a], at_a, buffers[b], at_b, n)
                models[b][at_b : at_b + n] = models[a][at_a : at_a + n]
            case 2:
                word = int(rng.integers(0, 1 << 32))
                device.fill(buffers[a], at_a, n, word)
                models[a][at_a : at_a + n] = word
            case _:
                assert np.array_equal(device.download(buffers[a], at_a, n), models[a][at_a : at_a + n])
    for buffer, model in zip(buffers, models, strict=True):
        assert np.array_equal(device.download(buffer, 0, buffer.n_words), model)


def test_float_and_integer_arrays_upload_their_bits(device: VulkanDevice) -> None:
    buffer = device.allocate(4)
    device.upload(buffer, 0, np.array([1.0, -2.5], np.float32))
    device.upload(buffer, 2, np.array([[-1], [7]], np.int32))
    assert device.download(buffer, 0, 4).tolist() == [0x3F800000, 0xC0200000, 0xFFFFFFFF, 7]


@pytest.mark.parametrize(("offset", "n"), [(0, 11), (10, 1), (-1, 2), (3, -1)])
def test_regions_outside_a_buffer_are_refused(device: VulkanDevice, offset: int, n: int) -> None:
    buffer = device.allocate(10)
    with pytest.raises(DeviceError, match="outside a buffer of 10 words"):
        device.download(buffer, offset, n)
    with pytest.raises(DeviceError, match="outside a buffer of 10 words"):
        device.fill(buffer, offset, n, 0)


# ---- recordings


def test_levels_are_ordered(device: VulkanDevice) -> None:
    n, steps = 64, 100
    chain = device.allocate(n * (steps + 1))
    device.fill(chain, 0, chain.n_words, 0xDEAD)
    first = [[fill_command(chain, 0, n, 17)]]
    recorded(device, first + [[copy_command(chain, n * i, chain, n * (i + 1), n)] for i in range(steps)]).run()
    assert device.download(chain, 0, chain.n_words).tolist() == [17] * chain.n_words


def test_barriers_stand_between_levels_only(device: VulkanDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    lib = device.session.lib

    def spy(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            return getattr(lib, name)(*args)

        return call

    buffer = device.allocate(1024)
    levels = [[fill_command(buffer, 256 * i, 256, level) for i in range(3)] for level in range(4)]
    names = ("vkCmdPipelineBarrier", "vkCmdDispatch", "vkCmdCopyBuffer", "vkCmdBindPipeline", "vkCmdBindDescriptorSets")
    device.session.lib = Faulty(lib, **{name: spy(name) for name in names})
    recorded(device, levels, used=(8, 8))
    barrier, dispatch, copy = "vkCmdPipelineBarrier", "vkCmdDispatch", "vkCmdCopyBuffer"
    bind = ["vkCmdBindPipeline", "vkCmdBindDescriptorSets"]  # once: every dispatch has the same ones
    body = [barrier, *bind, *[dispatch] * 3, *[barrier, *[dispatch] * 3] * 3]
    staged = not device.memory.unified
    assert calls == ([copy, *body, barrier, copy, barrier] if staged else [*body, barrier])


def test_only_used_words_are_copied() -> None:
    device = VulkanDevice(0, unified=False)
    inputs, outputs = device.host_region(100, "inputs"), device.host_region(100, "outputs")
    target = device.allocate(100)
    inputs.words[:], outputs.words[:] = 5, 6
    device.fill(inputs, 0, 100, 7)
    levels = [[copy_command(inputs, 0, target, 0, 100), fill_command(outputs, 0, 100, 8)]]
    device.record(levels, inputs, outputs, False, (30, 40)).run()
    assert device.download(target, 0, 100).tolist() == [5] * 30 + [7] * 70
    assert outputs.words.tolist() == [8] * 40 + [6] * 60
    device.record(levels, inputs, outputs, False).run()
    assert device.download(target, 0, 100).tolist() == [5] * 100
    assert outputs.words.tolist() == [8] * 100
    device.close()


def test_timestamps(device: VulkanDevice) -> None:
    buffer = device.allocate(1 << 20)
    levels = [[fill_command(buffer, 0, 1 << 20, 1, groups=64)] * 8, [fill_command(buffer, 0, 1, 2, groups=1)]]
    recording = recorded(device, levels, timestamps=True)
    start = time.perf_counter()
    recording.run()
    wall = time.perf_counter() - start
    heavy, light = recording.level_seconds()
    assert 0 < heavy < wall and 0 <= light < heavy
    with pytest.raises(DeviceError, match="timestamps=True"):
        recorded(device, levels).level_seconds()


def test_pipelines_do_not_depend_on_sizes_or_buffers(device: VulkanDevice) -> None:
    for n in (100, 5000):
        buffer = device.allocate(n)
        recorded(device, [[fill_command(buffer, 0, n, n, groups=1 + n // 1000)]]).run()
        assert device.download(buffer, n - 1, 1)[0] == n
    assert len(device.pipelines) == 1


def test_memory_and_descriptor_sets_are_given_back(device: VulkanDevice) -> None:
    device.pool.host("inputs", 1), device.pool.host("outputs", 1)
    device.fill(device.allocate(1), 0, 1, 0)  # makes the staging buffers
    before, objects = device.allocated_bytes, -1
    for i in range(300):  # more than one pool of sets
        a, b = device.allocate(1000), device.allocate(1000)
        recorded(device, [[fill_command(a, 0, 1000, i)], [copy_command(a, 0, b, 0, 1000)]]).run()
        assert device.download(b, 999, 1)[0] == i
        del a, b
        if i == 0:
            objects = len(device.session._cleanups)
    assert device.allocated_bytes == before
    assert len(device.session._cleanups) == objects


def test_many_live_descriptor_sets(device: VulkanDevice) -> None:
    buffers = [device.allocate(8) for _ in range(300)]
    recorded(device, [[fill_command(b, 0, 8, i) for i, b in enumerate(buffers)]]).run()
    assert [int(device.download(b, 7, 1)[0]) for b in buffers] == list(range(300))


# ---- waiting


def long_recording(device: VulkanDevice, seconds: float) -> tuple[VulkanRecording, Buffer]:
    """Work that takes about as long as asked, ending with a 3 in word 0."""
    n = 1 << 22
    buffer = device.allocate(n)
    levels = [[fill_command(buffer, 0, n, 2, groups=512)]] * 4
    probe = recorded(device, levels)
    probe.run()
    start = time.perf_counter()
    probe.run()
    repeats = max(1, round(seconds / (time.perf_counter() - start)))
    return recorded(device, [*levels * repeats, [fill_command(buffer, 0, 1, 3)]]), buffer


def test_waiting_sleeps(device: VulkanDevice) -> None:
    recording, _ = long_recording(device, 0.3)
    wall, cpu = time.perf_counter(), time.thread_time()
    recording.run()
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    assert cpu < 0.1 * wall, f"waiting {wall:.3f} s took {cpu:.3f} s of this thread"


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals need the main thread")
def test_an_interrupt_leaves_the_device_usable(device: VulkanDevice) -> None:
    recording, buffer = long_recording(device, 1.0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    start = time.perf_counter()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            recording.run()
        interrupted_after = time.perf_counter() - start
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    del recording
    gc.collect()  # the work still runs: what it uses must survive its owner
    assert device.download(buffer, 0, 1)[0] == 3  # waits for the interrupted work
    assert interrupted_after < 0.5 * (time.perf_counter() - start)
    recorded(device, [[fill_command(buffer, 0, 8, 9)]]).run()
    assert device.download(buffer, 0, 8).tolist() == [9] * 8
