"""Chat templates: from a list of messages to the text that the model was trained to continue.

A template is a Jinja program that comes with a file from anywhere, so it runs in Jinja's immutable sandbox, in a
process of its own (`chat_template.py`) whose time and memory are limited. Its helpers are those of Hugging Face.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkbackend.errors import ModelError

if TYPE_CHECKING:
    from vkbackend.model.tokenizer import Tokenizer

CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # of files without a template
MAX_SECONDS = 20.0  # by the clock; the process has 5 of computing
_PLACE = "\ue000the user's text\ue000"
_WORKER = Path(__file__).with_name("chat_template.py")
# The same packages as here and nothing else: -I keeps the current folder and the environment's paths away.
_START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
)


def render(
    messages: Sequence[Mapping[str, Any]],
    template: str,
    add_generation_prompt: bool = True,
    *,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: object,
) -> str:
    """The text of a conversation under a template (a file's `tokenizer.chat_template`).

    messages: mappings with "role" and "content" (and whatever else the template reads). add_generation_prompt: end
    with the beginning of the assistant's turn. tools: descriptions of functions the model may call. variables: other
    switches that the template knows, such as enable_thinking. All of it as JSON has it. Takes about 0.2 s, for the
    process. Raises `ModelError` of one line when the template fails, runs longer than 5 s, takes more than
    1 GiB or writes more than 16 million characters.
    """
    known = {"add_generation_prompt": add_generation_prompt, "bos_token": bos_token, "eos_token": eos_token}
    known |= {"messages": messages, "tools": tools}
    try:
        request = json.dumps({"template": template, "variables": known | variables}, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"chat template: messages, tools and variables must be as JSON has them: {error}") from error
    command = [sys.executable, "-I", "-c", _START, json.dumps([p for p in sys.path if p]), str(_WORKER)]
    try:
        done = subprocess.run(command, input=request.encode("ascii"), capture_output=True, timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"tokenizer.chat_template failed: it ran for more than {MAX_SECONDS:g} s") from error
    except OSError as error:
        raise ModelError(f"tokenizer.chat_template failed: its process did not start: {error}") from error
    if done.returncode:
        raise ModelError(f"tokenizer.chat_template failed: {_end_of(done)}")
    answer: dict[str, str] = json.loads(done.stdout)
    if "error" in answer:
        raise ModelError(f"tokenizer.chat_template failed{answer['error']}")
    return answer["text"]


def chat_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids of a conversation's beginning: the user says `text`, the assistant is to answer.

    The format is the file's chat template, else ChatML. Control tokens written in the user's text stay text.
    Raises `ModelError` when the template fails.
    """
    template = tokenizer.chat_template
    if template is None:
        whole = CHATML.format(_PLACE)
    else:
        whole = render([{"role": "user", "content": _PLACE}], template)
    before, found, after = whole.partition(_PLACE)
    if not found or _PLACE in after:
        raise ModelError(
            "tokenizer.chat_template does not show the user's text once; give the whole prompt without --chat"
        )
    return [*tokenizer.encode(before), *_continue(tokenizer, text, False), *_continue(tokenizer, after, True)]


def _continue(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    """The tokens of text that does not begin the prompt: without the BOS that some files ask for."""
    bos = tokenizer.encode("")
    return tokenizer.encode(text, parse_special=special)[len(bos) :]


def _plain(value: Any) -> Any:
    """Mappings and sequences of other kinds than JSON knows."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a value is of type {type(value).__name__}")


def _end_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Why the process ended without an answer."""
    last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    if done.returncode in (-9, -24):  # SIGKILL, SIGXCPU: the limit of computing time
        return "it ran for more than 5 s, or out of memory"
    if "MemoryError" in last:
        return "it takes more than 1 GiB of memory"
    return f"its process ended with status {done.returncode}: {''.join(c for c in last[:200] if c.isprintable())}"
