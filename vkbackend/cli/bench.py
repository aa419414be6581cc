"""`vkbackend bench`: prompt and decode speed, or (bench_ops.py) device time by op."""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vkbackend.cli.common import (
    Commands,
    add_command,
    add_draft_sizes,
    add_json,
    add_model,
    device_name,
    device_remark,
    load_model,
    print_json,
    speculator,
    table,
)

if TYPE_CHECKING:
    from vkbackend.model.loader import Model
    from vkbackend.spec.draft_mtp import DraftMTP
    from vkbackend.spec.stats import Stats


@dataclass(frozen=True)
class Rate:
    """Tokens per second over the repetitions."""

    median: float
    min: float
    max: float


def add(commands: Commands) -> None:
    parser = add_command(commands, "bench", run, "Measures prompt and decode speed with greedy decoding.")
    add_model(parser)
    parser.add_argument("-p", "--n-prompt", type=int, default=512, metavar="N", help="prompt tokens (default 512)")
    parser.add_argument(
        "-n", "--n-gen", type=int, default=128, metavar="N", help="tokens generated after it (default 128)"
    )
    parser.add_argument(
        "-r", "--repetitions", type=int, default=5, metavar="N", help="timed runs, after one untimed (default 5)"
    )
    parser.add_argument("-f", "--file", metavar="FILE", help="take the prompt from this text (default: random tokens)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the random prompt (default 1)")
    parser.add_argument(
        "--spec-type", default="none", metavar="TYPE[,TYPE]", help="measure each of these: none (default), draft-mtp"
    )
    add_draft_sizes(parser)
    parser.add_argument(
        "--ops", action="store_true", help="device time of one decode step and one prompt by op instead"
    )
    parser.add_argument("--trace", metavar="FILE", help="with --ops: write a Chrome trace (opens in Perfetto)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from vkbackend.cli import UsageError

    limits = (("-p", args.n_prompt, 1), ("-n", args.n_gen, 0), ("-r", args.repetitions, 1), ("--seed", args.seed, 0))
    for name, value, least in limits:
        if value < least:
            raise UsageError(f"{name} is {value}; at least {least} is needed")
    if args.trace and not args.ops:
        raise UsageError("--trace is of single ops: give --ops too")
    specs = {name: speculator(name, args) for name in args.spec_type.split(",")}
    model = load_model(args)
    for remark in device_remark(model.device.info, args):
        print(remark, file=sys.stderr)
    if args.ops:
        from vkbackend.cli.bench_ops import run_ops

        return run_ops(model, args)
    prompt = _prompt(model, args)
    runs = {}
    for name, spec in specs.items():
        work = f"prompt {len(prompt)}, then {args.n_gen} tokens, 1 untimed and {args.repetitions} timed runs"
        print(f"spec {name}: {work} on {device_name(model.device.info, args)}", file=sys.stderr)
        runs[name] = _measure(model, prompt, spec, args.n_gen, args.repetitions)
    info = model.device.info
    device = device_name(info, args)
    if args.json:
        print_json(
            {
                "device": device,
                "description": info.description,
                "model": str(args.model or "demo"),
                "n_prompt": len(prompt),
                "n_gen": args.n_gen,
                "repetitions": args.repetitions,
                "results": [_as_dict(name, stats) for name, stats in runs.items()],
            }
        )
        return 0
    print(f"{device} ({info.description}), prompt {len(prompt)}, generated {args.n_gen}, {args.repetitions} runs")
    rows = [["SPEC", "PROMPT tok/s (min .. max)", "DECODE tok/s (min .. max)", "TOKENS/STEP", "ACCEPTED"]]
    for name, stats in runs.items():
        last = stats[-1]
        rows.append(
            [
                name,
                _show(_rate([s.prompt_tok_s for s in stats])),
                _show(_rate([s.decode_tok_s for s in stats])),
                f"{last.tokens_per_step:.2f}",
                f"{100 * last.acceptance:.1f} %" if last.drafted else "-",
            ]
        )
    print(table(rows))
    return 0


def _prompt(model: Model, args: argparse.Namespace) -> list[int]:
    if args.file is None:
        import numpy as np

        n = min(model.hparams.n_vocab, model.tokenizer.n_vocab)
        return [int(i) for i in np.random.default_rng(args.seed).integers(0, n, args.n_prompt)]
    from vkbackend.cli import UsageError
    from vkbackend.cli.generate import read_text

    ids = model.tokenizer.encode(read_text(args.file))
    if len(ids) < args.n_prompt:
        raise UsageError(f"-f {args.file} has {len(ids)} tokens, -p asks for {args.n_prompt}")
    return ids[: args.n_prompt]


def _measure(model: Model, prompt: list[int], spec: DraftMTP | None, n_gen: int, repetitions: int) -> list[Stats]:
    """The statistics of the timed runs; the untimed one before them records every shape."""
    from vkbackend.spec.generate import Session

    session = Session(model, spec, n_ctx=len(prompt) + n_gen + 1 + (spec.n_max if spec else 0))
    out = []
    for i in range(repetitions + 1):
        text = session.stream(prompt, max(n_gen, 1), ignore_eos=True)
        _show_progress(i, repetitions, 0, n_gen)
        for _ in text:
            _show_progress(i, repetitions, len(text.tokens), n_gen)
        if i:
            out.append(text.stats)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return out


def _show_progress(i: int, repetitions: int, n_tokens: int, n_gen: int) -> None:
    """A line on a terminal that the next one replaces. Time between two pieces of a text counts for no rate."""
    if sys.stderr.isatty():
        doing = f"{n_tokens} of {max(n_gen, 1)} tokens" if n_tokens else "reading the prompt"
        print(f"\rrun {i} of {repetitions}: {doing}\033[K", end="", file=sys.stderr, flush=True)


def _rate(values: list[float]) -> Rate:
    return Rate(statistics.median(values), min(values), max(values))


def _show(rate: Rate) -> str:
    return f"{rate.median:.1f} ({rate.min:.1f} .. {rate.max:.1f})" if rate.max else "-"


def _as_dict(name: str, stats: list[Stats]) -> dict[str, Any]:
    last = stats[-1]
    return {
        "spec_type": name,
        "prompt_tok_s": vars(_rate([s.prompt_tok_s for s in stats])),
        "decode_tok_s": vars(_rate([s.decode_tok_s for s in stats])),
        "tokens_per_step": last.tokens_per_step,
        "drafted": last.drafted,
        "accepted": last.accepted,
        "acceptance": last.acceptance,
        "accepted_per_position": last.accepted_per_position,
        "steps": last.steps,
        "submissions": last.submissions,
    }
