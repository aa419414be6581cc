"""`--hf-repo` against a pretended hub: nothing here reaches a network."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vkbackend.cli import UsageError, hub
from vkbackend.errors import ModelError

huggingface_hub = pytest.importorskip("huggingface_hub")
NAMES = ["x-Q8_0.gguf", "x-Q4_K_M.gguf", "mtp-x-Q8_0.gguf", "mmproj-F16.gguf"]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretends a hub with NAMES, of which the cache has two; notes the files that are asked of the server."""
    made: list[str] = []

    def list_repo_files(self: object, name: str) -> list[str]:
        if name != "owner/name":
            raise ConnectionError(f"{name}\nnot found")
        return NAMES

    def hf_hub_download(name: str, filename: str) -> str:
        made.append(filename)
        return str(tmp_path / filename)

    def snapshot(folder: Path, names: list[str], refs: set[str], age: float) -> SimpleNamespace:
        files = [SimpleNamespace(file_path=folder / n) for n in names]
        return SimpleNamespace(snapshot_path=folder, files=files, refs=refs, last_modified=age)

    def scan_cache_dir() -> SimpleNamespace:
        revisions = {"old": snapshot(tmp_path / "old", NAMES, set(), 9.0)}
        revisions["main"] = snapshot(tmp_path, ["x-Q8_0.gguf", "mtp-x-Q8_0.gguf"], {"main"}, 1.0)
        repo = SimpleNamespace(repo_id="owner/name", repo_type="model", revisions=list(revisions.values()))
        other = SimpleNamespace(repo_id="owner/name", repo_type="dataset", revisions=[])
        return SimpleNamespace(repos=[other, repo])

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", list_repo_files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", scan_cache_dir)
    monkeypatch.setattr(hub, "has_block", lambda path: "Q4" in path.name)
    return made


@pytest.mark.parametrize(
    ("arguments", "main", "draft", "asked"),
    [
        (("owner/name", None, False, False), "x-Q4_K_M.gguf", None, 1),
        (("owner/name", None, False, True), "x-Q4_K_M.gguf", None, 1),
        (("owner/name:Q8_0", None, False, True), "x-Q8_0.gguf", "mtp-x-Q8_0.gguf", 2),
        (("owner/name:q8_0", None, False, False), "x-Q8_0.gguf", None, 1),
        (("owner/name", "x-Q8_0.gguf", False, False), "x-Q8_0.gguf", None, 1),
        (("owner/name", None, True, False), "x-Q8_0.gguf", None, 0),
        (("owner/name", None, True, True), "x-Q8_0.gguf", "mtp-x-Q8_0.gguf", 0),
    ],
)
def test_fetch(calls: list[str], tmp_path: Path, arguments: Any, main: str, draft: str | None, asked: int) -> None:
    assert hub.fetch(*arguments) == (tmp_path / main, tmp_path / draft if draft else None)
    assert calls == [name for name in (main, draft) if name][:asked]


@pytest.mark.parametrize("repo", ["name", "a/b/c", "/b", "a/", ""])
def test_malformed_names(calls: list[str], repo: str) -> None:
    with pytest.raises(UsageError, match="OWNER/NAME"):
        hub.fetch(repo, None, False, False)


def test_failures(calls: list[str]) -> None:
    with pytest.raises(ModelError, match="other/name could not be fetched: ConnectionError: other/name not found"):
        hub.fetch("other/name", None, False, False)
    with pytest.raises(ModelError, match=r"no file 'y\.gguf'"):
        hub.fetch("owner/name", "y.gguf", False, False)
    with pytest.raises(ModelError, match="'Q2_K'"):
        hub.fetch("owner/name:Q2_K", None, False, False)
    with pytest.raises(UsageError, match="not both"):
        hub.fetch("owner/name:Q8_0", "x-Q8_0.gguf", False, False)
    with pytest.raises(ModelError, match="other/name is not in the cache"):
        hub.fetch("other/name", None, True, False)
    assert calls == []
