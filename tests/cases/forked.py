"""A process of a test's own, forked from the server of ranks: it has torch from the beginning."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from pipeplan.runtime.processes.own_processes import context_of

from .patience import SECONDS


def forked(code: str | Path, *arguments: object) -> CompletedProcess[str]:
    """Carry out Python, or a script, with its arguments; return how it ended and what it wrote."""
    with TemporaryDirectory() as folder:
        written = [Path(folder, name) for name in ("out", "err")]
        words = [str(code) if isinstance(code, Path) else "-c", *map(str, arguments)]
        process = context_of().Process(target=_main, args=(code, words, written))
        process.start()
        process.join(SECONDS)
        process.kill()
        assert process.exitcode is not None, f"{words} hangs"
        return CompletedProcess(words, process.exitcode, *(x.read_text() for x in written))


def _main(code: str | Path, words: list[str], written: list[Path]) -> None:
    for number, path in enumerate(written, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = words
    if isinstance(code, Path):
        runpy.run_path(str(code), run_name="__main__")
    else:
        exec(code, {"__name__": "__main__"})
