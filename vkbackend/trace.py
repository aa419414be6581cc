"""Traces of device time in Chrome's format, which Perfetto (ui.perfetto.dev) opens too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vkbackend.model.profile import LevelTime


def trace_events(steps: Mapping[str, Sequence[LevelTime]]) -> list[dict[str, Any]]:
    """One row per step, named, and one slice per level on it, one after another; times in us."""
    events: list[dict[str, Any]] = []
    for row, (name, levels) in enumerate(steps.items()):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}})
        at = 0.0
        for i, level in enumerate(levels):
            args: dict[str, Any] = {"level": i, "kernels": ", ".join(level.kernels)}
            if level.n_bytes and level.seconds:
                args |= {"bytes": level.n_bytes, "GB/s": round(level.n_bytes / level.seconds / 1e9, 1)}
            if level.weights:
                args["weights"] = ", ".join(level.weights)
            us = level.seconds * 1e6
            events.append(
                {"name": " + ".join(level.ops), "ph": "X", "pid": 0, "tid": row, "ts": at, "dur": us, "args": args}
            )
            at += us
    return events


def write_trace(path: Path, steps: Mapping[str, Sequence[LevelTime]]) -> None:
    """Writes the trace of some steps. Raises `OSError` where the file can not be written."""
    path.write_text(json.dumps({"traceEvents": trace_events(steps), "displayTimeUnit": "ns"}))
