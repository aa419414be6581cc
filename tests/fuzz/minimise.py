"""Keeps the inputs that reach what no smaller one reaches.

    PYTHONPATH=tests:tests/fuzz python tests/fuzz/minimise.py tests/fuzz/corpus.zip FOLDER...

Reached is a step from one line to another in vkbackend or jinja2. (libFuzzer's own -merge=1 starts itself again and
again under atheris.) Texts and vocabularies are all kept: what they reach lies in a library that is not Python.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jinja2
import targets

import vkbackend.model

PLACES = (str(Path(vkbackend.__file__).parent), *vkbackend.model.__path__, str(Path(jinja2.__file__).parent))
WHOLE = (targets.any_text, targets.any_vocabulary)
Step = tuple[CodeType, int, int]


def steps_of(data: bytes) -> set[Step]:
    """The steps between lines that one input takes."""
    steps: set[Step] = set()
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            return trace if frame.f_code.co_filename.startswith(PLACES) else None
        if event == "line":
            steps.add((frame.f_code, last.get(frame, 0), frame.f_lineno))
            last[frame] = frame.f_lineno
        return trace

    sys.settrace(trace)
    try:
        targets.one_input(data)
    finally:
        sys.settrace(None)
    return steps


def main(out: str, folders: list[str]) -> None:
    inputs = sorted({p.read_bytes() for f in folders for p in Path(f).iterdir()}, key=lambda d: (len(d), d))
    for target in range(len(targets.TARGETS)):
        targets.one_input(bytes([target]))  # what is loaded once is no step of an input
    seen: set[Step] = set()
    kept = []
    for data in inputs:
        new = steps_of(data) - seen
        seen |= new
        if new or (data and targets.TARGETS[data[0] % len(targets.TARGETS)] in WHOLE):
            kept.append(data)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for i, data in enumerate(kept):
            file.writestr(zipfile.ZipInfo(f"{i:04d}"), data, zipfile.ZIP_DEFLATED)
    print(f"{len(kept)} of {len(inputs)} inputs, {sum(map(len, kept))} bytes")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
