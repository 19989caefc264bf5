"""What do layers take while other processes compute too, as in a run? Processes that train the same model meanwhile."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from ...errors import BadInput
from ..processes.own_processes import ENDING, context_of, follow_parent, our_imports_alone, settle_in, uninterrupted
from .steps import MeasureOptions, Others

FOREVER = 10**9  # steps


@contextmanager
def at_work(others: Others, options: MeasureOptions, one: bool) -> Iterator[None]:
    """Have ``others`` compute within the context, once all have begun; ``one``: with one layer in memory at a time.

    BadInput says why one of them could not, or cannot any more.
    """
    quiet = replace(options, others=None, clock=None, read=None, hold="one" if one else "all", seconds=None)
    quiet = replace(quiet, say=_nothing, note=_nothing, begun=_nothing, merge=None)
    quiet = quiet if one else replace(quiet, steps=FOREVER)
    try:
        work = pickle.dumps((others.train, quiet))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise BadInput(f"--beside: the model cannot go to other processes: {error}; name it instead") from error
    started: list[tuple[BaseProcess, Connection]] = []
    context = context_of()
    try:
        with uninterrupted(), our_imports_alone():
            for _ in range(others.count):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_train, args=(work, theirs), name="pipeplan profile", daemon=True)
                process.start()
                theirs.close()
                started.append((process, ours))
        for _, pipe in started:
            _told(pipe)
        yield
        for _, pipe in started:
            if pipe.poll():
                _told(pipe)
    finally:
        for process, pipe in started:
            process.kill()
            process.join()
            process.close()
            pipe.close()


def _told(pipe: Connection) -> None:
    """Wait until a process has begun; BadInput in its words where it cannot go on."""
    try:
        failure = pipe.recv()
    except EOFError:
        failure = "it was ended"
    if failure is not None:
        raise BadInput(f"--beside: a process that trains beside this one failed: {failure}")


def _nothing(*_: str) -> None:
    pass


def _train(work: bytes, pipe: Connection) -> None:
    """Be one of the others: train until the parent ends this process; tell it of the begin, and of a failure."""
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)
    settle_in()
    threading.Thread(target=follow_parent, daemon=True).start()
    told = False

    def begun() -> None:
        nonlocal told
        if not told:
            pipe.send(None)
            told = True

    try:
        train, options = pickle.loads(work)
        while True:
            train(replace(options, begun=begun))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(1)
