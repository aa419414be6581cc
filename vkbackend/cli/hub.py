"""`--hf-repo`: model files from Hugging Face, through the `huggingface_hub` library and its cache."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from vkbackend.errors import ModelError
from vkbackend.spec.model_files import choose_draft, choose_main, has_block


def fetch(repo: str, file: str | None, offline: bool, needs_block: bool) -> tuple[Path, Path | None]:
    """Downloads the main file of a repository, unless the cache has it, and where needed a file with its MTP block.

    repo: "owner/name" or "owner/name:quant". file: the name to take, None to choose by quant. offline: only what
    the cache holds. needs_block: also take an mtp-*.gguf when the main file has no MTP block. Returns both paths.
    Raises `UsageError` for a malformed name, `ModelError` when the server or the cache does not have it.
    """
    from vkbackend.cli import UsageError, one_line

    name, _, quant = repo.partition(":")
    if name.count("/") != 1 or not all(name.split("/")):
        raise UsageError(f"--hf-repo {repo!r}: OWNER/NAME or OWNER/NAME:QUANT is needed")
    if file and quant:
        raise UsageError(f"--hf-repo {repo!r} with --hf-file: give the quantisation or the file, not both")
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ModelError(
            f"--hf-repo needs the package huggingface_hub: pip install huggingface_hub ({error})"
        ) from error
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    try:
        cached = _cached(hub, name) if offline else {}
        names = list(cached) if offline else hub.HfApi().list_repo_files(name)

        def get(wanted: str) -> Path:
            return cached[wanted] if offline else Path(hub.hf_hub_download(name, wanted))

        if file and file not in names:
            raise ModelError(f"{name}: there is no file {file!r} in {'the cache' if offline else 'it'}")
        main = file or choose_main(names, quant, name)
        path = get(main)
        draft = choose_draft(names, main) if needs_block and not has_block(path) else None
        return path, get(draft) if draft else None
    except ModelError:
        raise
    except Exception as error:  # the library lets errors of several HTTP clients through
        raise ModelError(f"{name} could not be fetched: {type(error).__name__}: {one_line(error)[:300]}") from error


def _cached(hub: Any, name: str) -> dict[str, Path]:
    """The files of a repository that the cache holds, by their names there; of its main revision if that is known."""
    repos = [r for r in hub.scan_cache_dir().repos if (r.repo_id, r.repo_type) == (name, "model")]
    revisions = sorted(repos[0].revisions, key=lambda r: ("main" in r.refs, r.last_modified)) if repos else []
    if not revisions:
        raise ModelError(f"{name} is not in the cache; run once without --offline")
    newest = revisions[-1]
    return {f.file_path.relative_to(newest.snapshot_path).as_posix(): f.file_path for f in newest.files}
