"""How is one stage updated? From its gradient, summed over its replicas, that is scaled and clipped, and stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ...exchange.replica_sum import SumGroup
from ...measure.recorder import Recorder
from ..weights.gradients import Gradients
from .beside import Beside, LateNotes, Way
from .clipping import Clipping
from .exchanges import Exchange, Shared, Summed
from .loss_scale import Scaling, overflow
from .stage_optimizer import Factor
from .stepper import Stepper


def sums_of(
    stage: int,
    gradients: Gradients,
    stepper: Stepper,
    recorder: Recorder,
    group: SumGroup | None,
    coarsening: int | None = None,
    beside: Callable[[int], Way] | None = None,
) -> Exchange:
    """Return what the replicas in ``group`` exchange; None is for one alone.

    With ``beside``, which makes the way for so many parts, sums go on beside passes.
    """
    late = None if beside is None else LateNotes(recorder)
    notes = late or recorder
    found = Exchange(stage, gradients, stepper, notes)
    if group is not None and stepper.chunks is None:
        found = Summed(stage, gradients, stepper, notes, group, coarsening)
    elif group is not None and stepper.chunks:
        found = Shared(stage, gradients, stepper, notes, group)
    return found if beside is None or late is None else Beside(found, late, beside(len(found.parts)))


class StageUpdate:
    """Makes new versions of one stage's weights; with replicas :meth:`reduce` comes before each.

    At most ``added`` gradients of a weight are summed. With ``clipping`` all gradients are :meth:`measured` before; of
    the weights that other stages have too it is those at ``counted`` that are counted here.
    """

    def __init__(
        self,
        stage: int,
        gradients: Gradients,
        stepper: Stepper,
        recorder: Recorder,
        exchange: Exchange | None = None,
        scaling: Scaling | None = None,
        clipping: Clipping | None = None,
        added: int = 1,
        counted: Sequence[int] = (),
    ) -> None:
        self._stage, self._recorder, self._added, self._counted = stage, recorder, added, counted
        self.gradients, self.stepper, self.versions = gradients, stepper, gradients.versions
        self._exchange = exchange or Exchange(stage, gradients, stepper, recorder)
        self._scaling, self._clipping = scaling, clipping
        self._overflows: Tensor | None = None

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield what the stage keeps and uses for updates, and whether it is in host memory for want of room."""
        for there in (self.versions.tensors(), self.gradients.tensors(), self._exchange.scratch()):
            yield from ((tensor, False) for tensor in there)
        yield from self.stepper.tensors()

    def reduce(self, version: int) -> None:
        """Begin the sum of the gradients from which ``version`` will be made, unless it is known to be skipped."""
        if self._scaling is not None:
            if self._scaling.decided == version and self._scaling.skips:
                return
            if self._scaling.agrees and self._scaling.decided < version:
                self._overflows = self.overflows()
        self._check(version)
        self._exchange.begin(version)

    def overflows(self) -> Tensor | None:
        """Return whether the gradient for the next update overflows, or its sum might, as it was before the sum."""
        found, self._overflows = self._overflows, None
        return overflow(self.gradients.due, self._added) if found is None else found

    def put_aside(self) -> None:
        """Put the gradient for the next update aside."""
        self.gradients.put_aside()

    def measured(self) -> list[Tensor]:
        """Return the gradients whose norm this rank answers for, once they are summed; all replicas together."""
        if self._scaling is not None and self._scaling.skips:
            return []
        self._exchange.complete()
        due = self.gradients.due
        return [*self._exchange.answered(), *(x for i in self._counted if (x := due[i]) is not None)]

    def update(self, version: int) -> None:
        """Make ``version``, or the same weights again where the update is skipped."""
        if self._scaling is not None and self._scaling.skips:
            self._exchange.drop()
            start = self._recorder.mark()
            self.gradients.end_update(version, skipped=True)
            self.versions.rename(version)
            self._recorder.note("UPDATE", self._stage, version, start)
            return
        factor: Factor = 1.0 if self._scaling is None else 1 / self._scaling.used
        if self._clipping is not None:
            factor = factor * self._clipping.factor(version)
        if not self._exchange.sums:
            self._check(version)
        every = self._exchange.parts
        given: Sequence[Tensor | None] = ()
        for index, parts in enumerate(every):
            self._exchange.ready(index)
            start = self._recorder.mark()
            if index == 0:
                given = self._begin()
            for part in parts:
                self.stepper.step(part, given, factor)
            if index == len(every) - 1:
                self._end(version)
            self._recorder.note("UPDATE", self._stage, version, start)
            self._exchange.stepped(index)

    def update_tied(self, version: int) -> None:
        """Step the weights whose gradients, which other ranks have too, have waited for that."""
        waiting = self.gradients.tied
        if waiting is None:
            return
        start = self._recorder.mark()
        self.stepper.step_tied(waiting, 1.0 if self._scaling is None else 1 / self._scaling.used)
        self.stepper.finish()
        self.gradients.end_tied()
        self._recorder.note("UPDATE", self._stage, version, start)

    def _begin(self) -> list[Tensor | None]:
        """Return the gradient to step with. Those from older weights are :attr:`Gradients.delay` updates late."""
        given = self.gradients.begin_update()
        self.versions.begin()
        self.stepper.begin()
        return given

    def _end(self, version: int) -> None:
        if self.gradients.tied is None:
            self.stepper.finish()
        self.gradients.end_update(version)
        self.versions.end(version)

    def _check(self, version: int) -> None:
        if self._scaling is not None:
            self._scaling.check(version, self.gradients.due, self._added, self._recorder.later)
