"""Contexts side by side: in one thread, in several, in two processes; and what an interrupt leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from synthetic import write_model

import vkbackend as vkb
from vkbackend.device.base import Device
from vkbackend.model.loader import Model, load
from vkbackend.spec.generate import Session

N_CTX = 128
DEVICES = ["numpy_device", "kompute", "vulkan"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("side") / "tiny.gguf", seed=9, n_main=2, head="perfect")


@pytest.fixture(params=DEVICES)
def model(path: Path, request: pytest.FixtureRequest) -> Model:
    device: Device = request.getfixturevalue(request.param)
    return load(path, device=device)


def prompts(n: int) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [[int(t) for t in rng.integers(0, 64, rng.integers(1, 40))] for _ in range(n)]


def texts(model: Model, n: int, n_tokens: int = 24) -> list[list[int]]:
    session = Session(model, None, N_CTX)
    return [session.stream(p, n_tokens, ignore_eos=True).result().tokens for p in prompts(n)]


def test_two_contexts_take_turns(model: Model) -> None:
    """Token by token, one context's work never shows in the other's."""
    want = texts(model, 2)
    specs = (None, vkb.DraftMTP(2))
    streams = [
        Session(model, spec, N_CTX).stream(p, 24, ignore_eos=True) for spec, p in zip(specs, prompts(2), strict=True)
    ]
    live = list(streams)
    while live:
        live = [s for s in live if next(s, None) is not None]
    assert [s.tokens for s in streams] == want


def test_threads_decode_on_contexts_of_their_own(model: Model) -> None:
    n_threads = 3
    want = texts(model, 3)
    got: dict[int, list[list[int]]] = {}
    start = threading.Barrier(n_threads)

    def work(i: int) -> None:
        start.wait()
        session = Session(model, vkb.DraftMTP(2) if i % 2 else None, N_CTX)  # compiles while the others run
        out = []
        for prompt in prompts(3):
            out.append(session.stream(prompt, 24, ignore_eos=True).result().tokens)
            session.context.state_set(0, session.context.state_get(0))  # copies in and out, too
        got[i] = out

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert got == dict.fromkeys(range(n_threads), want)


CHILD = """
import json, sys
import vkbackend as vkb
model = vkb.load(sys.argv[1], device=sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps([vkb.generate(model, p, 24, n_ctx=128, ignore_eos=True).tokens for p in json.loads(sys.argv[3])]))
"""


@pytest.mark.parametrize("name", ["kompute", "vulkan"])
def test_two_processes_on_one_device(name: str, path: Path, request: pytest.FixtureRequest) -> None:
    model = load(path, device=request.getfixturevalue(name))
    command = [sys.executable, "-c", CHILD, str(path), f"{name}:0", json.dumps(prompts(2))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
        mine = texts(model, 2)  # while the other one works
        theirs = json.loads(child.communicate(timeout=300)[0])
    assert child.returncode == 0 and theirs == mine


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGALRM raises KeyboardInterrupt, as Ctrl-C does."""
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
@pytest.mark.parametrize("spec", [None, vkb.DraftMTP(2)], ids=["plain", "speculative"])
def test_an_interrupt_leaves_the_context_usable(
    model: Model, spec: vkb.DraftMTP | None, interrupts: None, rng: np.random.Generator
) -> None:
    (prompt,) = prompts(1)
    session = Session(model, spec, N_CTX)
    want = session.stream(prompt, 80, ignore_eos=True).result().tokens
    interrupted = 0
    for _ in range(6):
        stream = session.stream(prompt, 80, ignore_eos=True)
        try:
            signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(0.001, 0.03)))
            stream.result()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert stream.tokens == want[: len(stream.tokens)]
        n, known = session.context.seq_pos_max(0) + 1, [*prompt, *want]
        if spec is None and len(prompt) <= n < len(known) - 1:  # the text goes on where the context says it stands
            assert session.context.decode([known[n]], greedy=True).argmax.tolist() == [known[n + 1]]
        assert session.stream(prompt, 80, ignore_eos=True).result().tokens == want
    assert interrupted >= 2
