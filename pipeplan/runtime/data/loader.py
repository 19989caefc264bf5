"""Which microbatches does a DataLoader, a Dataset, or anything to iterate over give? The same to all, from any on.

A pass over the data is an epoch. Its order, and what is drawn for a microbatch, follow from the run's seed and from its
number alone. So every rank reads for itself what it needs, and a run that resumes reads what it would have read.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from ...errors import BadInput, CodeFailed
from ..model.contract import Batches, Read, Span
from ..model.network import kind_of
from ..model.randomness import BUILD, ORDER, OwnRandomness, key_of
from ..model.user_code import RAISED, code_failed, defined_at, user_code
from ..processes.own_processes import semaphores
from .loader_workers import Entry, Indexed, Streamed, WorkerStart, as_is, iterated, tell_epoch

SAMPLES: Final = (Tensor, tuple, list, Mapping, str, bytes, Iterator)  # no data, but one of them, or read once
SETTINGS: Final = ("num_workers", "prefetch_factor", "timeout", "multiprocessing_context", "worker_init_fn")
USUAL_START: Final = "fork" if sys.platform == "linux" else None  # a rank's own way would import torch in each worker
AT_ONCE: Final = 64  # microbatches whose samples are chosen together, as changing random numbers takes time
T = TypeVar("T")


@dataclass(frozen=True)
class _Source:
    """Where microbatches come from: of ``size`` samples, which ``collate`` puts together, or whole without a size.

    ``order`` has the indices of each microbatch; without it the data can only be read one after the other. A pass has
    ``length`` microbatches, if that is known. ``settings`` are those of workers. What is told of every new pass are
    ``parts``, and the user's own ``generators`` begin it with the seeds that they had, plus its number.
    """

    dataset: Any
    collate: Callable[[Any], Any] = as_is
    size: int | None = None
    order: Iterable[Any] | None = None
    length: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Any, ...] = ()
    generators: Mapping[torch.Generator, int] = field(default_factory=dict)
    base: torch.Generator | None = None

    def begin(self, epoch: int) -> None:
        """Begin a pass."""
        for part in self.parts:
            tell_epoch(part, epoch)
        for generator, seed in self.generators.items():
            generator.manual_seed(seed + epoch)
        if self.base is not None:  # a DataLoader seeds its workers first
            torch.empty((), dtype=torch.int64).random_(generator=self.base)


class Loader(Batches):
    """What ``make`` is, or returns when called, in microbatches of ``batch`` samples; ``name`` is how it is named.

    Called as ``data(index, seed)`` it gives a microbatch of the first pass with a seed.
    """

    def __init__(self, name: str, make: Any, batch: int) -> None:
        self.name = name
        self._make, self._batch = make, batch

    def __call__(self, index: int, seed: int) -> Any:
        """Return microbatch ``index``."""
        return next(self.read(Span(seed, index, index + 1))).given

    @property
    def batches(self) -> int | None:
        """Whole microbatches of a pass."""
        return self._source.length

    @property
    def workers(self) -> int:
        """Processes that read."""
        return int(self._source.settings.get("num_workers", 0))

    @property
    def shares(self) -> int | None:
        """The workers whose number decides who gives which microbatch."""
        return None if self._source.order is not None else self.workers

    def read(self, span: Span, by_workers: bool = False) -> Iterator[Read]:
        """Yield what ``span`` wants."""
        source = self._source
        if source.order is not None:
            reader, entries = Indexed(source.dataset, source.collate, source.size is not None, span.seed), self._entries
            if by_workers:
                reads = self._working(reader, key_of(span.seed, 0, ORDER), entries(span))
            else:
                reads = map(reader.alone, entries(span))
            yield from map(self._checked, reads)
            return

        def one_pass(epoch: int, begin: int) -> Iterator[Read]:
            source.begin(epoch)
            reader = Streamed(source.dataset, source.collate, source.size, epoch)
            if by_workers:
                return map(self._checked, self._working(reader, key_of(span.seed, epoch, ORDER)))
            return map(self._checked, reader.alone(span.seed, begin))

        yield from (read._replace(microbatch=microbatch) for microbatch, _, read in self._passes(span, one_pass))

    def _entries(self, span: Span) -> Iterator[Entry]:
        """Yield which samples make what ``span`` wants. Its draws are nobody else's."""
        source = self._source

        def one_pass(epoch: int, _: int) -> Iterator[Any]:
            randomness = OwnRandomness(key_of(span.seed, epoch, ORDER))
            with user_code(self.name):
                with randomness.installed():
                    source.begin(epoch)
                    order = iter(source.order or ())
                while True:
                    with randomness.installed():
                        some = list(islice(order, AT_ONCE))
                    if not some:
                        return
                    yield from some

        yield from self._passes(span, one_pass)

    def _passes(self, span: Span, one_pass: Callable[[int, int], Iterator[T]]) -> Iterator[tuple[int, int, T]]:
        """Yield what ``span`` wants of pass after pass, each with its microbatch and its pass."""
        length = span.epoch or self._source.length
        epoch = span.first // length if length else 0
        begin = epoch * (length or 0)
        while begin < span.last:
            number = 0
            for made in islice(one_pass(epoch, begin), length):
                microbatch = begin + number
                if microbatch >= span.first and span.wants(microbatch):
                    yield microbatch, epoch, made
                number += 1
                if begin + number == span.last:
                    return
            if number < (length or 1):
                few = f"ended after {number} of {length} microbatches" if length else "has not one microbatch"
                raise BadInput(f"{self.name}: {few} of {self._batch} samples")
            begin, epoch = begin + number, epoch + 1

    def _working(self, dataset: Dataset[Any], key: int, entries: Iterable[Entry] | None = None) -> Iterator[Read]:
        settings = dict(self._source.settings)
        users = settings.pop("worker_init_fn")
        settings["multiprocessing_context"] = settings["multiprocessing_context"] or USUAL_START
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=entries,
            collate_fn=as_is,
            worker_init_fn=WorkerStart(users),
            generator=torch.Generator().manual_seed(key),
            pin_memory=torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
            **settings,
        )
        before = semaphores()
        try:
            for number, read in enumerate(iterated(loader), 1):
                if number == self.workers:  # each has opened them, so nothing is left should this process be killed
                    for give_back in set(semaphores()).difference(before):
                        give_back()
                yield read
        except (ConnectionError, EOFError) as error:
            raise CodeFailed(f"{self.name}: a worker of its DataLoader died, perhaps for want of memory") from error
        except RAISED as error:  # a worker that has died; what the user's code raises comes as words
            raise code_failed(self.name, error) from error

    def _checked(self, read: Read) -> Read:
        if read.failure is not None:
            raise CodeFailed(f"{self.name}: {read.failure}")
        return read

    # --- what the user's is -----------------------------------------------------------------------------------------

    @cached_property
    def _source(self) -> _Source:
        found = self._made()
        with user_code(self.name):
            source = self._loaders(found) if isinstance(found, DataLoader) else self._datasets(found)
        if source.length == 0:
            raise BadInput(f"{self.name}: has fewer samples than the {self._batch} of one microbatch")
        return source

    def _made(self) -> Any:
        if is_data(self._make):
            return self._make
        with user_code(self.name), OwnRandomness(key_of(0, 0, BUILD)).installed():
            asks = any(x.name == "batch" or x.default is x.empty for x in _taken(self._make))
            return self._make(self._batch) if asks else self._make()

    def _datasets(self, found: Any) -> _Source:
        """Return the source of a dataset, in its own order, or of what gives microbatches one after the other."""
        if isinstance(found, IterableDataset):
            samples = _length(found)
            length = None if samples is None else samples // self._batch
            return _Source(found, default_collate, self._batch, length=length)
        by_index = hasattr(found, "__getitem__") and hasattr(found, "__len__")
        if isinstance(found, SAMPLES) or not (by_index or hasattr(found, "__iter__")):
            place = defined_at(self._make) if callable(self._make) else ""
            raise BadInput(
                f"{self.name}{place} gave {kind_of(found)}; return a DataLoader, a Dataset, or what can be iterated "
                "over again and again, or take (index, seed) and return that microbatch"
            )
        if not by_index:
            return _Source(found, length=_length(found))
        order = BatchSampler(SequentialSampler(found), self._batch, drop_last=True)
        return _Source(found, default_collate, self._batch, order, len(order))

    def _loaders(self, loader: DataLoader[Any]) -> _Source:
        """Return the source of a DataLoader, which is read without it: by its rules, from anywhere on."""
        if loader.batch_size not in (None, self._batch):
            raise BadInput(
                f"{self.name}: its DataLoader has batches of {loader.batch_size} samples, the profile microbatches of "
                f"{self._batch}; write the number once, by a function loader(batch) that is given it"
            )
        if type(loader).__iter__ is not DataLoader.__iter__:
            return _Source(loader, length=_length(loader))
        settings = {name: getattr(loader, name) for name in SETTINGS}
        if isinstance(loader.dataset, IterableDataset):
            samples = _length(loader.dataset)
            length = None if samples is None else samples // (loader.batch_size or 1)
            return _Source(loader.dataset, loader.collate_fn, loader.batch_size, None, length, settings)
        order: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        samplers = tuple(x for x in (loader.sampler, order, getattr(order, "sampler", None)) if x is not None)
        for sampler in samplers:
            if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
                raise BadInput(
                    f"{self.name}: its DistributedSampler gives each of {sampler.num_replicas} processes data of its "
                    "own, but all stages read the same, and replicas get theirs by themselves; leave it out"
                )
        length = _length(order)
        if loader.batch_size is not None:  # without the rest that makes no microbatch
            samples = _length(loader.sampler)
            length = None if samples is None else samples // loader.batch_size
        given = [getattr(x, "generator", None) for x in (loader, *samplers)]
        own = [generator for generator in given if isinstance(generator, torch.Generator)]
        return _Source(
            dataset=loader.dataset,
            collate=loader.collate_fn,
            size=None if loader.batch_sampler is None else self._batch,
            order=order,
            length=length,
            settings=settings,
            parts=samplers,
            generators={generator: generator.initial_seed() for generator in own},
            base=loader.generator,
        )


def data_from(found: Any, name: str, batch: int) -> Callable[[int, int], Any]:
    """Return ``found``, which is called ``name``, if it is a data(index, seed), and otherwise as a :class:`Loader`.

    That is what cannot be called with two arguments, or takes ``batch`` first, and classes, and loaders themselves.
    """
    return found if _takes_index(found) else Loader(name, found, batch)


def is_data(found: Any) -> bool:
    """Whether ``found`` is a loader or a dataset itself, and not what makes one."""
    return isinstance(found, DataLoader | Dataset)


def _takes_index(found: Any) -> bool:
    if is_data(found) or isinstance(found, type):
        return False
    try:
        taken = _taken(found)
        inspect.signature(found).bind(0, 0)
    except ValueError:  # nobody knows what it takes
        return True
    except TypeError:
        return sum(x.default is x.empty for x in taken) > 1
    return not taken or taken[0].name != "batch"


def _taken(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return what ``function`` takes by position."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [x for x in inspect.signature(function).parameters.values() if x.kind in kinds]


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # as torch has it for what has none
        return None
