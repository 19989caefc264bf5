"""How little must a stage recompute to hold g microbatches, when any of its segments may be recomputed?

From the ways to recompute each stage (:mod:`.labels`) comes a table: the least extra time at which ``layers[i:j]`` fit
into a device's memory with g microbatches in flight. A decision then asks it only for the two counts between which a
stage has to choose: the g that it has without recomputing, and one more, as the extra time may delay its backward into
the next period. Exact where all labels are kept, and then optimal among contiguous plans. ALGORITHMS section 5,
"Segments"; not in any paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache

import numpy as np

from ...cost import time_model
from ...cost.stage_tables import StageTables
from ...integers import NEVER, IntLike, Ints, ceil_div
from ...problem import Chain, Device, LayerTimes, Problem
from ..cuts import counts_standing, fixed_bytes, in_flight_limit, memory_counts
from ..tables.device_counts import Counts, device_counts
from ..tables.stages import Ranges, SearchTables, Work, replica_counts, with_replicas
from .labels import Labels, Units, labels_from
from .lowest_peaks import LowestPeak, lowest_peaks
from .pareto import Resolution

AnyLabels = Labels | LowestPeak
MOST_ENTRIES = 4 * 10**7  # of 8 bytes, some tables of as many at a time


@dataclass(frozen=True)
class LabelEffort:
    """How much work may go into the labels of all stages, and how finely they are compared with it.

    ``work`` counts extensions of labels by one more segment or run, over all first layers. For the stages from each
    first layer the first of ``resolutions`` is taken that needs no more than a quarter of what is left, else ``last``.
    """

    resolutions: tuple[Resolution, ...]
    last: Resolution
    work: int

    def over(self, cuts: int, many: int) -> LabelEffort:
        """Return the effort for one of so many ``cuts``, less where there are more than ``many``: by their square."""
        return replace(self, work=self.work * many**2 // max(many, cuts) ** 2)


def with_segments(
    tables: SearchTables, period: int, least: int, longest: int, least_delay: Ints, effort: LabelEffort
) -> tuple[SearchTables, bool] | None:
    """Return the tables with the times of stages that may recompute any segments, for plans of at most ``period`` ns.

    Also whether that is exact: no such plan is missing. None when there is none by work, devices and fixed memory
    alone. Decisions may be made for periods of ``least`` to ``period``; ``longest`` bounds the time of one microbatch.
    Segments begin and end at any layer, or only at cuts where some are left out.
    """
    counts = device_counts(tables, period, least_delay)
    if counts is None:
        return None
    groups, total, found = most_groups(tables, least, longest), int(tables.work[-1]), []
    for own in tables.variants:
        labels = {}
        for times in profiles(own):
            caps = caps_within(own, period, counts, times, total if tables.uniform else None)
            labels[times] = _labels_within(own, caps, own.problem.chain.timed(times), effort)
        found.append(with_labels(own, labels, groups))
    exact = tables.complete and all(x for _, x in found)
    return (tables.of_variants([x for x, _ in found]) if tables.uniform else found[0][0]), exact


def profiles(tables: SearchTables) -> tuple[LayerTimes | None, ...]:
    """Return the layer times of all classes of devices: where these have profiles of their own, each its labels."""
    return tuple(dict.fromkeys(x.times for x in (tables.best_device, *(x.device for x in tables.classes))))


def _labels_within(tables: SearchTables, caps: Caps, chain: Chain, effort: LabelEffort) -> Callable[[int], Labels]:
    """Return the function from first layers to labels, each made with no more than its share of ``effort``."""
    positions = np.arange(len(chain) + 1) if tables.complete else tables.cuts
    units = Units.of(chain, positions)
    steps = np.arange(len(positions))
    first = {int(position): step for step, position in enumerate(positions)}
    place = {int(cut): i for i, cut in enumerate(tables.cuts)}
    settled: dict[int, Resolution] = {}
    left = effort.work

    def labels(start: int) -> Labels:
        nonlocal left
        tables.problem.deadline.check()
        i, at = place[start], first[start]
        cost, peak = caps.cost[i, positions], caps.peak[i, positions]
        if start not in settled:
            for resolution in effort.resolutions:
                found, tried = labels_from(units, at, steps, cost, peak, resolution, left // 4)
                left = max(0, left - tried)
                if found is not None:
                    settled[start] = resolution
                    return found.at(positions)
        resolution = settled.setdefault(start, effort.last)
        found, _ = labels_from(units, at, steps, cost, peak, resolution)
        assert found is not None
        return found.at(positions)

    return labels


def with_lowest_peaks(tables: SearchTables, least: int, longest: int) -> SearchTables:
    """Return the tables with two choices for each stage: none, and the segments of the lowest peak, whatever they cost.

    Exact where one microbatch at a time is fast enough.
    """
    positions = range(len(tables.problem.chain) + 1) if tables.complete else tables.cuts.tolist()
    groups, found = most_groups(tables, least, longest), []
    for own in tables.variants:
        chain = own.problem.chain
        labels = {times: _lowest_peaks(chain.timed(times), tuple(positions)).__getitem__ for times in profiles(own)}
        found.append(with_labels(own, labels, groups)[0])
    return tables.of_variants(found) if tables.uniform else found[0]


@lru_cache(maxsize=2)
def _lowest_peaks(chain: Chain, positions: tuple[int, ...]) -> dict[int, LowestPeak]:
    """Remember the labels, by first layer, while one chain is tried with many memories and numbers of devices."""
    at = np.array(positions)
    return {int(x.position[0]): x for x in (found.at(at) for found in lowest_peaks(Units.of(chain, at)))}


def most_groups(tables: SearchTables, least: int, longest: int) -> int:
    """Return a bound on what one stage holds at periods of at least ``least`` ns.

    Idle time in a delay is at most the time of the element that opens a group, and no stage or cut takes more than its
    devices times the period.
    """
    return min(4 * len(tables.problem.platform), ceil_div(2 * longest, least))


def too_many_labels(tables: SearchTables, least: int, longest: int) -> bool:
    """Whether the table of what stages recompute at periods of at least ``least`` ns would take a gigabyte."""
    return len(tables.cuts) ** 2 * most_groups(tables, least, longest) > MOST_ENTRIES


@dataclass(frozen=True)
class Caps:
    """What labels may cost and hold at most, by (first cut, position): beyond, no plan of interest contains them.

    Shape (cuts, L + 1); they never grow with the position, and are negative where no stage passes.
    """

    cost: Ints
    peak: Ints


def caps_within(tables: SearchTables, period: int, counts: Counts, times: LayerTimes | None, total: int | None) -> Caps:
    """Return the caps of plans of at most ``period`` ns, for stages on devices with these layer ``times``: time that
    devices have left, memory that weights leave.

    ``counts`` are of GPUs, and ``total`` is what all layers take of them at least, where stages choose variants.
    """
    problem, cuts = tables.problem, tables.cuts
    width = 1 if total is None else problem.chain.tensor
    platform, sums = problem.platform, problem.chain.timed(times).sums
    classes = (tables.best_device, *(x.device for x in tables.classes))
    fastest = max(x.speed for x in classes if x.times == times)
    most = len(platform) if problem.replicas else 1
    start, stop = cuts[:, None], cuts[None, :]
    work = sums.forward_ns + sums.backward_ns
    left = width * len(platform) - counts.before[:, None] - counts.after[None, :]
    devices = np.minimum(left // width, most)
    spare = devices * period * fastest.numerator // fastest.denominator - (work[stop] - work[start])
    if all(x.times == times for x in classes):
        together = sum((x.speed for x in platform.devices), Fraction(0))
        idle = width * together * period - (int(work[-1]) if total is None else total)
        spare = np.minimum(spare, math.floor(idle / width))
    fixed = np.minimum.reduce([fixed_bytes(problem, start, stop, 1, replicas) for replicas in memory_counts(problem)])
    room = max(x.memory_bytes for x in platform.devices) - fixed
    index = np.arange(len(cuts))
    possible = (index[None, :] > index[:, None]) & (index[None, :] <= counts.reach[:, None])
    possible &= (devices > 0) & (spare >= 0) & (room >= 0)

    def by_position(table: Ints) -> Ints:
        later = np.maximum.accumulate(np.where(possible, table, -1)[:, ::-1], axis=1)[:, ::-1]
        return later[:, np.searchsorted(cuts, np.arange(len(problem.chain) + 1))]

    return Caps(by_position(spare), by_position(room))


def with_labels(
    tables: SearchTables, labels_of: Mapping[LayerTimes | None, Callable[[int], AnyLabels]], groups: int
) -> tuple[SearchTables, bool]:
    """Return the tables with the times that the labels allow (given by profile and first layer), and whether all are
    exact."""
    devices = dict.fromkeys([tables.best_device, *(x.device for x in tables.classes)])
    options: dict[Device, SegmentOptions] = {}
    exact = True
    for times, labels in labels_of.items():
        some, complete = _options_of(tables, [x for x in devices if x.times == times], labels, groups)
        options |= some
        exact = exact and complete
    classes = tuple(replace(x, options=options[x.device]) for x in tables.classes)
    return replace(tables, classes=classes, best=options[tables.best_device]), exact


def _options_of(
    tables: SearchTables, devices: Sequence[Device], labels_of: Callable[[int], AnyLabels], groups: int
) -> tuple[dict[Device, SegmentOptions], bool]:
    """Do the same for some devices with the same layer times."""
    problem, cuts = tables.problem, tables.cuts
    memories = sorted({x.memory_bytes for x in devices})
    size = len(cuts)
    counts = counts_standing(problem)
    times = {
        (memory, replicas): np.full(
            (size, size, ceil_div(groups, counts.index(replicas) + 1) + 2), NEVER, dtype=np.int64
        )
        for memory in memories
        for replicas in dict.fromkeys(counts)
    }
    index = np.full(len(problem.chain) + 1, -1)
    index[cuts] = np.arange(size)
    exact = True
    for i in range(size - 1):
        labels = labels_of(int(cuts[i]))
        exact = exact and labels.exact
        at = np.flatnonzero(index[labels.position] > i)
        stops = index[labels.position[at]]
        for (memory, replicas), table in times.items():
            limit = _limits(problem, labels, at, memory, replicas)
            np.minimum.at(table[i], (stops, np.minimum(limit, table.shape[2] - 2)), labels.cost[at])
    for table in times.values():
        table[:, :, 0] = NEVER  # labels that don't fit at all
        table[:] = np.minimum.accumulate(table[:, :, ::-1], axis=2)[:, :, ::-1]
    finder = _SegmentFinder(problem, labels_of)
    return {x: _options(tables, x, [times[x.memory_bytes, r] for r in counts], finder) for x in devices}, exact


def _limits(problem: Problem, labels: AnyLabels, at: Ints, memory: int, replicas: int) -> Ints:
    """Return how many microbatches each of the ``replicas`` of the stages of the labels ``at`` can hold."""
    start = np.broadcast_to(labels.position[0], at.shape)
    return in_flight_limit(problem, start, labels.position[at], labels.kept[at], labels.peak[at], memory, replicas)


class _SegmentFinder:
    """Finds the segments that a table's least recomputation stands for, which the table doesn't keep.

    The labels of the few stages that a plan has are made again.
    """

    def __init__(self, problem: Problem, labels_of: Callable[[int], AnyLabels]) -> None:
        self._problem, self._labels_from = problem, cache(labels_of)
        self._found: dict[tuple[int, ...], tuple[Ranges, Ranges]] = {}

    def find(self, start: int, stop: int, in_flight: int, replicas: int, memory: int) -> tuple[Ranges, Ranges]:
        """Return the cheapest segments of ``layers[start:stop]`` that fit with ``in_flight`` microbatches on each
        replica, and the runs whose cores run again."""
        key = start, stop, in_flight, replicas, memory
        if key not in self._found:
            labels, at = self._quickest(*key)
            self._found[key] = labels.ranges(int(at[0])), labels.ranges(int(at[0]), cores=True)
        return self._found[key]

    def ways(self, start: int, stop: int, replicas: int, memory: int) -> list[Ranges]:
        """Return segments that fit with one microbatch, the cheapest first, each keeping less than those before."""
        labels, at = self._quickest(start, stop, 1, replicas, memory)
        least = np.minimum.accumulate(np.concatenate([[NEVER], labels.kept[at]]))
        return [labels.ranges(int(x)) for x in at[labels.kept[at] < least[:-1]]]

    def _quickest(self, start: int, stop: int, in_flight: int, replicas: int, memory: int) -> tuple[AnyLabels, Ints]:
        """Return the labels from a stage's first layer, and which of them fit, the cheapest first."""
        labels = self._labels_from(start)
        at = np.flatnonzero(labels.position == stop)
        at = at[_limits(self._problem, labels, at, memory, replicas) >= in_flight]
        return labels, at[np.lexsort((labels.peak[at], labels.kept[at], labels.cost[at]))]


@dataclass(frozen=True)
class SegmentOptions:
    """How long the stages ``layers[cuts[i]:cuts[j]]`` take on devices of one class when any segments are recomputed.

    ``recompute[r][i, j, g]`` is the least recomputation (ns of the profiled device) while g microbatches are in flight
    on each of r + 1 replicas, NEVER where they don't fit; the last g stands for all beyond, of which the more replicas
    there are the fewer are asked for. ``forward`` is in ns of
    this class, with what blocks, ``backward[r]`` of the profiled device. The last r stands for all beyond.
    """

    cuts: Ints
    device: Device
    forward: Ints
    backward: tuple[Ints, ...]
    recompute: tuple[Ints, ...]
    relaxed: tuple[tuple[Ints, Ints], ...]  # for some ranges of counts the lowest's time, and the highest as the limit
    finder: _SegmentFinder

    @property
    def by_replicas(self) -> bool:
        """Whether the time of a stage, or what it can hold, depends on its replicas beyond their number."""
        return len(self.backward) > 1 or len(self.recompute) > 1

    def select(self, index: Ints) -> SegmentOptions:
        """Return the options of the stages between the cuts ``index`` alone."""
        both = np.ix_(index, index)
        backward, recompute = (tuple(table[both] for table in tables) for tables in (self.backward, self.recompute))
        cuts, forward = self.cuts[index], self.forward[both]
        relaxed = tuple((time[both], limit[both]) for time, limit in self.relaxed)
        return SegmentOptions(cuts, self.device, forward, backward, recompute, relaxed, self.finder)

    def work(self, start: int, stops: Ints, replicas: Ints) -> Work:
        """Return the least time of stages as a function of what they hold (see ``StageOptions``)."""
        most: IntLike = self.recompute[0].shape[2] - 1
        if len(self.recompute) == 1:
            table, place = self.recompute[0][start].reshape(-1), stops * (most + 1)
        else:
            rows = [table[start].reshape(-1) for table in self.recompute]
            table, which = np.concatenate(rows), np.clip(replicas, 1, len(rows)) - 1
            most = np.array([table.shape[2] for table in self.recompute])[which] - 1
            place = np.cumsum([0, *map(len, rows)])[which] + stops * (most + 1)
        forward = self.forward[start][stops]
        backward = with_replicas(self.backward, start, stops, replicas)
        speed = self.device.speed
        return lambda in_flight: _time(forward, backward, table[place + np.minimum(in_flight, most)], speed)

    def recomputed(self, start: int, stop: int, in_flight: int, replicas: int) -> tuple[Ranges, Ranges]:
        """Return the segments of least recomputation while ``in_flight`` microbatches are held by each replica, and the
        runs whose cores run again then."""
        first, last = int(self.cuts[start]), int(self.cuts[stop])
        return self.finder.find(first, last, in_flight, replicas, self.device.memory_bytes)

    def ways(self, start: int, stop: int, replicas: int) -> Sequence[Ranges]:
        """Return the segments that a stage may recompute, those of least recomputation first."""
        return self.finder.ways(int(self.cuts[start]), int(self.cuts[stop]), replicas, self.device.memory_bytes)


def _time(forward: Ints, backward: Ints, recompute: Ints, speed: Fraction) -> Ints:
    never = recompute >= NEVER
    time: Ints = forward + time_model.scaled(backward + np.where(never, 0, recompute), speed)
    time[never] = NEVER
    return time


def _options(
    tables: SearchTables, device: Device, recomputations: Sequence[Ints], finder: _SegmentFinder
) -> SegmentOptions:
    stages, profiled = StageTables.between(tables.problem, tables.cuts), replace(device, speed=Fraction(1))
    forward = stages.forward(device)
    backward = tuple(stages.backward(profiled, replicas) for replicas in replica_counts(tables.problem))
    idle = np.asarray(forward + backward[0] == 0)  # a stage without work would leave orders ambiguous
    forward = forward + stages.waits[0] + stages.waits[1]
    recompute = tuple(np.where(idle[:, :, None], NEVER, table) for table in recomputations)
    least, quickest = recompute[0].copy(), np.minimum(backward[0], backward[-1])  # on any number of replicas
    for table in recompute[1:]:
        np.minimum(least[:, :, : table.shape[2]], table, out=least[:, :, : table.shape[2]])
    most = least.shape[2] - 2
    largest = np.argmax(least[:, :, 1:] >= NEVER, axis=2)  # counts 1..largest fit
    options, low = [], 1
    while low <= most:
        high = min(most, low + low // 4)
        time = _time(forward, quickest, least[:, :, low], device.speed)
        options.append((time, np.where(largest >= low, np.minimum(largest, high), 0)))
        low = high + 1
    return SegmentOptions(tables.cuts, device, forward, backward, recompute, tuple(options), finder)
