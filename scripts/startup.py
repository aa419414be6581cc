"""Where the time before the first token goes, and what loading takes of the host's memory: of one process, one line.

    .venv/bin/python scripts/startup.py --device vulkan:0 -p 50
    D=$(mktemp -d); XDG_CACHE_HOME=$D MESA_SHADER_CACHE_DIR=$D .venv/bin/python scripts/startup.py ...    (cold)

Memory: anonymous and shared pages (Linux; the mapped file is neither) less what the device has allocated, which is the
host's memory too on a CPU driver and on NumPy: how much more of it there was at most while weights were loaded.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from time import perf_counter, sleep

SAMPLED_EVERY_S = 0.01


def resident_mib() -> float:
    """Of this process, without the pages of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="GGUF file (default: the demo model)")
    parser.add_argument("--device", default="numpy")
    parser.add_argument("-p", "--n-prompt", type=int, default=1, help="prompt tokens")
    args = parser.parse_args()

    times = {}
    last = perf_counter()

    def took(what: str) -> None:
        nonlocal last
        now = perf_counter()
        times[what] = now - last
        last = now

    from vkbackend.cli.common import demo_model
    from vkbackend.device import open_device
    from vkbackend.model.loader import load
    from vkbackend.spec.generate import Session

    took("imports")
    device = open_device(args.device)
    took("device")

    def host_mib() -> float:
        return resident_mib() - device.allocated_bytes / 2**20

    before = most = host_mib()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, host_mib())
            sleep(SAMPLED_EVERY_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load(args.model or demo_model(), device=device)
    done.set()
    watcher.join()
    took("load")
    pieces = Session(model).stream([5] * args.n_prompt, 1, ignore_eos=True)
    pieces.result()
    took("first token")
    context = model.context()
    context.decode([5], greedy=True)
    took("first step")
    for _ in range(3):
        context.decode([5], greedy=True)
    took("steps")
    times["steps"] /= 3
    shown = ", ".join(f"{what} {1000 * seconds:.0f}" for what, seconds in times.items())
    held = f"device {device.allocated_bytes / 2**20:.0f}, host while loading {most - before:.0f}"
    print(f"{args.device}: ms: {shown}; MiB: {held}")


if __name__ == "__main__":
    main()
