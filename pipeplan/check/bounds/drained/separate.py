"""How soon can a mini-batch be over at all where every stage has its GPUs for itself and the pipeline drains?

Beside all work, evenly shared, this counts how the pipeline fills and drains, and what a stage waits for or recomputes
if it has no room for more microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
import numpy.typing as npt

from ....integers import Ints, ceil_div, smallest
from ....plan import Bound, ScheduleKind
from ....problem import Problem
from ....schedule.kinds import KINDS
from .tables import LeastTables

_PRECISION = 4096  # a bound is found to this part
_MOST = 10**8  # stages, times their replicas and microbatches in flight, beyond which nothing is bounded
_BEYOND = 2**61

Bools = npt.NDArray[np.bool_]


def drained_bound(problem: Problem, kind: ScheduleKind | None = None) -> Bound | None:
    """Return the bound of class ``contiguous`` on drained plans, with ``kind`` those under that schedule; None where it
    would take too long to find, or nothing fits. OutOfTime at the problem's deadline.

    A stage on r GPUs, one of which has M microbatches, ``i`` of whose layers come before it, holds at most a of them.

    1. No forward comes before one has gone through the layers before; then there are M of all its passes, and the sum.
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
        sums = self.sums(replicas)
        ends = self.there[:, None] + self.back[:, None]
        for first, last in _ranges(count):
            self.problem.deadline.check()
            dropped = np.maximum(self.saved - room // first, 0)
            again = np.where(dropped > 0, dropped * np.minimum(self.price, 1e18), 0)
            fits = (room >= 0) & (again < 1e17) & (stages.stop > stages.start)
            own = work + np.where(fits, again, 0).astype(np.int64)
            held = (work if self.apart else own) - later + self._behind[None, :]
            total = np.maximum(
                self.there[:, None] + count * own + sums,
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
        fewest = np.where(possible.any(axis=0), possible.argmax(axis=0) + 1, _BEYOND)
        used = [0]
        for stop in range(1, fewest.shape[0]):
            used.append(min(_BEYOND, min(used[start] + int(fewest[start, stop]) for start in range(stop))))
        return used[-1] <= len(self.problem.platform)
