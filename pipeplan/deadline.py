"""When must a search be over? The caller's clock, which every long loop asks before it goes on.

Whoever searches catches :class:`OutOfTime` and answers with the best that it has so far. Long loops are in many places,
and what reads, sums up or validates has none that asks; so a search runs under :meth:`Deadline.insist`, too.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

from .errors import PipeplanError

SLACK_S = 0.3  # for those that ask to notice first
AGAIN_S = 0.5  # what was raised in a destructor, say, is lost


class OutOfTime(PipeplanError):
    """The time limit came while something was still being searched; nothing is known of what was left."""

    def __init__(self, text: str = "the time limit came before there was an answer") -> None:
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class Deadline:
    """``remaining_s`` tells how many seconds are left. All deadlines are equal: they are no part of what is asked."""

    remaining_s: Callable[[], float] = field(default=lambda: inf, compare=False, repr=False)

    def __reduce__(self) -> tuple[Callable[[float], Deadline], tuple[float]]:
        """Another process has the same deadline, by the clock on the wall."""
        return _until, (time.time() + self.remaining_s(),)

    @staticmethod
    def within(seconds: float) -> Deadline:
        """Return the deadline ``seconds`` from now."""
        end = time.monotonic() + seconds
        return Deadline(lambda: end - time.monotonic())

    def part(self, share: int) -> Deadline:
        """Return the deadline when this share of what is left now has passed."""
        left = self.remaining_s()
        if left == inf or share == 1:
            return self
        end = left - left / share
        return Deadline(lambda: self.remaining_s() - end)

    def of_looks(self, most: int) -> Deadline:
        """Return this deadline, or the one that has passed when it was looked at so often, if sooner: equal searches
        look equally often, on a busy machine as on any."""
        looks = count(1)
        return Deadline(lambda: self.remaining_s() if next(looks) <= most else 0.0)

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

    @contextmanager
    def insist(self) -> Iterator[None]:
        """Raise OutOfTime in what runs within, wherever it is, :data:`SLACK_S` behind the deadline.

        By the process's one alarm, so in its main thread alone, and between two steps of Python: one call of numpy or
        of a solver ends first. An alarm that was set before is set again afterwards.
        """
        left = self.remaining_s()
        if left == inf or threading.current_thread() is not threading.main_thread():
            yield
            return
        within = True

        def ring(*_: Any) -> None:
            if within and self.passed and not _leaving():
                raise OutOfTime

        handler, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
        before_s, again_s = signal.setitimer(signal.ITIMER_REAL, max(left, 0.0) + SLACK_S, AGAIN_S)
        try:
            try:
                yield
            finally:
                within = False
        finally:
            rest_s = max(1e-3, before_s - (time.monotonic() - began)) if before_s else 0.0
            signal.setitimer(signal.ITIMER_REAL, rest_s, again_s)
            signal.signal(signal.SIGALRM, handler)


def _until(end_s: float) -> Deadline:
    return NEVER if end_s == inf else Deadline.within(end_s - time.time())


def _leaving() -> bool:
    """Whether what ends the command, or the search, is on its way up already, through what cleans up."""
    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, OutOfTime) or not isinstance(error, Exception):
            return True
        error = error.__context__
    return False


NEVER = Deadline()
