"""How soon can a mini-batch be over at all where every stage has its GPUs for itself and the pipeline drains?

Beside all work, evenly shared, this counts how the pipeline fills and drains, and what a stage waits for or recomputes
if it has no room for more microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np
import numpy.typing as npt

from ....cost import memory_model, time_model
from ....cost.saved import first_saved
from ....deadline import OutOfTime
from ....integers import Ints, ceil_div, smallest
from ....plan import Bound, ScheduleKind
from ....problem import Problem
from ....schedule.kinds import KINDS

_PRECISION = 4096  # a bound is found to this part
_MOST = 10**8  # stages, times their replicas and microbatches in flight, beyond which nothing is bounded
_FINE = 1 - 1e-9  # what rounding of ratios can take off
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
    relaxed = time_model.relative(problem)
    anyhow = kind is None or KINDS[kind].written
    splits = anyhow or (kind is not None and KINDS[kind].splits)
    if not splits:
        layers = tuple(replace(layer, backward_weight_ns=0) for layer in relaxed.chain.layers)
        relaxed = replace(relaxed, chain=replace(relaxed.chain, layers=layers))
    stages = StageTables(relaxed, microbatches, splits, anyhow)
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


def drained_bounds(problem: Problem, kind: ScheduleKind) -> list[Bound]:
    """Return the bound on all drained plans of class ``contiguous``, and that on those under ``kind``, as far as there
    is time for them: an interrupt ends them, too, as there is a plan already."""
    found: list[Bound] = []
    with suppress(OutOfTime, KeyboardInterrupt):
        for one in (None, kind):
            bound = drained_bound(problem, one)
            found += [] if bound is None else [bound]
    return found


def _ranges(most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of how many are held, first and last, that make up 1..``most``, of all beyond a few an eighth."""
    first = 1
    while first <= most:
        last = min(most, first + first // 8)
        yield first, last
        first = last + 1


@dataclass(frozen=True)
class StageTables:
    """What every stage ``layers[i:j]`` takes at least on any device of a problem; tables have shape (L + 1, L + 1)."""

    problem: Problem
    microbatches: int
    splits: bool
    apart: bool = False  # whether recomputation may be a pass of its own

    @cached_property
    def ends(self) -> tuple[Ints, Ints]:
        """The layers where stages start and stop, to be broadcast."""
        cuts = np.arange(len(self.problem.chain) + 1)
        return cuts[:, None], cuts[None, :]

    @cached_property
    def _speed(self) -> tuple[int, int]:
        fastest = max(device.speed for device in self.problem.platform.devices)
        return fastest.denominator, fastest.numerator

    @cached_property
    def shared_ns(self) -> int:
        """What the work of all layers takes, evenly shared by as many devices as the fastest."""
        down, up = self._speed
        sums = self.problem.chain.sums
        total = int(sums.forward_ns[-1] + sums.backward_ns[-1]) * self.microbatches
        return total * down // (up * len(self.problem.platform))

    @cached_property
    def transfer(self) -> Ints:
        """The least time of a transfer over each cut that a plan may have; none where they block."""
        platform, cut_bytes = self.problem.platform, self.problem.chain.cut_bytes
        levels = range(0 if platform.blocking else len(platform.levels))
        inner = [min((platform.transfer_ns(size, k) for k in levels), default=0) for size in cut_bytes[1:-1]]
        return np.array([0, *inner, 0], dtype=np.int64)

    @cached_property
    def held(self) -> Ints:
        """The least for which a microbatch's messages over each cut keep the devices at its ends from computing."""
        platform, cut_bytes = self.problem.platform, self.problem.chain.cut_bytes
        inner = [2 * min(platform.held_ns(size, k) for k in range(len(platform.levels))) for size in cut_bytes[1:-1]]
        return np.array([0, *inner, 0], dtype=np.int64)

    @cached_property
    def there(self) -> Ints:
        """What comes before a forward behind each cut."""
        down, up = self._speed
        return np.asarray(self.problem.chain.sums.forward_ns * down // up + self.transfer)

    @cached_property
    def back(self) -> Ints:
        """What comes behind a gradient at each cut."""
        down, up = self._speed
        sums = self.problem.chain.sums
        return np.asarray((sums.backward_ns - sums.backward_weight_ns) * down // up + self.transfer)

    @cached_property
    def _behind(self) -> Ints:
        """The way of a microbatch from each cut to the loss and back."""
        down, up = self._speed
        sums = self.problem.chain.sums
        total = sums.forward_ns + sums.backward_ns - sums.backward_weight_ns
        return np.asarray((total[-1] - total) * down // up + 2 * self.transfer)

    @cached_property
    def saved(self) -> Ints:
        """Bytes that a stage keeps of a microbatch if it recomputes nothing, beside what it received in a buffer."""
        chain = self.problem.chain
        sums = np.cumsum([0, *first_saved(chain)])
        received = np.array(chain.cut_bytes, dtype=np.int64) * (self.problem.policy.engine is not None)
        return np.asarray(np.maximum(sums[None, :] - sums[:, None] - received[:, None], 0))

    @cached_property
    def price(self) -> npt.NDArray[np.float64]:
        """Time (ns) for each byte that a stage doesn't keep, at the best ratio of its layers; inf: it keeps all."""
        count, (down, up) = len(self.problem.chain), self._speed
        table = np.full((count + 1, count + 1), np.inf)
        if self.problem.checkpointing == "none":
            return table
        layers = zip(self.problem.chain.layers, first_saved(self.problem.chain), strict=True)
        ratios = np.array([layer.forward_ns * down / up / size if size else np.inf for layer, size in layers])
        for i in range(count):
            table[i, i + 1 :] = np.minimum.accumulate(ratios[i:])
        return table * _FINE

    def room(self, replicas: int) -> Ints:
        """Bytes that a stage has for activations."""
        problem, (start, stop) = self.problem, self.ends
        weights = memory_model.weights_bytes(
            problem.policy, *memory_model.weights_of(problem.chain, start, stop), 1, replicas
        )
        cuts = np.array([0, *problem.chain.cut_bytes[1:-1], 0], dtype=np.int64)
        buffers = memory_model.message_bytes(problem.policy, cuts[:, None], cuts[None, :], replicas)
        return np.asarray(max(device.memory_bytes for device in problem.platform.devices) - weights - buffers)

    def sums(self, replicas: int) -> Ints:
        """What the sum of a stage's gradients takes."""
        problem, (start, stop) = self.problem, self.ends
        gradients = np.maximum(np.asarray(memory_model.gradient_of(problem.chain, problem.policy, start, stop)), 0)
        paths = problem.platform.paths
        rings = [time_model.ring_all_reduce_ns(gradients.astype(object), replicas, *path) for path in paths]
        least: Ints = np.minimum.reduce([np.asarray(ring) for ring in rings]).astype(np.int64)
        return least

    def _with_replicas(self, replicas: int) -> Iterator[Ints]:
        """Yield the least time by which all of a stage is over, by ranges of what it holds."""
        problem, (start, stop) = self.problem, self.ends
        fastest = max(device.speed for device in problem.platform.devices)
        count = ceil_div(self.microbatches, replicas)
        work = np.asarray(time_model.work_ns(problem.chain, problem.policy, start, stop, 0, replicas, fastest))
        work = work + self.held[:, None] + self.held[None, :]
        later = 0
        if self.splits:
            later = time_model.backward_weight_ns(problem.chain, problem.policy, start, stop, replicas, fastest)
        room, sums = self.room(replicas), self.sums(replicas)
        ends = self.there[:, None] + self.back[:, None]
        for first, last in _ranges(count):
            self.problem.deadline.check()
            dropped = np.maximum(self.saved - room // first, 0)
            again = np.where(dropped > 0, dropped * np.minimum(self.price, 1e18), 0)
            fits = (room >= 0) & (again < 1e17) & (stop > start)
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
