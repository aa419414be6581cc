"""`vkbackend generate`: continues a prompt."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vkbackend.cli.common import (
    Commands,
    add_command,
    add_draft_sizes,
    add_json,
    add_model,
    device_name,
    device_remark,
    load_model,
    print_json,
    speculator,
    usage,
)
from vkbackend.model.chat import chat_prompt

DEFAULT_CTX = 4096


def add(commands: Commands) -> None:
    parser = add_command(commands, "generate", run, "Generates text that continues a prompt.")
    add_model(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("-f", "--file", metavar="FILE", help="a UTF-8 file with the prompt, - for standard input")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="the prompt as token ids")
    parser.add_argument(
        "-n", "--n-predict", type=int, default=128, metavar="N", help="most tokens to generate (default 128)"
    )
    parser.add_argument(
        "-c", "--ctx-size", type=int, metavar="N", help=f"tokens the context holds (default {DEFAULT_CTX})"
    )
    parser.add_argument(
        "--temp", "--temperature", type=float, default=0.0, metavar="T", help="temperature, 0 is greedy (default)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="keep the K most probable tokens, 0: all (default)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep tokens up to this sum of probability"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the best one's"
    )
    parser.add_argument("--repeat-penalty", type=float, default=1.0, metavar="R", help="above 1 discourages repeats")
    parser.add_argument(
        "--seed", type=int, default=None, metavar="N", help="of the random numbers (default: a new one)"
    )
    parser.add_argument("--chat", action="store_true", help="treat the prompt as a user's turn in a chat")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument("--spec-type", default="none", metavar="TYPE", help="speculation: none (default) or draft-mtp")
    add_draft_sizes(parser)
    parser.add_argument(
        "--stats", action="store_true", help="print device, rates and acceptance to stderr, terminal or not"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from vkbackend.cli import UsageError
    from vkbackend.spec.generate import check_max_tokens, stream
    from vkbackend.spec.sampling import Sampling
    from vkbackend.spec.stopping import check_stop

    spec = speculator(args.spec_type, args)
    sampling = usage(lambda: Sampling(args.temp, args.top_k, args.top_p, args.min_p, args.repeat_penalty, args.seed))
    usage(lambda: check_stop(args.stop))
    usage(lambda: check_max_tokens(args.n_predict))
    n_ctx: int = DEFAULT_CTX if args.ctx_size is None else args.ctx_size
    if n_ctx < 1:
        raise UsageError(f"-c is {n_ctx}; at least 1 is needed")
    if args.chat and args.prompt_ids is not None:
        raise UsageError("--chat needs a text prompt (-p or -f), not --prompt-ids")
    ids = _parse_ids(args.prompt_ids) if args.prompt_ids is not None else None
    text = args.prompt if args.file is None else read_text(args.file)
    model = load_model(args)
    if ids is None:
        ids = chat_prompt(model.tokenizer, text) if args.chat else model.tokenizer.encode(text)
    pieces = stream(model, ids, args.n_predict, sampling, spec, args.stop, n_ctx, args.ignore_eos)
    if args.chat and model.tokenizer.chat_template is None:
        what = "the demo model" if args.demo else "this model"
        print(
            f"{what} has no chat template, it may not be trained for chats; without --chat it continues the prompt",
            file=sys.stderr,
        )
    trained = model.hparams.n_ctx_train
    if args.ctx_size is not None and n_ctx > trained:
        print(f"-c is {n_ctx}; this model was trained for {trained} tokens, text beyond may be poor", file=sys.stderr)
    if not args.json:
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
    result = pieces.result()
    info = pieces.device
    name = device_name(info, args)
    if args.stats or sys.stderr.isatty():
        lines = result.stats.lines(f"{name} ({info.description})")
        print(*lines, *device_remark(info, args), sep="\n", file=sys.stderr)
    if result.stop_reason == "length" and len(result.tokens) < args.n_predict:
        print(_context_is_full(len(ids), args.n_predict, n_ctx, trained), file=sys.stderr)
    if args.json:
        print_json(
            {
                "text": result.text,
                "tokens": result.tokens,
                "stop_reason": result.stop_reason,
                "stats": result.stats.as_dict(),
                "device": name,
            }
        )
    return 0


def _context_is_full(n_prompt: int, n_predict: int, n_ctx: int, trained: int) -> str:
    """Why the text ended before -n tokens, and what gives more."""
    need = n_prompt + n_predict - 1  # the last token is not decoded
    beyond = f", more than the {trained} that this model was trained for" if need > trained else ""
    return f"ended early: the context of {n_ctx} tokens is full; all {n_predict} (-n) need -c {need}{beyond}"


def _parse_ids(text: str) -> list[int]:
    from vkbackend.cli import UsageError

    parts = [p.strip() for p in text.split(",")]
    try:
        return [int(p) for p in parts]
    except ValueError:
        raise UsageError(f"--prompt-ids {text!r}: whole numbers with commas between are needed, as in 1,2,3") from None


def read_text(name: str) -> str:
    """A UTF-8 text file, or standard input for "-". Raises `VkBackendError` when it can not be read or is not UTF-8."""
    from vkbackend.errors import VkBackendError

    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise VkBackendError(f"{name}: the prompt can not be read: {error.strerror or error}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise VkBackendError(f"{name}: byte {error.start} is not UTF-8; convert the prompt to UTF-8") from None
