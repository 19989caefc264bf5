"""What do the processes of a run tell each other before they meet? Through the store that torchrun gives them.

A process that is stopped, or killed with its node, tells nobody, and others would wait for it as long as nodes may
start apart. So each shows from its first moment on that it is there, and who waits looks whether others still do.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ..exchange.transport import PeerLost, exchanging
from .failure import FAILURE

WHERE: Final = "the agreement of the ranks before they meet"
LOOKS_S: Final = (0.001, 0.1)  # pauses between two looks, growing from the first to the second
SHOWN_S: Final = 5.0  # how often a process shows itself
GONE_S: Final = 60.0  # without being shown after which one that was there has gone: longer than a machine stalls
MOST_SHOWN: Final = 8  # ranks in a sentence


class StorePeers:
    """The ``world`` processes that share ``store``; each waits ``timeout_s`` for the others' answers, if none has gone
    by what ``presences`` sees."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float, presences: Presences | None = None) -> None:
        self.rank, self.world, self._presences = rank, world, presences
        self._store, self._timeout_s, self._rounds = store, timeout_s, 0

    def gathered(self, mine: str | None, timeout_s: float = 0.0) -> Sequence[str | None]:
        """Return what each gave; wait ``timeout_s`` longer for them than for an answer.

        Rank 0 reads what all gave and writes it in one piece, equal words once, so that what goes through the store
        grows with the ranks and not with their square. PeerLost when some don't come, or when any rank has failed.
        """
        keys, every = [f"told/{self._rounds}/{rank}" for rank in range(self.world)], f"told/{self._rounds}"
        self._rounds += 1
        with exchanging(WHERE):
            self._store.set(keys[self.rank], json.dumps(mine))
            self._await(keys, [every] if self.rank else keys, self._timeout_s + timeout_s)
            if not self.rank:
                given = [words.decode() for words in self._store.multi_get(keys)]
                places = {words: place for place, words in enumerate(dict.fromkeys(given))}
                self._store.set(every, json.dumps([list(places), [places[words] for words in given]]))
            told, whose = json.loads(self._store.get(every))
            return [json.loads(told[place]) for place in whose]

    def _await(self, keys: Sequence[str], awaited: list[str], timeout_s: float) -> None:
        for _ in looks(timeout_s):
            if self._store.check(awaited):
                return
            if self._store.check([FAILURE]) and not self._store.check(awaited):  # it may have failed by these
                raise PeerLost(f"{WHERE}: another rank has failed")
            if self._presences is not None:
                self._presences.check(WHERE, lambda: [0] if self.rank else self._missing(keys))  # which looks for all
        raise PeerLost(f"{WHERE}: timed out after {timeout_s:g} s", *self._missing(keys))

    def _missing(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]


def looks(seconds: float) -> Iterator[None]:
    """Yield now, and with growing pauses until ``seconds`` have passed, and once more then."""
    until, pause = time.monotonic() + seconds, LOOKS_S[0]
    while (left := until - time.monotonic()) > 0:
        yield
        time.sleep(min(pause, left))
        pause = min(2 * pause, LOOKS_S[1])
    yield


# --- liveness ---------------------------------------------------------------------------------------------------------


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
