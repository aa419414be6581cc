"""Where fixtures are: the small choice in tests/fixtures, the rest in ../shared/fixtures where that exists."""

from __future__ import annotations

from pathlib import Path

import pytest

_ROOTS = (Path(__file__).parent / "fixtures", Path(__file__).resolve().parents[2] / "shared" / "fixtures")


def fixture(name: str) -> Path:
    """The path of a fixture file such as "gguf/dense-q8_0.gguf"; skips the test where it is not to be had."""
    for root in _ROOTS:
        if (root / name).is_file():
            return root / name
    pytest.skip(f"fixture {name} is in neither {' nor '.join(str(r) for r in _ROOTS)}")
