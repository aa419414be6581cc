"""`--hf-repo`: model files from Hugging Face, through the `huggingface_hub` library and its cache.

The library reads HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE. Its newer versions forget a download that is cut
off; here it goes on where it ended.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vkbackend.errors import ModelError
from vkbackend.spec.model_files import choose_draft, choose_main, has_block, part_names

ATTEMPTS = 50
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's, or SHA-256 for large files


def fetch(repo: str, file: str | None, offline: bool, needs_block: bool) -> tuple[Path, Path | None]:
    """Downloads the main file of a repository, unless the cache has it, and where needed a file with its MTP block.

    repo: "owner/name" or "owner/name:quant". file: the name to take, None to choose by quant. offline: only what
    the cache holds. needs_block: also take an mtp-*.gguf when the main file has no MTP block. Returns both paths; all
    parts of split files are fetched, the first one's path is returned.
    Raises `UsageError` for a malformed name, `ModelError` when the server or the cache does not have it.
    """
    from vkbackend.cli import UsageError

    name, _, quant = repo.partition(":")
    if name.count("/") != 1 or not all(name.split("/")):
        raise UsageError(f"--hf-repo {repo!r}: OWNER/NAME or OWNER/NAME:QUANT is needed")
    if file and quant:
        raise UsageError(f"--hf-repo {repo!r} with --hf-file: give the quantisation or the file, not both")
    try:
        import huggingface_hub as hub
        import huggingface_hub.constants
        import huggingface_hub.utils
    except ImportError as error:
        raise ModelError(
            f"--hf-repo needs the package huggingface_hub: pip install huggingface_hub ({error})"
        ) from error
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    offline = offline or hub.constants.HF_HUB_OFFLINE
    try:
        cached = _cached(hub, name) if offline else {}
        names = list(cached) if offline else hub.HfApi().list_repo_files(name)

        def get(wanted: str) -> Path:
            parts = part_names(wanted)
            if missing := [part for part in parts if part not in names]:
                raise ModelError(f"{name}: there is no file {missing[0]!r} in {'the cache' if offline else 'it'}")
            paths = [cached[part] if offline else _download(hub, name, part) for part in parts]
            if len({path.parent for path in paths}) > 1:
                raise ModelError(f"{name}: was changed between the parts of {wanted}; run this again")
            return paths[0]

        main = file or choose_main(names, quant, name)
        path = get(main)
        draft = choose_draft(names, main) if needs_block and not has_block(path) else None
        return path, get(draft) if draft else None
    except ModelError:
        raise
    except Exception as error:  # the library lets errors of several HTTP clients through
        raise ModelError(f"{name} could not be fetched: {_reason(hub, error)}") from error


def _download(hub: Any, name: str, file: str) -> Path:
    """The path in the cache of a file that the server has, downloaded if it is not there yet."""
    _fill_cache(hub, name, file)
    return Path(hub.hf_hub_download(name, file))


def _fill_cache(hub: Any, name: str, file: str) -> None:
    """Puts the bytes of a file where the library's cache keeps them; the library then adds names and references.

    What a download that was cut off has left is kept and added to. Files too large for plain HTTP, or on a server that
    does not tell their hash, are left to the library.
    """
    from huggingface_hub.file_download import repo_folder_name

    url = hub.hf_hub_url(name, file)
    found = hub.get_hf_file_metadata(url)
    most = getattr(hub.constants, "MAX_HTTP_DOWNLOAD_SIZE", 50 << 30)
    if not found.size or found.size > most or not _HASH.fullmatch(found.etag or ""):
        return
    if isinstance(hub.try_to_load_from_cache(name, file, revision=found.commit_hash), str):
        return
    cache, folder = Path(hub.constants.HF_HUB_CACHE), repo_folder_name(repo_id=name, repo_type="model")
    blob, lock = cache / folder / "blobs" / found.etag, cache / ".locks" / folder / f"{found.etag}.lock"
    part = blob.with_name(blob.name + ".incomplete")
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    headers = hub.utils.build_hf_headers()
    if urlsplit(found.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is for the hub, not for where it keeps large files
    with hub.utils.WeakFileLock(lock):
        if blob.exists():
            return
        resumed = part.exists()
        _complete(part, found.location, found.size, headers, file)
        if resumed and len(found.etag) == 64 and _digest(part) != found.etag:
            part.unlink()
            raise ModelError(f"{name}: {file} was damaged while it was downloaded in pieces; run this again")
        part.replace(blob)


def _complete(part: Path, url: str, size: int, headers: dict[str, str], shown: str) -> None:
    """Downloads what a file lacks, in as many attempts as bring something."""
    from huggingface_hub.file_download import http_get

    for _ in range(ATTEMPTS):
        done = part.stat().st_size if part.exists() else 0
        if done == size:
            return
        if done > size:
            part.unlink()
            done = 0
        try:
            with part.open("ab") as f:
                http_get(url, f, resume_size=done, headers=headers, expected_size=size, displayed_filename=shown)
        except Exception:  # every HTTP client has its own
            if part.stat().st_size <= done:
                raise
    if part.stat().st_size != size:
        raise ModelError(f"{shown}: the connection broke {ATTEMPTS} times; run this again")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _reason(hub: Any, error: Exception) -> str:
    """What went wrong and what to do, on one line."""
    from vkbackend.cli import one_line

    text = f"{type(error).__name__}: {one_line(error)[:300]}"
    if isinstance(error, hub.utils.GatedRepoError):
        return f"its owner must grant access: ask for it on its page, and set HF_TOKEN to your token ({text})"
    if isinstance(error, hub.utils.RepositoryNotFoundError):
        return f"there is no such repository, or it is private: set HF_TOKEN to a token that may read it ({text})"
    answered = getattr(getattr(error, "response", None), "status_code", None) is not None
    if not answered and getattr(error, "errno", None) is None:  # an errno: of this machine, such as a full disk
        return f"{text}; --offline takes what was downloaded before"
    return text


def _cached(hub: Any, name: str) -> dict[str, Path]:
    """The files of a repository that the cache holds, by their names there; of its main revision if that is known."""
    cache = hub.constants.HF_HUB_CACHE
    known = hub.scan_cache_dir(cache).repos if Path(cache).is_dir() else ()
    repos = [r for r in known if (r.repo_id, r.repo_type) == (name, "model")]
    revisions = sorted(repos[0].revisions, key=lambda r: ("main" in r.refs, r.last_modified)) if repos else []
    if not revisions:
        raise ModelError(f"{name} is not in the cache; run once without --offline")
    newest = revisions[-1]
    return {f.file_path.relative_to(newest.snapshot_path).as_posix(): f.file_path for f in newest.files}
