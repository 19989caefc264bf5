"""How do sums go on beside passes? On a thread, which waits for each exchange and begins the next one.

A sum over replicas is several exchanges, each begun when the one before is through, and nothing tells a process that
works at something else that it is. Between hosts threads may exchange, each in a group of its own; what they note is
told when the sum is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

from torch import Tensor

from ..measure.recorder import Recorder
from ..measure.times import Activity
from .exchanges import Exchange, Told, nobody


class LateNotes:
    """Notes from a thread, of which the recorder hears when :meth:`tell` is called on its own."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._kept: deque[tuple[Activity, int, int, Any, Any]] = deque()

    def mark(self) -> Any:
        """Return a mark at this moment."""
        return self._recorder.mark()

    def note(self, activity: Activity, stage: int, microbatch: int, start: Any) -> None:
        """Keep what has just ended."""
        self._kept.append((activity, stage, microbatch, start, self.mark()))

    def tell(self) -> None:
        """Tell the recorder."""
        while self._kept:
            self._recorder.note(*self._kept.popleft())


class Beside:
    """Does what ``exchange`` does, whose sums are waited for on a thread as soon as they have begun.

    What goes wrong there is raised where the sum is waited for.
    """

    def __init__(self, exchange: Exchange, notes: LateNotes) -> None:
        self._exchange, self._notes = exchange, notes
        self.parts = exchange.parts
        self._there = [Event() for _ in self.parts]
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def begin(self, version: int) -> None:
        """Begin with the gradients from which ``version`` will be made, and the thread."""
        for event in self._there:
            event.clear()
        self._exchange.begin(version)
        self._thread = Thread(target=self._sum, name="sum of gradients", daemon=True)
        self._thread.start()

    def _sum(self) -> None:
        try:
            self._exchange.complete(lambda index: self._there[index].set())
        except Exception as error:
            self._error = error
        for event in self._there:  # if only to say that nothing more will come
            event.set()

    def complete(self, told: Told = nobody) -> None:
        """Wait for all sums."""
        self._join()
        for index in range(len(self.parts)):
            told(index)

    def drop(self) -> None:
        """Wait for all sums."""
        self._join()
        self._exchange.drop()

    def answered(self) -> list[Tensor]:
        """Return of the summed gradient what this replica answers for."""
        return self._exchange.answered()

    def ready(self, index: int) -> None:
        """Wait until these parts can be stepped."""
        self._there[index].wait()
        if index == len(self.parts) - 1 or self._error is not None:
            self._join()
        self._notes.tell()
        self._exchange.ready(index)

    def stepped(self, index: int) -> None:
        """Go on when they have been stepped."""
        self._exchange.stepped(index)

    def scratch(self) -> Iterator[Tensor]:
        """Yield the memory that is used beside weights and gradient."""
        return self._exchange.scratch()

    def _join(self) -> None:
        """Wait for the thread; raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._notes.tell()
        if self._error is not None:
            raise self._error
