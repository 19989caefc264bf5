"""Which stages with replicas balance compute, weight synchronisation and transfers best? PipeDream's partitioner.

It does not look at memory in flight; 1F1B* makes its allocation schedulable afterwards. PipeDream section 3.1.

A level joins units: devices inside a server, then servers. The best stages of a range end with one last stage on some
of the units, and the best stages of what is left on the others. The two modes of ``pipedream`` differ in what a stage
costs, which they pass in as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost import memory_model, time_model
from ...cost.stage_tables import largest_synced_gradient
from ...deadline import Deadline
from ...integers import Ints, ceil_div, largest_each
from ...plan import Allocation, Stage
from ...problem import Device, Problem

Table = npt.NDArray[Any]  # periods: int64 ns, or float64 in the released optimizer's arithmetic
Rows = Callable[[int], Table]
UNREACHABLE = 2**62
BLOCK = 128  # starts at a time: keeps the working set in cache and skips most cuts that lie before them


class StageRange(NamedTuple):
    """One stage: ``[start:stop]`` on ``replicas`` units of the level below, in the end devices."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True)
class Solved:
    """A solved level. ``table[m, stop, start]``: the least period of ``[start:stop]`` on m units.

    ``first(stop)`` and ``later(stop)`` have shape (units, stop): the period of ``[start:stop]`` as the only stage, and
    as the last of several with what enters it, on 1, 2, .. units. ``before(stop)`` are the cuts allowed before stop.
    """

    table: Table
    first: Rows
    later: Rows
    before: Callable[[int], Any]
    most_replicas: int

    def partition(self, start: int, stop: int, units: int) -> list[StageRange]:
        """Return stages of ``[start:stop]`` that have the period ``table[units, stop, start]``."""
        stages: list[StageRange] = []
        while True:
            least = self.table[units, stop, start]
            if units <= self.most_replicas and self.first(stop)[units - 1, start] == least:
                return [StageRange(start, stop, units), *stages[::-1]]
            cut = self._last_stage(start, stop, units)
            if cut is None:
                units -= 1  # one unit is left over
                continue
            stages.append(cut)
            stop, units = cut.start, units - cut.replicas

    def _last_stage(self, start: int, stop: int, units: int) -> StageRange | None:
        """Return the last of several stages, the longest one of those that are as good."""
        cuts = np.arange(stop)[self.before(stop)]
        entered, found = self.later(stop), []
        for m in range(1, min(units - 1, self.most_replicas) + 1):
            through = np.maximum(self.table[units - m, cuts, start], entered[m - 1, cuts])
            (hits,) = np.nonzero(through == self.table[units, stop, start])
            found += [StageRange(int(cuts[hits[0]]), stop, m)] if len(hits) else []
        return min(found, default=None)


def solve_level(
    length: int,
    units: int,
    first: Rows,
    later: Rows,
    *,
    before: Callable[[int], Any] | None = None,
    every_start: bool,
    fewer_units: bool,
    most_replicas: int,
    deadline: Deadline,
) -> Solved:
    """Return the dynamic program over the last stage of ``[start:stop]`` on ``units`` units (see :class:`Solved`).

    ``table[m, stop, start] = min(first, min over cuts k and q < m of max(table[m - q, k, start], later[q, k]))``, for
    start 0 alone unless ``every_start``; ``fewer_units`` lets units stay unused. ``before`` gives the cuts k, all in
    between by default. Time O(length^3 units^2) with every start, else O(length^2 units^2); vectorised.
    """
    before = before or (lambda stop: slice(1, stop))
    dtype = first(1).dtype
    unreachable = np.inf if dtype.kind == "f" else UNREACHABLE
    starts = length if every_start else 1
    table = np.full((units + 1, length + 1, starts), unreachable, dtype=dtype)
    for stop in range(1, length + 1):
        deadline.check()
        width = min(stop, starts)
        best = np.full((units, width), unreachable, dtype=dtype)
        best[:most_replicas] = first(stop)[:most_replicas, :width]
        entered, cuts = later(stop), before(stop)
        earlier, position = table[:, cuts, :width], np.arange(stop)[cuts]
        for left in range(0, width, BLOCK):
            block = slice(left, min(left + BLOCK, width))
            beyond = int(np.searchsorted(position, left, side="right"))  # the first cut after a start of the block
            for q in range(1, min(units - 1, most_replicas) + 1 if beyond < len(position) else 1):
                last = entered[q - 1, cuts, None][beyond:]
                for m in range(q + 1, units + 1):
                    through = np.maximum(earlier[m - q, beyond:, block], last).min(axis=0)
                    np.minimum(best[m - 1, block], through, out=best[m - 1, block])
        if fewer_units:
            np.minimum.accumulate(best, axis=0, out=best)
        table[1:, stop, :width] = best
    return Solved(table, first, later, before, most_replicas)


def device_stages(solved: Sequence[Solved], units: Sequence[int], length: int) -> list[StageRange]:
    """Return the stages of ``[0:length]`` on a whole solved hierarchy, lowest level first; replicas are devices."""
    stages = [StageRange(0, length, 1)]
    for level, count in zip(reversed(solved), reversed(units), strict=True):
        stages = [
            StageRange(inner.start, inner.stop, inner.replicas * outer.replicas)
            for outer in stages
            for inner in level.partition(outer.start, outer.stop, count)
        ]
    return stages


def on_consecutive_devices(stages: Sequence[StageRange], period: int) -> Allocation:
    """Return the allocation of ``stages`` on the platform's devices in order, claiming ``period`` ns."""
    placed, first = [], 0
    for stage in stages:
        placed.append(Stage(stage.start, stage.stop, tuple(range(first, first + stage.replicas))))
        first += stage.replicas
    return Allocation(tuple(placed), period)


Bools = npt.NDArray[np.bool_]


def pipedream(problem: Problem, straight: bool = False) -> Iterator[Allocation]:
    """Yield PipeDream's allocation: the better of a flat and a strictly hierarchical solve first, then the other.

    Minimises the most of compute / replicas, weight synchronisation (2(r-1)/r * W/B every r microbatches) and
    transfers (2a/B, as if all replicas shared one link). Flat: optimal among stages on consecutive devices from the
    first on, where every cut and every ring is charged the slowest level that it spans. Strict: optimal among
    hierarchies, in which a stage of an upper level takes whole units of the level below (PipeDream section 3.1, its T^k
    with the 1/m that its text has and its print lacks); all devices are taken to be as fast as the slowest, and the
    stages are laid on consecutive devices. ``claimed_period_ns`` is the solve's own period; memory is not looked at.
    ``straight`` allows no replicas.

    Time O(P^2 L log T) for L layers on P devices flat, O(m^2 L^3) per level of m units strict.
    """
    straight = straight or not problem.replicas
    solutions = [_flat(problem, straight)]
    if len(problem.platform.levels) > 1:
        strict = _strict(problem, straight)
        if strict[1] != solutions[0][1]:  # the same stages: the flat period is what they cost
            solutions.append(strict)
    for period, stages in sorted(solutions, key=lambda solution: solution[0]):
        yield on_consecutive_devices(stages, period)


# --- flat: the smallest period that a decision accepts ----------------------------------------------------------------


def _flat(problem: Problem, straight: bool) -> tuple[int, list[StageRange]]:
    """Return the least period over all partitions into stages on consecutive devices, and one that has it.

    Among those it is one of the fewest stages, on as many devices as these can use, cut where few bytes cross.
    """
    count, largest = len(problem.chain), 1 if straight else len(problem.platform)
    alone = problem.platform.devices[0]  # everything on the first device
    high = time_model.Passes(problem.chain.timed(alone.times), problem.policy, 0, count, speed=alone.speed).work_ns()
    low = 1
    while low < high:
        middle = (low + high) // 2
        ends = _nothing(problem)
        _extend(problem, _limits(problem, middle, largest), ends, ends)
        low, high = (low, middle) if ends[:, :, count].any() else (middle + 1, high)

    limits = _limits(problem, high, largest)
    by_stages = [_nothing(problem)]  # what one, two, ... stages cover
    while not by_stages[-1][:, :, count].any():
        by_stages.append(np.zeros_like(by_stages[0]))
        _extend(problem, limits, *by_stages[-2:])
    return high, _partition(problem, limits, by_stages)


@dataclass(frozen=True)
class _Limits:
    """What a period allows: ``passes[v, l]``, the transfer at cut l over level v; ``furthest(p, m)[l]``, the largest
    stop of a stage that starts at layer l on m devices from device p on (stops grow with starts); at most ``largest``
    replicas. ``spans[a, b]`` is the level that joins the devices a..b-1."""

    passes: Bools
    furthest: Callable[[int, int], Ints]
    largest: int
    spans: Ints

    def sizes(self, end: int) -> range:
        """Replica counts of a stage whose last device is end - 1."""
        return range(1, min(end, self.largest) + 1)


def _limits(problem: Problem, period: int, largest: int) -> _Limits:
    chain, platform = problem.chain, problem.platform
    directions = 1 if platform.full_duplex else 2
    passes = np.array(
        [
            [directions * platform.transfer_ns(size, k) <= period for size in chain.cut_bytes]
            for k in range(len(platform.levels))
        ]
    )

    @cache
    def furthest_stop(replicas: int, slowest: Device, level: int) -> Ints:
        problem.deadline.check()
        gradient = largest_synced_gradient(problem.policy, period, replicas, platform.paths[level][0])
        return _furthest(problem, period, replicas, slowest, gradient)

    @cache
    def furthest(p: int, m: int) -> Ints:
        slowest = replace(platform.slowest(range(p, p + m)), memory_bytes=0)  # which isn't looked at
        return furthest_stop(m, slowest, int(platform.spans[p, p + m]))

    return _Limits(passes, furthest, largest, platform.spans)


def _nothing(problem: Problem) -> Bools:
    """Return the table ``[p, v, l]``: the first l layers fit on the first p devices, the last stage spanning level v,
    with nothing covered yet."""
    ends = np.zeros((len(problem.platform) + 1, len(problem.platform.levels), len(problem.chain) + 1), dtype=np.bool_)
    ends[0, 0, 0] = True
    return ends


def _starts(limits: _Limits, covered: Bools, end: int) -> Bools:
    """Return the table (replicas - 1, level of the stage before, l): a stage whose last device is end - 1 may start
    at layer l."""
    sizes = np.array(limits.sizes(end))
    first = end - sizes
    own = np.maximum(limits.spans[first, end], limits.spans[first - 1, first + 1])  # its own, and to the device before
    spanned = np.maximum(np.arange(len(limits.passes)), own[:, None])
    starts: Bools = covered[first] & limits.passes[spanned]
    if first[-1] == 0:
        starts[-1] = covered[0]  # no transfer comes before the first stage
    return starts


def _extend(problem: Problem, limits: _Limits, covered: Bools, ends: Bools) -> None:
    """Add to ``ends`` what one more stage covers beyond ``covered``, which may be the same."""
    for end in range(1, len(problem.platform) + 1):  # behind its last device
        problem.deadline.check()
        sizes = limits.sizes(end)
        starts = _starts(limits, covered, end).any(axis=1)
        stops = np.array([limits.furthest(end - m, m) for m in sizes])
        index = np.arange(starts.shape[1])
        last = np.maximum.accumulate(np.where(starts, index, -1), axis=1)[:, :-1]  # the last start before each stop
        fits = (last >= 0) & (np.take_along_axis(stops, np.maximum(last, 0), axis=1) >= index[1:])
        spans = limits.spans[end - np.array(sizes), end]
        for v in np.unique(spans):
            ends[end, v, 1:] |= fits[spans == v].any(axis=0)


def _partition(problem: Problem, limits: _Limits, by_stages: list[Bools]) -> list[StageRange]:
    """Return stages that cover the chain, read back from what each number of stages covers."""
    stop = len(problem.chain)
    end, level = (int(x) for x in np.argwhere(by_stages[-1][:, :, stop])[-1])
    stages: list[StageRange] = []
    for covered in by_stages[-2::-1]:
        starts = _starts(limits, covered, end)[:, :, :stop]
        choices = []
        for m in limits.sizes(end):
            if limits.spans[end - m, end] == level:
                fits = starts[m - 1] & (limits.furthest(end - m, m)[:stop] >= stop)
                for before, start in np.argwhere(fits):
                    choices.append((problem.chain.cut_bytes[start], int(start), m, int(before)))
        _, start, m, level = min(choices)
        stages.append(StageRange(start, stop, m))
        end, stop = end - m, start
    return stages[::-1]


def _furthest(problem: Problem, period: int, replicas: int, slowest: Device, gradient: int) -> Ints:
    """Return for each start the largest stop so that ``layers[start:stop]`` on ``replicas`` devices keep ``period`` and
    have at most ``gradient`` bytes to sum."""
    chain, speed = problem.chain.timed(slowest.times), slowest.speed
    sums = chain.sums
    prefix = sums.forward_ns + sums.backward_ns
    budget = replicas * period
    roughly = min(budget * speed.numerator // speed.denominator, UNREACHABLE)  # rounding up only takes away
    stop = np.searchsorted(prefix, prefix + roughly, side="right") - 1
    start = np.arange(len(prefix))

    def keeps(stop: Ints) -> Bools:
        """Whether each stage is in time; longer ones are not if it isn't."""
        work = time_model.Passes(chain, problem.policy, start, stop, replicas, speed).work_ns()
        found: Bools = (work <= budget) & (memory_model.gradient_of(chain, problem.policy, start, stop) <= gradient)
        return found

    fits = keeps(stop)
    return largest_each(keeps, np.where(fits, stop, start), np.where(fits, stop, stop - 1))


# --- strict hierarchy: PipeDream's dynamic program, level by level ----------------------------------------------------


def _strict(problem: Problem, straight: bool) -> tuple[int, list[StageRange]]:
    """Return the least period of a strict hierarchy and its stages, replicas counted in devices."""
    chain, platform, policy = problem.chain, problem.platform, problem.policy
    length = len(chain)
    slowest = platform.slowest(range(len(platform)))
    speed, timed = slowest.speed, chain.timed(slowest.times)
    directions = 1 if platform.full_duplex else 2
    solved: list[Solved] = []
    for k, joined in enumerate(platform.levels):
        bandwidth, _ = platform.paths[k]
        crossing = np.array([directions * platform.transfer_ns(size, k) for size in chain.cut_bytes], dtype=np.int64)
        crossing[0] = 0
        below = solved[-1].table[-1] if solved else None
        most = 1 if straight else joined.count

        @cache
        def first(stop: int, below: Table | None = below, most: int = most, bandwidth: int = bandwidth) -> Table:
            start = np.arange(stop)
            gradient = np.asarray(memory_model.gradient_of(chain, policy, start, stop))
            exact: Any = gradient.astype(object)  # bytes times 1e9 exceed 64 bits
            rows = []
            for m in range(1, most + 1):
                own = time_model.Passes(timed, policy, start, stop, m, speed)
                work = own.work_ns() if below is None else below[stop, :stop]
                sync = np.asarray(time_model.sync_period_ns(policy, exact, m, bandwidth)).astype(np.int64)
                rows.append(np.maximum(ceil_div(work, m), sync))
            return np.array(rows)

        @cache
        def later(stop: int, first: Rows = first, crossing: Ints = crossing) -> Table:
            return np.maximum(first(stop), crossing[:stop])

        top = k == len(platform.levels) - 1
        solved.append(
            solve_level(
                length,
                joined.count,
                first,
                later,
                every_start=not top,
                fewer_units=True,
                most_replicas=most,
                deadline=problem.deadline,
            )
        )
    period = int(solved[-1].table[-1, length, 0])
    return period, device_stages(solved, [level.count for level in platform.levels], length)
