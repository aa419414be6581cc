"""Runs the command line inside the test's process."""

from __future__ import annotations

import pytest
from command_line import Run

from vkbackend import cli


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process: (status, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = cli.main([str(a) for a in arguments])
        out = capsys.readouterr()
        return status, out.out, out.err

    return call
