"""How do sums go on beside passes? On a thread between hosts, in a stream of its own on a GPU.

A sum over replicas is several exchanges, each begun when the one before is through, and nothing tells a process that
works at something else that it is. Between hosts a thread may wait for each and begin the next, in a group of its own.
On a GPU all are queued at once, behind each other and behind the gradient, and events tell of each part. What is noted
is told when the sum is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from ...device import new_stream
from ...measure.recorder import Recorder
from ...measure.times import Activity
from .exchanges import Exchange, Told, nobody


class LateNotes:
    """Notes from elsewhere, of which the recorder hears when :meth:`tell` is called in its own place."""

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


class Way(Protocol):
    """Where the sums of an exchange are waited for while the rank does something else."""

    def begin(self, exchange: Exchange, version: int) -> None:
        """Begin with the gradients from which ``version`` will be made, and with waiting for all sums."""

    def wait(self, part: int) -> None:
        """Wait for the sums of one of the exchange's parts, or until something has gone wrong."""

    def join(self) -> None:
        """Wait for all sums, and raise what has gone wrong."""


class OnThread:
    """For exchanges between hosts."""

    def __init__(self, parts: int) -> None:
        self._there = [Event() for _ in range(parts)]
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def begin(self, exchange: Exchange, version: int) -> None:
        """Begin, and start the thread."""
        for event in self._there:
            event.clear()
        exchange.begin(version)
        self._thread = Thread(target=self._sum, args=(exchange,), name="sum of gradients", daemon=True)
        self._thread.start()

    def _sum(self, exchange: Exchange) -> None:
        try:
            exchange.complete(lambda part: self._there[part].set())
        except Exception as error:
            self._error = error
        for event in self._there:  # if only to say that nothing more will come
            event.set()

    def wait(self, part: int) -> None:
        """Let the host wait."""
        self._there[part].wait()
        if self._error is not None:
            self.join()

    def join(self) -> None:
        """Wait for the thread; raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error


class OnStream:
    """For exchanges between GPUs: the host waits for nothing, and of the passes' stream what comes behind a wait."""

    def __init__(self, parts: int, device: torch.device) -> None:
        self._device, self._stream = device, new_stream(device)
        self._there = [torch.cuda.Event() for _ in range(parts)]  # type: ignore[no-untyped-call]

    def begin(self, exchange: Exchange, version: int) -> None:
        """Queue all of it, behind what the passes' stream has been given so far."""
        assert self._stream is not None, "a GPU has streams"
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            exchange.begin(version)
            exchange.complete(lambda part: self._there[part].record())

    def wait(self, part: int) -> None:
        """Let what is queued from here on wait."""
        self._there[part].wait()

    def join(self) -> None:
        """Let it wait for all."""
        for event in self._there:
            event.wait()


class Beside(Exchange):
    """Does what ``exchange`` does, whose sums are waited for on a ``way`` of their own as soon as they have begun.

    What goes wrong there is raised where the sum is waited for.
    """

    sums = True

    def __init__(self, exchange: Exchange, notes: LateNotes, way: Way) -> None:
        self._exchange, self._late, self._way = exchange, notes, way
        self.parts = exchange.parts

    def begin(self, version: int) -> None:
        """Begin with the gradients from which ``version`` will be made."""
        self._way.begin(self._exchange, version)

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
        self._way.wait(index)
        if index == len(self.parts) - 1:
            self._join()
        self._late.tell()
        self._exchange.ready(index)

    def stepped(self, index: int) -> None:
        """Go on when they have been stepped."""
        self._exchange.stepped(index)

    def scratch(self) -> Iterator[Tensor]:
        """Yield the memory that is used beside weights and gradient."""
        return self._exchange.scratch()

    def _join(self) -> None:
        try:
            self._way.join()
        finally:
            self._late.tell()
