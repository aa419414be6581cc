"""The command line: `vkbackend SUBCOMMAND ...`. One module per sub-command, each with `add` and `run`.

Exit status: 0 done, 1 the job failed (one line on stderr says what, why and what to do), 2 wrong usage, 130
interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from vkbackend.errors import VkBackendError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit status."""
    parser = build_parser()
    for out in (sys.stdout, sys.stderr):  # what the terminal's encoding lacks must not end the job
        if hasattr(out, "reconfigure"):
            out.reconfigure(errors="replace")
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:  # argparse itself would show the usage of all sub-commands
            parser = args.parser
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as end:  # argparse has printed why
        return int(end.code or 0)
    try:
        with warnings.catch_warnings():
            # Of NumPy, over weights that are no numbers: what comes out is judged by the sampler, in one line.
            warnings.simplefilter("ignore", RuntimeWarning)
            status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader is gone; the interpreter must not fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UsageError as error:
        complain(args.command, error)
        return 2
    except (VkBackendError, OSError, MemoryError) as error:
        complain(args.command, error)
        return 1


class UsageError(Exception):
    """The command line asks for something that does not exist or does not go together."""


def complain(command: str, error: BaseException) -> None:
    """Prints an error on one line of stderr. What the library calls `generate: ...` names the sub-command once."""
    text = one_line(error).removeprefix(f"{command}: ")
    print(f"vkbackend {command}: {text or type(error).__name__}", file=sys.stderr)


def one_line(error: BaseException) -> str:
    """An error's message on one line, without what moves a terminal's cursor."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(str(error).split()))


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; every sub-command sets `run` and `parser`, its own."""
    from vkbackend import __version__
    from vkbackend.cli import bench, check_ops, convert, devices, generate, inspect

    parser = argparse.ArgumentParser(
        prog="vkbackend",
        description="Runs Qwen3.5-family models from GGUF files on Vulkan GPUs, with speculative decoding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vkbackend {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (generate, devices, inspect, check_ops, bench, convert):
        module.add(commands)
    return parser
