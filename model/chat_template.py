"""The process in which a chat template runs: `python chat_template.py < request > answer`, both JSON.

A template is a program from anywhere. Jinja's sandbox keeps it away from this machine, but not from endless loops and
endless text, so `chat.render` runs it here, where time and memory have a limit. Nothing of vkbackend is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

CPU_SECONDS = 5
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 16_000_000


def render_here(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a template in Jinja's immutable sandbox. Raises whatever the template's code raises."""
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
    return environment.from_string(template).render(variables)


def answer_of(template: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """{"text": ...}, or {"error": one line} when the template fails."""
    try:
        text = render_here(template, variables)
        if len(text) > MAX_CHARACTERS:
            return {"error": f": it wrote {len(text)} characters; at most {MAX_CHARACTERS} are allowed"}
        return {"text": text}
    except Exception as error:  # the template's code may raise anything
        line = getattr(error, "lineno", None)
        where = f" at line {line}" if line else ""
        what = " ".join(str(error).split()) or "no message"
        what = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in what[:300])
        return {"error": f"{where}: {type(error).__name__}: {what}"}


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _limit_this_process() -> None:
    if sys.platform == "win32":
        return  # the caller's clock is the only limit there
    import resource

    for kind, limit in ((resource.RLIMIT_CPU, CPU_SECONDS), (resource.RLIMIT_AS, MEMORY_BYTES)):
        try:
            resource.setrlimit(kind, (limit, limit))
        except (OSError, ValueError):
            pass  # a system that has no such limit, or a lower one


if __name__ == "__main__":
    _limit_this_process()
    request = json.loads(sys.stdin.buffer.read())
    sys.stdout.buffer.write(json.dumps(answer_of(request["template"], request["variables"])).encode("ascii"))
