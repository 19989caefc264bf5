"""What does every split take over stages on given groups of GPUs, drained?

Stages recompute as little as lets them hold the microbatches that they are to have ahead. Many are timed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm

import numpy as np

from ...cost.stage_tables import StageTables
from ...integers import NEVER, Ints, ceil_div
from ...partition.balance import balance
from ...partition.contiguous.contiguous import tables_within
from ...partition.cuts import round_trips_ns
from ...partition.tables.split_paths import first_split, least_longest, short_splits, up_to
from ...partition.tables.stages import Ranges, SearchTables, StageOptions, held_times
from ...plan import Stage
from ...problem import Device, Level, Platform, Policy, Problem
from ...schedule.programs.one_f_one_b import forwards_ahead
from .run import Retiming, Run, retimed

Split = tuple[int, ...]  # indices of cuts


class Tables:
    """What every stage takes on a group of devices of which it has one part in ``parts`` of the memory, each table
    computed once, shape (cuts, cuts).

    No stage that takes more than ``most_ns`` is in them; ``exact``: all others are, at their least times. With
    ``microbatches`` they are of one of equal pipelines that runs so many.
    """

    def __init__(
        self, problem: Problem, found: tuple[SearchTables, int, bool], parts: int = 1, microbatches: int | None = None
    ) -> None:
        self.found, self.most_ns, self.exact = found
        self.problem, self.parts, self.alike = problem, parts, microbatches is not None
        self.microbatches = microbatches or problem.policy.accumulate or 1
        self.size = len(self.found.cuts)
        self.retimed: tuple[Run, Retiming] | None = None  # the last
        self._options: dict[Device, StageOptions] = {x.device: x.options for x in self.found.classes}
        self.stages = StageTables.between(problem, self.found.cuts)
        self._known: dict[object, Ints] = {}

    def copies(self, group: Sequence[int]) -> int:
        """Return the replicas of a stage on a group that its times are to know."""
        return 1 if self.alike else len(group)

    def options(self, group: Sequence[int]) -> StageOptions | None:
        """Return the times of all stages on a group of devices."""
        return self._options.get(_part(self.problem.platform.slowest(group), self.parts))

    def times(self, group: Sequence[int], in_flight: int) -> Ints | None:
        """Return U of every stage whose replicas each hold so many microbatches, NEVER if they can't."""
        options, r = self.options(group), self.copies(group)
        if options is None:
            return None
        key = "times", self.problem.platform.slowest(group), r, in_flight
        if key not in self._known:
            self.problem.deadline.check()
            self._known[key] = held_times(options, self.size, in_flight, r, self.most_ns)
        own = self._forward(group)
        forward, backward = self._exchanging(own, self._known[key] - own, group)
        return np.asarray(np.minimum(NEVER, forward + backward))

    def forward(self, group: Sequence[int]) -> Ints:
        """Return F of every stage, with what it waits for where transfers block."""
        forward = self._forward(group)
        return self._exchanging(forward, forward, group)[0]

    def _forward(self, group: Sequence[int]) -> Ints:
        device = self.problem.platform.slowest(group)
        before, behind = self.stages.waits
        return self.stages.once(("waited", device), lambda: self.stages.forward(device) + before // 2 + behind // 2)

    def _exchanging(self, forward: Ints, backward: Ints, group: Sequence[int]) -> tuple[Ints, Ints]:
        platform = self.problem.platform
        path = platform.paths[platform.level_of(group)]
        return self.stages.exchanging(forward, backward, len(group), path)

    def update(self, group: Sequence[int]) -> Ints:
        """Return what the update of every stage takes behind its last backward, at least."""
        platform = self.problem.platform
        return self.stages.update(platform.slowest(group), len(group), platform.paths[platform.level_of(group)])

    def weight(self, group: Sequence[int]) -> Ints:
        """Return the part of every stage's backward that may come later."""
        return self.stages.later(self.problem.platform.slowest(group), len(group))

    def bare(self, group: Sequence[int]) -> Ints:
        """Return U of every stage that recomputes nothing, whatever it can hold."""
        table = StageTables.between(self.found.problem, self.found.cuts).work(self.problem.platform.slowest(group))
        return np.where(self.stages.stop > self.stages.start, table, NEVER)

    def load(self, one: Sequence[int], other: Sequence[int]) -> Ints:
        """Return how long a microbatch keeps the link between two groups busy over each cut, at least."""
        platform, trip = self.problem.platform, self.trip(one, other)
        return trip // 2 if platform.both_ways(platform.level_between(one, other)) else trip

    def trip(self, one: Sequence[int], other: Sequence[int]) -> Ints:
        """Return both transfers of a microbatch over each cut between two groups; nothing where they block."""
        platform = self.problem.platform
        level = platform.level_between(one, other)
        key = "trip", level, tuple(one) == tuple(other)
        if key not in self._known:
            trips = round_trips_ns(self.problem.chain, platform, self.found.cuts, level)
            moves = tuple(one) != tuple(other) and not platform.blocking
            self._known[key] = np.array([min(NEVER, trip) * moves for trip in trips], dtype=np.int64)
        return self._known[key]


def tables_of(problem: Problem, parts: int = 1) -> Tables | None:
    """Return the tables of stages that may each fill one part in ``parts`` of their devices' memory, of those that
    drained plans with some hope have; None where no contiguous plan fits that much."""
    platform, microbatches = problem.platform, problem.policy.accumulate or 1
    count = parts * len(platform)
    slack = min(Fraction(4), max(Fraction(3, 2), Fraction(2 * count + microbatches, microbatches)))
    relaxed = problem
    if parts > 1:
        devices = tuple(_part(device, parts) for device in platform.devices) * parts
        level = Level(count, *platform.paths[0 if platform.blocking else -1])
        relaxed = replace(problem, platform=replace(platform, devices=devices, levels=(level,)))
    found = tables_within(relaxed, slack)
    return None if found is None else Tables(problem, found, parts)


def tables_of_pipelines(problem: Problem, groups: Sequence[tuple[int, ...]], microbatches: int) -> Tables | None:
    """Return the tables of equal pipelines whose stage s runs on ``groups[s]``, of which each runs so many
    ``microbatches``; None when no split fits.

    ``policy.accumulate`` counts those of all pipelines. Any split that drains sooner than p stages at the shortest
    possible period has no stage longer than (p + M) / M of that period, so longer ones aren't looked at.
    """
    platform, count = problem.platform, len(groups)
    alone = Platform(
        tuple(platform.slowest(group) for group in groups),
        (Level(count, *platform.paths[0 if platform.blocking else -1]),),
        platform.full_duplex,
        platform.blocking,
        overhead_ns=platform.overhead_ns,
    )
    # a replica's share of a step is the same, and of the optimizer's state
    policy = replace(problem.policy, accumulate=microbatches, pipelines=len(groups[0]))
    slack = min(Fraction(4), max(Fraction(3, 2), Fraction(count + microbatches, microbatches)))
    found = tables_within(replace(problem, platform=alone, policy=policy, replicas=False), slack)
    return None if found is None else Tables(problem, found, microbatches=microbatches)


def _part(device: Device, parts: int) -> Device:
    return device if parts == 1 else replace(device, memory_bytes=device.memory_bytes // parts)


@dataclass(frozen=True)
class Layout:
    """Stage s on ``groups[s]``, which may hold several, each holding ``held[s]`` microbatches on every device."""

    tables: Tables
    groups: tuple[tuple[int, ...], ...]
    held: tuple[int, ...]

    @staticmethod
    def ahead(tables: Tables, groups: tuple[tuple[int, ...], ...]) -> Layout:
        """Return the layout of stages that hold what they run ahead under 1F1B."""
        replicas = tuple(map(len, groups))
        pairs = zip(forwards_ahead(replicas), replicas, strict=True)
        return Layout(tables, groups, tuple(min(a, ceil_div(tables.microbatches, r)) for a, r in pairs))

    def guess_ns(self, split: Split) -> int:
        """Return about what a mini-batch of a split takes under 1F1B."""
        assert self.times is not None
        pairs = list(pairwise(split))
        way = sum(int(u[pair]) for u, pair in zip(self.times, pairs, strict=True))
        way += sum(int(trip[at]) for trip, at in zip(self.trips, split[1:-1], strict=True))
        longest = max(int(x[pair]) for x, pair in zip(self._each, pairs, strict=True))
        updates = max(int(costs[-1][pair]) for costs, pair in zip(self.costs, pairs, strict=True))
        pipelines = len(self.groups[0]) // self._shares[0]
        return way + (ceil_div(self.tables.microbatches, pipelines) - 1) * longest + updates

    @cached_property
    def times(self) -> list[Ints] | None:
        """U of each stage; None where a group is none that the tables know."""
        pairs = zip(self.groups, self.held, strict=True)
        found = [self.tables.times(group, held) for group, held in pairs]
        return [x for x in found if x is not None] if all(x is not None for x in found) else None

    @cached_property
    def trips(self) -> list[Ints]:
        """Both transfers over each cut, by the stage before it."""
        return [self.tables.trip(one, other) for one, other in pairwise(self.groups)]

    @cached_property
    def loads(self) -> list[Ints]:
        """What a microbatch takes of the links over each cut, by the stage before it."""
        return [self.tables.load(one, other) for one, other in pairwise(self.groups)]

    @cached_property
    def _shares(self) -> list[int]:
        """The replicas of each stage in every one of as many equal pipelines as there may be."""
        common = gcd(*map(len, self.groups))
        return [len(group) // common for group in self.groups]

    @cached_property
    def _each(self) -> list[Ints]:
        """What a microbatch takes of each stage's time on all its GPUs."""
        pairs = zip(self.times or (), self._shares, strict=True)
        return [np.where(x < NEVER, ceil_div(x, r), NEVER) for x, r in pairs]

    def fits(self, split: Split) -> bool:
        """Whether the stages of a split can hold what they are to."""
        return self.times is not None and all(u[x] < NEVER for u, x in zip(self.times, pairwise(split), strict=True))

    def even(self) -> Iterator[Split]:
        """Yield splits of about equal work, and those whose longest stage is shortest, with the long ones first or
        last; all as far as they fit."""
        if self.times is None:
            return
        work, shares = self.tables.found.work, np.cumsum(list(map(len, self.groups)))
        inner = (int(np.abs(work - work[-1] * share // shares[-1]).argmin()) for share in shares[:-1])
        for split in (self._balanced(), (0, *inner, self.tables.size - 1)):
            if all(low < high for low, high in pairwise(split)) and self.fits(split):
                yield split
        longest = least_longest(self._each)
        if longest is not None:
            allowed = [up_to(longest, x) for x in self._each]
            yield from (found for long in (True, False) if (found := first_split(allowed, long)))

    def _balanced(self) -> Split:
        """Return the split whose longest stage is shortest if nothing is recomputed; -1 for cuts that there aren't."""
        problem, place = self.tables.problem, {int(cut): i for i, cut in enumerate(self.tables.found.cuts)}
        devices = tuple(map(problem.platform.slowest, self.groups))
        alone = Problem(problem.chain, Platform(devices, problem.platform.levels), Policy(), False, "none")
        return (0, *(place.get(stage.stop, -1) for stage in next(balance(alone)).stages))

    @cached_property
    def costs(self) -> list[tuple[Ints, Ints, Ints, Ints]]:
        """Forward, U, the part of it that may come later, and update of each stage."""
        assert self.times is not None
        of = self.tables
        pairs = zip(self.groups, self.times, strict=True)
        return [(of.forward(group), times, of.weight(group), of.update(group)) for group, times in pairs]

    def starts(self) -> Iterator[Split]:
        """Yield splits whose longest stage is shortest, or somewhat longer, and the way through them short."""
        if self.times is not None:
            pairs = zip(self.loads, pairwise(self._shares), strict=True)
            links = [ceil_div(load, lcm(*ends)) for load, ends in pairs]
            yield from short_splits(self._each, self.times, self.trips, links)

    def makespans(self, splits: Sequence[Split], run: Run) -> Ints:
        """Return about what a mini-batch of each split takes if devices and links keep the order of a ``run``, NEVER
        where one doesn't fit."""
        cuts, program, count = np.array(splits, dtype=np.int64).T, run.timeline.program, len(self.groups)
        picked = [
            tuple(table[low, high] for table in tables)
            for tables, low, high in zip(self.costs, cuts[:-1], cuts[1:], strict=True)
        ]
        forward, work, later, updates = (np.stack(x) for x in zip(*picked, strict=True))
        there = [trip[at][None, :] // 2 for trip, at in zip(self.trips, cuts[1:-1], strict=True)]
        fits = np.all(work < NEVER, axis=0)
        backward = np.where(fits, work - forward - (later if program.split else 0), 0)
        durations = np.concatenate([forward, backward, *there, later])
        first = {"F": 0, "B": count, "SEND_F": 2 * count, "SEND_B": 2 * count - 1, "W": 3 * count - 1}
        rows = [first[work.kind] + work.stage for work in program.operations]
        if self.tables.retimed is None or self.tables.retimed[0] is not run:
            self.tables.retimed = run, retimed(run.timeline)
        return np.where(fits, self.tables.retimed[1].makespans(durations[rows], updates), NEVER)

    def ways(self, split: Split) -> list[Sequence[Ranges]]:
        """Return the ways to recompute each stage of a split, the quickest first, those later keeping less."""
        found = []
        for group, (i, j) in zip(self.groups, pairwise(split), strict=True):
            options = self.tables.options(group)
            assert options is not None, "its times were asked for"
            found.append(options.ways(i, j, self.tables.copies(group)))
        return found

    def stages(self, split: Split) -> tuple[Stage, ...]:
        """Return the stages of a split, which recompute what they must."""
        cuts = self.tables.found.cuts
        found = []
        for (i, j), group, held in zip(pairwise(split), self.groups, self.held, strict=True):
            options = self.tables.options(group)
            assert options is not None, "its times were asked for"
            found.append(
                Stage(int(cuts[i]), int(cuts[j]), group, options.checkpoint(i, j, held, self.tables.copies(group)))
            )
        return tuple(found)
