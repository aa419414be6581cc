"""Every place in the source that makes an error for a user, with its text: what docs/errors.md has to list."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("vkbackend", "model", "spec", "shaders")
KINDS = ("VkBackendError", "DeviceError", "ModelError", "ContextError", "UsageError")
MAKERS = ("fail", "error")  # methods that put the place before what they are given


@dataclass(frozen=True)
class Site:
    """One place: the error's class, or the method that makes it; `text` with {name} for what is filled in."""

    where: str  # file:line
    kind: str
    text: str

    @property
    def key(self) -> str:
        return key_of(self.text)


def key_of(text: str) -> str:
    """A text without the names of what is filled in, and with single blanks: by this, sites and rows are compared."""
    return " ".join(re.sub(r"\{[^{}]*\}", "{}", text).split())


def error_sites() -> Iterator[Site]:
    """All sites, file by file. Those that only pass on a text made elsewhere are left out."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and (kind := _kind(node.func)) and node.args:
                    text = " ".join(_text(a) for a in (node.args if kind not in MAKERS else node.args[-1:]))
                    if re.search(r"[a-z]{2}", re.sub(r"\{[^{}]*\}", "", text)):
                        yield Site(f"{path.relative_to(ROOT)}:{node.lineno}", kind, text)


def _kind(func: ast.expr) -> str:
    if isinstance(func, ast.Name):
        return func.id if func.id in KINDS else ""
    if isinstance(func, ast.Attribute) and func.attr in (*KINDS, *MAKERS):
        owner = func.value.id if isinstance(func.value, ast.Name) else ""
        return "" if owner in ("log", "parser") else func.attr
    return ""


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v.value) if isinstance(v, ast.FormattedValue) else _text(v) for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    names = [n.attr if isinstance(n, ast.Attribute) else n.id for n in ast.walk(node)
             if isinstance(n, ast.Attribute | ast.Name)]  # fmt: skip
    return "{" + (names[0] if names else "") + "}"
