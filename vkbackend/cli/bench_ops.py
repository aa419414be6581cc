"""`vkbackend bench --ops`: device time of one decode step and one prompt by op, against the device's copy speed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from vkbackend.cli.common import device_name, print_json, table

if TYPE_CHECKING:
    from vkbackend.device.base import Device
    from vkbackend.model.loader import Model
    from vkbackend.model.profile import LevelTime

COPY_BYTES = {"gpu": 512 << 20, "cpu": 16 << 20}  # the smaller of two copies
COPIES = 5


def run_ops(model: Model, args: argparse.Namespace) -> int:
    """Measures and prints; with --trace also writes every level's time."""
    from vkbackend.model.profile import profile_step
    from vkbackend.trace import write_trace

    steps = {
        "decode, 1 token": profile_step(model, 1, args.n_prompt, args.repetitions),
        f"prompt, {args.n_prompt} tokens": profile_step(model, args.n_prompt, 0, args.repetitions),
    }
    copy = copy_bandwidth(model.device)
    if args.trace:
        write_trace(Path(args.trace), steps)
    info = model.device.info
    device = device_name(info, args)
    if args.json:
        print_json(
            {
                "device": device,
                "description": info.description,
                "copy_bytes_per_s": copy,
                "steps": {name: [vars(level) for level in levels] for name, levels in steps.items()},
            }
        )
        return 0
    print(f"{device} ({info.description}), copies move {copy / 1e9:.0f} GB/s (read and written)")
    for i, (name, levels) in enumerate(steps.items()):
        total = sum(level.seconds for level in levels)
        if i:
            print()
        print(f"{device}, {name}: {total * 1e6:.0f} us in {len(levels)} levels")
        print(table(_rows(levels, total, copy)))
    return 0


def _rows(levels: Sequence[LevelTime], total: float, copy: float) -> list[list[str]]:
    kinds: dict[tuple[str, str, str, int], list[float]] = {}
    for level in levels:
        weights = ", ".join(_short(name) for name in level.weights)
        key = (" + ".join(level.ops), weights, ", ".join(level.kernels), level.n_bytes)
        kinds.setdefault(key, []).append(level.seconds)
    rows = [["OP", "WEIGHTS", "KERNELS", "LEVELS", "EACH us", "ALL us", "SHARE", "MB", "GB/s", "OF COPY"]]
    for (ops, weights, kernels, n_bytes), seconds in sorted(kinds.items(), key=lambda kind: -sum(kind[1])):
        spent = sum(seconds)
        rate = n_bytes * len(seconds) / spent if spent else 0.0
        rows.append(
            [
                ops,
                weights or "-",
                kernels,
                str(len(seconds)),
                f"{1e6 * spent / len(seconds):.1f}",
                f"{1e6 * spent:.0f}",
                f"{100 * spent / total:.1f} %" if total else "-",
                f"{n_bytes / 1e6:.1f}" if n_bytes else "-",
                f"{rate / 1e9:.0f}" if rate else "-",
                f"{100 * rate / copy:.0f} %" if rate else "-",
            ]
        )
    return rows


def _short(name: str) -> str:
    """What a tensor is called in every block: ffn_down for blk.3.ffn_down.weight."""
    return re.sub(r"^blk\.\d+\.|\.weight$", "", name)


def copy_bandwidth(device: Device) -> float:
    """Bytes per second that a copy inside the device's memory reads and writes together.

    From the difference of two copies' times, of n and 2 n words, so that what a submission costs drops out.
    """
    limits = device.info.limits
    most = min(limits.max_storage_range, limits.max_buffer_bytes) // 2
    n_words = min(COPY_BYTES["gpu" if device.info.kind == "gpu" else "cpu"], most) // 4
    source, target = (device.allocate(2 * n_words, label="copy speed") for _ in range(2))

    def seconds(n: int) -> float:
        times = []
        for _ in range(COPIES):
            start = perf_counter()
            device.copy(source, 0, target, 0, n)
            times.append(perf_counter() - start)
        return min(times)

    device.fill(source, 0, 2 * n_words, 0)
    seconds(2 * n_words)  # wakes an idle card
    more = seconds(2 * n_words) - seconds(n_words)
    return 8 * n_words / max(more, 1e-9)
