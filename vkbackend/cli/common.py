"""Arguments that several sub-commands share, and what they stand for."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from vkbackend.errors import ModelError, VkBackendError

if TYPE_CHECKING:
    from vkbackend.device.base import DeviceInfo
    from vkbackend.model.loader import Model
    from vkbackend.spec.draft_mtp import DraftMTP

T = TypeVar("T")
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

DEMO_MODEL = "data/demo-qwen35-mtp-q8_0.gguf"  # package data of vkbackend.model
SPEC_TYPES = ("none", "draft-mtp")
# What the library calls the arguments that options become.
OPTIONS = {
    "generate: max_tokens": "-n",
    "sampling: temperature": "--temp",
    "sampling: top_k": "--top-k",
    "sampling: top_p": "--top-p",
    "sampling: min_p": "--min-p",
    "sampling: repeat_penalty": "--repeat-penalty",
    "sampling: seed": "--seed",
    "draft-mtp: n_max": "--spec-draft-n-max",
    "draft-mtp: n_min": "--spec-draft-n-min",
    "stop string": "--stop: string",
}
LATER_SPEC_TYPES = ("draft-simple", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """A sub-command's parser."""
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """-m, --demo, --hf-repo: where the model is; --model-draft and --device."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-m", "--model", metavar="FILE", type=Path, help="GGUF file")
    source.add_argument("--demo", action="store_true", help="the small model that comes with vkbackend")
    source.add_argument("--hf-repo", metavar="OWNER/NAME[:QUANT]", help="a repository on Hugging Face: downloaded once")
    parser.add_argument(
        "--model-draft", metavar="FILE", type=Path, help="GGUF file with the MTP block, if not in the model's"
    )
    parser.add_argument("--hf-file", metavar="NAME", help="this file of the repository")
    parser.add_argument("--offline", action="store_true", help="use what was downloaded before, ask no server")
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device"""
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="a name that `vkbackend devices` lists; auto: the first GPU"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json"""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_draft_sizes(parser: argparse.ArgumentParser) -> None:
    """--spec-draft-n-max, --spec-draft-n-min"""
    parser.add_argument("--spec-draft-n-max", type=int, metavar="N", help="most tokens drafted a step (default 3)")
    parser.add_argument("--spec-draft-n-min", type=int, metavar="N", help="use no drafts when fewer (default 0)")


def speculator(name: str, args: argparse.Namespace) -> DraftMTP | None:
    """The speculator that a --spec-type name stands for.

    Raises `UsageError` for an unknown one, for bad sizes, and for sizes where nothing drafts.
    """
    from vkbackend.cli import UsageError
    from vkbackend.spec.draft_mtp import DraftMTP

    sizes = {"n_max": args.spec_draft_n_max, "n_min": args.spec_draft_n_min}
    sizes = {size: value for size, value in sizes.items() if value is not None}
    if name == "none":
        if sizes and "draft-mtp" not in args.spec_type.split(","):
            option = OPTIONS[f"draft-mtp: {next(iter(sizes))}"]
            raise UsageError(f"{option} is of drafts: give --spec-type draft-mtp too")
        return None
    if name in LATER_SPEC_TYPES:
        raise UsageError(f"--spec-type {name} is not available yet; available are {', '.join(SPEC_TYPES)}")
    if name != "draft-mtp":
        raise UsageError(f"--spec-type {name!r} is unknown; available are {', '.join(SPEC_TYPES)}")
    speculator: DraftMTP = usage(lambda: DraftMTP(**sizes))
    return speculator


def usage(make: Callable[[], T]) -> T:
    """The result of a call whose errors mean that the command line was wrong; they name the option."""
    from vkbackend.cli import UsageError

    try:
        return make()
    except VkBackendError as error:
        text = str(error).removesuffix(", or None")  # a seed that is not given: no option says so
        name = next((n for n in OPTIONS if text.startswith(n)), "")
        raise UsageError(OPTIONS.get(name, "") + text.removeprefix(name)) from error


def load_model(args: argparse.Namespace) -> Model:
    """Loads the model that the arguments name, with a progress bar on a terminal.

    For draft-mtp, a file without MTP block is joined by the mtp-*.gguf beside it, if there is one.
    """
    from vkbackend.cli.hub import fetch
    from vkbackend.model.loader import load
    from vkbackend.spec.model_files import find_draft

    needs_block = args.model_draft is None and "draft-mtp" in args.spec_type.split(",")
    draft: Path | None = args.model_draft
    if args.hf_repo:
        path, found = fetch(args.hf_repo, args.hf_file, args.offline, needs_block)
        draft = draft or found
    else:
        path = demo_model() if args.demo else args.model
        draft = draft or (find_draft(path) if needs_block else None)
    return load(path, device=args.device, draft=draft, progress=Progress() if sys.stderr.isatty() else None)


def device_name(info: DeviceInfo, args: argparse.Namespace) -> str:
    """The name of the device in use, with the option that was asked for: kompute:0:strict."""
    return ":".join([info.name, *args.device.split(":")[2:]])


def device_remark(info: DeviceInfo, args: argparse.Namespace) -> list[str]:
    """What a user should know of the device in use, if anything. Whoever names numpy knows that it is no GPU."""
    from vkbackend.device import note

    return list(filter(None, ["" if args.device == "numpy" else note(info)]))


def demo_model() -> Path:
    """The demo model in the package's data. Raises `ModelError` when this installation lacks it."""
    import vkbackend.model

    for folder in vkbackend.model.__path__:
        path = Path(folder) / DEMO_MODEL
        if path.is_file():
            return path
    raise ModelError(f"the demo model {DEMO_MODEL} is not in this installation; give a GGUF file with -m")


class Progress:
    """A line on stderr that counts up while weights are loaded, or what `doing` says is done with them."""

    def __init__(self, doing: str = "loading") -> None:
        self.doing = doing

    def __call__(self, done: int, total: int) -> None:
        share = done / total if total else 1.0
        end = "\r\033[K" if done >= total else ""
        line = f"\r{self.doing} {done >> 20} of {total >> 20} MiB ({share:.0%})"
        print(line + end, end="", file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """One JSON object on one line. Infinite numbers become null: JSON has none."""
    print(json.dumps(_finite(value), ensure_ascii=False, default=_plain, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    return str(value)


def table(rows: list[list[str]]) -> str:
    """Columns padded to the widest cell; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
