"""How do several processes do what one would do in turn? Each task in one of its own, and results in their order.

What a task does depends on its arguments alone, never on how many processes there are or which is done first, so the
results are those of one process. A process has the modules of its task and no others, leaves no child behind and ends
when this one does, however that ends: its standard input closes then.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import wait
from typing import IO, Any, Generic, TypeVar, cast

from ...errors import PipeplanError

Result = TypeVar("Result")
START = "from pipeplan.planner.periodic.jobs import serve; serve()"


class Task(Generic[Result]):
    """``function(*arguments)`` in a process of its own, which begins at once; all of it can be pickled."""

    def __init__(self, function: Callable[..., Result], *arguments: Any) -> None:
        asked = pickle.dumps((function, arguments))
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is this process's affair
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer
            self._process.stdin.write(asked)
            self._process.stdin.flush()

    @property
    def answer(self) -> IO[bytes]:
        """Where its result comes."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def answers(self) -> bool:
        """Whether its result comes now, or never will."""
        return bool(wait([self.answer.fileno()], timeout=0))

    def result(self) -> Result:
        """Wait for the task and return its result, or raise what it raised."""
        try:
            error, found = pickle.load(self.answer)
        except (EOFError, pickle.UnpicklingError):
            raise PipeplanError("a process of the search has ended before its answer") from None
        finally:
            self.end()
        if error is not None:
            raise error
        return cast(Result, found)

    def end(self) -> None:
        """End the process and its children, whatever they do."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


def in_order(jobs: int, function: Callable[..., Result], every: Iterable[tuple[Any, ...]]) -> Iterator[Result]:
    """Yield ``function(*arguments)`` of all arguments, up to ``jobs`` at a time, each in a process; one: in this.

    Others begin as soon as any is done, whosever turn it is.
    """
    if jobs == 1:
        for arguments in every:
            yield function(*arguments)
        return
    tasks: deque[Task[Result]] = deque()
    left = iter(every)
    try:
        while True:
            for arguments in islice(left, max(0, jobs - sum(not task.answers for task in tasks))):
                tasks.append(Task(function, *arguments))
            if not tasks:
                return
            if tasks[0].answers:
                yield tasks.popleft().result()
            else:
                wait([task.answer.fileno() for task in tasks if not task.answers])
    finally:
        for task in tasks:
            task.end()


def serve() -> None:
    """Do the task that comes on standard input; what is printed meanwhile goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function, arguments = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    error: Exception | None = None
    found = None
    try:
        found = function(*arguments)
    except PipeplanError as refusal:  # is raised where the result is asked for
        error = refusal
    pickle.dump((error, found), answers)
    answers.close()


def _end_with_parent() -> None:
    while os.read(0, 1):  # not through the buffer, whose lock the interpreter wants when it ends
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
