"""How is one stage updated? Sums over its replicas in chunks, each stepped while the next one is summed.

Myelin section V-C: the gradient is summed in chunks of ``coarsening`` buckets; as soon as one is there, its buckets are
stepped, and meanwhile the next ones are under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..exchange.replica_sum import ChunkSum, Group
from ..measure.recorder import Recorder
from .loss_scale import Scaling
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
    assert versions.flat is not None, "replicated stages have flat gradients"
    runs: list[list[int]] = []
    summed = [bucket for bucket in versions.buckets if bucket.slices[0].index < versions.own]
    for index, bucket in enumerate(summed):
        fits = runs and versions.buckets[runs[-1][0]].dtype == bucket.dtype
        if fits and (coarsening is None or len(runs[-1]) < coarsening):
            runs[-1].append(index)
        else:
            runs.append([index])
    chunks = []
    for place, run in enumerate(runs):
        first, last = versions.buckets[run[0]], versions.buckets[run[-1]]
        is_last = place == len(runs) - 1
        parts = range(run[0], versions.parts.stop if is_last else run[-1] + 1)
        if versions.optimizer.parts != len(versions.buckets):
            parts = range(versions.optimizer.parts if is_last else 0)
        chunks.append(Chunk(versions.flat.flats[first.dtype][first.start : last.stop], parts))
    return chunks


class StageUpdate:
    """Makes new versions of one stage's weights; with replicas, ``group``, :meth:`reduce` comes before each.

    At most ``added`` gradients of a weight are summed.
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
    ) -> None:
        self._stage, self._versions, self._recorder, self._added = stage, versions, recorder, added
        self._group, self._replicas, self._scaling = group, replicas, scaling
        self._chunks = [] if group is None else chunks_of(versions, coarsening)
        self._sums: list[ChunkSum] = []
        self._begun: list[Any] = []  # marks

    @property
    def replicas(self) -> int:
        """The number of ranks that make the same update."""
        return self._replicas

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield what the stage keeps and uses for updates, and whether it is in host memory for want of room."""
        yield from self._versions.tensors()
        yield from ((chunk.scratch, False) for chunk in self._sums)

    def reduce(self, version: int) -> None:
        """Begin the sum of the gradients from which ``version`` will be made."""
        if self._scaling is not None:
            if self._scaling.skips:
                return
            self._scaling.check(version, self._versions.gradients(), self._added)
        self._sums = [ChunkSum(chunk.gradient, self._group) for chunk in self._chunks]
        self._begun = []
        if self._sums:
            self._begin(0)

    def update(self, version: int) -> None:
        """Make ``version``, or the same weights again where the update is skipped.

        Of chunk i + 1 the sum is under way while chunk i is stepped: its first exchange has been waited for and its
        second one begun, and so is the first of chunk i + 2.
        """
        versions, recorder, s = self._versions, self._recorder, self._stage
        if self._scaling is not None and self._scaling.skips:
            start = recorder.mark()
            versions.skip_update(version)
            recorder.note("UPDATE", s, version, start)
            return
        scale = 1.0 if self._scaling is None else self._scaling.used
        if self._group is None and self._scaling is not None:
            self._scaling.check(version, versions.gradients(), self._added)
        if self._sums:
            self._turn(0)
        every = [chunk.parts for chunk in self._chunks] or [versions.parts]
        for index, parts in enumerate(every):
            if self._sums:
                self._sums[index].end()
                recorder.note("REDUCE", s, version, self._begun[index])
                if index + 1 < len(self._sums):
                    self._turn(index + 1)
            start = recorder.mark()
            if index == 0:
                versions.begin_update()
            for part in parts:
                versions.step(part, scale)
            if index == len(every) - 1:
                versions.end_update(version)
            recorder.note("UPDATE", s, version, start)
        self._sums = []

    def _begin(self, index: int) -> None:
        self._begun.append(self._recorder.mark())
        self._sums[index].begin()

    def _turn(self, index: int) -> None:
        """Send the sum of a chunk to all, and begin the next chunk behind it."""
        self._sums[index].turn()
        if index + 1 < len(self._sums):
            self._begin(index + 1)
