"""How is one stage updated? From its gradient, summed over its replicas, that is scaled and clipped, and stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ...exchange.emulated_link import EmulatedLink
from ...exchange.transport import Group
from ...measure.recorder import Recorder
from ..weights.versions import Versions
from .beside import Beside, LateNotes, Way
from .clipping import Clipping
from .exchanges import Alone, Exchange, Shared, Summed
from .loss_scale import Scaling, overflow
from .stage_optimizer import Factor


class StageUpdate:
    """Makes new versions of one stage's weights; with replicas, ``group``, :meth:`reduce` comes before each.

    At most ``added`` gradients of a weight are summed. With ``clipping`` all gradients are :meth:`measured` before; of
    the weights that other stages have too it is those at ``counted`` that are counted here. With ``beside``, which
    makes the way for so many parts, sums go on beside passes; with a ``link`` they take as long as over that.
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
        beside: Callable[[int], Way] | None = None,
        link: EmulatedLink | None = None,
    ) -> None:
        self._stage, self._versions, self._recorder, self._added = stage, versions, recorder, added
        self._group, self._replicas, self._scaling = group, replicas, scaling
        self._clipping, self._counted = clipping, counted
        self._exchange: Exchange = Alone(versions)
        self._overflows: Tensor | None = None
        late = None if beside is None else LateNotes(recorder)
        if group is not None and versions.chunks is None:
            self._exchange = Summed(stage, versions, late or recorder, group, coarsening, link)
        elif group is not None and versions.chunks:
            self._exchange = Shared(stage, versions, late or recorder, group, link)
        if beside is not None and late is not None:
            self._exchange = Beside(self._exchange, late, beside(len(self._exchange.parts)))

    @property
    def replicas(self) -> int:
        """The number of ranks that make the same update."""
        return self._replicas

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield what the stage keeps and uses for updates, and whether it is in host memory for want of room."""
        yield from self._versions.tensors()
        yield from ((tensor, False) for tensor in self._exchange.scratch())

    def reduce(self, version: int) -> None:
        """Begin the sum of the gradients from which ``version`` will be made, unless it is known to be skipped."""
        if self._scaling is not None:
            if self._scaling.decided == version and self._scaling.skips:
                return
            self._scaling.check(version, self._versions.gradients(), self._added, self._recorder.later)
            if self._scaling.agrees and self._scaling.decided < version:
                self._overflows = self.overflows()
        self._exchange.begin(version)

    def overflows(self) -> Tensor | None:
        """Return whether the gradient for the next update overflows, or its sum might, as it was before the sum."""
        found, self._overflows = self._overflows, None
        return overflow(self._versions.gradients(), self._added) if found is None else found

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
            self._exchange.drop()
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
