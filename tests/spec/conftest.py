"""The demo model on the NumPy device, shared by the tests of text generation."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from vkbackend.cli.common import demo_model
from vkbackend.errors import ModelError
from vkbackend.model.loader import Model, load

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "models" / "demo-qwen35-mtp-q8_0.gguf"


def demo_path() -> Path:
    """The demo model in the package, else beside the checkout."""
    try:
        return demo_model()
    except ModelError:
        if not BESIDE.exists():
            pytest.skip("the demo model is not here")
        return BESIDE


@pytest.fixture(scope="session")
def demo() -> Model:
    return load(demo_path(), device="numpy")


@pytest.fixture
def seed() -> int:
    """A fresh seed, shown when the test fails."""
    value = secrets.randbelow(1 << 31)
    print(f"seed {value}")
    return value
