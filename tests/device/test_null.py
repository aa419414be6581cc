"""The null device records like a GPU and runs nothing."""

from __future__ import annotations

import numpy as np
import pytest

from vkbackend.device import open_device
from vkbackend.device.base import Limits
from vkbackend.device.null import NullDevice
from vkbackend.errors import DeviceError
from vkbackend.graph import Graph
from vkbackend.ops import all_ops
from vkbackend.ops.case import CaseBuilder
from vkbackend.ops.rms_norm import rms_norm


def graph() -> Graph:
    g = Graph()
    x, w = g.input("x", (3, 8)), g.input("w", (8,))
    y = rms_norm(g, rms_norm(g, x, w, 1e-6), w, 1e-6)
    g.output("y", y)
    g.output("z", rms_norm(g, x, w, 1e-6))
    return g


def test_it_keeps_levels_and_counts_runs() -> None:
    device = NullDevice()
    program = device.compile(graph())
    (recording,) = device.recordings
    assert [len(level) for level in recording.levels] == [2, 1]
    assert recording.runs == 0
    for n in (1, 2):
        out = program.run({"x": np.ones((3, 8)), "w": np.ones(8)})
        assert recording.runs == n and {k: v.shape for k, v in out.items()} == {"y": (3, 8), "z": (3, 8)}
    assert program.level_seconds() == [0.0, 0.0]


def test_every_case_of_every_op_can_be_recorded() -> None:
    """Within the limits that Vulkan guarantees everywhere."""
    device = NullDevice()
    for op in all_ops():
        for case in op.cases():
            builder = CaseBuilder(device, np.random.default_rng(0))
            case.build(builder)
            n = len(device.recordings)
            device.compile(builder.graph)
            assert len(device.recordings) == n + 1 and device.recordings[-1].levels, f"{op.name}: {case.label}"


def test_memory_is_sizes_only() -> None:
    device = open_device("null")
    assert isinstance(device, NullDevice) and device.info.limits == Limits() and device.holds_packed_weights
    buffer = device.allocate(1 << 24, label="weights")  # 64 MiB that nobody pays for
    device.upload(buffer, 3, np.ones(2, np.float32))
    device.fill(buffer, 0, 9, 1)
    device.copy(buffer, 0, buffer, 9, 3)
    assert device.allocated_bytes == 4 << 24
    for call in (
        lambda: device.upload(buffer, 1 << 24, np.ones(1, np.float32)),
        lambda: device.download(buffer, -1, 5),
        lambda: device.fill(buffer, 5, 1 << 24, 0),
        lambda: device.copy(buffer, 0, buffer, (1 << 24) - 1, 2),
    ):
        with pytest.raises(DeviceError, match="outside a buffer of 16777216 words"):
            call()
    assert device.download(buffer, 0, 5).tolist() == [0] * 5
    assert not hasattr(buffer, "_words")
    device.close()
    assert device.buffers == [] and device.recordings == []
