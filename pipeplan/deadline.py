"""When must a search be over? The caller's clock, which every long loop asks before it goes on.

Whoever searches catches :class:`OutOfTime` and answers with the best that it has so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from .errors import PipeplanError


class OutOfTime(PipeplanError):
    """The time limit came while something was still being searched; nothing is known of what was left."""

    def __init__(self) -> None:
        super().__init__("the time limit came before there was an answer")


@dataclass(frozen=True, slots=True)
class Deadline:
    """``remaining_s`` tells how many seconds are left. All deadlines are equal: they are no part of what is asked."""

    remaining_s: Callable[[], float] = field(default=lambda: inf, compare=False, repr=False)

    @staticmethod
    def within(seconds: float) -> Deadline:
        """Return the deadline ``seconds`` from now."""
        end = time.monotonic() + seconds
        return Deadline(lambda: end - time.monotonic())

    def later(self, seconds: float) -> Deadline:
        """Return the deadline so many seconds behind this one."""
        return Deadline(lambda: self.remaining_s() + seconds)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining_s() <= 0

    def check(self, needed_s: float = 0.0) -> None:
        """Raise OutOfTime when no time is left, or less than is needed; takes less than a microsecond."""
        if self.remaining_s() <= needed_s:
            raise OutOfTime


NEVER = Deadline()
