"""How soon can a mini-batch be over at all, of a class of drained plans and under a schedule?

``plan`` quotes what these searches find, and ``check`` runs them anew for what a file claims. Where every stage has its
GPUs for itself, a bound counts beside all work, evenly shared, how the pipeline fills and drains, and what a stage
waits for or recomputes if it has no room for more microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np
import numpy.typing as npt

from ....deadline import OutOfTime
from ....integers import Ints, ceil_div, smallest
from ....plan import AllocationClass, Bound, ScheduleKind
from ....problem import Problem
from ....schedule.kinds import KINDS, vee
from ...shapes import shapes
from ...targets import Shape
from .shapes import Loop, Vee
from .tables import LeastTables, Placed

_PRECISION = 4096  # a bound is found to this part
_MOST = 10**8  # stages, times their replicas and microbatches in flight, beyond which nothing is bounded
_BEYOND = 2**61

Bools = npt.NDArray[np.bool_]


def drained_bound(problem: Problem, kind: ScheduleKind | None = None) -> Bound | None:
    """Return the bound of class ``contiguous`` on drained plans, with ``kind`` those under that schedule; None where it
    would take too long to find, or nothing fits. OutOfTime at the problem's deadline.

    A stage on r GPUs, one of which has M microbatches, ``i`` of whose layers come before it, holds at most a of them.

    1. No forward comes before one has gone through the layers before; then there are M of all its passes, and the
       update.
    2. Behind its last gradient of an input are the backwards of the layers before.
    3. Each microbatch is held while it goes to the loss and back, so that takes M / a times as long, rounded up. It may
       be recomputed meanwhile, but where the schedule has that within backwards.

    For these a it recomputes what its memory asks for, at the best ratio of bytes to time of any of its layers. Where
    the schedule may split backwards, what nothing waits for may come last. The least time at which stages with so few
    GPUs cover all layers is bisected. O(n^2 P log M) for n layers and each step.
    """
    count = len(problem.chain) + 1
    microbatches = problem.policy.accumulate or 1
    anyhow = kind is None or KINDS[kind].written
    splits = anyhow or (kind is not None and KINDS[kind].splits)
    stages = _Separate.of(problem, kind, microbatches, None, splits, anyhow)
    if count**2 * len(problem.platform) * len(list(_ranges(microbatches))) > _MOST:
        return None
    high = low = max(1, stages.shared_ns)
    while not stages.enough(high):
        if high >= _BEYOND // 2:
            return None
        low, high = high + 1, 2 * high
    grain = max(1, low // _PRECISION)
    found = smallest(lambda step: stages.enough(step * grain) or None, max(1, low // grain), ceil_div(high, grain))
    assert found is not None, "the last is enough"
    period = ceil_div(max(low, (found[0] - 1) * grain + 1), microbatches)
    return Bound("contiguous", problem.replicas, problem.checkpointing, period, schedule=kind)


def _ranges(most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of how many are held, first and last, that make up 1..``most``, of all beyond a few an eighth."""
    first = 1
    while first <= most:
        last = min(most, first + first // 8)
        yield first, last
        first = last + 1


@dataclass(frozen=True)
class _Separate(LeastTables):
    """What stages take that have their GPUs for themselves."""

    splits: bool
    apart: bool = False  # whether recomputation may be a pass of its own

    @cached_property
    def _behind(self) -> Ints:
        """The way of a microbatch from each cut to the loss and back."""
        sums = self.problem.chain.sums
        total = sums.forward_ns + sums.backward_ns - sums.backward_weight_ns
        return self._least_ns(total[-1] - total) + 2 * self.transfer

    def _with_replicas(self, replicas: int) -> Iterator[Ints]:
        """Yield the least time by which all of a stage is over, by ranges of what it holds."""
        stages, count = self.stages, ceil_div(self.microbatches, replicas)
        work = stages.work(self.fastest, replicas) + self.held[:, None] + self.held[None, :]
        later = stages.later(self.fastest, replicas) if self.splits else 0
        room = self.most_bytes - stages.weights_bytes(1, replicas) - stages.buffers(replicas)
        update = self.update(replicas)
        ends = self.there[:, None] + self.back[:, None]
        for first, last in _ranges(count):
            self.problem.deadline.check()
            dropped = np.maximum(self.saved - room // first, 0)
            again = np.where(dropped > 0, dropped * np.minimum(self.price, 1e18), 0)
            fits = (room >= 0) & (again < 1e17) & (stages.stop > stages.start)
            own = work + np.where(fits, again, 0).astype(np.int64)
            held = (work if self.apart else own) - later + self._behind[None, :]
            total = np.maximum(
                self.there[:, None] + count * own + update,
                ends + np.maximum(count * (own - later), ceil_div(count, last) * held),
            )
            yield np.where(fits, total, _BEYOND)

    @cached_property
    def _least(self) -> Ints:
        """The least time of a stage, whatever it holds, by replicas."""
        counts = range(1, self.problem.most_replicas + 1)
        return np.stack([reduce(np.minimum, self._with_replicas(replicas)) for replicas in counts])

    def enough(self, total: int) -> bool:
        """Whether there are as many GPUs as stages need that are all over within ``total`` ns."""
        self.problem.deadline.check()
        possible: Bools = self._least <= total
        ending = np.ascontiguousarray(np.where(possible.any(axis=0), possible.argmax(axis=0) + 1, _BEYOND).T)
        used = np.zeros(len(ending), dtype=np.int64)
        for stop in range(1, len(used)):
            used[stop] = min(_BEYOND, (used[:stop] + ending[stop, :stop]).min())
        return bool(used[-1] <= len(self.problem.platform))


MOST_LOOP, MOST_VEE = 4 * 10**6, 2 * 10**7  # layers to the third, times GPUs, beyond which nothing is bounded


def proved(problem: Problem, allocation: AllocationClass, kind: ScheduleKind | None) -> Bound | None:
    """Return the bound of a class on all plans under a ``kind`` of schedule, None: under any; None where nothing proves
    such, that would take too long, or nothing fits. OutOfTime at the problem's deadline."""
    if allocation == "contiguous":
        return drained_bound(problem, kind)
    placed = allocation == "any" and kind is not None and KINDS[kind].homes is not None
    return placed_bound(problem, kind) if placed and kind is not None else None


def placed_bound(problem: Problem, kind: ScheduleKind) -> Bound | None:
    """Return the bound on all plans under a ``kind`` that places stages, as many on each GPU as there may be; None
    where that would take too long, or nothing fits. Every number of ranks and of pipelines is looked at."""
    count, gpus = len(problem.chain), len(problem.platform)
    like_vee, microbatches = KINDS[kind].homes is vee, problem.policy.accumulate or 1
    if count**3 * gpus > (MOST_VEE if like_vee else MOST_LOOP):
        return None
    every = shapes(problem, kind, count, lambda ranks: (2,) if like_vee else range(1, count // ranks + 1))
    best: int | None = None
    for one in sorted(
        (_placed(problem, kind, x) for x in every), key=lambda one: (one.floor_ns, one.shape.ranks, one.shape.chunks)
    ):
        problem.deadline.check()
        if best is None or one.floor_ns < best:
            best = one.least(best)
    if best is None:
        return None
    return Bound("any", problem.replicas, problem.checkpointing, ceil_div(best, microbatches), schedule=kind)


def shape_bound(problem: Problem, kind: ScheduleKind, shape: Shape, cuts: Ints) -> int | None:
    """Return a time (ns) below which no stages of a shape between some ``cuts`` run a mini-batch under a kind that
    places them; None where they fit in no way."""
    return _placed(problem, kind, shape, cuts).least()


def _placed(problem: Problem, kind: ScheduleKind, shape: Shape, cuts: Ints | None = None) -> Placed:
    microbatches = ceil_div(problem.policy.accumulate or 1, shape.pipelines)
    return (Vee if shape.vee else Loop)(LeastTables.of(problem, kind, microbatches, cuts), kind, shape)


def quoted(problem: Problem, kind: ScheduleKind) -> Iterator[Bound]:
    """Yield the bounds that a plan under ``kind`` quotes, as far as there is time for them, that on placed stages
    without replicas where it says more. An interrupt ends them, too, as there is a plan already."""
    with suppress(OutOfTime, KeyboardInterrupt):
        free = (proved(problem, "contiguous", one) for one in (None, kind))
        yield from (bound for bound in free if bound is not None)
        found = proved(problem, "any", kind)
        alone = proved(replace(problem, replicas=False), "any", kind) if problem.replicas and found else None
        if alone is not None and found is not None and alone.period_ns > found.period_ns:
            yield alone
        if found is not None:
            yield found
