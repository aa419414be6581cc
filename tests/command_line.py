"""What the `run` fixture of tests/cli gives: a function of a command line's words, (status, stdout, stderr)."""

from __future__ import annotations

from collections.abc import Callable

Run = Callable[..., tuple[int, str, str]]
