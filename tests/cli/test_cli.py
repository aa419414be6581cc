"""The command line: what it prints where, and its exit status."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run
from fixture_paths import fixture

import vkbackend as vkb
from vkbackend.cli import common
from vkbackend.device.base import Limits
from vkbackend.errors import DeviceError
from vkbackend.model import loader
from vkbackend.model.chat import chat_prompt
from vkbackend.model.loader import Model, load

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "models" / "demo-qwen35-mtp-q8_0.gguf"


@pytest.fixture(scope="module")
def demo_file() -> Path:
    try:
        return common.demo_model()
    except vkb.ModelError:
        if not BESIDE.exists():
            pytest.skip("the demo model is not here")
        return BESIDE


@pytest.fixture(scope="module")
def model(demo_file: Path) -> Model:
    return load(demo_file, device="numpy")


def words(demo_file: Path, *more: object) -> list[object]:
    return ["generate", "-m", demo_file, "--device", "numpy", "-n", 12, "-c", 64, *more]


# ---- generate


def test_text_goes_to_stdout_and_nothing_else(run: Run, demo_file: Path, model: Model) -> None:
    want = vkb.generate(model, "It was", 12, n_ctx=64).text
    assert run(*words(demo_file, "-p", "It was")) == (0, want + "\n", "")
    assert run(*words(demo_file, "-p", "It was", "--spec-type", "draft-mtp")) == (0, want + "\n", "")


def test_json(run: Run, demo_file: Path, model: Model) -> None:
    status, out, err = run(*words(demo_file, "-p", "It was", "--spec-type", "draft-mtp", "--json"))
    got, want = json.loads(out), vkb.generate(model, "It was", 12, spec=vkb.DraftMTP(), n_ctx=64)
    assert (status, err) == (0, "")
    assert (got["text"], got["tokens"], got["stop_reason"]) == (want.text, want.tokens, "length")
    for name in ("drafted", "accepted", "accepted_per_position", "steps", "submissions"):
        assert got["stats"][name] == getattr(want.stats, name)


def test_stats_on_demand(run: Run, demo_file: Path) -> None:
    status, _, err = run(*words(demo_file, "-p", "It was", "--spec-type", "draft-mtp", "--stats"))
    assert status == 0
    for part in ("numpy (NumPy", "tok/s", "tokens per step", "accepted"):
        assert part in err
    assert "running on NumPy" not in err  # as was asked for


def test_stats_say_why_auto_took_no_gpu(run: Run, demo_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(prefix: str) -> list[object]:
        raise DeviceError("the Vulkan loader found no driver")

    monkeypatch.setattr("vkbackend.device.probe.vulkan_devices", none)
    status, _, err = run("generate", "-m", demo_file, "-p", "It was", "-n", 2, "-c", 64, "--stats")
    assert status == 0 and err.endswith("running on NumPy: the Vulkan loader found no driver\n")


@pytest.mark.parametrize("more", [[], ["--json"], ["--spec-type", "draft-mtp"]])
def test_a_full_context_says_which_option_gives_more(run: Run, demo_file: Path, more: list[str]) -> None:
    need = "ended early: the context of 9 tokens is full; all 12 (-n) need -c 16\n"
    assert run(*words(demo_file, "--prompt-ids", "5,6,7,8,9", "-c", 9, *more))[::2] == (0, need)
    assert run(*words(demo_file, "--prompt-ids", "5,6,7,8,9", "-c", 16, *more))[::2] == (0, "")
    err = run(*words(demo_file, "--prompt-ids", "5,6,7,8,9", "-c", 9, "-n", 5000, *more))[2]
    assert err.endswith("all 5000 (-n) need -c 5004, more than the 4096 that this model was trained for\n")


def test_a_context_beyond_the_trained_one_is_said_once(run: Run, demo_file: Path) -> None:
    more = "-c is 4097; this model was trained for 4096 tokens, text beyond may be poor\n"
    assert run(*words(demo_file, "-p", "It was", "-c", 4097))[::2] == (0, more)
    assert run(*words(demo_file, "-p", "It was", "-c", 4096))[::2] == (0, "")


def test_prompt_from_file_ids_and_stdin(
    run: Run, demo_file: Path, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = run(*words(demo_file, "-p", "It was é"))
    (tmp_path / "prompt").write_text("It was é", encoding="utf-8")
    assert run(*words(demo_file, "-f", tmp_path / "prompt")) == want
    ids = model.tokenizer.encode("It was é")
    assert run(*words(demo_file, "--prompt-ids", ",".join(map(str, ids)))) == want
    with open(tmp_path / "prompt") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run(*words(demo_file, "-f", "-")) == want


def test_sampling_options_arrive(run: Run, demo_file: Path, model: Model) -> None:
    sampling = vkb.Sampling(0.9, 50, 0.95, 0.02, 1.1, seed=7)
    want = vkb.generate(model, "It was", 12, sampling, n_ctx=64).text
    options = [
        "--temp",
        "0.9",
        "--top-k",
        "50",
        "--top-p",
        "0.95",
        "--min-p",
        "0.02",
        "--repeat-penalty",
        "1.1",
        "--seed",
        "7",
    ]
    assert run(*words(demo_file, "-p", "It was", *options))[1] == want + "\n"
    options[0] = "--temperature"  # as other programs call it
    assert run(*words(demo_file, "-p", "It was", *options))[1] == want + "\n"


def test_stop_and_eos_options_arrive(run: Run, demo_file: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = vkb.generate(model, "It was", 12, n_ctx=64)
    got = json.loads(run(*words(demo_file, "-p", "It was", "--stop", whole.text[5:8], "--json"))[1])
    assert (got["text"], got["stop_reason"]) == (whole.text[: whole.text.index(whole.text[5:8])], "stop")
    monkeypatch.setattr(common, "load_model", lambda args: model)
    monkeypatch.setattr("vkbackend.cli.generate.load_model", lambda args: model)
    monkeypatch.setattr(model.tokenizer, "eos_ids", frozenset({whole.tokens[3]}))
    got = json.loads(run(*words(demo_file, "-p", "It was", "--json"))[1])
    assert (got["tokens"], got["stop_reason"]) == (whole.tokens[: whole.tokens.index(whole.tokens[3])], "eos")
    got = json.loads(run(*words(demo_file, "-p", "It was", "--ignore-eos", "--json"))[1])
    assert got["tokens"] == whole.tokens


def test_chat_keeps_control_tokens_of_the_user_as_text(
    run: Run, demo_file: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    from vkbackend.spec import generate

    original = generate.stream

    def spy(m: Model, prompt: list[int], *rest: Any) -> Any:
        seen.append(prompt)
        return original(m, prompt, *rest)

    monkeypatch.setattr(generate, "stream", spy)
    status, _, err = run(*words(demo_file, "--chat", "-p", "hi<|im_end|>"))
    assert status == 0 and err.startswith("this model has no chat template") and err.count("\n") == 1
    text = model.tokenizer.decode(seen[0])
    assert text == "<|im_start|>user\nhi<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    start, end = (model.tokenizer.encode(f"<|im_{name}|>")[0] for name in ("start", "end"))
    assert (seen[0].count(start), seen[0].count(end)) == (2, 1)


def test_a_chat_template_is_used(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
    template += "{% if add_generation_prompt %}>>{% endif %}"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    assert model.tokenizer.decode(chat_prompt(model.tokenizer, "a [b]\n")) == "[user]a [b]\n>>"
    for bad in (
        "{{ raise_exception('no') }}",
        "{% nonsense %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "fixed text",
    ):
        monkeypatch.setattr(model.tokenizer, "chat_template", bad)
        with pytest.raises(vkb.ModelError, match="chat_template"):
            chat_prompt(model.tokenizer, "a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["generate", "-m", "x"], "required"),
        (["generate", "-p", "x"], "required"),
        (["generate", "-m", "x", "-p", "x", "-f", "y"], "not allowed with"),
        (["generate", "-m", "x", "--demo", "-p", "x"], "not allowed with"),
        (["generate", "-m", "x", "-p", "x", "-n", "many"], "many"),
        (["generate", "-m", "x", "-p", "x", "-n", "-1"], "generate: -n is -1; a whole number of 0"),
        (["generate", "-m", "x", "-p", "x", "-c", "0"], "-c is 0"),
        (["generate", "-m", "x", "-p", "x", "--temp", "-1"], "generate: --temp is -1.0; allowed is 0 or more\n"),
        (["generate", "-m", "x", "-p", "x", "--top-p", "2"], "generate: --top-p is 2.0"),
        (["generate", "-m", "x", "-p", "x", "--top-k", "-1"], "generate: --top-k is -1"),
        (["generate", "-m", "x", "-p", "x", "--min-p", "2"], "generate: --min-p is 2.0"),
        (["generate", "-m", "x", "-p", "x", "--repeat-penalty", "0"], "generate: --repeat-penalty is 0.0"),
        (["generate", "-m", "x", "-p", "x", "--seed", "-1"], "generate: --seed is -1; allowed is 0 or more\n"),
        (["generate", "-m", "x", "-p", "x", "--stop", ""], "generate: --stop: string 0 is ''"),
        (["generate", "-m", "x", "-p", "x", "--spec-type", "magic"], "magic"),
        (["generate", "-m", "x", "-p", "x", "--spec-type", "ngram-mod"], "not available yet"),
        (["generate", "-m", "x", "-p", "x", "--spec-type", "draft-mtp", "--spec-draft-n-max", "0"], "n-max is 0"),
        (["generate", "-m", "x", "-p", "x", "--spec-draft-n-max", "5"], "--spec-draft-n-max is of drafts: give --spec"),
        (["bench", "-m", "x", "--spec-type", "none", "--spec-draft-n-min", "1"], "--spec-draft-n-min is of drafts"),
        (["bench", "--demo", "--spec-type", "draft-mtp", "--spec-draft-n-min", "4"], "bench: --spec-draft-n-min is 4"),
        (["generate", "-m", "x", "--prompt-ids", "1,a"], "1,a"),
        (["generate", "-m", "x", "--chat", "--prompt-ids", "1"], "--chat"),
        (["generate", "--hf-repo", "a", "-p", "x"], "OWNER/NAME"),
        (["test-ops", "--op", "no_such_op"], "no_such_op"),
        (["test-ops", "--variant", "odd"], "odd"),
        (["bench", "-m", "x", "-r", "0"], "-r is 0"),
        (["bench", "-m", "x", "--spec-type", "none,magic"], "magic"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], message: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_draft_sizes_arrive(run: Run, demo_file: Path) -> None:
    for sizes, n_max in (([], 3), (["--spec-draft-n-max", 1], 1), (["--spec-draft-n-max", 5], 5)):
        options = ["-p", "It was", "--spec-type", "draft-mtp", *sizes, "--json"]
        stats = json.loads(run(*words(demo_file, *options))[1])["stats"]
        assert len(stats["accepted_per_position"]) == n_max


@pytest.mark.parametrize("command", ["generate --demo -p x", "devices", "inspect x", "convert x", "bench --demo"])
def test_an_unknown_option_shows_the_usage_of_its_command(run: Run, command: str) -> None:
    status, out, err = run(*command.split(), "--nonsense", "--odd=1")
    assert (status, out) == (2, "")
    name = command.split()[0]
    assert err.startswith(f"usage: vkbackend {name} ")
    assert err.endswith(f"vkbackend {name}: error: unrecognized arguments: --nonsense --odd=1\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "/no/such/file.gguf", "-p", "x"], "/no/such/file.gguf"),
        (["-m", "DEMO", "-p", ""], "empty"),
        (["-m", "DEMO", "--prompt-ids", "-1"], "-1"),
        (["-m", "DEMO", "--prompt-ids", "5000"], "0..4095"),
        (["-m", "DEMO", "-p", "one two three four", "-c", "2"], "holds 2"),
        (["-m", "DEMO", "-p", "x", "-c", str(1 << 62)], "smaller n_ctx"),
        (["-m", "DEMO", "-p", "x", "-c", "9" * 18], "smaller n_ctx"),
        (["-m", "DEMO", "-f", "/no/such/prompt"], "/no/such/prompt"),
        (["-m", "DEMO", "-p", "x", "--device", "quantum:0"], "quantum:0"),
    ],
)
def test_failed_jobs_say_why_on_one_line(run: Run, demo_file: Path, arguments: list[str], message: str) -> None:
    device = [] if "--device" in arguments else ["--device", "numpy"]
    status, out, err = run("generate", *[str(demo_file) if a == "DEMO" else a for a in arguments], *device)
    assert (status, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1 and err.startswith("vkbackend generate: ")


def test_the_draft_file_is_given_or_found_beside_the_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    main, draft = fixture("gguf/dense-f32.gguf"), fixture("gguf/mtp-dense-f32.gguf")
    options = ["--device", "numpy", "--prompt-ids", "5,6,7", "-n", 9, "-c", 32, "--spec-type", "draft-mtp", "--json"]
    inside = json.loads(run("generate", "-m", main, *options)[1])
    status, out, err = run("generate", "-m", main, "--model-draft", draft, *options)
    assert (status, err) == (0, "")
    given = json.loads(out)
    assert given["tokens"] == inside["tokens"]
    assert given["stats"]["drafted"] > 0
    loaded: list[object] = []
    original = loader.load

    def spy(path: Path, draft: Path | None = None, **rest: Any) -> Model:
        loaded.append(draft)
        return original(path, draft=draft, **rest)

    monkeypatch.setattr(loader, "load", spy)
    monkeypatch.setattr("vkbackend.spec.model_files.find_draft", lambda path: draft)
    assert json.loads(run("generate", "-m", main, *options)[1])["tokens"] == inside["tokens"]
    assert run("generate", "-m", main, *options, "--spec-type", "none")[0] == 0
    assert loaded == [draft, None]


def test_a_block_alone_says_how_it_is_given(run: Run) -> None:
    status, _, err = run("generate", "-m", fixture("gguf/mtp-dense-f32.gguf"), "--device", "numpy", "--prompt-ids", 5)
    assert status == 1 and "load the main model with this file as --model-draft (draft= in Python)" in err


def test_a_prompt_that_is_no_text(run: Run, demo_file: Path, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff")
    status, _, err = run(*words(demo_file, "-f", tmp_path / "binary"))
    assert status == 1 and "byte 2 is not UTF-8" in err


def test_interrupt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: argparse.Namespace) -> Model:
        raise KeyboardInterrupt

    monkeypatch.setattr("vkbackend.cli.generate.load_model", interrupt)
    assert run("generate", "-m", "x", "-p", "x") == (130, "", "\n")


def test_a_closed_pipe_ends_quietly(demo_file: Path) -> None:
    command = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-B", "-m", "vkbackend.cli"]
    command += [str(a) for a in words(demo_file, "-p", "It was")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1


# ---- the other commands


def test_devices(run: Run) -> None:
    status, out, _ = run("devices")
    assert status == 0
    assert out.splitlines()[0].split()[:2] == ["NAME", "KIND"]
    assert any(line.split()[:2] == ["numpy", "reference"] for line in out.splitlines())
    listed = json.loads(run("devices", "--json")[1])["devices"]
    assert [d["name"] for d in listed] == [d.name for d in vkb.devices()]


HAVE_NONE = "the Vulkan drivers here have none; install your GPU's driver, or a CPU one"


@pytest.mark.parametrize("why", ["the Vulkan loader found no driver; install one", ""])
def test_devices_say_why_there_is_none_of_vulkan(run: Run, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def none(prefix: str) -> list[object]:
        if why:
            raise DeviceError(why)
        return []

    monkeypatch.setattr("vkbackend.device.probe.vulkan_devices", none)
    status, out, err = run("devices")
    assert status == 0 and [line.split()[0] for line in out.splitlines()] == ["NAME", "numpy"]
    assert err == f"no Vulkan device: {why or HAVE_NONE}\n"
    assert [d["name"] for d in json.loads(run("devices", "--json")[1])["devices"]] == ["numpy"]


def test_inspect(run: Run, demo_file: Path) -> None:
    status, out, _ = run("inspect", demo_file)
    assert status == 0
    for part in ("qwen35: 8 layers (2 attention, 6 gated delta net), 1 MTP block", "token_embd.weight", "q8_0"):
        assert part in out
    got = json.loads(run("inspect", demo_file, "--json")[1])
    assert got["arch"] == "qwen35" and got["supported"]
    assert got["hparams"]["n_embd"] == 512
    table = {t["name"]: t for t in got["tensors"]}
    assert table["token_embd.weight"] == {
        "name": "token_embd.weight", "shape": [4096, 512], "type": "q8_0", "bytes": 4096 * 512 // 32 * 34,
    }  # fmt: skip


def test_inspect_of_something_else(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    status, out, err = run("inspect", tmp_path / "x.gguf")
    assert (status, out) == (1, "") and "x.gguf" in err


def test_test_ops(run: Run) -> None:
    status, out, err = run("test-ops", "--device", "numpy", "--op", "rms_norm", "--seed", 3)
    assert (status, err) == (0, "")
    assert "seed 3" in out and "cases passed" in out
    got = json.loads(run("test-ops", "--device", "numpy", "--op", "rms_norm", "--json")[1])
    assert got["failed"] == 0 and got["passed"] == len(got["results"]) > 0
    assert {r["op"] for r in got["results"]} == {"rms_norm"}


def test_test_ops_runs_both_variants(run: Run) -> None:
    if not any(d.name == "kompute:0" for d in vkb.devices()):
        pytest.skip("no Vulkan device here")
    status, out, _ = run("test-ops", "--device", "kompute:0", "--op", "rms_norm", "--json")
    got = json.loads(out)
    assert status == 0, got
    assert "shared" in {r["variant"] for r in got["results"]}
    only = json.loads(run("test-ops", "--device", "kompute:0", "--op", "rms_norm", "--variant", "shared", "--json")[1])
    assert {r["variant"] for r in only["results"]} == {"shared"}


def test_a_failing_op_fails_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkbackend.ops import case

    real, n = case.run_case, 0

    def sometimes(c: case.Case, device: Any, seed: int) -> case.CaseResult:
        nonlocal n
        n += 1
        if n == 1:
            return case.CaseResult(c.label, np.inf, c.max_nmse, "out0: 3 of 5 integers differ")
        if n == 2:
            raise DeviceError("the device is gone")
        return real(c, device, seed)

    monkeypatch.setattr(case, "run_case", sometimes)
    status, out, err = run("test-ops", "--device", "numpy", "--op", "rms_norm")
    assert status == 1
    assert "3 of 5 integers differ" in out and "the device is gone" in out
    assert "2 of" in err and "--seed" in err


def test_bench(run: Run, demo_file: Path) -> None:
    words = ["bench", "-m", demo_file, "--device", "numpy", "-p", 20, "-n", 9, "-r", 3, "--spec-type", "none,draft-mtp"]
    status, out, err = run(*words, "--json")
    got = json.loads(out)
    doing = "prompt 20, then 9 tokens, 1 untimed and 3 timed runs on numpy"
    assert (status, err) == (0, f"spec none: {doing}\nspec draft-mtp: {doing}\n")
    assert [r["spec_type"] for r in got["results"]] == ["none", "draft-mtp"]
    for result in got["results"]:
        for name in ("prompt_tok_s", "decode_tok_s"):
            assert 0 < result[name]["min"] <= result[name]["median"] <= result[name]["max"]
    assert [got["results"][0]["steps"], got["results"][0]["drafted"]] == [8, 0]
    assert got["results"][1]["drafted"] > 0
    assert "draft-mtp" in run(*words)[1]


@pytest.mark.parametrize("more", [[], ["--ops"]])
def test_bench_says_why_auto_took_no_gpu(
    run: Run, demo_file: Path, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(prefix: str) -> list[object]:
        raise DeviceError("the Vulkan loader found no driver")

    monkeypatch.setattr("vkbackend.device.probe.vulkan_devices", none)
    err = run("bench", "-m", demo_file, "-p", 2, "-n", 2, "-r", 1, *more)[2]
    assert err.startswith("running on NumPy: the Vulkan loader found no driver\n") and err.count("\n") == 2


def test_bench_shows_how_far_it_is_on_a_terminal(run: Run, demo_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    err = run("bench", "-m", demo_file, "--device", "numpy", "-p", 4, "-n", 2, "-r", 1)[2]
    for part in ("\rrun 0 of 1: reading the prompt", "\rrun 1 of 1: reading the prompt", "\rrun 1 of 1: 2 of 2 tokens"):
        assert part in err


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("auto", "kompute:0"),
        ("kompute", "kompute:0"),
        ("kompute:0", "kompute:0"),
        ("kompute:0:strict", "kompute:0:strict"),
        ("kompute::relaxed", "kompute:0:relaxed"),
    ],
)
def test_the_option_of_a_device_is_shown(asked: str, shown: str) -> None:
    info = vkb.DeviceInfo("kompute:0", "some GPU", "gpu", Limits())
    assert common.device_name(info, argparse.Namespace(device=asked)) == shown


def test_stats_and_bench_show_the_option(run: Run, demo_file: Path) -> None:
    if not any(d.name == "kompute:0" for d in vkb.devices()):
        pytest.skip("no Vulkan device here")
    model = ["-m", demo_file, "--device", "kompute:0:strict"]
    _, out, err = run("generate", *model, "--prompt-ids", 5, "-n", 2, "-c", 16, "--json", "--stats")
    assert json.loads(out)["device"] == "kompute:0:strict" and err.startswith("device   kompute:0:strict (")
    assert run("bench", *model, "-p", 2, "-n", 2, "-r", 1)[1].startswith("kompute:0:strict (")


# ---- the package


def test_importing_does_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, threading, vkbackend\n"
        "loaded = [m for m in ('numpy', 'kp', 'vulkan', 'tokenizers', 'gguf') if m in sys.modules]\n"
        "assert not loaded, loaded\n"
        "assert threading.active_count() == 1\n"
        "for name in vkbackend.__all__: getattr(vkbackend, name)\n"
        "assert set(vkbackend.__all__) <= set(dir(vkbackend))\n"
        "from vkbackend import *\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=os.environ)


def test_the_version_is_that_of_the_distribution() -> None:
    try:
        installed = importlib.metadata.version("vkbackend")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vkbackend is not installed")
    assert vkb.__version__ == installed


def test_unknown_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        vkb.nonsense  # noqa: B018
