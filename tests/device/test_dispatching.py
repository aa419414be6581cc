"""Limits are checked before anything is recorded; programs move their inputs and outputs."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vkbackend.device.base import Device, DeviceInfo, Limits
from vkbackend.device.dispatching import Command, DispatchProgram, check_allocation, check_launch
from vkbackend.device.kompute import KomputeDevice
from vkbackend.device.null import NullBuffer, NullDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.errors import DeviceError, VkBackendError
from vkbackend.graph import Graph, Tensor, bound
from vkbackend.launch import Launch
from vkbackend.ops.op import Bind, Dispatch, Kernel, Op, PushValue
from vkbackend.ops.rms_norm import rms_norm

LIMITS = Limits(
    max_push_bytes=64, max_groups=(100, 50, 20), max_invocations=256, max_storage_range=4096, max_buffer_bytes=8192
)
INFO = DeviceInfo("small:0", "a device with small limits", "reference", LIMITS)


def unused(*_: Any) -> Any:
    raise AssertionError("this test runs no reference")


OP = Op("made_up", unused, lambda node, limits: [[node.attrs]], list, list)


def launch(
    push: int = 1, groups: tuple[int, int, int] = (1, 1, 1), local_size: int = 128, n_words: int = 8
) -> tuple[Launch, list[NullBuffer]]:
    made = Launch("made_up", Kernel("copy_words", local_size), (), (0,) * push, groups, ())
    return made, [NullBuffer(8), NullBuffer(n_words)]


@pytest.mark.parametrize(
    "at_the_limit",
    [
        launch(push=16),
        launch(groups=(100, 50, 20)),
        launch(local_size=256),
        launch(n_words=1024),
    ],
)
def test_a_launch_at_the_limit_is_allowed(at_the_limit: tuple[Launch, list[NullBuffer]]) -> None:
    check_launch(*at_the_limit, INFO)


OVER = [
    (launch(push=17), "68 bytes of push constants.* allows 64"),
    (launch(groups=(101, 1, 1)), r"101 workgroups along x.* allows 1\.\.100"),
    (launch(groups=(1, 51, 1)), r"51 workgroups along y.* allows 1\.\.50"),
    (launch(groups=(1, 1, 21)), r"21 workgroups along z.* allows 1\.\.20"),
    (launch(groups=(0, 1, 1)), r"0 workgroups along x.* allows 1\.\.100"),
    (launch(local_size=512), "512 invocations.* allows 256"),
    (launch(n_words=1025), "binding 1 is a buffer of 4100 bytes.* 4096"),
]


@pytest.mark.parametrize(("over", "numbers"), OVER, ids=[numbers for _, numbers in OVER])
def test_a_launch_over_a_limit_is_refused_with_the_numbers(over: tuple[Launch, list[NullBuffer]], numbers: str) -> None:
    with pytest.raises(DeviceError, match=rf"made_up \(copy_words\.comp\) on small:0: .*{numbers}"):
        check_launch(*over, INFO)


def one_dispatch(
    push: tuple[PushValue, ...] = (), groups: tuple[int, int, int] = (1, 1, 1), kernel: Kernel | None = None
) -> Graph:
    g = Graph()
    y = g.temp("y", (8,))
    kernel = kernel or Kernel("fill_words")
    # A first dispatch that is fine: it must not be recorded either.
    for p, n in (((0,), (1, 1, 1)), (push, groups)):
        g.add(OP, [], [y], Dispatch(kernel, (Bind(y, "w"),), p, n))
    g.output("y", y)
    return g


@pytest.mark.parametrize(
    ("graph", "numbers"),
    [
        (lambda: one_dispatch(push=(0,) * 33), "132 bytes.*128"),
        (lambda: one_dispatch(groups=(65536, 1, 1)), r"65536 workgroups along x.*1\.\.65535"),
        (lambda: one_dispatch(kernel=Kernel("fill_words", 256)), "256 invocations.*128"),
    ],
)
def test_nothing_is_recorded_when_one_launch_is_over_a_limit(graph: Any, numbers: str) -> None:
    device = NullDevice()
    with pytest.raises(DeviceError, match=numbers):
        device.compile(graph())
    assert device.recordings == []
    device.compile(one_dispatch())
    assert len(device.recordings) == 1


def test_kompute_refuses_before_it_records(kompute: KomputeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("recorded")

    monkeypatch.setattr(kompute, "record", fail)
    with pytest.raises(DeviceError, match=r"132 bytes of push constants.*128"):
        kompute.compile(one_dispatch(push=(0,) * 33))


@pytest.mark.parametrize("n_words", [0, -1, 1025])
def test_allocations_outside_the_limits_are_refused(n_words: int) -> None:
    device = NullDevice(LIMITS)
    with pytest.raises(DeviceError, match=rf"null: the ring needs {4 * n_words} bytes.*allows 1\.\.4096"):
        device.allocate(n_words, label="the ring")
    assert device.buffers == []
    device.allocate(1024)
    small = replace(INFO, limits=replace(LIMITS, max_buffer_bytes=2048))
    with pytest.raises(DeviceError, match=r"a buffer needs 2052 bytes.*allows 1\.\.2048"):
        check_allocation(513, "", small)


# ---- programs


def normed(g: Graph, x: Tensor, buffer: Any) -> Tensor:
    return rms_norm(g, x, bound("w", buffer, 0, (x.shape[1],)), 1e-6)


def device_named(name: str, request: pytest.FixtureRequest) -> Device:
    found: Device = request.getfixturevalue(name)
    return found


@pytest.mark.parametrize("name", ["kompute", "numpy_device"])
def test_inputs_must_be_given_and_fit(name: str, request: pytest.FixtureRequest) -> None:
    device = device_named(name, request)
    g = Graph()
    w = device.allocate(6)
    device.upload(w, 0, np.ones(6, np.float32))
    g.output("y", normed(g, g.input("x", (1, 6)), w))
    program = device.compile(g)
    with pytest.raises(VkBackendError, match=r"'x' was not given.*\(1, 6\)"):
        program.run({"z": np.ones((1, 6))})
    for shape in ((6,), (1, 1), (2, 6)):  # none is stretched to fit
        with pytest.raises(VkBackendError, match=re.escape(f"'x' has shape {shape}; this graph was built for (1, 6)")):
            program.run({"x": np.ones(shape)})


@pytest.mark.parametrize("name", ["kompute", "kompute_shared", "numpy_device"])
def test_outputs_may_be_strided_views_of_one_result(
    name: str, request: pytest.FixtureRequest, rng: np.random.Generator
) -> None:
    device = device_named(name, request)
    g = Graph()
    w = device.allocate(6)
    device.upload(w, 0, np.ones(6, np.float32))
    y = normed(g, g.input("x", (4, 6)), w)
    views = {"all": y, "columns": y.narrow(1, 2, 3), "turned": y.permute(1, 0), "row": y.narrow(0, 3, 1).reshape(6)}
    for key, view in views.items():
        g.output(key, view)
    program = device.compile(g, poison=True)
    for _ in range(2):
        out = program.run({"x": rng.standard_normal((4, 6))})
        whole = out["all"]
        want = {"columns": whole[:, 2:5], "turned": whole.T, "row": whole[3]}
        for key, value in want.items():
            np.testing.assert_array_equal(out[key], value)
        before = whole.copy()
        program.run({"x": np.zeros((4, 6))})
        np.testing.assert_array_equal(whole, before)  # outputs are the caller's own


def test_programs_of_a_device_share_their_regions() -> None:
    device = NullDevice()
    for n in (3, 5, 8):
        g = Graph()
        y = normed(g, normed(g, g.input("x", (n, 20)), NullBuffer(20)), NullBuffer(20))
        g.output("y", y)
        device.compile(g)
    assert sorted(b.label for b in device.buffers) == ["activation arena", "graph inputs", "graph outputs"]
    assert {b.n_words for b in device.buffers} == {1024}


def test_a_program_waits_until_another_has_read_its_results() -> None:
    """Programs share their host regions, so writing inputs, running and reading outputs must be one turn."""
    device = NullDevice()

    def program() -> DispatchProgram:
        g = Graph()
        g.output("y", normed(g, g.input("x", (1, 4)), NullBuffer(4)))
        return device.compile(g)

    first, second = program(), program()
    words = device.pool.host("inputs", 1).words
    seen: list[Any] = []

    class Slow:
        def run(self) -> None:
            other = threading.Thread(target=second.run, args=({"x": np.full((1, 4), 2)},))
            other.start()
            other.join(0.2)
            seen.append((other, other.is_alive(), words[:4].view(np.float32).tolist()))

        def level_seconds(self) -> list[float]:
            return []

    first._recording = Slow()
    first.run({"x": np.full((1, 4), 1)})
    ((other, waited, inputs),) = seen
    other.join(10)
    assert waited and inputs == [1] * 4
    assert not other.is_alive() and words[:4].view(np.float32).tolist() == [2] * 4


def test_regions_grow_in_powers_of_two_up_to_what_can_be_bound() -> None:
    device = NullDevice(replace(LIMITS, max_storage_range=4 * 5000, max_buffer_bytes=1 << 20))
    assert [device.pool.arena(n).n_words for n in (0, 1024, 1025, 4096, 4097, 5000)] == [
        1024, 1024, 2048, 4096, 4097, 5000,
    ]  # fmt: skip
    with pytest.raises(DeviceError, match="activation arena needs 20004 bytes"):
        device.pool.arena(5001)
    assert device.pool.arena(2000) is device.pool.arena(2048)
    assert device.pool.host("inputs", 5) is not device.pool.host("outputs", 5)


def test_poisoned_programs_start_from_nan(kompute: KomputeDevice) -> None:
    """Temporaries and outputs that nothing writes read as NaN, and only then."""
    g = Graph()
    y = g.temp("y", (5, 4))
    rms_norm(g, g.input("x", (2, 4)), g.input("w", (4,)), 1e-6, out=y.narrow(0, 1, 2))
    g.output("y", y)
    feeds = {"x": np.ones((2, 4)), "w": np.ones(4)}
    got = [d.compile(g, poison=True).run(feeds)["y"] for d in (kompute, NumpyDevice())]
    for out in got:
        assert np.isnan(out).all(axis=1).tolist() == [True, False, False, True, True]


def test_commands_carry_what_was_planned() -> None:
    device = NullDevice()
    g = Graph()
    w = device.allocate(20, label="w")
    g.output("y", normed(g, g.input("x", (3, 20)), w))
    device.compile(g)
    ((command,),) = device.recordings[0].levels
    assert isinstance(command, Command)
    assert command.label == "rms_norm" and command.groups == (3, 1, 1)
    assert [getattr(b, "label", "") for b in command.buffers] == ["graph inputs", "w", "graph outputs"]
