#!/usr/bin/env python3
"""Runs op cases and texts under Vulkan's validation layer (core, synchronisation, best practices): counts its messages.

    .venv/bin/python scripts/validate.py [--device vulkan|kompute] [--cases N] [-- COMMAND...]

Needs the layer (Debian: apt install vulkan-validationlayers). Without COMMAND: every op's first N cases (default: all),
in both variants and, on the direct device, through mapped and through staged memory; then texts of a tiny model, plain
and speculative, step by step and in bursts. Exit status 1 when the layer said anything or the command failed.

The layer takes a dispatch to touch all of every buffer that it binds. Ours bind whole arenas, so dispatches of one
level that share an arena (on words of their own) look like a hazard to it. Everything is therefore recorded with one
dispatch a level, which shows every barrier, copy and host access; and that levels hold no hazard is checked by running
each level's dispatches backwards as well: cases must pass and texts be the same.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LAYER = "VK_LAYER_KHRONOS_validation"
SETTINGS = """\
khronos_validation.enables = VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT,\
VK_VALIDATION_FEATURE_ENABLE_BEST_PRACTICES_EXT
khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG
khronos_validation.report_flags = error,warn,perf
khronos_validation.enable_message_limit = false
khronos_validation.log_filename = {log}
"""
MESSAGE = re.compile(r"\[ ([\w-]+) \] Object|\[ ([\w-]+) \]")


def layer_is_there() -> bool:
    """Whether the Vulkan loader knows the validation layer."""
    from vkbackend.device.probe import load_vulkan
    from vkbackend.errors import DeviceError

    try:
        vk = load_vulkan()
    except DeviceError:
        return False
    return any(str(layer.layerName) == LAYER for layer in vk.vkEnumerateInstanceLayerProperties())


def under_the_layer(command: Sequence[str]) -> tuple[int, Counter[str], str]:
    """Runs a command: its exit status, the layer's messages by their names, and the log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        (Path(folder) / "vk_layer_settings.txt").write_text(SETTINGS.format(log=log))
        env = {**os.environ, "VK_INSTANCE_LAYERS": LAYER, "VK_LAYER_SETTINGS_PATH": folder}
        status = subprocess.run(command, env=env, check=False).returncode
        text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if "MessageID" in line]
    return status, Counter(next(filter(None, match.groups())) for match in map(MESSAGE.search, lines) if match), text


def work(kind: str, n_cases: int | None) -> None:
    """What is validated, in the process that the layer watches."""
    from vkbackend.device.kompute import KomputeDevice
    from vkbackend.device.vulkan import VulkanDevice
    from vkbackend.ops import all_ops
    from vkbackend.ops.case import run_case

    ways: list[dict[str, Any]] = [{"subgroups": True}, {"subgroups": False}]
    if kind == "vulkan":
        ways.append({"subgroups": True, "unified": False})
    for way in ways:
        device: Any = VulkanDevice(0, **way) if kind == "vulkan" else KomputeDevice(0, **way)
        n, texts = 0, []
        for backwards in (False, True):
            with one_by_one(device, backwards):
                for op in all_ops():
                    for case in op.cases()[:n_cases]:
                        result = run_case(case, device, seed=1)
                        assert result.ok, f"{op.name} {case.label}: {result}"
                        n += 1
                texts.append(_texts(device))
        assert texts[0] == texts[1], "dispatches of one level depend on each other"
        print(f"{device.info.name} {way}: {n} cases, {sum(map(len, texts))} texts", flush=True)
        device.close()


@contextmanager
def one_by_one(device: Any, backwards: bool) -> Iterator[None]:
    """Barriers after every dispatch; the dispatches of a level in their order, or from the last to the first."""
    record = device.record

    def arranged(levels: Any, *rest: Any) -> Any:
        return record([[c] for level in levels for c in (reversed(level) if backwards else level)], *rest)

    device.record = arranged
    try:
        yield
    finally:
        device.record = record


def _texts(device: Any) -> list[list[int]]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from synthetic import write_model

    import vkbackend as vkb

    texts = []
    with tempfile.TemporaryDirectory() as folder:
        model = vkb.load(write_model(Path(folder) / "tiny.gguf", seed=1, n_main=2, head="perfect"), device=device)
        for bursts in (1, 4):
            device.max_burst = bursts
            for spec in (None, vkb.DraftMTP(2)):
                for sampling in (None, vkb.Sampling(temperature=1.0, seed=1)):
                    text = vkb.generate(model, [3] * 40, 12, sampling, spec, n_ctx=128, ignore_eos=True)
                    texts.append(text.tokens)
        context = model.context(n_ctx=64, n_seq_max=2)
        context.decode([1, 2, 3])
        context.seq_cp(0, 1)
        context.state_set(0, context.state_get(1))
        texts.append(context.decode([5], greedy=True).argmax.tolist())
    return texts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("vulkan", "kompute"), default="vulkan")
    parser.add_argument("--cases", type=int, default=None, metavar="N", help="only the first N of each op")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="print the first N messages whole")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="after --: run this instead")
    args = parser.parse_args()
    if args.work:
        work(args.device, args.cases)
        return 0
    if not layer_is_there():
        print(f"{LAYER} is not here (Debian: apt install vulkan-validationlayers)", file=sys.stderr)
        return 2
    own = [sys.executable, __file__, "--work", "--device", args.device]
    own += ["--cases", str(args.cases)] if args.cases is not None else []
    status, counts, text = under_the_layer(args.command or own)
    print(*[line for line in text.splitlines() if "MessageID" in line][: args.show], sep="\n")
    for name, n in counts.most_common():
        print(f"{n:6} {name}")
    print(f"exit status {status}, {sum(counts.values())} messages")
    return int(bool(status or counts))


if __name__ == "__main__":
    sys.exit(main())
