"""How does a command show that it lives? By one line on standard error: redrawn on a terminal, added elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

import click

from ..status import Status

QUIET_S = 0.7  # what takes less needs no line
EVERY_S = 1.3  # elsewhere than on a terminal: between two
POLL_S = 0.2
STATUS = "pipeplan.status"  # in the meta of contexts


def status() -> Status:
    """Return what the running command says of itself."""
    found: Status = click.get_current_context().meta.setdefault(STATUS, Status(""))  # nobody watches a completion
    return found


class LiveLine:
    """Shows a ``status`` and the seconds while a command runs in a ``with`` block.

    A thread reads it, so that also one long integer program or table shows its seconds; the command never waits.
    On a terminal whatever else is written there comes in the line's place; once standard output is, the command is
    done and the line gone. After a search a line says what the time was spent on.
    """

    def __init__(self, status: Status, stream: TextIO | None = None) -> None:
        self.status = status
        self._stream = sys.stderr if stream is None else stream
        self._redrawn = self._stream is not None and self._stream.isatty()
        self._began = self._ticked = self._wrote = time.perf_counter()
        self._spent: dict[str, float] = {}
        self._drawn = False
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._streams = sys.stdout, sys.stderr

    def __enter__(self) -> LiveLine:
        self._streams = sys.stdout, sys.stderr
        for name, first, there in (("stdout", self.end, True), ("stderr", self.clear, self._redrawn)):
            if there and getattr(sys, name) is not None:
                setattr(sys, name, _Beside(getattr(sys, name), first))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(kind is None)
        self._thread.join()
        sys.stdout, sys.stderr = self._streams

    def tick(self, now: float) -> None:
        """Count the seconds since the last tick to the phase, and write a line if it is time for one."""
        with self._lock:
            phase = self.status.phase
            if isinstance(phase, str):
                self._spent[phase] = self._spent.get(phase, 0.0) + now - self._ticked
            self._ticked = now
            line = self.status.line
            first = self._redrawn or self._wrote == self._began
            due = now - self._began >= QUIET_S if first else now - self._wrote >= EVERY_S
            if due and line and not self._over.is_set():
                self._wrote = now
                self._draw(f"{now - self._began:6.1f} s  {line}")

    def clear(self) -> None:
        """Take the line from the terminal, for something else to be written there."""
        with self._lock:
            if self._drawn:
                self._put("\r\x1b[2K")
                self._drawn = False

    def end(self, well: bool = True) -> None:
        """Show no line any more, but where all went ``well`` one of what a search took."""
        with self._lock:
            if not self._over.is_set():
                self._over.set()
                self.clear()
                if well and self.status.candidates and self._wrote > self._began:
                    self._put(f"{self.spent()}\n")

    def spent(self) -> str:
        """Return what the time was spent on, in words."""
        parts = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self._spent.items() if seconds >= POLL_S)
        return f"spent on {parts}; {self.status.candidates} candidates"

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            self.tick(time.perf_counter())

    def _draw(self, line: str) -> None:
        if self._redrawn:
            self._put(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")
            self._drawn = True
        else:
            self._put(f"{line}\n")

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError, AttributeError):  # nobody can be told
            self._over.set()


class _Beside:
    """A stream in whose place the line is, or whose reader it would disturb: ``first`` is called before each write."""

    def __init__(self, stream: Any, first: Callable[[], None]) -> None:
        self._stream, self._first = stream, first

    def write(self, text: str) -> int:
        """Write."""
        self._first()
        count: int = self._stream.write(text)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
