#!/usr/bin/env python3
"""How many drafts of the demo model's MTP block stand: per position, and tokens per round. Prints a Markdown table.

    .venv/bin/python scripts/acceptance.py [--device kompute:0] [--prompts 32] [--tokens 128] [--prose FILE] [--greedy]

Code prompts are 128 tokens cut from this Python's own standard library; prose prompts are cut from FILE, or without one
are 128 tokens that the model itself wrote at temperature 0.8 after a few opening words.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import numpy as np

import vkbackend as vkb
from vkbackend.cli.common import demo_model
from vkbackend.spec.generate import Session

OPENINGS = [
    "It is a truth universally acknowledged, that", "And it came to pass, that", "She was", "The LORD said unto",
    "Mr. Darcy", "My dear sister,", "In those days", "He had been", "And the king", "Elizabeth", "Behold,",
    "There was a man", "\"I am sure,\" said", "Now the sons of", "It was not", "Then said he",
]  # fmt: skip
SAMPLED = vkb.Sampling(temperature=0.8, top_p=0.95, seed=1)


def code_prompts(model: vkb.Model, n: int, rng: np.random.Generator) -> list[list[int]]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    out: list[list[int]] = []
    while len(out) < n:
        text = files[int(rng.integers(len(files)))].read_text(errors="ignore")
        if len(text) > 2000:
            out.append(cut(model, text, rng))
    return out


def cut(model: vkb.Model, text: str, rng: np.random.Generator) -> list[int]:
    """128 tokens from somewhere in a text."""
    at = int(rng.integers(len(text) - 1500))
    return model.tokenizer.encode(text[at : at + 1500])[1:129]


def prose_prompts(model: vkb.Model, n: int) -> list[list[int]]:
    session = Session(model, None, n_ctx=256)
    out = []
    for i in range(n):
        sampling = vkb.Sampling(temperature=0.8, top_p=0.95, seed=100 + i)
        opening = model.tokenizer.encode(OPENINGS[i % len(OPENINGS)])
        text = session.stream(opening, 128 - len(opening), sampling, ignore_eos=True).result()
        out.append([*opening, *text.tokens])
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prose", metavar="FILE", help="text to cut the prose prompts from")
    parser.add_argument("--greedy", action="store_true", help="leave the sampled rows out")
    args = parser.parse_args()
    model = vkb.load(demo_model(), device=args.device)
    rng = np.random.default_rng(1)
    if args.prose:
        text = Path(args.prose).read_text(errors="ignore")
        prose = [cut(model, text, rng) for _ in range(args.prompts)]
    else:
        prose = prose_prompts(model, args.prompts)
    texts = {"prose": prose, "code": code_prompts(model, args.prompts, rng)}
    samplings = {"greedy": vkb.Sampling(), "T = 0.8, top-p 0.95": SAMPLED}
    if args.greedy:
        del samplings["T = 0.8, top-p 0.95"]
    info = model.device.info
    print(f"{info.name} ({info.description}), {args.prompts} prompts, {args.tokens} tokens each\n")
    print("| text | decoding | cond i = 1..4 | tokens/round n = 1 / 2 / 3 / 4 / 5 |\n| --- | --- | --- | --- |")
    for name, prompts in texts.items():
        for label, sampling in samplings.items():
            per_round, conditional = [], ""
            for n_max in (1, 2, 3, 4, 5):
                session = Session(model, vkb.DraftMTP(n_max), n_ctx=320)
                stood, steps = np.zeros(n_max), 0
                for prompt in prompts:
                    stats = session.stream(prompt, args.tokens, sampling, ignore_eos=True).result().stats
                    steps += stats.steps
                    stood += np.array([*stats.accepted_per_position, *([0] * n_max)])[:n_max]
                per_round.append(f"{1 + stood.sum() / steps:.2f}")
                if n_max == 4:
                    rates = stood / np.array([steps, *stood[:-1]])
                    conditional = " ".join(f"{r:.3f}"[1:] if r < 1 else "1" for r in rates)
            print(f"| {name} | {label} | {conditional} | {' / '.join(per_round)} |")


if __name__ == "__main__":
    main()
