"""When would it have come over a slower link? One of a known rate, to see what a network does."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import Final

GIGA: Final = 10**9


def carried_ns(size: int, rate: int | None) -> int:
    """Return how long ``size`` bytes are under way at ``rate`` bytes per second; None is as fast as can be."""
    return 0 if rate is None else -(-size * GIGA // rate)


def wait_until(due_ns: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
    """Sleep until it is then by ``clock``."""
    while (early_ns := due_ns - clock()) > 0:
        time.sleep(early_ns / GIGA)


class EmulatedLink:
    """What a rank sends to others for sums goes over one link of ``rate`` bytes per second, one thing after the other.

    Bytes go when they can; who waits for them waits until they would have been there, too.
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._lock = Lock()
        self._free_ns = 0

    def due_ns(self, size: int) -> int:
        """Return when ``size`` bytes are through that are sent now, behind those before them."""
        with self._lock:
            self._free_ns = max(self._free_ns, time.monotonic_ns()) + carried_ns(size, self._rate)
            return self._free_ns
