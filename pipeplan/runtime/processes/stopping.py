"""Where does a run stop after a signal? All ranks before the same mini-batch, the first that none of them has begun.

A rank that began a mini-batch would wait for ever for one that refused it. So which may be begun is agreed: through
shared memory among processes of one machine, through a store among those that torchrun started.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from ...errors import RunStopped
from ..exchange.transport import PeerLost
from ..measure.report import RunReport
from .own_processes import ENDING

NEVER: Final = 2**62
POLL_S: Final = 0.5  # how often a rank looks whether another one has been asked to stop
GO_S: Final = 5.0  # how long a rank that has finished waits for its own thread


def stopped_after(step: int, folder: Path | None, report: RunReport | None) -> RunStopped:
    """Return what to raise when a run was asked to stop, which has a ``report`` on rank 0.

    It has left a checkpoint in ``folder``, if there is one.
    """
    left = "" if folder is None else f"; its checkpoint is in {folder}"
    return RunStopped(f"stopped after update {step}{left}", report=report)


@contextmanager
def asked(stop: Callable[..., None], stops: bool) -> Iterator[None]:
    """Let SIGTERM, SIGHUP or SIGINT ``stop`` the run, unless it is ignored, if it ``stops`` in order.

    The first one alone; the second acts as it would have.
    """
    if not stops or threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}

    def act(*_: Any) -> None:
        stop()
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, act)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StoreStop:
    """The agreement of ``rank`` with ``world - 1`` others through ``store``, whichever of them is asked to stop.

    Nothing is asked of the store while a mini-batch begins. A thread looks for the word to stop; then every rank lets
    none begin until all have told how far they are. This waits for threads alone, not for the pipeline, so it ends;
    at most ``timeout_s`` long if a rank has gone. ``first`` is the run's first mini-batch, which is always done.
    """

    def __init__(self, store: Any, rank: int, world: int, first: int, timeout_s: float) -> None:
        self._store, self._rank, self._world, self._first = store, rank, world, first
        self._timeout = timedelta(seconds=timeout_s)
        self._changed = threading.Condition()
        self._begun, self._limit = -1, NEVER
        self._deciding = self._asked = False
        self._failed: str | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def limit(self) -> int:
        """The first mini-batch that may not be begun."""
        return self._limit

    def may_begin(self, minibatch: int) -> bool:
        """Whether ``minibatch`` may be begun; if so, it counts as begun. PeerLost when the ranks cannot agree."""
        with self._changed:
            self._changed.wait_for(lambda: not self._deciding)
            if self._failed is not None:
                raise PeerLost(f"the agreement on where to stop: {self._failed}")
            if minibatch >= self._limit:
                return False
            self._begun = max(self._begun, minibatch)
            return True

    def ask(self, *_: Any) -> None:
        """Stop; for a signal handler, which may interrupt anything and so waits for no lock."""
        self._asked = True

    def close(self) -> None:
        """Tell the others that this rank begins nothing more."""
        self._finished.set()
        with suppress(RuntimeError):  # the store has gone, and with it whoever would ask
            self._tell()
        self._thread.join(GO_S)

    def _watch(self) -> None:
        try:
            while not self._finished.wait(POLL_S):
                if self._asked:
                    self._store.set("stop", "asked")
                if self._asked or self._store.check(["stop"]):
                    self._agree()
                    return
        except RuntimeError as error:  # no answer, or the store has gone
            with self._changed:
                self._failed = str(error).partition("\n")[0]
                self._deciding = False
                self._changed.notify_all()

    def _agree(self) -> None:
        with self._changed:
            self._deciding = True
        self._tell()
        keys = [_key(rank) for rank in range(self._world)]
        self._store.wait(keys, self._timeout)
        limit = max(self._first, *map(int, self._store.multi_get(keys))) + 1
        with self._changed:
            self._limit = limit
            self._deciding = False
            self._changed.notify_all()

    def _tell(self) -> None:
        self._store.set(_key(self._rank), str(self._begun))


def _key(rank: int) -> str:
    return f"begun/{rank}"
