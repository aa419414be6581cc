"""Workgroup memory of kernels, from their SPIR-V."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vkbackend.device.base import DeviceInfo, Limits
from vkbackend.device.null import NullDevice
from vkbackend.device.shared_memory import check_shared, module_shared_bytes, shared_bytes
from vkbackend.device.vulkan import VulkanDevice
from vkbackend.device.vulkan_pipelines import PipelineKey
from vkbackend.errors import DeviceError
from vkbackend.graph import Graph
from vkbackend.ops import all_ops
from vkbackend.ops.case import CaseBuilder
from vkbackend.ops.op import Kernel
from vkbackend.ops.rms_norm import rms_norm
from vkbackend.shaders import compiler
from vkbackend.shaders.compiler import compile_to, find_compiler

SHADER = """#version 450
layout(constant_id = 0) const uint A = 5u;
layout(constant_id = 1) const uint B = 3u;
const uint PITCH = (A + 3u) / 4u * 4u + 1u;
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) buffer Y { float y[]; };
struct Pair { vec4 a; uint b; uint c[3]; };
shared float first[A * B];
shared vec4 second[PITCH > 8u ? 8u : PITCH];
shared Pair pairs[2];
shared uint third[7][B];
shared float plain[LOCAL_SIZE];
void main() {
    uint i = gl_LocalInvocationIndex;
    first[i % (A * B)] = y[i]; second[i % 2u] = vec4(y[i]); pairs[i % 2u].b = i; third[i % 7u][0] = i; plain[i] = y[i];
    barrier();
    y[i] = first[0] + second[0].x + float(pairs[1].b) + float(third[3][0]) + plain[0];
}
"""


@pytest.mark.skipif(find_compiler() is None, reason="no glslangValidator here")
@pytest.mark.parametrize("spec", [(), (8,), (9, 1), (1, 200)])
def test_sizes_follow_the_specialisation(
    spec: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sized.comp").write_text(SHADER)
    monkeypatch.setattr(compiler, "SOURCE_DIR", tmp_path)
    code = compile_to(Kernel("sized", 64), False, tmp_path / "out.spv")
    a, b = (*spec, *(5, 3)[len(spec) :])
    pitch = (a + 3) // 4 * 4 + 1
    want = 4 * a * b + 16 * min(pitch, 8) + 2 * 32 + 4 * 7 * b + 4 * 64
    assert module_shared_bytes(code, spec) == want


def test_every_case_stays_within_what_vulkan_guarantees() -> None:
    """The null device has the guaranteed limits, so kernels that a lowering picks for it must fit 16 KiB."""
    device, sizes = NullDevice(), set()
    for op in all_ops():
        for case in op.cases():
            builder = CaseBuilder(device, np.random.default_rng(0))
            case.build(builder)
            device.compile(builder.graph)
            for level in device.recordings[-1].levels:
                for command in level:
                    for subgroup in (False, True):
                        n = shared_bytes(command.kernel, subgroup, command.spec)
                        assert n <= Limits().max_shared_bytes, f"{op.name} {case.label}: {command.kernel} takes {n}"
                        sizes.add(n)
            device.close()
    assert max(sizes) > 4096 and 0 in sizes


def test_a_kernel_that_needs_more_is_refused(vulkan: VulkanDevice) -> None:
    kernel = Kernel("argmax")
    need = shared_bytes(kernel, True)
    info = DeviceInfo("small:0", "a device", "gpu", Limits(max_shared_bytes=need))
    check_shared(kernel, True, (), info)
    small = replace(info, limits=Limits(max_shared_bytes=need - 1))
    with pytest.raises(
        DeviceError, match=rf"argmax\.comp on small:0 \(a device\): needs {need} bytes .* has {need - 1}"
    ):
        check_shared(kernel, True, (), small)


@pytest.mark.parametrize("name", ["kompute", "vulkan"])
def test_devices_refuse_before_they_make_a_pipeline(name: str, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue(name)
    info = device.info
    g = Graph()
    g.output("y", rms_norm(g, g.input("x", (3, 7)), g.input("w", (7,)), 1e-6))
    # The pipelines of the session's devices may exist already: one of this test's own.
    device = type(device)(0, subgroups=False)
    try:
        device.info = replace(info, limits=replace(info.limits, subgroup_shuffle=False, max_shared_bytes=8))
        if name == "vulkan":
            device.session.info = device.info
            assert PipelineKey(Kernel("rms_norm"), (), 3, 8) not in device.pipelines._pipelines
        with pytest.raises(DeviceError, match=r"rms_norm\.comp on .*: needs \d+ bytes of workgroup memory"):
            device.compile(g)
    finally:
        device.close()
