"""How far has a clock run away from another? Clocks of GPUs and hosts differ by up to 50 us in a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .times import OpTime

WINDOW_NS: Final = 10**10  # in which the host waits for a GPU often enough to be told at once of something once


@dataclass(frozen=True, slots=True)
class Lag:
    """That what the one clock said happened ``at_ns`` was heard of ``late_ns`` later by the other."""

    at_ns: int
    late_ns: int


class Drift:
    """Sets a GPU's times right that were told by its own clock since it was compared with the host's.

    What the host hears of while it waits it hears of at once: the least lag of a window is what hearing takes, which
    stays, and what the clocks have run apart, which grows. Behind the last whole window it grows as it did before it.
    """

    def __init__(self, window_ns: int = WINDOW_NS) -> None:
        self._window_ns = window_ns
        self._least: Lag | None = None  # of the window at hand
        self._start: int | None = None
        self._begin = 0  # of the window at hand
        self._last: Lag | None = None  # of the last whole window
        self._grown_ns, self._rate = 0.0, 0.0  # by how much the lag has grown until then, and how fast

    def heard(self, at_ns: int, host_ns: int) -> None:
        """Note that the host heard at ``host_ns``, having waited for it, of what the GPU's clock puts ``at_ns``."""
        if self._start is None:
            self._start = self._begin = at_ns
        if at_ns - self._begin >= self._window_ns and self._least is not None:
            self._end(self._least)
            self._begin, self._least = at_ns, None
        if self._least is None or host_ns - at_ns < self._least.late_ns:
            self._least = Lag(at_ns, host_ns - at_ns)

    def right(self, at_ns: int) -> int:
        """Return the host's time of what the GPU's clock puts ``at_ns``."""
        if self._last is None:
            return at_ns
        return at_ns + round(self._grown_ns + self._rate * (at_ns - self._last.at_ns))

    def _end(self, found: Lag) -> None:
        last, self._last = self._last, found
        if last is None:
            return
        assert self._start is not None, "windows begin with what was heard"
        first = not self._rate
        self._rate = (found.late_ns - last.late_ns) / (found.at_ns - last.at_ns)
        if first:  # until the first window's least lag it has grown as well
            self._grown_ns = self._rate * (last.at_ns - self._start)
        self._grown_ns += found.late_ns - last.late_ns


@dataclass(frozen=True, slots=True)
class Compared:
    """At ``at_ns`` of a host's clock it lacked ``offset_ns`` to rank 0's."""

    offset_ns: int
    at_ns: int


def straightened(times: list[OpTime], before: Compared, after: Compared) -> list[OpTime]:
    """Return ``times`` that were told with the offset ``before`` as they are if it grew evenly to that ``after``."""
    grown, elapsed = after.offset_ns - before.offset_ns, after.at_ns - before.at_ns
    if not grown or elapsed <= 0:
        return times
    begin = before.at_ns + before.offset_ns

    def right(at_ns: int) -> int:
        return at_ns + grown * (at_ns - begin) // elapsed

    return [OpTime(t.activity, t.stage, t.microbatch, right(t.start_ns), right(t.end_ns)) for t in times]
