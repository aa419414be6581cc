"""`vkbackend convert`: a Hugging Face checkpoint to a GGUF file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vkbackend.cli.common import Commands, Progress, add_command

TYPES = ("f32", "f16", "bf16", "q8_0")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "convert",
        run,
        "Makes a GGUF file of a Qwen3.5, Qwen3.5-MoE or Qwen3-Next checkpoint (safetensors) and prints its path.",
    )
    parser.add_argument("folder", metavar="HF_DIR", type=Path, help="the folder with config.json and the weights")
    parser.add_argument(
        "-o",
        "--out",
        metavar="OUT",
        type=Path,
        help="a .gguf file, or a folder, made if missing (default: here, named after HF_DIR and the type)",
    )
    parser.add_argument(
        "--outtype", "--type", dest="type", choices=TYPES, help="type of the matrices (default: the checkpoint's own)"
    )
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument(
        "--mtp",
        dest="mtp",
        action="store_const",
        const="only",
        default="with",
        help="only the MTP block, as mtp-*.gguf; default: trunk and block in one file",
    )
    parts.add_argument("--no-mtp", dest="mtp", action="store_const", const="without", help="only the trunk")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there already")


def run(args: argparse.Namespace) -> int:
    from vkbackend.model.convert import convert

    progress = Progress("writing") if sys.stderr.isatty() else None
    print(convert(args.folder, args.out, args.type, args.mtp, progress, args.force))
    return 0
