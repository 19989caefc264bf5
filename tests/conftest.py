"""Fixtures that several test files use."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

import pytest

os.environ["COLUMNS"] = "120"  # as wide as no terminal, or one, would happen to be

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pipeplan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process: ``pipeplan("plan", ..., stdin="")`` gives (exit code, stdout, stderr)."""
    from pipeplan.cli import main

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipeplan", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return run
