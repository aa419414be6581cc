#!/usr/bin/env python3
"""Runs op cases and texts under Vulkan's validation layer (core, synchronisation, best practices): counts its messages.

    .venv/bin/python scripts/validate.py [--device vulkan|kompute] [--cases N]
    .venv/bin/python scripts/validate.py [--one-by-one [--backwards]] [--log FILE] -- COMMAND...
    .venv/bin/python scripts/validate.py --one-by-one -- .venv/bin/python -m pytest -q

Needs the layer (Debian: apt install vulkan-validationlayers). Without COMMAND: every op's first N cases (default: all),
in both variants and, on the direct device, through mapped and through staged memory; then texts of a tiny model, plain
and speculative, step by step and in bursts. Exit status 1 when the layer said anything or the command failed.

The layer takes a dispatch to touch all of every buffer that it binds. Ours bind whole arenas, so dispatches of one
level that share an arena (on words of their own) look like a hazard to it. Everything is therefore recorded with one
dispatch a level, which shows every barrier, copy and host access; and that levels hold no hazard is checked by running
each level's dispatches backwards as well: cases must pass and texts be the same.

--one-by-one does so to a command: in all its Python processes the direct device records one dispatch a level, and
Kompute's own instances are made without the layer (docs/kompute.md lists what it says of them). Under pytest the
messages are listed by test.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
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
ORDER, LOG = "VKBACKEND_VALIDATE_ORDER", "VKBACKEND_VALIDATE_LOG"  # set for the processes of a command
TEST = "TEST "  # before a test's name in the log
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


def under_the_layer(command: Sequence[str], one_by_one: str = "") -> tuple[int, Counter[str], str]:
    """Runs a command: its exit status, the layer's messages by their names, and the log.

    The log is a pipe: every instance opens it anew, which would empty a file. one_by_one: forwards or backwards.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, parts = Path(folder) / "log", []
        os.mkfifo(log)
        (Path(folder) / "vk_layer_settings.txt").write_text(SETTINGS.format(log=log))
        env = {**os.environ, "VK_INSTANCE_LAYERS": LAYER, "VK_LAYER_SETTINGS_PATH": folder}
        if one_by_one:
            (Path(folder) / "sitecustomize.py").write_text("import validate\nvalidate.watch_imports()\n")
            paths = [folder, str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
            env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTEST_PLUGINS": "validate"}
            env |= {ORDER: one_by_one, LOG: str(log)}
        reader = threading.Thread(target=lambda: parts.append(log.read_bytes()))
        reader.start()
        with log.open("wb"):  # held open: the reader ends with the last writer
            status = subprocess.run(command, env=env, check=False).returncode
        reader.join()
    text = b"".join(parts).decode(errors="replace")
    return status, Counter(_name(line) for line in text.splitlines() if "MessageID" in line), text


def _name(line: str) -> str:
    match = MESSAGE.search(line)
    return next(filter(None, match.groups())) if match else "a message without a name"


def by_test(text: str) -> Counter[tuple[str, str]]:
    """The messages of a log by test and name."""
    counts: Counter[tuple[str, str]] = Counter()
    test = "before the first test"
    for line in text.splitlines():
        if line.startswith(TEST):
            test = line.removeprefix(TEST)
        elif "MessageID" in line:
            counts[test, _name(line)] += 1
    return counts


# ---- in the processes of the command


def pytest_runtest_logstart(nodeid: str) -> None:
    """As a plugin of pytest: names the test in the log."""
    with open(os.environ[LOG], "w") as log:
        log.write(f"{TEST}{nodeid}\n")


def watch_imports() -> None:
    """Changes the direct device and Kompute as soon as they are imported."""
    sys.meta_path.insert(0, _Watch())  # type: ignore[arg-type]


class _Watch:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        change = {"vkbackend.device.vulkan": _record_one_by_one, "kp": _without_the_layer}.get(name)
        if change is None:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _record_one_by_one(module: ModuleType) -> None:
    record = module.VulkanDevice.record
    backwards = os.environ[ORDER] == "backwards"
    module.VulkanDevice.record = lambda self, *a, **k: arranged(partial(record, self), backwards)(*a, **k)  # type: ignore[attr-defined]


def _without_the_layer(module: ModuleType) -> None:
    """Kompute takes the layer by itself where it finds it: its instances are made with no layer to be found."""
    make = module.Manager

    def manager(*args: Any) -> Any:
        before = os.environ.copy()
        os.environ.pop("VK_INSTANCE_LAYERS", None)
        os.environ["VK_LAYER_PATH"] = "/nowhere"
        try:
            return make(*args)
        finally:
            os.environ.clear()
            os.environ.update(before)

    module.Manager = manager  # type: ignore[attr-defined]


def arranged(record: Callable[..., Any], backwards: bool) -> Callable[..., Any]:
    """`record` with one dispatch a level; a recording's times are still those of the levels that it is given."""

    def one_by_one(levels: Any, inputs: Any, outputs: Any, timestamps: bool, *rest: Any) -> Any:
        single = [[c] for level in levels for c in (reversed(level) if backwards else level)]
        recording = record(single, inputs, outputs, timestamps, *rest)
        if timestamps:  # only then: it makes a recording hold itself
            recording.level_seconds = partial(_sums, recording.level_seconds, [len(level) for level in levels])
        return recording

    return one_by_one


def _sums(times: Callable[[], list[float]], sizes: list[int]) -> list[float]:
    left = iter(times())
    return [sum(next(left) for _ in range(n)) for n in sizes]


# ---- op cases and texts


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
    device.record = arranged(record, backwards)
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
    parser.add_argument("--one-by-one", action="store_true", help="record one dispatch a level in COMMAND")
    parser.add_argument("--backwards", action="store_true", help="... a level's from the last to the first")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep all that the layer said")
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
    order = "backwards" if args.backwards else "forwards" if args.one_by_one else ""
    status, counts, text = under_the_layer(args.command or own, order if args.command else "")
    if args.log:
        args.log.write_text(text)
    print(*[line for line in text.splitlines() if "MessageID" in line][: args.show], sep="\n")
    if TEST in text:
        for (test, name), n in by_test(text).items():
            print(f"{n:6} {name} in {test}")
    for name, n in counts.most_common():
        print(f"{n:6} {name}")
    print(f"exit status {status}, {sum(counts.values())} messages")
    return int(bool(status or counts))


if __name__ == "__main__":
    sys.exit(main())
