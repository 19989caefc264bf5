"""Where does a rank have its samples from? It calls for them when it needs them, or workers have read them ahead.

Inputs go to the stages that use them, targets to the last; each rank with such stages reads for itself, and all read
the same. A GPU's host is ahead of it, so samples are on their way to the device before passes come to them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing import active_children
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ...errors import BadInput
from ..device import moved, new_stream
from ..measure.times import Activity
from ..model.contract import Batches, Data, Read, Span
from ..model.network import TensorSpec
from ..model.randomness import DATA
from ..model.structure import mapped, tensors_in
from ..model.user_code import user_code
from ..training.rank import Rank
from ..training.repeatable import begin_draws
from .job import Job

Sample = tuple[Any, Any]  # the network's inputs, and the target; None for what the rank doesn't need


def reads_of(source: Data, span: Span, by_workers: bool = False) -> Iterator[Read]:
    """Yield what ``span`` wants of a loader, or of the user's data(index, seed), called for each microbatch."""
    if isinstance(source, Batches):
        yield from source.read(span, by_workers)
        return
    for microbatch in filter(span.wants, range(span.first, span.last)):
        epoch, index = divmod(microbatch, span.epoch) if span.epoch else (0, microbatch)
        begin_draws(span.seed, microbatch, DATA)
        yield Read(microbatch, 0, source(index, span.seed + epoch))


@dataclass
class _Ready:
    """A microbatch as the model takes it, on the rank's device once its stream has come to ``there``.

    It will be asked for ``left`` times.
    """

    microbatch: int
    checksum: str
    sample: Sample
    there: Any
    left: int


class Reader:
    """Gives ``rank`` its samples; BadInput where there are none of its size. Until it has one, ``activity`` goes on.

    Of data that are called for, all ranks read the run's first microbatch, whoever takes it: files may differ between
    nodes.
    """

    def __init__(self, job: Job, rank: Rank) -> None:
        lowered, options, source = rank.lowered, job.options, rank.model.data.source
        self._rank, self._stream = rank, new_stream(rank.device)
        last = len(lowered.plan.allocation.stages) - 1
        self._inputs = [s for s in rank.stages if rank.model.read_by(rank.stage(s))]
        self._targets = last in rank.stages
        self._takers = [lowered.ranks_of(s) for s in sorted({*self._inputs, *([last] if self._targets else [])})]
        self._loader = source if isinstance(source, Batches) else None
        first = lowered.first.microbatch
        self._span = Span(
            options.seed,
            first,
            lowered.last.microbatch,
            options.epoch,
            lambda m: self._times(m) > 0 or (self._loader is None and m == first),
        )
        self._ready: dict[int, _Ready] = {}
        self._spent_ns: list[int] = []
        if self._takers and self._loader is not None:
            self._check_length(self._loader, options.epoch)
        self._workers = self._loader.workers if self._takers and self._loader is not None else 0
        self.activity: Activity = "WAIT_DATA" if self._workers else "DATA"
        self._others = set(active_children())
        self._reads = map(self._made_ready, reads_of(source, self._span, self._workers > 0))

    def begin(self) -> tuple[int, str] | None:
        """Start the workers, and wait for the first microbatch; return it with a checksum, None if none is read."""
        if not self._takers or not any(map(self._span.wants, range(self._span.first, self._span.last))):
            return None
        first = self._next()
        return first.microbatch, first.checksum

    def take(self, microbatch: int) -> Sample:
        """Return inputs and target of a microbatch, once for each stage of the rank that takes any of them.

        Of what comes before it others take.
        """
        while microbatch not in self._ready:
            self._next()
        ready = self._ready[microbatch]
        sample, ready.left = ready.sample, ready.left - 1
        if not ready.left:
            del self._ready[microbatch]
        elif len(self._inputs) == 1:
            ready.sample = None, sample[1]
        if ready.there is not None:
            stream = torch.cuda.current_stream(self._rank.device)
            stream.wait_event(ready.there)
            for tensor in tensors_in(sample):
                tensor.record_stream(stream)
        return sample

    def close(self) -> tuple[int, int] | None:
        """End the workers, whatever they do; return so many, and the ns that each took for a
        microbatch; None where that was no work of a loader's."""
        for process in set(active_children()) - self._others if self._workers else ():
            process.kill()
            process.join()
        spent = self._spent_ns[1:] or self._spent_ns  # the first one opens files, and imports
        if self._loader is None or not spent:
            return None
        return self._loader.workers, round(fmean(spent))

    def _times(self, microbatch: int) -> int:
        """Return how often the rank's stages ask for a microbatch."""
        turn = self._rank.lowered.turn(microbatch)
        return sum(ranks[turn % len(ranks)] == self._rank.number for ranks in self._takers)

    def _next(self) -> _Ready:
        ready = next(self._reads)
        if ready.left:
            self._ready[ready.microbatch] = ready
        return ready

    def _made_ready(self, read: Read) -> _Ready:
        """Return what was read as the model takes it, as far as the rank's stages do, on its way to the device."""
        begin = time.perf_counter_ns()
        checksum = "" if self._spent_ns else _checksum(read.given)
        x, target = self._rank.model.data.enter(read.microbatch, read.given)
        if self._loader is not None:
            self._check_size(self._loader, x[0])
        mine = x if self._inputs else None, target if self._targets else None
        there = None
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            sample = mapped(lambda tensor: moved(tensor, self._rank.device), mine)
            if self._stream is not None:
                there = torch.cuda.Event()  # type: ignore[no-untyped-call]
                there.record()
        self._spent_ns.append(read.ns + (0 if self._workers else time.perf_counter_ns() - begin))
        return _Ready(read.microbatch, checksum, sample, there, self._times(read.microbatch))

    def _check_length(self, loader: Batches, epoch: int | None) -> None:
        """Raise BadInput where a pass is too short."""
        lowered, batches = self._rank.lowered, loader.batches
        if batches is not None and batches < lowered.interval:
            raise BadInput(
                f"{loader.name}: its {batches} microbatches of {lowered.plan.chain.microbatch} samples are fewer than "
                f"the {lowered.interval} of one update"
            )
        if batches is not None and batches < (epoch or 0):
            raise BadInput(f"{loader.name}: an epoch is to have {epoch} microbatches, and it has {batches}")

    def _check_size(self, loader: Batches, x: Tensor) -> None:
        """Raise BadInput where microbatches have another number of samples than the profile's."""
        spec, found = self._rank.model.specs[0], TensorSpec(tuple(x.shape), x.dtype)
        if spec.shape[1:] == found.shape[1:] and spec.shape[:1] != found.shape[:1]:
            raise BadInput(
                f"{loader.name}: gives microbatches of {found.shape[0]} samples; the profile's have {spec.shape[0]}"
            )


def repeatedly(data: Callable[[int, int], Any]) -> Callable[[], object] | None:
    """Return what reads a microbatch of ``data`` each time that it is called, as ranks do between their passes.

    None for a loader whose workers read. What is returned raises CodeFailed where the data do.
    """

    def call() -> Any:
        begin_draws(0, 0, DATA)
        with user_code("data"):
            return data(0, 0)

    if not isinstance(data, Batches):
        return call
    here = data.read(Span(0, 0, sys.maxsize))
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
