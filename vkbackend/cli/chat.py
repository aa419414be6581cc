"""`--chat`: one turn of a user, written in the format that the model was trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vkbackend.errors import ModelError

if TYPE_CHECKING:
    from vkbackend.model.tokenizer import Tokenizer

CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # of files without a template
_PLACE = "\ue000the user's text\ue000"


def chat_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids of a conversation's beginning: the user says `text`, the assistant is to answer.

    The format is the file's chat template, else ChatML. Control tokens written in the user's text stay text.
    Raises `ModelError` when the template fails.
    """
    whole = CHATML.format(_PLACE) if tokenizer.chat_template is None else _render(tokenizer.chat_template)
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


def _render(template: str) -> str:
    try:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ModelError(
            f"--chat needs the package jinja2 for this model's template: pip install jinja2 ({error})"
        ) from error

    def fail(message: str) -> Any:
        raise TemplateError(message)

    # A template comes with a file from anywhere: it must not reach this process.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = fail
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": _PLACE}], add_generation_prompt=True, bos_token="", eos_token=""
        )
    except Exception as error:
        raise ModelError(f"tokenizer.chat_template of this model failed: {type(error).__name__}: {error}") from error
