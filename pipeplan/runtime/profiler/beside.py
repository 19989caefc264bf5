"""What do layers take while other processes compute too, as in a run? Processes that train the same model meanwhile, or
that run each layer together.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from ...errors import BadInput, PipeplanError
from ...scratch import scratch_folder
from ..device import Kind, own_device
from ..exchange.layer_group import LayerGroup
from ..exchange.transport import PeerLost
from ..processes.own_processes import ENDING, context_of, follow_parent, our_imports_alone, settle_in, uninterrupted
from .steps import MeasureOptions, Others

FOREVER = 10**9  # steps
LONGEST = timedelta(hours=1)  # for which ranks wait for one another; of one that has ended all hear at once


@contextmanager
def at_work(others: Others, options: MeasureOptions, one: bool) -> Iterator[None]:
    """Have ``others`` compute within the context, once all have begun; ``one``: with one layer in memory at a time.

    BadInput says why one of them could not, or cannot any more.
    """
    quiet = replace(options, others=None, clock=None, read=None, hold="one" if one else "all", seconds=None)
    quiet = replace(quiet, say=_nothing, note=_nothing, begun=_nothing, merge=None, together=None)
    quiet = quiet if one else replace(quiet, steps=FOREVER)
    work = _pickled("--beside", (others.train, quiet))
    with _started(_train, [(work,)] * others.count) as pipes:
        for pipe in pipes:
            _told(pipe)
        yield
        for pipe in pipes:
            if pipe.poll():
                _told(pipe)


def measured_together(measure: Callable[[LayerGroup], Any], ranks: int, kind: Kind) -> Any:
    """Return what ``measure(group)`` returns on the first of so many processes that run each layer together.

    Each calls it, which is unpickled there, with the group as that process is in it. PipeplanError where one fails.
    """
    work, found, failures = _pickled(f"--tensor {ranks}", measure), None, list[PipeplanError]()
    with scratch_folder() as folder:
        places = [(work, f"{folder}/store", place, ranks, kind) for place in range(ranks)]
        with _started(_measure_together, places) as pipes:
            while pipes and all(isinstance(x, PeerLost) for x in failures):
                for pipe in wait(pipes):
                    assert isinstance(pipe, Connection), "as all of them are"
                    pipes.remove(pipe)
                    try:
                        said = pipe.recv()
                    except EOFError:
                        said = BadInput("a process was ended, perhaps for want of memory")
                    if isinstance(said, PipeplanError):
                        failures.append(said)
                    elif said is not None:
                        found = said
    if failures:
        root = min(failures, key=lambda x: isinstance(x, PeerLost))
        raise type(root)(f"--tensor {ranks}: {root}")
    return found


@contextmanager
def _started(does: Callable[..., None], given: list[tuple[Any, ...]]) -> Iterator[list[Connection]]:
    """Have a process for each of what is ``given`` to ``does`` and, as the last argument, its pipe; yield our ends."""
    started: list[tuple[BaseProcess, Connection]] = []
    context = context_of()
    try:
        with uninterrupted(), our_imports_alone():
            for arguments in given:
                ours, theirs = context.Pipe()
                process = context.Process(target=does, args=(*arguments, theirs), name="pipeplan profile")
                process.start()
                theirs.close()
                started.append((process, ours))
        yield [pipe for _, pipe in started]
    finally:
        for process, pipe in started:
            process.kill()
            process.join()
            process.close()
            pipe.close()


def _pickled(option: str, work: Any) -> bytes:
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise BadInput(f"{option}: the model cannot go to other processes: {error}; name it instead") from error


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


def _settled() -> None:
    """Let this process end with the one that started it, and by no signal that reaches all."""
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)
    settle_in()
    threading.Thread(target=follow_parent, daemon=True).start()


def _train(work: bytes, pipe: Connection) -> None:
    """Be one of the others: train until the parent ends this process; tell it of the begin, and of a failure."""
    _settled()
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


def _measure_together(work: bytes, store: str, place: int, ranks: int, kind: Kind, pipe: Connection) -> None:
    """Be one of those that run each layer together; tell the parent what the first has found, or a failure."""
    _settled()
    torch.manual_seed(0)  # to all alike, whose weights and inputs are parts of the same
    found: Any = None
    try:
        measure, meeting = pickle.loads(work), dist.FileStore(store, ranks)  # type: ignore[attr-defined]  # torch exports it not
        found = measure(LayerGroup(meeting, 0, place, ranks, own_device(kind, place), LONGEST))
        found = None if place else found
    except PipeplanError as error:
        found = error
    except BaseException as error:
        found = BadInput(f"{type(error).__name__}: {error}")
    with suppress(OSError, EOFError):
        pipe.send(found)
        pipe.recv()  # for ever: who leaves takes from others what they exchange
    os._exit(1)
