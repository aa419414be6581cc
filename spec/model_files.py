"""Which of several GGUF files is which: the main model, or a draft that belongs to it.

Repositories and folders hold one model in several quantisations, and beside it files that are no models of their own:
vision parts (mmproj*), importance matrices (imatrix*) and separate MTP blocks (mtp-*).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from vkbackend.errors import ModelError

_SIDE_FILES = ("mmproj", "imatrix", "mtp-")
_TYPE = re.compile(r"(?<![a-z0-9])(i?q(\d+)(_[a-z0-9]+)*|bf16|f16|f32|mxfp4(_moe)?)(?![a-z0-9])", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)
_OTHER_BITS = {"bf16": 16, "f16": 16, "f32": 32, "mxfp4": 4}


def is_main_file(name: str) -> bool:
    """Whether a path may be a main model: a GGUF file that is not known to be something else."""
    base = PurePosixPath(name).name.lower()
    return base.endswith(".gguf") and not base.startswith(_SIDE_FILES)


def file_type(name: str) -> str:
    """The quantisation that a file's name ends with, in lower case ("q4_k_m", "bf16"); empty when it names none."""
    found = list(_TYPE.finditer(PurePosixPath(name).stem))
    return found[-1].group(0).lower() if found else ""


def type_bits(name: str) -> int:
    """Bits per weight that the name of a file's quantisation promises; 0 when it names none."""
    match = _TYPE.search(file_type(name))
    if not match:
        return 0
    return int(match.group(2)) if match.group(2) else _OTHER_BITS[match.group(1).lower().removesuffix("_moe")]


def choose_main(names: Iterable[str], quant: str = "", where: str = "the repository") -> str:
    """The main model among a repository's files.

    quant: its quantisation, such as "Q8_0"; empty takes Q4_K_M where there is one, else the first file. Files nearer
    to the root come first. Raises `ModelError` naming what there is when nothing fits.
    """
    mains = sorted((n for n in names if is_main_file(n)), key=lambda n: (n.count("/"), n))
    if not mains:
        raise ModelError(f"{where}: there is no GGUF model file in it")
    fitting = [n for n in mains if _is_type(n, quant or "q4_k_m")]
    if quant and not fitting:
        kinds = ", ".join(dict.fromkeys(file_type(n) or PurePosixPath(n).name for n in mains))
        raise ModelError(f"{where}: there is no quantisation {quant!r} in it; there are {kinds}")
    chosen = (fitting or mains)[0]
    if _PART.search(chosen):
        raise ModelError(
            f"{where}: {chosen} is one part of a split model, which is not supported; join the parts first"
        )
    return chosen


def _is_type(name: str, quant: str) -> bool:
    # A publisher's own variants write their mark in front: UD-Q4_K_XL.
    wanted = quant.lower()
    return file_type(name) == wanted or PurePosixPath(_PART.sub("", name)).stem.lower().endswith(f"-{wanted}")


def choose_draft(names: Iterable[str], main: str) -> str | None:
    """The mtp-*.gguf that belongs to a main file, or None.

    names: paths as in a repository, with / between folders. The one in the deepest folder shared with the main file
    is taken; of several there the one nearest in bits per weight, then the first by name.
    """
    folders = PurePosixPath(main).parent.parts

    def rank(name: str) -> tuple[int, int, str]:
        path = PurePosixPath(name)
        shared = 0
        for mine, theirs in zip(folders, path.parent.parts, strict=False):
            if mine != theirs:
                break
            shared += 1
        return (-shared, abs(type_bits(name) - type_bits(main)), name)

    drafts = [n for n in names if PurePosixPath(n).name.lower().startswith("mtp-") and n.lower().endswith(".gguf")]
    return min(drafts, key=rank, default=None)


def has_block(path: Path) -> bool:
    """Whether a GGUF file holds an MTP block. Raises `ModelError` for an unreadable file."""
    from vkbackend.model.gguf import open_gguf

    return any(".nextn.eh_proj." in name for name in open_gguf(path).tensors)


def find_draft(path: str | Path) -> Path | None:
    """The file with the MTP block for a main file on disk that has none itself: the best mtp-*.gguf beside it.

    None when the file has a block, or there is nothing beside it. Raises `ModelError` for an unreadable main file.
    """
    main = Path(path)
    if has_block(main):
        return None
    try:
        names = [p.name for p in main.parent.iterdir() if p != main and p.is_file()]
    except OSError as error:
        raise ModelError(f"{main.parent}: looking for mtp-*.gguf failed: {error}") from error
    chosen = choose_draft(names, main.name)
    return main.parent / chosen if chosen else None
