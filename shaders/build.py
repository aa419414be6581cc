"""Compiles every kernel of every op into shaders/spv: `python -m vkbackend.shaders.build` (wheels, set-up)."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vkbackend.device.copy import COPY_WORDS, FILL_WORDS
from vkbackend.device.kompute_order import WITNESS
from vkbackend.ops import all_ops
from vkbackend.ops.op import Kernel
from vkbackend.shaders.compiler import SHIPPED_DIR, compile_to, content_hash


def build(folder: Path = SHIPPED_DIR) -> tuple[int, int]:
    """Brings `folder` up to date: compiles what is missing, removes what no kernel needs. (compiled, kept)."""
    wanted: dict[str, tuple[Kernel, bool]] = {}
    for kernel in [COPY_WORDS, FILL_WORDS, WITNESS, *(k for op in all_ops() for k in op.kernels())]:
        for subgroup in (False, True):
            wanted[f"{kernel.name}-{content_hash(kernel, subgroup)}.spv"] = (kernel, subgroup)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.spv"):
        if old.name not in wanted:
            old.unlink(missing_ok=True)  # two builds at a time
    missing = [(name, *spec) for name, spec in wanted.items() if not (folder / name).is_file()]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda m: compile_to(m[1], m[2], folder / m[0]), missing))
    return len(missing), len(wanted) - len(missing)


if __name__ == "__main__":
    compiled, kept = build()
    print(f"shaders: {compiled} compiled, {kept} up to date", file=sys.stderr)
