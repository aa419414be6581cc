"""Chat templates: from a list of messages to the text that the model was trained to continue.

A template is a Jinja program that comes with a file from anywhere, so it runs in Jinja's immutable sandbox: it sees
the messages and the helpers below, nothing of this process. The helpers are those that Hugging Face's templates use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from vkbackend.errors import ModelError


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
    switches that the template knows, such as enable_thinking. Raises `ModelError` of one line when it fails.
    """
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
            tools=tools,
            **variables,
        )
    except Exception as error:  # the template's code may raise anything
        line = getattr(error, "lineno", None)
        where = f" at line {line}" if line else ""
        what = " ".join(str(error).split()) or "no message"
        raise ModelError(f"tokenizer.chat_template failed{where}: {type(error).__name__}: {what[:300]}") from error


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
