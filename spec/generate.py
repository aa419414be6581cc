"""The generation loop: a prompt in, text out, plain or with speculation.

One step of the loop, with drafts d1 .. dn (plain decoding is the case n = 0):

1. the speculator drafts d1 .. dn to follow the last token;
2. the trunk decodes [last, d1 .. dn] in one batch, and the speculator follows it (`process`);
3. `verify` chooses a token for each row for as long as they match the drafts;
4. the trunk's memory is rolled back to what was accepted (`seq_rm`: no data moves).

On a GPU several of these steps run in one submission (vkbackend/model/burst.py), unless a repeat penalty looks at the
tokens before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING

from vkbackend.errors import ContextError, DeviceError, VkBackendError, is_whole, shown
from vkbackend.model.batch import Batch
from vkbackend.model.loader import check_sizes
from vkbackend.spec.draft_mtp import MTPSpeculator
from vkbackend.spec.sampling import Sampler, Sampling
from vkbackend.spec.speculator import DraftRequest, SpeculatorSettings
from vkbackend.spec.stats import Stats
from vkbackend.spec.stopping import TextAssembler
from vkbackend.spec.verify import Choose, choose_greedy, choose_sampled, verify

if TYPE_CHECKING:
    from vkbackend.device.base import DeviceInfo
    from vkbackend.model.burst import Burst
    from vkbackend.model.context import DecodeOutput
    from vkbackend.model.loader import Model

log = logging.getLogger("vkbackend")


@dataclass(frozen=True)
class Generation:
    """A finished text. `tokens` are its ids, without an EOS; `stop_reason` is "length", "eos" or "stop"."""

    text: str
    tokens: list[int]
    stop_reason: str
    stats: Stats


class Session:
    """The contexts in which texts of one model are generated, one after the other.

    `generate` and `stream` make a new one for every text; keep one to avoid setting the contexts up again.
    """

    def __init__(self, model: Model, spec: SpeculatorSettings | None = None, n_ctx: int = 4096) -> None:
        _check_spec(spec)
        self._spec, self._n_ctx = spec, n_ctx
        self._open(model)

    def _open(self, model: Model) -> None:
        spec, n_ctx = self._spec, self._n_ctx
        self.model = model
        self.speculator = spec.start(model, n_ctx) if spec else None
        hidden, n_rs_seq = (spec.hidden, spec.n_max) if spec else (None, 0)
        self.context = model.context(n_ctx=n_ctx, n_rs_seq=n_rs_seq, hidden=hidden)
        self.burst = self._make_burst()

    def fall_back(self, error: DeviceError) -> bool:
        """Goes on with NumPy where a device failed that "auto" had chosen; the contexts are new and empty then."""
        if self.model.fallback is None:
            return False
        log.warning("%s. Going on with NumPy", error)
        self._open(self.model.fallback())
        return True

    def _make_burst(self) -> Burst | None:
        if self.speculator is None:
            return self.model.burst(self.context)
        if isinstance(self.speculator, MTPSpeculator):
            return self.model.burst(self.context, self.speculator.context, self.speculator.n_max)
        return None

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> TextStream:
        """Begins a text, forgetting the one before. Arguments and errors as for `generate`."""
        _check_sampling(sampling)
        ids = check_prompt(self.model, prompt, self.context.n_ctx)
        return TextStream(self, ids, check_max_tokens(max_tokens), sampling or Sampling(), stop, ignore_eos)

    @property
    def submissions(self) -> int:
        """Programs run so far, of the trunk and the speculator."""
        return self.context.submissions + (self.speculator.submissions if self.speculator else 0)


class TextStream:
    """An iterator of text pieces: whole characters, never a part of a stop string.

    `tokens`, `text` and `stats` grow with it; `stop_reason` is None until the end. Nothing runs before the first
    piece is asked for.
    """

    def __init__(
        self,
        session: Session,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        stop: str | Sequence[str],
        ignore_eos: bool,
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.stop_reason: str | None = None
        self.stats = Stats(prompt_tokens=len(prompt))
        self._session = session
        self._max_tokens = max_tokens
        self._sampler = Sampler(sampling)
        self._assembler = TextAssembler(session.model.tokenizer, stop)
        self._eos = frozenset() if ignore_eos else frozenset(session.model.tokenizer.eos_ids)
        self._history = prompt  # every token so far
        self._in_bursts = False  # the burst's own state is ahead of the speculator's
        self._pieces = self._run()

    @property
    def device(self) -> DeviceInfo:
        """Where the text is made, which changes when an "auto" device fails."""
        return self._session.model.device.info

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def result(self) -> Generation:
        """The whole text, after running whatever has not run yet."""
        for _ in self:
            pass
        assert self.stop_reason is not None
        return Generation(self.text, self.tokens, self.stop_reason, self.stats)

    # ---- the loop

    def _run(self) -> Iterator[str]:
        if self._max_tokens == 0:
            self.stop_reason = "length"
            return
        stats, submissions = self.stats, self._session.submissions
        start = perf_counter()
        piece = self._take(self._first())
        stats.prompt_s = perf_counter() - start
        while True:
            stats.submissions = self._session.submissions - submissions
            if self.stop_reason is not None:
                piece += self._assembler.finish()
            self.text += piece
            if piece:
                yield piece
            if self.stop_reason is not None:
                return
            start, device_s = perf_counter(), stats.device_s
            piece = ""
            for n_drafts, chosen in self._rounds():
                stats.steps += 1
                if n_drafts:
                    stats.count_drafts(n_drafts, len(chosen) - 1)
                piece += self._take(chosen)
                if self.stop_reason is not None:
                    break
            stats.host_s += perf_counter() - start - (stats.device_s - device_s)

    def _first(self) -> list[int]:
        """Decodes the prompt and chooses the token after it."""
        try:
            out = self._read(self._history)
        except DeviceError as error:
            if not self._session.fall_back(error):
                raise
            out = self._read(self._history)
        return verify([], self._recent(), self._choose(out))

    def _rounds(self) -> list[tuple[int, list[int]]]:
        """The next rounds, of a burst or one: (drafts, chosen tokens) of each."""
        try:
            return self._burst() or [self._step()]
        except DeviceError as error:  # raised before anything was chosen
            if not self._session.fall_back(error):
                raise
            self._in_bursts = False
            self._read(self._history[:-1])
            return [self._step()]

    def _read(self, prompt: Sequence[int]) -> DecodeOutput:
        """Decodes tokens from the start, and the speculator follows."""
        session = self._session
        session.context.clear()
        if session.speculator:
            session.speculator.clear()
        n = session.model.n_ubatch
        for at in range(0, len(prompt), n):  # by pieces: hidden rows of a long prompt are large
            chunk = prompt[at : at + n]
            last = at + n >= len(prompt)
            want = [False] * (len(chunk) - 1) + [last]
            batch = Batch(chunk, list(range(at, at + len(chunk))), None, want)
            out = session.context.decode_batch(batch, greedy=self._greedy)
            if session.speculator:
                session.speculator.process(batch, out.hidden)
        return out

    def _burst(self) -> list[tuple[int, list[int]]]:
        """Rounds in one submission: (drafts, chosen tokens) of each; none if not possible."""
        session, burst = self._session, self._session.burst
        if burst is None or self._sampler.sampling.looks_back:
            return []
        per_round = max(1.0, self.stats.tokens_per_step or burst.tokens_per_round)
        wanted = ceil((self._max_tokens - len(self.tokens)) / per_round)
        n_rounds = 1 << (min(burst.rounds(session.model.device.max_burst), wanted).bit_length() - 1)
        while n_rounds > 1 and not burst.fits(n_rounds):
            n_rounds //= 2
        if not burst.fits(n_rounds):
            return []
        start = perf_counter()
        if not self._in_bursts:
            speculator = session.speculator
            pending_h = speculator.pending_h[0] if isinstance(speculator, MTPSpeculator) else None
            burst.begin(self._history[-1], pending_h, self._sampler.device_words)
            self._in_bursts = True
        rounds = burst.run(n_rounds)
        self.stats.burst_s += perf_counter() - start
        return [(burst.tokens_per_round - 1, chosen) for chosen in rounds]

    def _step(self) -> tuple[int, list[int]]:
        """Decodes the last token, with drafts behind it: the number of drafts, and the tokens chosen to follow it."""
        session, stats = self._session, self.stats
        n_past = len(self._history) - 1  # the last token is not decoded yet
        start = perf_counter()
        drafts: list[int] = []
        # After bursts the speculator lacks what they decoded: the few steps left before the context is full go without.
        if session.speculator and not self._in_bursts:
            drafts = session.speculator.draft([DraftRequest(0, self._history[-1], n_past)])[0]
        drafted = perf_counter()
        batch = Batch(
            [self._history[-1], *drafts],
            list(range(n_past, n_past + 1 + len(drafts))),
            None,
            [True] * (1 + len(drafts)),
        )
        out = session.context.decode_batch(batch, greedy=self._greedy)
        decoded = perf_counter()
        if session.speculator and not self._in_bursts:
            session.speculator.process(batch, out.hidden)
        stats.draft_s += drafted - start + perf_counter() - decoded
        stats.verify_s += decoded - drafted

        chosen = verify(drafts, self._recent(), self._choose(out))
        n_accepted = len(chosen) - 1
        if session.speculator and not self._in_bursts:
            session.speculator.accept(0, n_accepted)
        if not session.context.seq_rm(0, n_past + 1 + n_accepted):
            raise ContextError(
                f"generate: {len(drafts) - n_accepted} rejected drafts could not be rolled back; the context keeps "
                f"{session.context.rollback_depth(0)} older states (n_rs_seq)"
            )
        return len(drafts), chosen

    @property
    def _greedy(self) -> bool:
        return self._sampler.sampling.is_argmax

    def _choose(self, out: DecodeOutput) -> Choose:
        if self._greedy:
            return choose_greedy(out.argmax)
        return choose_sampled(out.logits, self._sampler, len(self._history))

    def _recent(self) -> list[int]:
        """As much of the history as the repeat penalty looks at."""
        n = self._sampler.sampling.repeat_last_n
        return self._history[-n:] if n else []

    def _take(self, chosen: Sequence[int]) -> str:
        """Adds chosen tokens to the text up to where it ends, and says why it ended. Returns the new text."""
        piece = ""
        for token in chosen:
            if token < 0:
                raise VkBackendError(
                    f"the model returned NaN among the logits for position {len(self._history)}, or no finite greatest "
                    "one: its output is not usable; the file may be damaged, or the driver at fault (see: vkbackend "
                    "test-ops)"
                )
            if token in self._eos:
                self.stop_reason = "eos"
                break
            self.tokens.append(token)
            self._history.append(token)
            piece += self._assembler.push(token)
            if self._assembler.stopped:
                self.stop_reason = "stop"
                break
            if len(self.tokens) == self._max_tokens or len(self._history) > self._session.context.n_ctx:
                self.stop_reason = "length"
                break
        self.stats.tokens = len(self.tokens)
        return piece


def generate(
    model: Model,
    prompt: str | Sequence[int],
    max_tokens: int = 128,
    sampling: Sampling | None = None,
    spec: SpeculatorSettings | None = None,
    stop: str | Sequence[str] = (),
    n_ctx: int = 4096,
    ignore_eos: bool = False,
) -> Generation:
    """Generates a text that continues the prompt.

    prompt: text, or token ids. max_tokens: most tokens to generate; fewer when an EOS token comes (unless
    `ignore_eos`), a stop string is complete, or the context of `n_ctx` tokens is full. sampling: greedy by default.
    spec: a speculator such as `DraftMTP()`, None for plain decoding; it changes speed, never what comes out. stop:
    strings that end the text and are not part of it.
    Raises `ContextError`, before anything runs, for an empty or too long prompt, ids outside the vocabulary,
    numbers out of range and arguments of another type; `ModelError` when the speculator needs what the model lacks.
    """
    return stream(model, prompt, max_tokens, sampling, spec, stop, n_ctx, ignore_eos).result()


def stream(
    model: Model,
    prompt: str | Sequence[int],
    max_tokens: int = 128,
    sampling: Sampling | None = None,
    spec: SpeculatorSettings | None = None,
    stop: str | Sequence[str] = (),
    n_ctx: int = 4096,
    ignore_eos: bool = False,
) -> TextStream:
    """As `generate`, but text comes piece by piece as it is made: `for piece in stream(...)`.

    Joined, the pieces are exactly `generate(...).text`. Errors in the arguments are raised at once.
    """
    if not hasattr(model, "tokenizer"):
        raise ContextError(f"generate: the model is {shown(model)}; a model is needed: vkb.load(path)")
    check_sizes(n_ctx)
    ids = check_prompt(model, prompt, n_ctx)
    return Session(model, spec, n_ctx).stream(ids, max_tokens, sampling, stop, ignore_eos)


def check_prompt(model: Model, prompt: str | Sequence[int], n_ctx: int) -> list[int]:
    """The prompt's token ids. Raises `ContextError` when there are none, too many, or some outside the vocabulary."""
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable) or getattr(prompt, "ndim", 1) == 0:
        raise ContextError(f"generate: the prompt is of type {type(prompt).__name__}; a str or token ids are needed")
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    n_vocab = model.hparams.n_vocab
    if not ids:
        raise ContextError("generate: the prompt is empty; give at least one token")
    for i, token in enumerate(ids):
        if not is_whole(token):
            raise ContextError(f"generate: prompt token {i} is {token!r}; ids must be whole numbers")
        if not 0 <= token < n_vocab:
            raise ContextError(f"generate: prompt token {i} is {token}; allowed are 0..{n_vocab - 1}")
    if len(ids) > n_ctx:
        raise ContextError(
            f"generate: the prompt has {len(ids)} tokens, the context holds {n_ctx}; make the context larger (n_ctx, "
            "-c) or the prompt shorter"
        )
    return [int(i) for i in ids]


def _check_spec(spec: object) -> None:
    """Raises `ContextError` for what is no speculator: its name, or the class itself."""
    if spec is not None and (isinstance(spec, type) or not hasattr(spec, "start")):
        raise ContextError(f"generate: spec is {shown(spec)}; a speculator such as vkb.DraftMTP(), or None, is needed")


def _check_sampling(sampling: object) -> None:
    """Raises `ContextError` for what is no `Sampling`: a temperature, or a dict of settings."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ContextError(
            f"generate: sampling is {shown(sampling)}; a vkb.Sampling(temperature=...), or None, is needed"
        )


def check_max_tokens(max_tokens: int) -> int:
    """max_tokens as given. Raises `ContextError` when it is not a whole number of 0 or more."""
    if not is_whole(max_tokens) or max_tokens < 0:
        raise ContextError(f"generate: max_tokens is {max_tokens!r}; a whole number of 0 or more is needed")
    return int(max_tokens)
