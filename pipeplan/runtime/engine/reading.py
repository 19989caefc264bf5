"""Where does a rank have its samples from? It calls for them when it needs them, or workers have read them ahead.

Inputs go to the stages that use them, targets to the last; each rank with such stages reads for itself, and all read
the same. What workers have read is on its way to the device before it is asked for.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from statistics import fmean
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ...errors import BadInput
from ..data.loader import Loader, Span
from ..data.loader_workers import Entry, Read
from ..device import moved, new_stream
from ..measure.times import Activity, Reading
from ..model.network import TensorSpec
from ..model.randomness import DATA
from ..model.structure import mapped, tensors_in
from ..model.user_code import user_code
from ..processes.own_processes import ENDING, follow_parent
from ..training.draws import begin_draws
from ..training.rank import Rank
from .job import Job

AHEAD: Final = 2  # microbatches that are read and on the device, or on their way there, before they are asked for
Sample = tuple[Any, Any]  # the network's inputs, and the target; None for what the rank doesn't need


class Reader(Protocol):
    """What gives a rank its samples."""

    activity: Activity
    """What a rank does until it has one."""

    def begin(self) -> tuple[int, str] | None:
        """Begin to read ahead; return the first microbatch that was read with a checksum of it, None if none was."""

    def take(self, microbatch: int) -> Sample:
        """Return inputs and target of a microbatch, once for each stage of the rank that takes any of them."""

    def close(self) -> Reading | None:
        """Read no further; return how reading went, None where it was no work of a loader's."""


class _Takers:
    """Which stages of a rank take ``inputs`` or ``targets``. Torch's engine asks for all together."""

    def __init__(self, job: Job, rank: Rank) -> None:
        last = len(rank.lowered.plan.allocation.stages) - 1
        self.inputs = [s for s in rank.stages if rank.model.read_by(rank.stage(s))]
        self.targets = last in rank.stages
        takers = sorted({*self.inputs, *([last] if self.targets else [])})
        self._ranks = [rank.lowered.ranks_of(s) for s in takers]
        self._turn = rank.lowered.turn
        self._number, self._once = rank.number, job.options.engine == "torch"

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def times(self, microbatch: int) -> int:
        """Return how often the rank asks for a microbatch."""
        turn = self._turn(microbatch)
        times = sum(ranks[turn % len(ranks)] == self._number for ranks in self._ranks)
        return min(times, 1) if self._once else times


class Called:
    """Samples that the user's data(index, seed) is called for, once for each microbatch."""

    activity: Activity = "DATA"

    def __init__(self, job: Job, rank: Rank) -> None:
        self._job, self._rank, self._takers = job, rank, _Takers(job, rank)
        self._held: dict[int, tuple[int, Sample]] = {}  # what is asked for again, and how often

    def begin(self) -> tuple[int, str] | None:
        """Call for the run's first microbatch, whoever takes it: files may differ between nodes."""
        if not self._takers:
            return None
        first = self._rank.lowered.first.microbatch
        return first, _checksum(self._called(first))

    def take(self, microbatch: int) -> Sample:
        """Call for it, or return what others take of one that was called for."""
        if microbatch in self._held:
            left, sample = self._held.pop(microbatch)
            if left > 1:
                self._held[microbatch] = left - 1, sample
            return sample
        inputs, target = _moved_all(self._called(microbatch), self._rank.device)
        left = self._takers.times(microbatch) - 1
        if left > 0:
            self._held[microbatch] = left, (inputs if len(self._takers.inputs) > 1 else None, target)
        return inputs, target

    def _called(self, microbatch: int) -> Sample:
        length, seed = self._job.options.epoch, self._job.options.seed
        epoch, index = divmod(microbatch, length) if length else (0, microbatch)
        begin_draws(seed, microbatch, DATA)
        return self._rank.model.data(index, seed + epoch)

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class _Ready:
    """A microbatch as the model takes it, on the rank's device once its stream has come to ``there``."""

    microbatch: int
    ns: int
    checksum: str
    sample: Sample
    there: Any


class Loaded:
    """Samples of a loader of the user's, of which the rank's stages ``take`` inputs, targets, or both."""

    def __init__(self, loader: Loader, job: Job, rank: Rank) -> None:
        lowered = rank.lowered
        self._rank, self._model, self._device = rank, rank.model, rank.device
        self._takers = _Takers(job, rank)
        self._loader, self._stream = loader, new_stream(rank.device)
        self._span = Span(
            job.options.seed, lowered.first.microbatch, lowered.last.microbatch, job.options.epoch, self._wants
        )
        self._held: dict[int, _Ready] = {}
        self._left: dict[int, int] = {}  # of those held, how often they are still asked for
        self._spent_ns: list[int] = []
        self._first: str | None = None
        self._feed: _Feed | None = None
        self._here: Iterator[_Ready] = iter(())
        if self._takers and loader.batches is not None and loader.batches < lowered.interval:
            raise BadInput(
                f"{loader.name}: its {loader.batches} microbatches of {lowered.plan.chain.microbatch} samples are "
                f"fewer than the {lowered.interval} of one update"
            )
        if self._takers and loader.batches is not None and loader.batches < (job.options.epoch or 0):
            raise BadInput(
                f"{loader.name}: an epoch is to have {job.options.epoch} microbatches, and it has {loader.batches}"
            )
        self.activity: Activity = "WAIT_DATA" if self._takers and loader.workers else "DATA"

    def begin(self) -> tuple[int, str] | None:
        """Start the workers, and wait for the first microbatch."""
        if not self._takers or not any(map(self._wants, range(self._span.first, self._span.last))):
            return None
        if self._loader.workers:
            self._feed = _Feed(self._loader, self._span, self._ready)
        else:
            self._here = map(self._ready, self._loader.here(self._span))
        first = self._next()
        return first.microbatch, first.checksum

    def take(self, microbatch: int) -> Sample:
        """Return what is there, or wait for it; of what comes before it others take."""
        while microbatch not in self._held:
            self._next()
        ready = self._held[microbatch]
        self._left[microbatch] -= 1
        if not self._left[microbatch]:
            del self._held[microbatch], self._left[microbatch]
        if ready.there is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ready.there)
            for tensor in tensors_in(ready.sample):
                tensor.record_stream(stream)
        return ready.sample

    def close(self) -> Reading | None:
        """End the workers."""
        if self._feed is not None:
            self._feed.close()
        spent = self._spent_ns[1:] or self._spent_ns  # the first one opens files, and imports
        return Reading(self._loader.workers, round(fmean(spent)), len(self._spent_ns)) if spent else None

    def _wants(self, microbatch: int) -> bool:
        return self._takers.times(microbatch) > 0

    def _next(self) -> _Ready:
        ready = next(self._here) if self._feed is None else self._feed.get()
        self._spent_ns.append(ready.ns)
        self._held[ready.microbatch] = ready
        self._left[ready.microbatch] = self._takers.times(ready.microbatch)
        return ready

    def _ready(self, read: Read) -> _Ready:
        """Return what was read as the model takes it, as far as the rank's stages do, on its way to the device."""
        begin = time.perf_counter_ns()
        checksum = "" if self._first is not None else _checksum(read.given)
        self._first = self._first or checksum
        x, target = self._model.data.enter(read.microbatch, read.given)
        self._check(x[0])
        mine = x if self._takers.inputs else None, target if self._takers.targets else None
        there = None
        if self._stream is None:
            sample: Sample = _moved_all(mine, self._device)
        else:
            torch.cuda.set_device(self._device)  # of this thread
            with torch.cuda.stream(self._stream):
                sample = _moved_all(mine, self._device)
                there = torch.cuda.Event()  # type: ignore[no-untyped-call]
                there.record()
        spent = 0 if self._feed is not None else time.perf_counter_ns() - begin
        return _Ready(read.microbatch, read.ns + spent, checksum, sample, there)

    def _check(self, x: Tensor) -> None:
        """Raise BadInput where microbatches have another number of samples than the profile's."""
        spec, found = self._model.specs[0], TensorSpec(tuple(x.shape), x.dtype)
        if spec.shape[1:] == found.shape[1:] and spec.shape[:1] != found.shape[:1]:
            raise BadInput(
                f"{self._loader.name}: gives microbatches of {found.shape[0]} samples; the profile's have "
                f"{spec.shape[0]}"
            )


def reader_of(job: Job, rank: Rank) -> Reader:
    """Return what gives ``rank`` its samples; BadInput where there are none of its size."""
    source = rank.model.data.source
    return Loaded(source, job, rank) if isinstance(source, Loader) else Called(job, rank)


def repeatedly(data: Callable[[int, int], Any]) -> Callable[[], object] | None:
    """Return what reads a microbatch of ``data`` each time that it is called, as ranks do between their passes.

    None for a loader whose workers read. What is returned raises CodeFailed where the data do.
    """

    def call() -> Any:
        begin_draws(0, 0, DATA)
        with user_code("data"):
            return data(0, 0)

    if not isinstance(data, Loader):
        return call
    here = data.here(Span(0, 0, sys.maxsize))
    return None if data.workers else lambda: next(here)


def differing(first: list[tuple[int, str] | None]) -> str | None:
    """Return which two ranks have read something else for one microbatch, given the ``first`` of every rank."""
    seen: dict[int, tuple[int, str]] = {}
    for rank, read in enumerate(first):
        if read is not None:
            other, checksum = seen.setdefault(read[0], (rank, read[1]))
            if checksum != read[1]:
                return (
                    f"data: ranks {other} and {rank} read different samples for microbatch {read[0]}; every node needs "
                    "the same files, and what is drawn must follow from torch's, Python's and NumPy's random numbers"
                )
    return None


def _checksum(given: Any) -> str:
    found = blake2b(digest_size=8)
    for tensor in tensors_in(given):
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _moved_all(value: Any, device: torch.device) -> Any:
    return mapped(lambda tensor: moved(tensor, device), value)


# --- ahead ----------------------------------------------------------------------------------------------------------


class _Closed(Exception):
    """Nobody reads any more."""


class _Feed:
    """A thread that takes what workers have read, and makes it ready, until :data:`AHEAD` wait.

    It draws no random numbers, which are the whole process's: whose samples are read is said by who waits for them.
    Workers are started while he waits.
    """

    def __init__(self, loader: Loader, span: Span, make: Callable[[Read], _Ready]) -> None:
        self._changed = threading.Condition()
        self._ready: deque[_Ready] = deque()
        self._ended: BaseException | None = None
        self._waiting = self._closed = False
        self._others: set[BaseProcess] = set(active_children())
        self._asked: SimpleQueue[Entry | None] = SimpleQueue()
        self._to_ask = loader.entries(span) if loader.has_entries else None
        for _ in range(loader.begun + AHEAD + 2):  # one more is asked for before one is given out
            self._ask()
        reads = loader.by_workers(span, _settle_in, iter(self._asked.get, None), self._may_start)
        threading.Thread(target=self._run, args=(map(make, reads),), daemon=True).start()

    def get(self) -> _Ready:
        """Return the next one, once it is there."""
        self._ask()
        with self._changed:
            self._waiting = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready or self._ended is not None)
            self._waiting = False
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
        assert self._ended is not None, "nobody asks for more than there is to come"
        raise self._ended

    def close(self) -> None:
        """End the workers, whatever they do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for process in set(active_children()) - self._others:
            process.kill()
            process.join()

    def _ask(self) -> None:
        if self._to_ask is not None:
            self._asked.put(next(self._to_ask, None))

    def _may_start(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                raise _Closed

    def _run(self, made: Iterator[_Ready]) -> None:
        try:
            for ready in made:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < AHEAD or self._closed)
                    if self._closed:
                        return
                    self._ready.append(ready)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._ended = error
                self._changed.notify_all()


def _settle_in() -> None:
    """Let a worker end with its rank, and not by itself: signals may reach all of a run's processes."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _unless_cut_off
    threading.Thread(target=follow_parent, daemon=True).start()


def _unless_cut_off(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Tell of an error as Python does, but not that a rank, which is told of itself, went while it took something."""
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
