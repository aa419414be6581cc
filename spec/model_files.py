"""Which of several GGUF files is which: the main model, or a draft that belongs to it.

Repositories and folders hold one model in several quantisations, and beside it files that are no models of their own:
vision parts (mmproj*), importance matrices (imatrix*) and separate MTP blocks (mtp-*).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from vkbackend.errors import ModelError

# Matched from the start. NAME-imatrix.gguf and NAME-mmproj-F16.gguf too, but not NAME-imatrix-Q4_K_M.gguf: that is a
# model, quantised with one.
_SIDE_FILE = re.compile(r"mtp-|imatrix|(.*[^a-z0-9])?mmproj|.*[^a-z0-9]imatrix\.gguf$")
_TYPE = re.compile(r"(?<![a-z0-9])(i?q(\d+)(_[a-z0-9]+)*|bf16|f16|f32|mxfp4(_moe)?)(?![a-z0-9])", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_OTHER_BITS = {"bf16": 16, "f16": 16, "f32": 32, "mxfp4": 4}


def is_main_file(name: str) -> bool:
    """Whether a path may be a main model: a GGUF file that is not known to be something else."""
    base = PurePosixPath(name).name.lower()
    return base.endswith(".gguf") and not _SIDE_FILE.match(base)


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
    """The main model among a repository's files; of a split model its first part.

    quant: its quantisation, such as "Q8_0", in the file's name or its folder's; "Q4_K" also takes Q4_K_M, which comes
    before other kinds of Q4_K. Empty takes Q4_K_M, else Q8_0, else the first file. Files nearer to the root come
    first. Raises `ModelError` naming what there is when nothing fits.
    """
    mains = sorted({part_names(n)[0] for n in names if is_main_file(n)}, key=lambda n: (n.count("/"), n))
    if not mains:
        raise ModelError(f"{where}: there is no GGUF model file in it")
    for wanted in [quant] if quant else ["q4_k_m", "q8_0"]:
        ranks = {n: rank for n in mains if (rank := _match(n, wanted)) is not None}
        if ranks:
            return min(ranks, key=ranks.__getitem__)
    if not quant:
        return mains[0]
    kinds = ", ".join(dict.fromkeys(file_type(n) or PurePosixPath(n).name for n in mains))
    raise ModelError(f"{where}: there is no quantisation {quant!r} in it; there are {kinds}")


def _match(name: str, quant: str) -> int | None:
    """How well a file fits a quantisation, 0 best; None when it does not."""
    wanted, found = quant.lower(), file_type(name)
    stem = PurePosixPath(_PART.sub("", name)).stem.lower()
    # A publisher's own variants write their mark in front: UD-Q4_K_XL.
    if found == wanted or stem.endswith(f"-{wanted}"):
        return 0
    if not found and PurePosixPath(name).parent.name.lower() == wanted:
        return 1
    return (2 if found == wanted + "_m" else 3) if found.startswith(wanted + "_") else None


def part_names(name: str) -> list[str]:
    """All parts of a split model, from the name of any of them; the name alone when it is whole."""
    match = _PART.search(name)
    if not match:
        return [name]
    n = int(match.group(2))
    return [f"{name[: match.start()]}-{i + 1:05d}-of-{n:05d}{name[match.end() :]}" for i in range(max(n, 1))]


def choose_draft(names: Iterable[str], main: str) -> str | None:
    """The mtp-*.gguf that belongs to a main file, or None.

    names: paths as in a repository, with / between folders. The one in the deepest folder shared with the main file
    is taken; of several there the one nearest in bits per weight, then the one in fewest folders, then the first by
    name. Of a split one, its first part is returned.
    """
    folders = PurePosixPath(main).parent.parts

    def rank(name: str) -> tuple[int, int, int, str]:
        path = PurePosixPath(name)
        shared = 0
        for mine, theirs in zip(folders, path.parent.parts, strict=False):
            if mine != theirs:
                break
            shared += 1
        return (-shared, abs(type_bits(name) - type_bits(main)), len(path.parts), name)

    drafts = {
        part_names(n)[0]
        for n in names
        if PurePosixPath(n).name.lower().startswith("mtp-") and n.lower().endswith(".gguf")
    }
    return min(drafts, key=rank, default=None)


def has_block(path: Path) -> bool:
    """Whether a GGUF file holds an MTP block, or any part of it. Raises `ModelError` for an unreadable file."""
    from vkbackend.model.gguf import open_gguf

    parts = [path.with_name(name) for name in part_names(path.name)]
    return any(".nextn.eh_proj." in name for part in parts for name in open_gguf(part).tensors)


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
