"""`--hf-repo` against a hub on loopback."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from fixture_paths import fixture
from gguf_content import read_content, write_content
from hub_server import COMMIT, TOKEN, Hub, serve

from vkbackend.cli import UsageError, hub
from vkbackend.cli.common import demo_model
from vkbackend.errors import ModelError

pytest.importorskip("huggingface_hub")
URL = "/{repo_id}/resolve/{revision}/{filename}"
SPLIT = [f"Q5_K_M/x-Q5_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


def write(path: Path, *tensors: str) -> bytes:
    """A GGUF file with tensors of these names."""
    w = gguf.GGUFWriter(path, "qwen35")
    for i, name in enumerate(tensors):
        w.add_tensor(name, np.full((64, 64), i, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository: a model with a block, one without, a split one, and what is no model."""
    folder = tmp_path_factory.mktemp("models")
    whole = write(folder / "a.gguf", "blk.0.attn_norm.weight", "blk.1.nextn.eh_proj.weight")
    trunk = write(folder / "b.gguf", "blk.0.attn_norm.weight", "blk.1.attn_norm.weight")
    return {
        "README.md": b"# x\n",
        "mmproj-F16.gguf": b"mmproj",
        "imatrix.gguf": b"imatrix",
        "x-Q4_K_M.gguf": whole,
        "x-Q8_0.gguf": trunk,
        "mtp-x-Q8_0.gguf": b"draft 8",
        "mtp-x-Q4_0.gguf": b"draft 4",
        "BF16/x-BF16.gguf": trunk,
        "BF16/mtp-x-Q8_0.gguf": b"deep draft",
        **{n: write(folder / Path(n).name, f"blk.{i}.attn_norm.weight") for i, n in enumerate(SPLIT)},
    }


@pytest.fixture
def served(models: dict[str, bytes]) -> Iterator[Hub]:
    with serve(Hub({"owner/name": models})) as served:
        yield served


class Client:
    """Fetches from a hub into a cache of its own."""

    def __init__(self, home: Path, served: Hub, patch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        self.home, self.served = home, served
        self.snapshot = home / "hub" / "models--owner--name" / "snapshots" / COMMIT
        self.blobs = self.snapshot.parents[1] / "blobs"
        patch.setattr(constants, "ENDPOINT", served.endpoint)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.endpoint + URL)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
        patch.setattr(time, "sleep", lambda seconds: None)  # the library waits before it tries again
        patch.delenv("HF_TOKEN", raising=False)

    def fetch(
        self, repo: str, file: str | None = None, offline: bool = False, needs_block: bool = False
    ) -> tuple[str, str | None]:
        """Names of main file and draft in the snapshot."""
        main, draft = hub.fetch(repo, file, offline, needs_block)
        return self._name(main), self._name(draft) if draft else None

    def _name(self, path: Path) -> str:
        return path.relative_to(self.snapshot).as_posix()

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A process of its own, which learns of the hub from its environment as users' processes do."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        settings = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.served.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
        return subprocess.run(
            [sys.executable, *command], env={**own, **settings, **env}, capture_output=True, text=True, timeout=120
        )


@pytest.fixture
def client(tmp_path: Path, served: Hub, monkeypatch: pytest.MonkeyPatch) -> Client:
    return Client(tmp_path / "home", served, monkeypatch)


@pytest.mark.parametrize(
    ("repo", "file", "needs_block", "main", "draft"),
    [
        ("owner/name", None, True, "x-Q4_K_M.gguf", None),
        ("owner/name:q8_0", None, False, "x-Q8_0.gguf", None),
        ("owner/name:Q8_0", None, True, "x-Q8_0.gguf", "mtp-x-Q8_0.gguf"),
        ("owner/name:BF16", None, True, "BF16/x-BF16.gguf", "BF16/mtp-x-Q8_0.gguf"),
        ("owner/name", "x-Q8_0.gguf", False, "x-Q8_0.gguf", None),
        ("owner/name:Q5_K", None, True, SPLIT[0], "mtp-x-Q4_0.gguf"),
    ],
)
def test_what_is_fetched(
    client: Client,
    served: Hub,
    models: dict[str, bytes],
    repo: str,
    file: str | None,
    needs_block: bool,
    main: str,
    draft: str | None,
) -> None:
    wanted = [*(SPLIT if main in SPLIT else [main]), *([draft] if draft else [])]
    assert client.fetch(repo, file, needs_block=needs_block) == (main, draft)
    assert served.bodies() == [(name, 0) for name in wanted]  # each once, and nothing else
    assert {p.relative_to(client.snapshot).as_posix() for p in client.snapshot.rglob("*.gguf")} == set(wanted)
    assert all((client.snapshot / name).read_bytes() == models[name] for name in wanted)
    served.requests.clear()
    assert client.fetch(repo, file, needs_block=needs_block) == (main, draft)
    assert served.bodies() == []  # the cache has them


def test_offline_takes_what_the_cache_has(client: Client, served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="owner/name is not in the cache; run once without --offline"):
        client.fetch("owner/name", offline=True)
    client.fetch("owner/name:Q8_0", needs_block=True)
    served.requests.clear()
    assert client.fetch("owner/name", offline=True, needs_block=True) == ("x-Q8_0.gguf", "mtp-x-Q8_0.gguf")
    with pytest.raises(ModelError, match="there is no quantisation 'Q4_K_M' in it; there are q8_0"):
        client.fetch("owner/name:Q4_K_M", offline=True)
    with pytest.raises(ModelError, match=r"no file 'x-Q4_K_M\.gguf' in the cache"):
        client.fetch("owner/name", "x-Q4_K_M.gguf", offline=True)
    with pytest.raises(ModelError, match="other/name is not in the cache; run once without --offline"):
        client.fetch("other/name", offline=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # its environment variable
    assert client.fetch("owner/name:Q8_0") == ("x-Q8_0.gguf", None)
    assert served.requests == []


def test_an_incomplete_split_model(client: Client, served: Hub, models: dict[str, bytes]) -> None:
    served.repos["owner/name"] = {n: x for n, x in models.items() if n != SPLIT[1]}
    with pytest.raises(ModelError, match=rf"no file '{SPLIT[1]}' in it"):
        client.fetch("owner/name:Q5_K_M")
    assert served.bodies() == []


class TestResuming:
    FILE = "x-Q4_K_M.gguf"

    def test_within_a_process(self, client: Client, served: Hub, models: dict[str, bytes]) -> None:
        served.cut = 20000  # of 33 kB
        assert client.fetch("owner/name") == (self.FILE, None)
        (first, start), (second, again) = served.bodies()
        assert (first, start, second) == (self.FILE, 0, self.FILE) and 16000 < again <= 20000
        assert (client.snapshot / self.FILE).read_bytes() == models[self.FILE]

    def cut_off(self, client: Client, served: Hub, models: dict[str, bytes], n: int) -> Path:
        """Leaves the first n bytes, as a process does that ends while it downloads."""
        client.fetch("owner/name")
        [blob] = client.blobs.iterdir()
        part = blob.rename(blob.with_name(blob.name + ".incomplete"))
        (client.snapshot / self.FILE).unlink()
        part.write_bytes(models[self.FILE][:n])
        served.requests.clear()
        return part

    @pytest.mark.parametrize("ranges", [True, False])
    def test_in_another_process(self, client: Client, served: Hub, models: dict[str, bytes], ranges: bool) -> None:
        self.cut_off(client, served, models, 1000)
        served.ranges = ranges
        assert client.fetch("owner/name") == (self.FILE, None)
        # Some versions of the library take a server that ignores the range for one that obeys: then all comes again.
        assert served.bodies() in [[(self.FILE, 1000)], [(self.FILE, 1000), (self.FILE, 0)]][: 1 if ranges else 2]
        assert (client.snapshot / self.FILE).read_bytes() == models[self.FILE]
        assert not list(client.blobs.glob("*.incomplete"))

    @pytest.mark.parametrize("n", [0, 1])
    def test_whole_or_too_long(self, client: Client, served: Hub, models: dict[str, bytes], n: int) -> None:
        part = self.cut_off(client, served, models, len(models[self.FILE]))
        part.write_bytes(models[self.FILE] + bytes(n))
        assert client.fetch("owner/name") == (self.FILE, None)
        assert served.bodies() == [(self.FILE, 0)] * n
        assert (client.snapshot / self.FILE).read_bytes() == models[self.FILE]

    def test_damaged_pieces(self, client: Client, served: Hub, models: dict[str, bytes]) -> None:
        part = self.cut_off(client, served, models, 1000)
        part.write_bytes(bytes(1000))
        with pytest.raises(ModelError, match=rf"{self.FILE} was damaged while it was downloaded in pieces; run this"):
            client.fetch("owner/name")
        assert not (client.snapshot / self.FILE).exists()
        assert client.fetch("owner/name") == (self.FILE, None)
        assert (client.snapshot / self.FILE).read_bytes() == models[self.FILE]

    def test_a_killed_process_leaves_what_it_had(self, client: Client, served: Hub, models: dict[str, bytes]) -> None:
        code = (
            "import os, huggingface_hub.file_download as d; from vkbackend.cli.hub import fetch\n"
            "def dies(url, f, **how): f.write(bytes_of(url)[:20000]); f.flush(); os._exit(9)\n"
            "import urllib.request; bytes_of = lambda url: urllib.request.urlopen(url).read()\n"
            "d.http_get = dies; fetch('owner/name', None, False, False)"
        )
        assert client.run("-c", code).returncode == 9
        served.requests.clear()
        assert client.fetch("owner/name") == (self.FILE, None)
        assert served.bodies() == [(self.FILE, 20000)]
        assert (client.snapshot / self.FILE).read_bytes() == models[self.FILE]

    def test_a_connection_that_always_breaks(self, client: Client, served: Hub) -> None:
        served.cut = 0
        with pytest.raises(ModelError, match="owner/name could not be fetched"):
            client.fetch("owner/name")
        assert len(served.bodies()) < 10


def test_tokens(client: Client, served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    served.private.add("owner/name")
    with pytest.raises(ModelError, match=r"owner/name could not be fetched: .*private: set HF_TOKEN to a token"):
        client.fetch("owner/name")
    served.requests.clear()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert client.fetch("owner/name") == ("x-Q4_K_M.gguf", None)
    assert {(r.host, r.token) for r in served.requests} == {("127.0.0.1", True), ("localhost", False)}


def test_what_the_hub_refuses(client: Client, served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ModelError, match="there is no such repository, or it is private"):
        client.fetch("owner/other")
    with pytest.raises(ModelError, match=r"no file 'y\.gguf' in it"):
        client.fetch("owner/name", "y.gguf")
    with pytest.raises(ModelError, match="no quantisation 'Q2_K' in it; there are"):
        client.fetch("owner/name:Q2_K")
    served.repos["owner/empty"] = {"mmproj.gguf": b"", "mtp-x.gguf": b""}
    with pytest.raises(ModelError, match="owner/empty: there is no GGUF model file"):
        client.fetch("owner/empty")
    served.gated.add("owner/name")
    with pytest.raises(ModelError, match="must grant access: ask for it on its page, and set HF_TOKEN"):
        client.fetch("owner/name")
    assert served.bodies() == []


def test_no_server(tmp_path: Path, models: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Hub({"owner/name": models})) as served:
        client = Client(tmp_path, served, monkeypatch)
        wanted = client.fetch("owner/name")
    with pytest.raises(ModelError, match=r"owner/name could not be fetched: .*; --offline takes what was downloaded"):
        client.fetch("owner/name")
    assert client.fetch("owner/name", offline=True) == wanted


def test_generate_from_a_repository(client: Client, served: Hub) -> None:
    served.repos["owner/demo"] = {"demo-Q8_0.gguf": demo_model().read_bytes()}
    command = ["-m", "vkbackend.cli", "generate", "--hf-repo", "owner/demo", "--device", "numpy"]
    done = client.run(*command, "--prompt-ids", "1,2,3", "-n", "4", "--ignore-eos")
    assert done.returncode == 0 and done.stdout and done.stderr == ""  # no progress bars off a terminal
    again = client.run(*command, "--prompt-ids", "1,2,3", "-n", "4", "--ignore-eos", "--offline")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert len(served.bodies()) == 1


@pytest.mark.parametrize("repo", ["name", "a/b/c", "/b", "a/", ""])
def test_malformed_names(repo: str) -> None:
    with pytest.raises(UsageError, match="OWNER/NAME"):
        hub.fetch(repo, None, False, False)


def test_a_quantisation_and_a_file() -> None:
    with pytest.raises(UsageError, match="not both"):
        hub.fetch("owner/name:Q8_0", "x-Q8_0.gguf", False, False)


def test_progress_is_shown_on_a_terminal(client: Client, served: Hub, models: dict[str, bytes]) -> None:
    """Bars come off the terminal in pieces; the last one says that all of the file is there."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    code = "from vkbackend.cli.hub import fetch; fetch('owner/name', None, False, False)"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {"HF_HOME": str(client.home), "HF_ENDPOINT": served.endpoint}
    done = subprocess.run([sys.executable, "-c", code], env=env, stderr=theirs, stdout=subprocess.PIPE, timeout=120)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # how the end of a terminal's output is told
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"x-Q4_K_M.gguf" in shown and b"100%" in shown
    assert (client.snapshot / "x-Q4_K_M.gguf").read_bytes() == models["x-Q4_K_M.gguf"]


def test_a_separate_block_is_fetched_and_used(client: Client, served: Hub, tmp_path: Path) -> None:
    """The whole way: a trunk and the mtp-*.gguf in its folder, one text with and without speculation."""
    whole = read_content(fixture("gguf/dense-q8_0.gguf"))
    trunk = read_content(fixture("gguf/dense-q8_0.gguf"))
    trunk.tensors = {n: t for n, t in trunk.tensors.items() if not n.startswith("blk.8.")}
    trunk.set("block_count", 8)
    trunk.drop("nextn_predict_layers")
    trunk.keys.pop("qwen35.attention.recurrent_layers", None)
    whole.tensors = {n: t for n, t in whole.tensors.items() if n.startswith("blk.8.") or not n.startswith("blk.")}
    served.repos["owner/name"] = {
        "a/x-Q8_0.gguf": write_content(trunk, tmp_path / "trunk.gguf").read_bytes(),
        "a/mtp-x-Q8_0.gguf": write_content(whole, tmp_path / "block.gguf").read_bytes(),
        "mtp-x-Q8_0.gguf": b"not this one",
    }
    command = ["-m", "vkbackend.cli", "generate", "--hf-repo", "owner/name:Q8_0", "--device", "numpy"]
    command += ["--prompt-ids", "1,2,3", "-n", "12", "--ignore-eos"]
    plain = client.run(*command)
    assert plain.returncode == 0 and plain.stdout
    assert [name for name, _ in served.bodies()] == ["a/x-Q8_0.gguf"]  # no draft was asked for
    drafted = client.run(*command, "--spec-type", "draft-mtp", "--stats")
    assert (drafted.returncode, drafted.stdout) == (0, plain.stdout) and "drafts " in drafted.stderr, drafted.stderr
    assert [name for name, _ in served.bodies()] == ["a/x-Q8_0.gguf", "a/mtp-x-Q8_0.gguf"]
