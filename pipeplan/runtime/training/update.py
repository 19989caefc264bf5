"""How is one stage updated? Sums over its replicas in chunks, each stepped while the next one is summed.

Myelin section V-C: the gradient is summed in chunks of ``coarsening`` buckets; as soon as one is there, its buckets are
stepped, and meanwhile the next ones are under way. Where replicas share the steps, each sums, steps and gives out its
own share of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from ..exchange.replica_sum import ChunkSum, Group
from ..measure.recorder import Recorder
from .buckets import in_runs
from .clipping import Clipping
from .loss_scale import Scaling
from .stage_optimizer import Factor
from .versions import Versions


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of the gradient that is summed by one exchange, and the optimizer's parts that can be stepped then."""

    gradient: Tensor
    parts: range


def chunks_of(versions: Versions, coarsening: int | None) -> list[Chunk]:
    """Return the chunks of a stage's flat gradient: ``coarsening`` buckets each, None for all of one type.

    A chunk has one type. The parts of an optimizer that steps all at once belong to the last chunk, and so do those of
    weights that are summed over all stages that have them, which is not done here.
    """
    summed = [bucket for bucket in versions.buckets if bucket.slices[0].index < versions.own]
    runs = in_runs(summed, coarsening)
    chunks = []
    for place, run in enumerate(runs):
        first, last = versions.buckets[run[0]], versions.buckets[run[-1]]
        is_last = place == len(runs) - 1
        parts = range(run[0], versions.parts.stop if is_last else run[-1] + 1)
        if versions.optimizer.parts != len(versions.buckets):
            parts = range(versions.optimizer.parts if is_last else 0)
        chunks.append(Chunk(versions.summed.flats[first.dtype][first.start : last.stop], parts))
    return chunks


class Exchange(Protocol):
    """What replicas do together for an update: :meth:`begin`, then for each of ``parts`` of the optimizer, which are
    stepped at once, :meth:`ready` before and :meth:`stepped` behind. The recorder hears of what was waited for.
    Where the norm of all sums is needed before any step, :meth:`complete` comes before all that."""

    parts: list[range]

    def begin(self, version: int) -> None:
        """Begin with the gradients from which ``version`` will be made."""

    def complete(self) -> None:
        """Wait for all sums."""

    def answered(self) -> list[Tensor]:
        """Return of the summed gradient what this replica answers for, so that all answer once for everything."""

    def ready(self, index: int) -> None:
        """Wait until these parts can be stepped; none of the last are, where there is but something to wait for."""

    def stepped(self, index: int) -> None:
        """Go on when they have been stepped."""

    def scratch(self) -> Iterator[Tensor]:
        """Yield the memory that is used beside weights and gradient."""


class Alone:
    """No other replica has a part in the update."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self.parts = [versions.parts]

    def begin(self, version: int) -> None:
        """Nothing is to be summed."""

    def complete(self) -> None:
        """Nothing is under way."""

    def answered(self) -> list[Tensor]:
        """Return all of the gradient."""
        return _of_its_own(self._versions)

    def ready(self, index: int) -> None:
        """All is there."""

    def stepped(self, index: int) -> None:
        """Nobody waits for it."""

    def scratch(self) -> Iterator[Tensor]:
        """Nothing is used."""
        return iter(())


def _of_its_own(versions: Versions) -> list[Tensor]:
    """Return the gradients of the weights that no other stage has."""
    return [gradient for gradient in versions.gradients()[: versions.own] if gradient is not None]


class _Noted:
    """Exchanges of a stage's chunks, each noted from when it was begun to when it had been waited for."""

    def __init__(self, stage: int, recorder: Recorder) -> None:
        self._stage, self._recorder = stage, recorder
        self._version = 0
        self._begun: dict[Any, Any] = {}  # marks

    def begun(self, what: Any) -> None:
        """Note the begin of an exchange."""
        self._begun[what] = self._recorder.mark()

    def over(self, what: Any) -> None:
        """Note its end."""
        self._recorder.note("REDUCE", self._stage, self._version, self._begun.pop(what))


class Summed(_Noted):
    """Every replica gets all of the sum and steps all of it.

    Of chunk i + 1 the sum is under way while chunk i is stepped: its first exchange has been waited for and its second
    one begun, and so is the first of chunk i + 2.
    """

    def __init__(
        self, stage: int, versions: Versions, recorder: Recorder, group: Group, coarsening: int | None
    ) -> None:
        super().__init__(stage, recorder)
        self._group, self._versions = group, versions
        self._chunks = chunks_of(versions, coarsening)
        self._sums: list[ChunkSum] = []
        self.parts = [chunk.parts for chunk in self._chunks] or [versions.parts]

    def begin(self, version: int) -> None:
        """Begin with the first chunk."""
        self._version = version
        self._sums = [ChunkSum(chunk.gradient, self._group) for chunk in self._chunks]
        self._begin(0)

    def complete(self) -> None:
        """Wait for one chunk's sum after the other."""
        for index in range(len(self._sums)):
            self.ready(index)
        self._sums = []

    def answered(self) -> list[Tensor]:
        """Return all of it on the first replica."""
        return _of_its_own(self._versions) if dist.get_rank(self._group) == 0 else []

    def ready(self, index: int) -> None:
        """Wait for a chunk's sum, and send the sum of the next one to all."""
        if not self._sums:
            return
        if index == 0:
            self._turn(0)
        self._sums[index].end()
        self.over(index)
        self._turn(index + 1)

    def stepped(self, index: int) -> None:
        """Forget the sums when all is stepped."""
        if index == len(self.parts) - 1:
            self._sums = []

    def scratch(self) -> Iterator[Tensor]:
        """Yield what chunks under way need."""
        return (chunk.scratch for chunk in self._sums)

    def _begin(self, index: int) -> None:
        if index < len(self._sums):
            self.begun(index)
            self._sums[index].begin()

    def _turn(self, index: int) -> None:
        """Send the sum of a chunk to all, and begin the next chunk behind it."""
        if index < len(self._sums):
            self._sums[index].turn()
            self._begin(index + 1)


class Shared(_Noted):
    """Every replica gets its share of the sum, steps that, and gives the new weights to all in the gradient's place.

    While chunk i is stepped, the gradient of chunk i + 1 and the weights of chunk i - 1 are under way. Tied weights
    that wait are stepped elsewhere.
    """

    def __init__(self, stage: int, versions: Versions, recorder: Recorder, group: Group) -> None:
        super().__init__(stage, recorder)
        self._versions, self._group = versions, group
        self._chunks = [chunk for chunk in versions.chunks or () if chunk.summed or not versions.waits]
        self._rows = [versions.summed.flats[chunk.dtype][chunk.start : chunk.stop] for chunk in self._chunks]
        self._sums: list[ChunkSum] = []
        self._completed = False
        self.parts: list[range] = []
        for chunk in self._chunks:
            stop = self.parts[-1].stop if self.parts else 0
            self.parts.append(range(stop, stop + len(chunk.own)))
        self.parts.append(range(0))

    def begin(self, version: int) -> None:
        """Begin with the first chunk."""
        self._version = version
        pairs = zip(self._rows, self._chunks, strict=True)
        self._sums = [ChunkSum(row, self._group, chunk.first) for row, chunk in pairs]
        self._begin(0)

    def complete(self) -> None:
        """Wait for the own share of one chunk's sum after the other."""
        for index in range(len(self._chunks)):
            self.ready(index)
        self._completed = True

    def answered(self) -> list[Tensor]:
        """Return the own shares."""
        flats = self._versions.summed.flats
        return [flats[x.dtype][own.start : own.stop] for x in self._chunks if x.summed for own in x.own]

    def ready(self, index: int) -> None:
        """Begin with the next chunk, and wait for the own share of this one's sum; at last for all weights."""
        if not self._completed:
            self._begin(index + 1)
        if index == len(self._chunks):
            if index:
                self._take(index - 1)
            self._sums, self._completed = [], False
        elif self._chunks[index].summed and not self._completed:
            self._sums[index].add()
            self.over(("sum", index))

    def stepped(self, index: int) -> None:
        """Give the new weights of the own share to all, and take those of the chunk before."""
        if index == len(self._chunks):
            return
        self._versions.give_stepped(self._chunks[index])
        self.begun(("weights", index))
        self._sums[index].spread()
        if index:
            self._take(index - 1)

    def scratch(self) -> Iterator[Tensor]:
        """Yield what chunks under way need."""
        return (chunk.scratch for chunk in self._sums)

    def _begin(self, index: int) -> None:
        if index < len(self._sums) and self._chunks[index].summed:
            self.begun(("sum", index))
            self._sums[index].begin()

    def _take(self, index: int) -> None:
        self._sums[index].end()
        self.over(("weights", index))
        self._versions.take_gathered(self._chunks[index])


class StageUpdate:
    """Makes new versions of one stage's weights; with replicas, ``group``, :meth:`reduce` comes before each.

    At most ``added`` gradients of a weight are summed. With ``clipping`` all gradients are :meth:`measured` before; of
    the weights that other stages have too it is those at ``counted`` that are counted here.
    """

    def __init__(
        self,
        stage: int,
        versions: Versions,
        recorder: Recorder,
        group: Group | None = None,
        replicas: int = 1,
        coarsening: int | None = None,
        scaling: Scaling | None = None,
        added: int = 1,
        clipping: Clipping | None = None,
        counted: Sequence[int] = (),
    ) -> None:
        self._stage, self._versions, self._recorder, self._added = stage, versions, recorder, added
        self._group, self._replicas, self._scaling = group, replicas, scaling
        self._clipping, self._counted = clipping, counted
        self._exchange: Exchange = Alone(versions)
        if group is not None and versions.chunks is None:
            self._exchange = Summed(stage, versions, recorder, group, coarsening)
        elif group is not None and versions.chunks:
            self._exchange = Shared(stage, versions, recorder, group)

    @property
    def replicas(self) -> int:
        """The number of ranks that make the same update."""
        return self._replicas

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield what the stage keeps and uses for updates, and whether it is in host memory for want of room."""
        yield from self._versions.tensors()
        yield from ((tensor, False) for tensor in self._exchange.scratch())

    def reduce(self, version: int) -> None:
        """Begin the sum of the gradients from which ``version`` will be made."""
        if self._scaling is not None:
            if self._scaling.skips:
                return
            self._scaling.check(version, self._versions.gradients(), self._added, self._recorder.later)
        self._exchange.begin(version)

    def put_aside(self) -> None:
        """Put the gradient for the next update aside."""
        self._versions.put_aside()

    def measured(self) -> list[Tensor]:
        """Return the gradients whose norm this rank answers for, once they are summed; all replicas together."""
        if self._scaling is not None and self._scaling.skips:
            return []
        self._exchange.complete()
        gradients = self._versions.gradients()
        return [*self._exchange.answered(), *(x for i in self._counted if (x := gradients[i]) is not None)]

    def update(self, version: int) -> None:
        """Make ``version``, or the same weights again where the update is skipped."""
        versions, recorder, s = self._versions, self._recorder, self._stage
        if self._scaling is not None and self._scaling.skips:
            start = recorder.mark()
            versions.skip_update(version)
            recorder.note("UPDATE", s, version, start)
            return
        factor: Factor = 1.0 if self._scaling is None else 1 / self._scaling.used
        if self._clipping is not None:
            factor = factor * self._clipping.factor(version)
        if self._group is None and self._scaling is not None:
            self._scaling.check(version, versions.gradients(), self._added, recorder.later)
        every = self._exchange.parts
        for index, parts in enumerate(every):
            self._exchange.ready(index)
            start = recorder.mark()
            if index == 0:
                versions.begin_update()
            for part in parts:
                versions.step(part, factor)
            if index == len(every) - 1:
                versions.end_update(version)
            recorder.note("UPDATE", s, version, start)
            self._exchange.stepped(index)
