"""What a generation measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

log = logging.getLogger("vkbackend")

_ENOUGH_DRAFTS = 100
_POOR_RATE = 0.05


@dataclass
class Stats:
    """Counts and wall-clock seconds of one generation.

    prompt_tokens, prompt_s: the prompt, its first sampled token included. tokens: generated (an EOS token counts,
    tokens after a stop do not). steps: trunk decodes after the prompt. submissions: programs run, of trunk and
    draft together. drafted, accepted: draft tokens made and confirmed; `accepted_per_position[i]` counts how often
    draft i was confirmed. decode_s: everything after the prompt; of this draft_s went to drafting, verify_s to the
    trunk's decodes, burst_s to submissions that hold both, host_s to the rest (sampling, text; whoever reads the
    stream is left out).
    """

    prompt_tokens: int = 0
    prompt_s: float = 0.0
    tokens: int = 0
    steps: int = 0
    submissions: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    burst_s: float = 0.0
    host_s: float = 0.0

    @property
    def device_s(self) -> float:
        """Seconds after the prompt that were spent waiting for the device."""
        return self.draft_s + self.verify_s + self.burst_s

    @property
    def decode_s(self) -> float:
        """Seconds spent after the prompt."""
        return self.device_s + self.host_s

    @property
    def prompt_tok_s(self) -> float:
        """Prompt tokens per second; 0 when there was nothing to measure."""
        return _rate(self.prompt_tokens, self.prompt_s)

    @property
    def decode_tok_s(self) -> float:
        """Generated tokens per second after the first, which the prompt's time pays for."""
        return _rate(self.tokens - 1, self.decode_s)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that one trunk decode yielded: 1 without speculation."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that were confirmed."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Adds one verification. Warns once, through logging, when drafting does not pay."""
        had_enough = self.drafted >= _ENOUGH_DRAFTS
        self.drafted += drafted
        self.accepted += accepted
        while len(self.accepted_per_position) < drafted:
            self.accepted_per_position.append(0)
        for i in range(accepted):
            self.accepted_per_position[i] += 1
        if not had_enough and self.drafted >= _ENOUGH_DRAFTS and self.acceptance < _POOR_RATE:
            log.warning(
                "only %d of the first %d draft tokens were accepted (less than %d %%): speculation slows this text "
                "down; try without it, or see whether the draft model belongs to this model",
                self.accepted, self.drafted, round(100 * _POOR_RATE),
            )  # fmt: skip

    def as_dict(self) -> dict[str, object]:
        """Every count, time and rate by name, for JSON."""
        rates = ("decode_s", "prompt_tok_s", "decode_tok_s", "tokens_per_step", "acceptance")
        return {**asdict(self), **{name: getattr(self, name) for name in rates}}

    def lines(self, device: str) -> Sequence[str]:
        """A few lines for people."""
        out = [
            f"device   {device}",
            f"prompt   {self.prompt_tokens} tokens, {self.prompt_tok_s:.1f} tok/s",
            f"decode   {self.tokens} tokens, {self.decode_tok_s:.1f} tok/s, {self.tokens_per_step:.2f} tokens per step",
        ]
        if self.drafted:
            stood = " ".join(f"{100 * n / self.steps:.0f}" for n in self.accepted_per_position)
            out += [
                f"drafts   {self.accepted} of {self.drafted} accepted ({100 * self.acceptance:.1f} %)",
                f"         draft 1, 2, .. was accepted in {stood} % of {self.steps} steps",
                f"time     draft {self.draft_s:.2f} s, verify {self.verify_s:.2f} s, bursts {self.burst_s:.2f} s, "
                f"host {self.host_s:.2f} s",
            ]
        return out


def _rate(n: int, seconds: float) -> float:
    return n / seconds if n > 0 and seconds > 0 else 0.0
