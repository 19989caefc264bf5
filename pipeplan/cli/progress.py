"""How does a long search show that it lives? By one line on standard error: redrawn on a terminal, rare elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from ..planner.incumbent import Status

QUIET_S = 1.0  # what takes less needs no progress on a terminal
PATIENT_S = 5.0  # nor elsewhere
POLL_S = 0.2
NEWS_S = 2.0  # between two lines where they aren't redrawn, if anything is new
ALIVE_S = 15.0  # and if nothing is


class LiveLine:
    """Says what a search is doing while it runs in a ``with`` block: phase, candidates, best, bound, seconds.

    A thread reads the ``status``, so that also one long integer program or table shows its seconds; the search itself
    never waits, and no plan depends on it. Afterwards a line says what the time was spent on.
    """

    def __init__(self, status: Status, stream: TextIO | None = None) -> None:
        self._status = status
        self._stream = sys.stderr if stream is None else stream
        self._redrawn = self._stream is not None and self._stream.isatty()
        self._quiet_s = QUIET_S if self._redrawn else PATIENT_S
        self._best = ""
        self._began = self._ticked = self._wrote = time.perf_counter()
        self._shown: tuple[str, str] | None = None
        self._spent: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def best(self, line: str) -> None:
        """Take what a search says of its best plan."""
        self._best = line

    def __enter__(self) -> LiveLine:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        now = time.perf_counter()
        self.tick(now, silent=True)
        if now - self._began > self._quiet_s:
            self._write(self.spent() if kind is None else "", last=True)

    def tick(self, now: float, silent: bool = False) -> None:
        """Count the seconds since the last tick to the phase, and write a line if it is time for one."""
        phase = self._status.phase
        self._spent[phase] = self._spent.get(phase, 0.0) + now - self._ticked
        self._ticked = now
        if silent or now - self._began < self._quiet_s:
            return
        news = (phase, self._best) != self._shown
        if self._redrawn or now - self._wrote > (NEWS_S if news else ALIVE_S) or self._shown is None:
            self._shown, self._wrote = (phase, self._best), now
            looked = self._status.candidates
            counted = f", {looked} candidates" if looked else ""
            self._write(f"{now - self._began:6.1f} s  {phase}{counted}: {self._best or self._nothing_yet()}")

    def _nothing_yet(self) -> str:
        floor = self._status.floor_ns
        return "no plan yet" + ("" if floor is None else f", no plan is below {floor / 1e6:.3f} ms")

    def spent(self) -> str:
        """Return what the time was spent on, in words."""
        parts = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self._spent.items() if seconds >= POLL_S)
        return f"spent on {parts}; {self._status.candidates} candidates" if parts else ""

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            self.tick(time.perf_counter())

    def _write(self, line: str, last: bool = False) -> None:
        if self._redrawn:
            width = shutil.get_terminal_size().columns
            line = f"\r\x1b[2K{line[: width - 1]}" + ("\n" if last and line else "")
        elif line:
            line += "\n"
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError, AttributeError):  # nobody can be told
            self._over.set()
