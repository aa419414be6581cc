"""The generation loop on the demo model: speculation changes nothing, and text ends where it should."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import vkbackend as vkb
from vkbackend.cli.common import demo_model
from vkbackend.model.loader import Model
from vkbackend.spec.draft_mtp import MTPSpeculator
from vkbackend.spec.generate import Session
from vkbackend.spec.stats import Stats

CODE = 'class Stack:\n    """A simple stack."""\n\n    def __init__(self):\n'
PROSE = "It was a truth universally acknowledged, that"


@pytest.mark.parametrize("n_max", [1, 2, 3, 8, 15])
@pytest.mark.parametrize("prompt", [CODE, PROSE, "a"])
def test_speculation_changes_no_greedy_token(demo: Model, prompt: str, n_max: int) -> None:
    plain = vkb.generate(demo, prompt, 40, n_ctx=128)
    fast = vkb.generate(demo, prompt, 40, n_ctx=128, spec=vkb.DraftMTP(n_max))
    assert (fast.tokens, fast.text, fast.stop_reason) == (plain.tokens, plain.text, plain.stop_reason)
    assert fast.stats.steps < plain.stats.steps


def test_speculation_changes_no_sampled_token(demo: Model, seed: int) -> None:
    sampling = vkb.Sampling(0.8, top_p=0.95, repeat_penalty=1.1, seed=seed)
    plain = vkb.generate(demo, PROSE, 60, sampling, n_ctx=128)
    fast = vkb.generate(demo, PROSE, 60, sampling, vkb.DraftMTP(3), n_ctx=128)
    assert fast.tokens == plain.tokens
    assert plain.tokens != vkb.generate(demo, PROSE, 60, n_ctx=128).tokens


def test_greedy_rows_and_logits_agree(demo: Model) -> None:
    """A penalty of 1 over nothing takes the way through logits and gives what the device's argmax gives."""
    by_logits = vkb.generate(
        demo, CODE, 30, vkb.Sampling(repeat_penalty=1.5, repeat_last_n=0), vkb.DraftMTP(), n_ctx=64
    )
    assert by_logits.tokens == vkb.generate(demo, CODE, 30, spec=vkb.DraftMTP(), n_ctx=64).tokens


def test_long_prompts_go_in_pieces(demo: Model, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.random.default_rng(seed).integers(0, 4000, 75).tolist()
    whole = vkb.generate(demo, prompt, 12, spec=vkb.DraftMTP(), n_ctx=128)
    monkeypatch.setattr(demo, "n_ubatch", 16)
    pieces = vkb.generate(demo, prompt, 12, spec=vkb.DraftMTP(), n_ctx=128)
    assert pieces.tokens == whole.tokens
    assert pieces.stats.prompt_tokens == 75


@pytest.mark.parametrize("spec", [None, vkb.DraftMTP(3)])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 17])
def test_max_tokens_is_exact(demo: Model, n: int, spec: vkb.DraftMTP | None) -> None:
    gen = vkb.generate(demo, CODE, n, spec=spec, n_ctx=64)
    assert (len(gen.tokens), gen.stop_reason, gen.stats.tokens) == (n, "length", n)
    assert gen.text == demo.tokenizer.decode(gen.tokens)


@pytest.mark.parametrize("spec", [None, vkb.DraftMTP(3)])
def test_a_full_context_ends_the_text(demo: Model, spec: vkb.DraftMTP | None) -> None:
    prompt = demo.tokenizer.encode(CODE)
    n_ctx = len(prompt) + 9
    gen = vkb.generate(demo, prompt, 500, spec=spec, n_ctx=n_ctx)
    assert gen.stop_reason == "length"
    # Every place of the context is used, and the last place's prediction is a token too.
    assert len(gen.tokens) == 10
    assert gen.tokens == vkb.generate(demo, prompt, 10, n_ctx=64).tokens
    assert len(vkb.generate(demo, prompt, 500, spec=spec, n_ctx=len(prompt)).tokens) == 1


@pytest.mark.parametrize("spec", [None, vkb.DraftMTP(3)])
def test_eos_inside_an_accepted_run(demo: Model, spec: vkb.DraftMTP | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = vkb.generate(demo, CODE, 40, n_ctx=64).tokens
    for token in dict.fromkeys(tokens):
        monkeypatch.setattr(demo.tokenizer, "eos_ids", frozenset({token}))
        gen = vkb.generate(demo, CODE, 40, spec=spec, n_ctx=64)
        assert gen.tokens == tokens[: tokens.index(token)]
        assert gen.stop_reason == "eos"
        assert vkb.generate(demo, CODE, 40, spec=spec, n_ctx=64, ignore_eos=True).tokens == tokens


@pytest.mark.parametrize("spec", [None, vkb.DraftMTP(3)])
def test_stop_strings_inside_an_accepted_run(demo: Model, spec: vkb.DraftMTP | None) -> None:
    text = vkb.generate(demo, CODE, 30, n_ctx=64).text
    for start in range(0, 40, 3):
        stop = text[start : start + 5]
        pieces = list(vkb.stream(demo, CODE, 30, spec=spec, n_ctx=64, stop=["never in the text", stop]))
        assert "".join(pieces) == text[: text.index(stop)]
        assert "" not in pieces
    gen = vkb.generate(demo, CODE, 30, spec=spec, n_ctx=64, stop=text[7:9])
    assert gen.stop_reason == "stop"
    assert gen.text == text[: text.index(text[7:9])]


def test_pieces_are_whole_characters(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third token stands for one byte of a long character."""
    of_token = demo.tokenizer.token_bytes
    face = "😀".encode()
    monkeypatch.setattr(demo.tokenizer, "token_bytes", lambda i: face[i % 4 : i % 4 + 1] if i % 3 == 0 else of_token(i))
    stream = vkb.stream(demo, PROSE, 60, vkb.Sampling(1.0, seed=1), vkb.DraftMTP(), n_ctx=128)
    pieces = list(stream)
    assert "".join(pieces) == stream.text
    data = b"".join(demo.tokenizer.token_bytes(i) for i in stream.tokens)
    whole = data.decode(errors="replace")
    assert whole.startswith(stream.text) and len(whole) - len(stream.text) <= 1


def test_text_comes_as_it_is_made(demo: Model) -> None:
    stream = vkb.stream(demo, CODE, 20, n_ctx=64)
    assert stream.stop_reason is None and stream.tokens == []
    seen = ""
    for piece in stream:
        seen += piece
        assert stream.text == seen
        assert demo.tokenizer.decode(stream.tokens).startswith(seen)
    assert stream.stop_reason == "length"
    assert stream.result().text == seen == vkb.generate(demo, CODE, 20, n_ctx=64).text


def test_a_session_forgets_the_text_before(demo: Model) -> None:
    session = Session(demo, vkb.DraftMTP(), n_ctx=128)
    first = session.stream(CODE, 20).result()
    other = session.stream(PROSE, 20).result()
    again = session.stream(CODE, 20).result()
    assert again.tokens == first.tokens != other.tokens
    assert again.stats.submissions == first.stats.submissions
    assert isinstance(session.speculator, MTPSpeculator)
    session.speculator.pending_h[:] = np.nan
    cleared = session.stream(CODE, 20).result()
    assert (cleared.tokens, cleared.stats.accepted) == (first.tokens, first.stats.accepted)


@pytest.mark.parametrize("spec", [None, vkb.DraftMTP(3)])
def test_the_repeat_penalty_sees_prompt_and_text(demo: Model, spec: vkb.DraftMTP | None) -> None:
    prompt = demo.tokenizer.encode(PROSE)
    gen = vkb.generate(demo, prompt, 40, vkb.Sampling(repeat_penalty=1000.0), spec, n_ctx=128)
    assert len({*prompt, *gen.tokens}) == len(set(prompt)) + 40


@pytest.mark.parametrize("spec", [None, vkb.DraftMTP(2)])
def test_stats_add_up(demo: Model, spec: vkb.DraftMTP | None) -> None:
    gen = vkb.generate(demo, CODE, 33, spec=spec, n_ctx=64)
    s = gen.stats
    assert s.prompt_tokens == len(demo.tokenizer.encode(CODE))
    assert sum(s.accepted_per_position) == s.accepted
    assert 0 <= 1 + s.steps + s.accepted - s.tokens <= 2  # the last run may be cut
    assert s.prompt_tok_s > 0 and s.decode_tok_s > 0
    assert s.decode_s == pytest.approx(s.draft_s + s.verify_s + s.host_s)
    if spec is None:
        assert (s.drafted, s.steps, s.accepted_per_position) == (0, 32, [])
    else:
        assert s.drafted == 2 * s.steps
        assert s.accepted_per_position == sorted(s.accepted_per_position, reverse=True)
        assert s.tokens_per_step == pytest.approx(1 + s.accepted / s.steps)
    assert {"decode_tok_s", "prompt_tok_s", "drafted", "accepted_per_position", "steps", "submissions"} <= set(
        s.as_dict()
    )


@pytest.mark.parametrize("sizes", [{"n_ctx": "4"}, {"n_ctx": 4.0}, {"n_seq_max": True}, {"n_rs_seq": None}])
def test_sizes_of_a_context_are_whole_numbers(demo: Model, sizes: dict[str, Any]) -> None:
    for make in (demo.context, *([demo.mtp_context] if "n_rs_seq" not in sizes else [])):
        with pytest.raises(vkb.ContextError, match=r"context: n_\w+ is .*; a whole number of at least \d is needed"):
            make(**sizes)
    assert demo.context(n_ctx=np.int64(4)).n_ctx == 4


@pytest.mark.parametrize("device", [None, 0, b"numpy"])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(vkb.DeviceError, match=r"device is .*; 'auto', a name such as 'kompute:0'"):
        vkb.load("never opened.gguf", device=device)


def test_poor_acceptance_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    poor, good = Stats(), Stats()
    with caplog.at_level(logging.WARNING, logger="vkbackend"):
        for _ in range(50):
            good.count_drafts(3, 1)
        assert caplog.records == []
        for _ in range(33):
            poor.count_drafts(3, 0)
        assert caplog.records == []
        for _ in range(50):
            poor.count_drafts(3, 0)
    assert len(caplog.records) == 1
    assert "0 of the first 102" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": [1, -1]}, r"token 1 is -1.*0\.\.4095"),
        ({"prompt": [4096]}, r"token 0 is 4096.*0\.\.4095"),
        ({"prompt": [1.5]}, "1.5"),
        ({"prompt": [1] * 65}, "65 tokens.*64"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"stop": [""]}, "stop string 0"),
        ({"prompt": None}, "prompt is of type NoneType; a str or token ids"),
        ({"prompt": b"abc"}, "prompt is of type bytes; a str or token ids"),
        ({"prompt": 7}, "prompt is of type int; a str or token ids"),
        ({"spec": "draft-mtp"}, r"spec is 'draft-mtp'; a speculator such as vkb\.DraftMTP\(\)"),
        ({"sampling": 0.7}, r"sampling is 0\.7; a vkb\.Sampling\(temperature=\.\.\.\), or None"),
        ({"sampling": {"temperature": 1}}, r"sampling is of type dict, length 1; a vkb\.Sampling\(temperature"),
        ({"n_ctx": np.array(16)}, r"n_ctx is array\(16\); a whole number"),
        ({"spec": vkb.DraftMTP}, r"spec is <class .*DraftMTP'>; a speculator"),
        ({"n_ctx": "64"}, "n_ctx is '64'; a whole number of at least 1"),
        ({"n_ctx": 0}, "n_ctx is 0; a whole number of at least 1"),
    ],
)
def test_bad_arguments_reach_no_device(
    demo: Model, arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was compiled for the device")

    monkeypatch.setattr(demo.device, "compile", never)
    for start in (vkb.generate, vkb.stream):
        with pytest.raises(vkb.ContextError, match=message):
            start(demo, **{"prompt": [1], "n_ctx": 64, **arguments})


def test_a_path_is_no_model() -> None:
    for start in (vkb.generate, vkb.stream):
        with pytest.raises(vkb.ContextError, match=r"the model is 'a\.gguf'; a model is needed: vkb\.load\(path\)"):
            start("a.gguf", "text")  # type: ignore[arg-type]


def test_numpy_ids_are_ids(demo: Model) -> None:
    ids: NDArray[np.int64] = np.array(demo.tokenizer.encode(CODE))
    assert vkb.generate(demo, ids, 5, n_ctx=64).tokens == vkb.generate(demo, CODE, 5, n_ctx=64).tokens  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["numpy", "kompute", "vulkan"])
def test_sizes_may_be_numpy_numbers(device: str, request: pytest.FixtureRequest) -> None:
    """They reach kernels as Python's numbers: Kompute would crash, and small ones overflow."""
    opened = request.getfixturevalue("numpy_device" if device == "numpy" else device)
    model = vkb.load(demo_model(), device=opened, n_ubatch=np.int64(512))
    tokens = list(range(60))
    want = model.context(n_ctx=100).decode(tokens).logits
    got = model.context(n_ctx=np.int8(100), n_seq_max=np.int8(1), n_rs_seq=np.uint64(0)).decode(tokens).logits
    np.testing.assert_array_equal(got, want)
