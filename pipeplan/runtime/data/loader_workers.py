"""What runs in a loader's workers? The user's dataset, read a microbatch at a time: seeded, timed, its failures worded.

The same runs in the process itself where a loader has no workers.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ..model.contract import Read
from ..model.randomness import DATA, OwnRandomness, begin_all, key_of
from ..model.user_code import RAISED, said
from ..processes.own_processes import ENDING, follow_parent

Entry = tuple[int, int, Any]  # a microbatch, its pass over the data, and what the sampler gives for it
Collate = Callable[[Any], Any]


class Indexed(Dataset[Any]):
    """A dataset of samples by index: what it gives for an :data:`Entry`, drawn by its microbatch alone.

    A ``batched`` entry has the indices of its samples, any other the one of a whole microbatch.
    """

    def __init__(self, dataset: Any, collate: Collate, batched: bool, seed: int) -> None:
        self.dataset = dataset
        self.failure: str | None = None
        self._collate, self._batched, self._seed = collate, batched, seed
        self._epoch: int | None = None

    def __getitem__(self, entry: Entry) -> Read:
        microbatch, epoch, index = entry
        if self.failure is not None:
            return Read(microbatch, 0, None, self.failure)
        begin = time.perf_counter_ns()
        try:
            if epoch != self._epoch:
                tell_epoch(self.dataset, epoch)
                self._epoch = epoch
            begin_all(key_of(self._seed, microbatch, DATA))
            given = self._collate(self._items(index))
        except RAISED as error:
            return Read(microbatch, 0, None, said(error))
        return Read(microbatch, time.perf_counter_ns() - begin, given)

    def alone(self, entry: Entry) -> Read:
        """Return the same, and leave this process's random numbers alone."""
        with OwnRandomness(0).installed():
            return self[entry]

    def _items(self, index: Any) -> Any:
        if not self._batched:
            return self.dataset[index]
        if callable(getattr(self.dataset, "__getitems__", None)):
            return self.dataset.__getitems__(index)
        return [self.dataset[i] for i in index]


class Streamed(IterableDataset[Any]):
    """Data that can only be read one after the other: whole microbatches of ``size`` samples of pass ``epoch``.

    Without ``size`` what they give are microbatches. What is read knows nothing of its number: that is left to others.
    """

    def __init__(self, dataset: Iterable[Any], collate: Collate, size: int | None, epoch: int) -> None:
        self.dataset = dataset
        self.failure: str | None = None
        self._collate, self._size, self._epoch = collate, size, epoch

    def __iter__(self) -> Iterator[Read]:
        if self.failure is not None:
            yield Read(-1, 0, None, self.failure)
            return
        begin = time.perf_counter_ns()
        try:
            tell_epoch(self.dataset, self._epoch)
            source = iter(self.dataset)
            while items := list(islice(source, self._size or 1)):
                if len(items) < (self._size or 1):
                    return
                given = self._collate(items if self._size else items[0])
                yield Read(-1, time.perf_counter_ns() - begin, given)
                del items, given
                begin = time.perf_counter_ns()
        except RAISED as error:
            yield Read(-1, 0, None, said(error))

    def alone(self, seed: int, first: int) -> Iterator[Read]:
        """Yield the same, each drawn by its number, from ``first`` on; this process's random numbers are left alone."""
        reading = iter(self)
        for number in count(first):
            with OwnRandomness(key_of(seed, number, DATA)).installed():
                read = next(reading, None)
            if read is None:
                return
            yield read


def tell_epoch(part: Any, epoch: int) -> None:
    """Tell a dataset or a sampler which pass begins, if it wants to know."""
    if callable(getattr(part, "set_epoch", None)):
        part.set_epoch(epoch)


@dataclass(frozen=True)
class WorkerStart:
    """What a worker begins with: ours, and then what its user has for it, to whom the dataset is his own.

    It ends with its rank, and not by itself: signals may reach all of a run's processes.
    """

    users: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        """Begin worker ``number``."""
        for ending in ENDING:
            signal.signal(ending, signal.SIG_IGN)
        sys.excepthook = _unless_cut_off
        threading.Thread(target=follow_parent, daemon=True).start()
        info = get_worker_info()
        assert info is not None, "this is a worker"
        wrapped: Any = info.dataset
        object.__setattr__(info, "dataset", wrapped.dataset)  # torch lets nobody change it
        try:
            if self.users is not None:
                self.users(number)
        except RAISED as error:
            wrapped.failure = said(error)


def _unless_cut_off(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Tell of an error as Python does, but not that a rank, which is told of itself, went while it took something."""
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def iterated(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin with ``loader``, whose worker that dies is told of where the next microbatch is asked for, not anywhere."""
    handler = signal.getsignal(signal.SIGCHLD)
    found = iter(loader)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)
    return found


def as_is(value: Any) -> Any:
    """Return ``value``: microbatches are whole already."""
    return value
