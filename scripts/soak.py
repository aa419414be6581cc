#!/usr/bin/env python3
"""A long run: thousands of texts of two tiny models on one device. Memory must stay flat and every text right.

    .venv/bin/python scripts/soak.py --device vulkan:0 [--generations 10000] [--tokens 1000000] [--minutes M]

Texts are plain and speculative, greedy and sampled, finished and abandoned, in kept contexts and in fresh ones. One
model's drafts all stand, the other's hardly ever do. Greedy texts must equal what the same prompt gave at the start.
Prints a line of figures now and then; exit status 1 when a text differed or memory grew.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from synthetic import write_model

import vkbackend as vkb
from vkbackend.spec.generate import Session

N_CTX = 512
N_PROMPTS = 16
MODELS = ("perfect", "random")  # what the drafts are worth
WARM_UP = 0.5  # share of the run after which nothing may grow any more
OBJECTS_PER_PROGRAM = 4  # Vulkan objects that one recording has: a rare shape may still come late
FILES_PER_PROGRAM = 1  # NVIDIA's driver opens one for each recording
RSS_SLACK = 8 << 20  # bytes: allocators settle late; a leak of 1.6 KiB a text is more
RSS_PER_PROGRAM = 4 << 20  # bytes of a recording that comes late, through Kompute with pipelines of its own


@dataclass(frozen=True)
class Figures:
    """What is held at one moment. Bytes; `programs`: graphs compiled so far for contexts that are kept."""

    seconds: float
    generations: int
    tokens: int
    rss: int
    device_bytes: int
    pipelines: int
    programs: int
    objects: int
    files: int
    threads: int

    def line(self) -> str:
        return (
            f"{self.seconds:7.0f} s  {self.generations:6} texts  {self.tokens:8} tokens  "
            f"RSS {self.rss / 2**20:7.1f} MiB  device {self.device_bytes / 2**20:6.2f} MiB  "
            f"{self.pipelines} pipelines  {self.programs} recordings  {self.objects} objects  "
            f"{self.files} files  {self.threads} threads"
        )


@dataclass
class Report:
    """The figures over time, and the texts that differed from what they should be."""

    figures: list[Figures] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    compared: int = 0

    def problems(self) -> list[str]:
        """Why the run was not clean: wrong texts, memory or objects that grew after the warm-up."""
        end = self.figures[-1]
        start = next(f for f in self.figures if f.generations >= WARM_UP * end.generations)
        found = list(self.wrong)
        n_programs = end.programs - start.programs
        if end.rss - start.rss > RSS_SLACK + n_programs * RSS_PER_PROGRAM:
            found.append(f"RSS grew from {start.rss} to {end.rss} bytes in {end.generations - start.generations} texts")
        allowed = {"objects": OBJECTS_PER_PROGRAM * n_programs, "files": FILES_PER_PROGRAM * n_programs}
        for name in ("device_bytes", "pipelines", "objects", "files", "threads"):
            before, after = getattr(start, name), getattr(end, name)
            if after > before + allowed.get(name, 0):
                found.append(f"{name} grew from {before} to {after} in {end.generations - start.generations} texts")
        return found


class Soak:
    """Two models on one device, a kept plain and a kept speculative session of each, and what their texts must be."""

    def __init__(self, device: str, folder: Path, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.device: Any = vkb.open_device(device)
        self.programs = 0
        self._count_programs()
        self.report = Report()
        self.models = [
            vkb.load(write_model(folder / f"{head}.gguf", seed, n_main=2, head=head), device=self.device)
            for head in MODELS
        ]
        spec = vkb.DraftMTP(n_max=3)
        self.sessions = [[Session(m, s, n_ctx=N_CTX) for s in (None, spec)] for m in self.models]
        n_vocab = self.models[0].hparams.n_vocab
        lengths = self.rng.integers(1, 48, N_PROMPTS)
        self.prompts = [[int(t) for t in self.rng.integers(0, n_vocab, n)] for n in lengths]
        self.generations = self.tokens = 0
        self._start = perf_counter()

    def _count_programs(self) -> None:
        compile_graph = self.device.compile

        def counted(*args: Any, **settings: Any) -> Any:
            self.programs += 1
            return compile_graph(*args, **settings)

        self.device.compile = counted

    def first_texts(self, n: int) -> None:
        """The texts of `n` tokens that later ones are compared with: greedy, plain, from contexts of their own."""
        self.expected = [
            [vkb.generate(m, p, n, n_ctx=N_CTX, ignore_eos=True).tokens for p in self.prompts] for m in self.models
        ]
        # Every kind of text once: what is made on first use is then there.
        longest = max(self.prompts, key=len)
        fresh = Session(self.models[0], vkb.DraftMTP(n_max=2), n_ctx=N_CTX)
        for session in [fresh, *(s for sessions in self.sessions for s in sessions)]:
            for sampling in (None, vkb.Sampling(temperature=1.0, seed=1)):
                session.stream(longest, 8, sampling, ignore_eos=True).result()
        self.all_texts()  # the longest as well, or the end would need larger regions than what came before
        self.programs = 0

    def one_text(self, length: int) -> None:
        """One text of about `length` tokens, of a random kind."""
        rng = self.rng
        model, prompt = int(rng.integers(len(self.models))), int(rng.integers(N_PROMPTS))
        speculative = int(rng.random() < 0.4)
        n = int(rng.integers(1, 2 * length))
        kind = rng.choice(["greedy", "sampled", "abandoned", "fresh"], p=[0.84, 0.1, 0.05, 0.01])
        session = self.sessions[model][speculative]
        if kind == "fresh":
            programs = self.programs
            session = Session(self.models[model], vkb.DraftMTP(n_max=2) if speculative else None, n_ctx=N_CTX)
        sampling = vkb.Sampling(temperature=1.0, seed=int(rng.integers(1 << 31))) if kind == "sampled" else None
        stream = session.stream(self.prompts[prompt], n, sampling, ignore_eos=True)
        for _ in islice(stream, n // 3) if kind == "abandoned" else stream:
            pass
        if kind == "fresh":
            del session
            self.programs = programs
        self.generations += 1
        self.tokens += len(stream.tokens)
        if kind != "sampled":
            self._compare(model, prompt, stream.tokens, f"{kind} text {self.generations}")

    def all_texts(self) -> None:
        """The first texts once more, whole, through every kept session."""
        for model, sessions in enumerate(self.sessions):
            for i, prompt in enumerate(self.prompts):
                for session in sessions:
                    n = len(self.expected[model][i])
                    tokens = session.stream(prompt, n, ignore_eos=True).result().tokens
                    self._compare(model, i, tokens, f"whole text of prompt {i}")

    def _compare(self, model: int, prompt: int, got: list[int], name: str) -> None:
        want = self.expected[model][prompt]
        n = min(len(got), len(want))
        self.report.compared += 1
        if got[:n] != want[:n]:
            at = next(i for i in range(n) if got[i] != want[i])
            self.report.wrong.append(
                f"{name}, model {MODELS[model]}, prompt {prompt}: token {at} is {got[at]}, first it was {want[at]}"
            )

    def note(self) -> Figures:
        """Adds what is held now to the report."""
        gc.collect()
        device = self.device
        pipelines = getattr(device, "pipelines", None)
        session = getattr(device, "session", None)
        proc = Path("/proc/self")
        figures = Figures(
            seconds=perf_counter() - self._start,
            generations=self.generations,
            tokens=self.tokens,
            rss=int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            device_bytes=device.allocated_bytes,
            pipelines=len(pipelines) if pipelines is not None else 0,
            programs=self.programs,
            objects=len(session._cleanups) if session is not None else 0,
            files=len(os.listdir(proc / "fd")),
            threads=len(os.listdir(proc / "task")),
        )
        self.report.figures.append(figures)
        return figures


def soak(
    device: str, generations: int, tokens: int, seed: int, seconds: float = float("inf"), lines: int = 20
) -> Report:
    """Runs that many texts with that many tokens between them, or as many as the time allows."""
    with tempfile.TemporaryDirectory() as folder:
        run = Soak(device, Path(folder), seed)
    length = max(1, tokens // generations)
    info = run.device.info
    print(f"{info.name} ({info.description}), seed {seed}, {generations} texts, {tokens} tokens", flush=True)
    run.first_texts(2 * length)
    start = perf_counter()
    next_line = 0
    while (run.generations < generations or run.tokens < tokens) and perf_counter() - start < seconds:
        done = min(run.generations / generations, run.tokens / tokens)
        if max(done, (perf_counter() - start) / seconds) * lines >= next_line:
            print(run.note().line(), flush=True)
            next_line += 1
        run.one_text(length)
    run.all_texts()
    print(run.note().line(), flush=True)
    run.device.close()
    return run.report


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    parser.add_argument("--generations", type=int, default=10_000, metavar="N")
    parser.add_argument("--tokens", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--minutes", type=float, default=float("inf"), metavar="M", help="stop after this time")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    report = soak(args.device, args.generations, args.tokens, args.seed, 60 * args.minutes)
    problems = report.problems()
    print(*problems[:20], sep="\n")
    print(f"{report.compared} texts compared, {len(report.wrong)} wrong; {'FAILED' if problems else 'memory flat'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
