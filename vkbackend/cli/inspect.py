"""`vkbackend inspect`: what is in a GGUF file."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkbackend.cli.common import Commands, add_command, add_json, print_json, table
from vkbackend.errors import VkBackendError

if TYPE_CHECKING:
    from vkbackend.model.gguf import GGUFFile

LONG_ARRAY = 8  # arrays of more values are shown as their length
LONGEST_CELL = 300  # characters


def add(commands: Commands) -> None:
    parser = add_command(commands, "inspect", run, "Shows what a GGUF file holds: sizes, metadata, tensors.")
    parser.add_argument("file", metavar="FILE", type=Path)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from vkbackend.model.split import open_model

    file = open_model(args.file)
    hparams, problem = _hparams(file)
    if args.json:
        print_json(
            {
                "file": str(args.file),
                "version": file.version,
                "parts": file.n_parts,
                "arch": file.metadata.get("general.architecture"),
                "supported": not problem,
                "problem": problem,
                "hparams": hparams,
                "metadata": {key: _short(value) for key, value in file.metadata.items()},
                "tensors": [
                    {"name": t.name, "shape": list(t.shape), "type": type_name(t.type), "bytes": t.nbytes}
                    for t in file.tensors.values()
                ],
            }
        )
        return 0
    _print_text(args.file, file, hparams, problem)
    return 0


def _hparams(file: GGUFFile) -> tuple[dict[str, Any], str]:
    """The hyper-parameters, or why this file can not be run."""
    from vkbackend.model.hparams import read_hparams

    try:
        return asdict(read_hparams(file)), ""
    except VkBackendError as error:
        return {}, str(error)


def _print_text(path: Path, file: GGUFFile, hparams: dict[str, Any], problem: str) -> None:
    total = sum(max(t.nbytes, 0) for t in file.tensors.values())
    parts = f"{file.n_parts} parts, " if file.n_parts > 1 else ""
    print(f"{path}: GGUF version {file.version}, {parts}{len(file.tensors)} tensors, {total / 2**20:.1f} MiB")
    if problem:
        print(f"can not be run: {problem}")
    else:
        n_mtp = hparams["n_nextn"]
        n_recurrent = sum(hparams["recurrent"])
        n_main = hparams["n_layer"] - n_mtp
        print(
            f"{hparams['arch']}: {n_main} layers ({n_main - n_recurrent} attention, {n_recurrent} gated delta net), "
            + (f"{n_mtp} MTP block{'s' if n_mtp > 1 else ''}" if n_mtp else "no MTP block")
            + f", hidden {hparams['n_embd']}, vocabulary {hparams['n_vocab']}"
        )
    kinds = Counter(type_name(t.type) for t in file.tensors.values())
    print("types: " + ", ".join(f"{name} x {n}" for name, n in kinds.most_common()))
    print()
    print(table([["KEY", "VALUE"], *([_cell(key), _cell(_short(v))] for key, v in file.metadata.items())]))
    print()
    rows = [["TENSOR", "SHAPE", "TYPE", "BYTES"]]
    rows += [
        [_cell(t.name), " x ".join(map(str, t.shape)), type_name(t.type), str(t.nbytes)] for t in file.tensors.values()
    ]
    print(table(rows))


def type_name(kind: int) -> str:
    """The name of a quantisation id, in lower case; the number when it is unknown."""
    import gguf

    try:
        return str(gguf.GGMLQuantizationType(kind).name.lower())
    except ValueError:
        return f"unknown ({kind})"


def _short(value: Any) -> Any:
    """Metadata as shown: long arrays by their length, long texts by their beginning."""
    if isinstance(value, str):
        return value if len(value) <= 200 else f"{value[:200]}... ({len(value)} characters)"
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_short(v) for v in value] if len(value) <= LONG_ARRAY else f"[{len(value)} values]"
    return value


def _cell(value: Any) -> str:
    """A cell of a table: what a stranger wrote may neither move the cursor nor widen every row without bounds."""
    text = str(value)[:LONGEST_CELL]
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
