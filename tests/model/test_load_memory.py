"""Host memory while weights are loaded: a few chunks, whatever the model's size."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_content import Content, Stored, write_content

from vkbackend.device.base import Device, Limits
from vkbackend.device.null import NullDevice
from vkbackend.device.numpy import NumpyDevice
from vkbackend.model import weights
from vkbackend.model.gguf import open_gguf
from vkbackend.model.weights import CHUNK_BYTES, WeightLoader
from vkbackend.quants import random_blocks

MIB = 1 << 20
SLACK = 2 * MIB  # temporaries of packing (planes.py) and small objects
ROWS, COLS = 4096, 1024


@pytest.fixture(scope="module", params=["Q8_0", "Q4_K", "Q6_K", "F16"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two matrices of 4 M weights."""
    kind = gguf.GGMLQuantizationType[request.param]
    rng = np.random.default_rng(1)
    if kind == gguf.GGMLQuantizationType.F16:
        data = rng.standard_normal((ROWS, COLS)).astype(np.float16)
    else:
        data = random_blocks(rng, kind, ROWS, COLS)
    content = Content("qwen35", tensors={name: Stored(data, kind) for name in ("a", "b")})
    return write_content(content, tmp_path_factory.mktemp("large") / f"{request.param}.gguf")


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("make", [lambda: NullDevice(Limits(max_storage_range=3 * MIB)), NumpyDevice])
def test_a_few_chunks_at_a_time(
    large: Path, make: Callable[[], Device], interleave: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", MIB)
    monkeypatch.setattr(weights, "FLOAT_CHUNK_BYTES", MIB // 8)
    device = make()
    loader = WeightLoader(device)
    loader.matrix(open_gguf(large), ("a", "b"), interleave)
    tracemalloc.start()
    try:
        loader.load()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held = device.allocated_bytes if isinstance(device, NumpyDevice) else 0  # the null device has no memory
    assert kept - held < MIB // 4
    assert peak - kept < 2 * MIB + SLACK  # raw bytes in the device's order, and packed


def test_that_is_less_than_the_smallest_arena() -> None:
    """Every Vulkan device binds 128 MiB, so large models have arenas of at least that size."""
    assert 1.2 * Limits().max_storage_range > 2 * CHUNK_BYTES + SLACK
