"""What is going on? A task writes it, and whoever watches reads it, from another thread. No result depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Status:
    """What a task is doing: its ``phase`` in words, or what says them when they are read; without any nothing is shown.

    Of a search also how many allocations were looked at, its ``best`` plan in words, the ns below which there is no
    plan, and on how many allocations the integer program's solver failed. ``part`` says which of several tasks it is.
    ``notes`` are sentences to show beside what was found.
    """

    phase: str | Callable[[], str] = "search"
    part: str = ""
    best: str = ""
    candidates: int = 0
    floor_ns: int | None = None
    unsolved: int = 0
    notes: list[str] = field(default_factory=list)

    def say(self, phase: str | Callable[[], str]) -> None:
        """Take what begins now."""
        self.phase = phase

    def improved(self, best: str) -> None:
        """Take what a search says of its best plan."""
        self.best = best

    @property
    def words(self) -> str:
        """The phase in words."""
        return self.phase if isinstance(self.phase, str) else self.phase()

    @property
    def line(self) -> str:
        """All there is to say, in one line; nothing without a phase."""
        words = ", ".join(filter(None, (self.part, self.words)))
        if not words:
            return ""
        counted = f", {self.candidates} candidates" if self.candidates else ""
        floor = "" if self.floor_ns is None else f", no plan is below {self.floor_ns / 1e6:.3f} ms"
        begun = f"no plan yet{floor}" if counted or floor else ""
        found = self.best or begun
        return f"{words}{counted}{': ' if found else ''}{found}"
