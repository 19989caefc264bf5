"""What ends a rank of torchrun, whatever it waits for? A signal, a failure elsewhere, or that nobody is left to end it.

Ranks wait for others, for GPUs and for the user's own code in places where Python runs no handler and nothing looks at
the store. So a thread does. It ends the process by itself only where that doesn't end in time for what it is told.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, NoReturn

from ...errors import BY_SIGNAL, PipeplanError
from ...names import SENTENCE, shown

POLL_S: Final = 0.5  # how often the thread looks
LAST_LOOK_S: Final = 5.0  # for which a store may keep waiting who has nothing more to ask of it
PATIENCE_S: Final = 4.0  # for which a rank may end by itself: longer than it takes to hear of a root cause
TELLING_S: Final = (
    20.0  # of the 30 that torchrun gives, for which a store may keep waiting who has no more than a signal to tell
)
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TORCHRUN: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # the variables that torchrun sets for a rank
AGENT: Final = "TORCHELASTIC_RUN_ID"  # where the parent is torchrun's agent


class Watch:
    """Watches over one process, whose :data:`SIGNALS` it takes if it is made on the main thread.

    ``ask`` is called by a signal instead of ending, where there is one; ``tell_signal`` tells the others of a signal
    that ends this process, and returns what had gone wrong before, if anything had. While ``telling`` this process is
    telling why it ends already.
    """

    def __init__(self) -> None:
        self.ask: Callable[[], None] | None = None
        self.tell_signal: Callable[[int], PipeplanError | None] | None = None
        self.telling = False
        self.told = False  # the others know why this process ends
        self.over = threading.Event()  # nobody waits for this process any more
        self._parent = os.getppid() if AGENT in os.environ else None
        self._process = os.getpid()
        self._handlers: dict[signal.Signals, Any] = {}
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._closed = False
        self._lookers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, _woken)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.release()
        self._closed = True
        with suppress(BlockingIOError):
            os.write(self._writer, b"\0")
        self._thread.join()
        for thread in self._lookers:  # one that is in a store when Python ends would abort the process
            thread.join(LAST_LOOK_S)
        os.close(self._reader)
        os.close(self._writer)

    def release(self) -> None:
        """Give the signals back."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if self._process != os.getpid() else handler)
        self._handlers = {}

    def look(self, elsewhere: Callable[[], PipeplanError | None]) -> None:
        """Let a thread of its own ask what has gone wrong ``elsewhere``, None while all is well, for that may wait."""
        self._lookers.append(threading.Thread(target=self._look, args=(elsewhere,), daemon=True))
        self._lookers[-1].start()

    def _look(self, elsewhere: Callable[[], PipeplanError | None]) -> None:
        while not self.over.wait(POLL_S):
            error = None if self.telling else elsewhere()
            if error is not None:
                if not self.over.wait(PATIENCE_S):
                    end(f"error: {shown(str(error), SENTENCE)}", error.exit_code)
                return

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], [], [], POLL_S)
            numbers = {*os.read(self._reader, 64)} & self._handlers.keys() if ready else set()
            if self._closed:
                return
            if numbers:  # others have handlers of their own
                self._signalled(max(numbers))
            elif self._parent not in (None, os.getppid()) and not self.over.is_set():
                self._end_by("error: torchrun has gone, which started this process", signal.SIGTERM)

    def _signalled(self, number: int) -> None:
        if self.telling or self.told:
            return
        if self.ask is not None:
            self.ask()
            return
        name = signal.Signals(number).name
        self._end_by("interrupted" if number == signal.SIGINT else f"ended by {name}", number)

    def _end_by(self, words: str, number: int) -> NoReturn:
        code, causes = BY_SIGNAL + number, list[PipeplanError | None]()

        def tell() -> None:
            with suppress(Exception):  # there is nothing left to be done about it
                causes.append(None if self.tell_signal is None else self.tell_signal(number))

        if not self.over.is_set():
            teller = threading.Thread(target=tell, daemon=True)
            teller.start()
            teller.join(TELLING_S)
        for cause in causes:
            if cause is not None:
                words, code = f"error: {shown(str(cause), SENTENCE)}", cause.exit_code
        end(words, code)


_current: Watch | None = None


@contextmanager
def watching() -> Iterator[Watch]:
    """Within the context a :class:`Watch` watches over this process: a new one, or the one that there is."""
    global _current
    if _current is not None:
        yield _current
        return
    try:
        with Watch() as _current:
            yield _current
    finally:
        _current = None


def end(words: str, code: int) -> NoReturn:
    """End this process now, with ``words`` on standard error; the main thread may hold any lock, its streams' too."""
    with suppress(OSError):
        os.write(2, f"{words}\n".encode(errors="replace"))
    os._exit(code)


def _woken(_: int, __: FrameType | None) -> None:
    """Do nothing: what the system tells Python of a signal reaches the thread at once, this only between two steps."""


def _leave_to_parent() -> None:
    """Let a process that was forked from one that is watched over have signals of its own."""
    if _current is not None:
        _current.release()


os.register_at_fork(after_in_child=_leave_to_parent)
