"""Which ranks that torchrun started were there, and have gone without a word, while others wait to meet them?

A process that is stopped, or killed with its node, tells nobody, and others would wait for it as long as nodes may
start apart. So each shows from its first moment on that it is there, and who waits looks whether others still do.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ..exchange.transport import PeerLost

SHOWN_S: Final = 5.0  # how often a process shows itself
GONE_S: Final = 60.0  # without being shown after which one that was there has gone: longer than a machine stalls
MOST_SHOWN: Final = 8  # ranks in a sentence


@contextmanager
def present(store: Callable[[], Any], rank: int, every_s: float = SHOWN_S) -> Iterator[None]:
    """Show within the context, in a thread, that ``rank`` is there; ``store()`` returns a connection of its own.

    What can't connect shows nothing: whoever needs the store finds out, and says so.
    """
    over = threading.Event()
    shown = (store, rank, every_s, over)
    threading.Thread(target=_show, args=shown, name=_key(rank), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _show(store: Callable[[], Any], rank: int, every_s: float, over: threading.Event) -> None:
    mine, count = f"{os.getpid()} {secrets.token_hex(4)}", 0
    try:
        connection = store()
        while not over.is_set():
            connection.set(_key(rank), f"{mine} {count}")
            count += 1
            over.wait(every_s)
    except Exception:  # the store has gone, or there is none
        return


class Presences:
    """What one process sees of others in ``store``; ``clock`` gives seconds."""

    def __init__(self, store: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock, self._next = store, clock, clock() + SHOWN_S
        self._seen: dict[int, tuple[bytes, float]] = {}

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """Return those of ``ranks`` that were there, and have not shown themselves for so long."""
        found = []
        for rank in ranks:
            if not self._store.check([_key(rank)]):
                continue
            shown, now = self._store.get(_key(rank)), self._clock()
            if rank not in self._seen or self._seen[rank][0] != shown:
                self._seen[rank] = shown, now
            elif now - self._seen[rank][1] >= GONE_S:
                found.append(rank)
        return found

    def check(self, where: str, ranks: Callable[[], Iterable[int]]) -> None:
        """Raise PeerLost, which says ``where`` they are waited for, if some of ``ranks()`` have gone.

        Looks no more often than they show themselves.
        """
        if self._clock() < self._next:
            return
        self._next = self._clock() + SHOWN_S
        if gone := self.gone(ranks()):
            raise PeerLost(f"{where}: {listed(gone)} gave no sign of life for {GONE_S:g} s", *gone)


def listed(ranks: Sequence[int]) -> str:
    """Return what to call ``ranks`` in a sentence."""
    shown = ", ".join(map(str, ranks[:MOST_SHOWN])) + (", ..." if len(ranks) > MOST_SHOWN else "")
    return f"rank{'s'[: len(ranks) > 1]} {shown}"


def _key(rank: int) -> str:
    return f"present/{rank}"
