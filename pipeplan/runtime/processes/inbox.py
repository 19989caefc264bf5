"""What have the processes of a run said? A thread for each pipe hears it out: nobody waits for half a message."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


class Gone:
    """In place of a message: the process has closed its pipe, as it does when it ends."""


class Inbox:
    """Messages from ``pipes`` in the order in which they are complete; a process may be stopped while it writes one."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._messages: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        for number, pipe in enumerate(pipes):
            threading.Thread(target=self._hear, args=(number, pipe), daemon=True).start()

    def _hear(self, number: int, pipe: Connection) -> None:
        message: Any = None
        while not isinstance(message, Gone):
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                message = Gone()
            self._messages.put((number, message))

    def next(self, seconds: float) -> tuple[int, Any] | None:
        """Return the number of a pipe and a message from it, or None if there is none within ``seconds``."""
        with suppress(queue.Empty):
            return self._messages.get(timeout=seconds)
        return None
