"""What do the replicas of a stage exchange for an update, and where is it waited for? Sums in chunks.

Myelin section V-C: the gradient is summed in chunks of ``coarsening`` buckets; as soon as one is there, its buckets are
stepped, and meanwhile the next ones are under way. Where replicas share the steps, each sums, steps and gives out its
own share of a chunk.

A sum over replicas is several exchanges, each begun when the one before is through, and nothing tells a process that
works at something else that it is. For sums beside passes a thread between hosts may wait for each and begin the next,
in a group of its own; on a GPU all are queued at once in a stream, behind each other and behind the gradient, and
events tell of each part. What is noted is told when the sum is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import accumulate, pairwise
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...device import new_stream
from ...exchange.collective import ChunkSum
from ...exchange.transport import Group
from ...measure.recorder import Recorder
from ...measure.times import Activity
from ..weights.buckets import SharedChunk
from ..weights.gradients import Gradients
from .stepper import Stepper

Told = Callable[[int], None]


class Exchange:
    """What replicas do together for an update: :meth:`begin`, then for each of ``parts`` of the optimizer, which are
    stepped at once, :meth:`ready` before and :meth:`stepped` behind. The recorder is to hear of what
    was waited for.
    Where all sums are needed before any step, :meth:`complete` comes before all that.

    This one is for a stage without other replicas.
    """

    sums = False

    def __init__(self, stage: int, gradients: Gradients, stepper: Stepper, recorder: Recorder) -> None:
        self.stage, self.gradients, self.stepper, self._recorder = stage, gradients, stepper, recorder
        self._ended: deque[tuple[Activity, int, int, Any, Any]] = deque()  # what the recorder hasn't heard of
        self._version = 0
        self._begun: dict[Any, Any] = {}  # marks
        self._sums: list[ChunkSum] = []
        self.parts = [stepper.parts(not gradients.waits)]
        self.answers: Callable[[int], bool] | None = None  # for which weights it does, where others do for the rest

    def begin(self, version: int) -> None:
        """Begin with the gradients from which ``version`` will be made."""

    def complete(self, told: Told = lambda _: None) -> None:
        """Wait for all sums; ``told`` hears of each of ``parts`` that has all of its own."""

    def drop(self) -> None:
        """Wait for what was begun, of which nothing is stepped."""

    def answered(self) -> list[Tensor]:
        """Return of the summed gradient what this replica answers for, so that all answer once for everything."""
        own = enumerate(self.gradients.due[: self.gradients.versions.own])
        return [x for i, x in own if x is not None and (self.answers is None or self.answers(i))]

    def ready(self, index: int) -> None:
        """Wait until these parts can be stepped; none of the last are, where there is but something to wait for."""

    def stepped(self, index: int) -> None:
        """Go on when they have been stepped."""

    def scratch(self) -> Iterator[Tensor]:
        """Yield the memory that is used beside weights and gradient."""
        return (chunk.scratch for chunk in self._sums)

    def _note_begin(self, what: Any) -> None:
        self._begun[what] = self._recorder.mark()

    def _note_end(self, what: Any) -> None:
        """Note how long it was under way, until it had been waited for."""
        end = self._recorder.mark()
        self._ended.append(("REDUCE", self.stage, self._version, self._begun.pop(what), end))

    def tell(self) -> None:
        """Tell the recorder what has ended."""
        while self._ended:
            self._recorder.note(*self._ended.popleft())


class _OverReplicas(Exchange):
    """What is done in ``chunks`` by the replicas in ``group``, each sum begun when the one before is through."""

    sums = True

    def __init__(
        self,
        stage: int,
        gradients: Gradients,
        stepper: Stepper,
        recorder: Recorder,
        group: Group,
        chunks: Iterable[SharedChunk],
    ) -> None:
        super().__init__(stage, gradients, stepper, recorder)
        self._group, self._chunks = group, list(chunks)
        self._rows = [gradients.summed.flats[chunk.dtype][chunk.start : chunk.stop] for chunk in self._chunks]
        self._there = 0  # chunks whose sums have been waited for
        ends = accumulate((len(chunk.own) for chunk in self._chunks), initial=0)
        self.parts = self._parts([range(start, stop) for start, stop in pairwise(ends)])

    def _parts(self, by_chunk: list[range]) -> list[range]:
        """Return which parts of the optimizer are stepped at once, of those that chunks have."""
        raise NotImplementedError

    def begin(self, version: int) -> None:
        """Begin with the first chunk."""
        self._version, self._there = version, 0
        pairs = zip(self._rows, self._chunks, strict=True)
        self._sums = [ChunkSum(row, self._group, chunk.first) for row, chunk in pairs]
        self._begin(0)

    def drop(self) -> None:
        """Wait for all sums."""
        self.complete()
        self._sums = []

    def _begin(self, index: int) -> None:
        if index < len(self._sums) and self._chunks[index].summed:
            self._note_begin(("sum", index))
            self._sums[index].begin()


class Summed(_OverReplicas):
    """Every replica gets all of the sum and steps all of it.

    Of chunk i + 1 the sum is under way while chunk i is stepped: its first exchange has been waited for and its second
    one begun, and so is the first of chunk i + 2. The parts of an optimizer that steps all at once belong to the last
    chunk, and so do those of weights that are summed over all stages that have them, which is not done here.
    """

    def _parts(self, by_chunk: list[range]) -> list[range]:
        if not by_chunk:
            return self.parts
        parts = by_chunk if self.stepper.by_bucket else [range(0) for _ in by_chunk]
        return [*parts[:-1], range(parts[-1].start, self.parts[0].stop)]

    def complete(self, told: Told = lambda _: None) -> None:
        """Wait for one chunk's sum after the other."""
        for index in range(len(self._sums)):
            self.ready(index)
            told(index)

    def answered(self) -> list[Tensor]:
        """Return all of it on the first replica."""
        return super().answered() if dist.get_rank(self._group) == 0 else []

    def ready(self, index: int) -> None:
        """Wait for a chunk's sum, and send the sum of the next one to all."""
        if not self._there <= index < len(self._sums):
            return
        if index == 0:
            self._turn(0)
        self._sums[index].end()
        self._note_end(("sum", index))
        self._turn(index + 1)
        self._there = index + 1

    def stepped(self, index: int) -> None:
        """Forget the sums when all is stepped."""
        if index == len(self.parts) - 1:
            self._sums = []

    def _turn(self, index: int) -> None:
        """Send the sum of a chunk to all, and begin the next chunk behind it."""
        if index < len(self._sums):
            self._sums[index].turn()
            self._begin(index + 1)


class Shared(_OverReplicas):
    """Every replica gets its share of the sum, steps that, and gives the new weights to all in the gradient's place.

    While chunk i is stepped, the gradient of chunk i + 1 and the weights of chunk i - 1 are under way. Tied weights
    that wait are stepped elsewhere.
    """

    def _parts(self, by_chunk: list[range]) -> list[range]:
        return [*by_chunk, range(0)]

    def complete(self, told: Told = lambda _: None) -> None:
        """Wait for the own share of one chunk's sum after the other; steps, which exchange too, come behind the last.

        So they keep their order on all ranks.
        """
        for index in range(len(self._sums)):
            self.ready(index)
        for index in range(len(self.parts)):
            told(index)

    def answered(self) -> list[Tensor]:
        """Return the own shares."""
        flats, buckets = self.gradients.summed.flats, [own for x in self._chunks if x.summed for own in x.own]
        rows = [flats[own.dtype][own.start : own.stop] for own in buckets]
        if self.answers is None:
            return rows
        spans = [span for own in buckets for span in own.slices]
        parts = [torch.split(row, [x.size for x in own.slices]) for row, own in zip(rows, buckets, strict=True)]
        found = (x for row in parts for x in row)
        return [x for x, span in zip(found, spans, strict=True) if self.answers(span.index)]

    def ready(self, index: int) -> None:
        """Begin with the next chunk, and wait for the own share of this one's sum; at last for all weights."""
        if index >= self._there:
            self._there = index + 1
            self._begin(index + 1)
            if index < len(self._chunks) and self._chunks[index].summed:
                self._sums[index].add()
                self._note_end(("sum", index))
        if index == len(self._chunks):
            if index:
                self._take(index - 1)
            self._sums = []

    def stepped(self, index: int) -> None:
        """Give the new weights of the own share to all, and take those of the chunk before."""
        if index == len(self._chunks):
            return
        self._chunks[index].give(self.gradients.versions.made, self._rows[index])
        self._note_begin(("weights", index))
        self._sums[index].spread()
        if index:
            self._take(index - 1)

    def _take(self, index: int) -> None:
        self._sums[index].end()
        self._note_end(("weights", index))
        self._chunks[index].take(self._rows[index], self.gradients.versions.made)


# --- where sums are waited for ----------------------------------------------------------------------------------------


class Way:
    """How the sums of an ``exchange`` are waited for: here where they are needed.

    Others sum while the rank does something else. What goes wrong there is raised where the sum is waited for.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def begin(self, version: int) -> None:
        """Begin with the gradients from which ``version`` will be made."""
        self.exchange.begin(version)

    def wait(self, index: int) -> None:
        """Wait until one of the exchange's parts can be stepped."""
        self._await(index)
        self.exchange.ready(index)
        self.exchange.tell()

    def join(self) -> None:
        """Wait for all sums."""
        for index in range(len(self.exchange.parts)):
            self._await(index)
        self.exchange.complete()
        self.exchange.tell()

    def _await(self, index: int) -> None:
        """Wait for what of these parts is summed elsewhere."""


class OnThread(Way):
    """For exchanges between hosts: the host waits."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._there: list[Future[None]] = []

    def begin(self, version: int) -> None:
        """Begin, and start the thread."""
        self._there = [Future() for _ in self.exchange.parts]
        self.exchange.begin(version)
        Thread(target=self._sum, name="sum of gradients", daemon=True).start()

    def _sum(self) -> None:
        try:
            self.exchange.complete(lambda part: self._there[part].set_result(None))
        except Exception as error:
            for there in self._there:
                if not there.done():
                    there.set_exception(error)

    def _await(self, index: int) -> None:
        if self._there:  # otherwise nothing was begun
            self._there[index].result()


class OnStream(Way):
    """For exchanges between GPUs: the host waits for nothing, and of the passes' stream what comes behind a wait."""

    def __init__(self, exchange: Exchange, device: torch.device) -> None:
        super().__init__(exchange)
        self._device, self._stream = device, new_stream(device)
        self._there = [torch.cuda.Event() for _ in exchange.parts]  # type: ignore[no-untyped-call]

    def begin(self, version: int) -> None:
        """Queue all of it, behind what the passes' stream has been given so far."""
        assert self._stream is not None, "a GPU has streams"
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self.exchange.begin(version)
            self.exchange.complete(lambda part: self._there[part].record())

    def _await(self, index: int) -> None:
        self._there[index].wait()
