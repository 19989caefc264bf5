"""What does every split take over stages on given groups of GPUs, drained?

Stages recompute as little as lets them hold the microbatches that they are to have ahead.
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
from ...partition.tables.split_paths import extreme_splits, short_splits
from ...partition.tables.stages import Ranges, SearchTables, StageOptions, held_times
from ...plan import Stage
from ...problem import Device, Level, Platform, Policy, Problem
from ...schedule.programs.one_f_one_b import forwards_ahead

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
        device, count, path = self.stages.joined(group)
        before, behind = self.stages.waits
        own = self.stages.once(("waited", device), lambda: self.stages.forward(device) + before // 2 + behind // 2)
        forward, backward = self.stages.exchanging(own, self._known[key] - own, count, path)
        return np.asarray(np.minimum(NEVER, forward + backward))

    def bare(self, group: Sequence[int]) -> Ints:
        """Return U of every stage that recomputes nothing, whatever it can hold."""
        table = StageTables.between(self.found.problem, self.found.cuts).work(self.problem.platform.slowest(group))
        return np.where(self.stages.stop > self.stages.start, table, NEVER)

    def load(self, one: Sequence[int], other: Sequence[int]) -> Ints:
        """Return how long a microbatch keeps the link between two groups busy over each cut, at least."""
        platform, trip = self.problem.platform, self.stages.trip(one, other)
        return trip // 2 if platform.both_ways(platform.level_between(one, other)) else trip


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
        """Return about what a mini-batch of a split takes, NEVER where it doesn't fit: the way of one microbatch, and
        all others on the GPUs that take longest."""
        if self.times is None or not self.fits(split):
            return NEVER
        way = sum(int(trip[at]) for trip, at in zip(self.trips, split[1:-1], strict=True))
        each, updates = dict[tuple[int, ...], int](), 0
        for group, table, update, pair in zip(self.groups, self.times, self.updates, pairwise(split), strict=True):
            way += int(table[pair])
            each[group] = each.get(group, 0) + int(table[pair])
            updates = max(updates, int(update[pair]))
        others = ((ceil_div(self.tables.microbatches, len(group)) - 1) * one for group, one in each.items())
        return way + max(others) + updates

    @cached_property
    def times(self) -> list[Ints] | None:
        """U of each stage; None where a group is none that the tables know."""
        pairs = zip(self.groups, self.held, strict=True)
        found = [self.tables.times(group, held) for group, held in pairs]
        return [x for x in found if x is not None] if all(x is not None for x in found) else None

    @cached_property
    def trips(self) -> list[Ints]:
        """Both transfers over each cut, by the stage before it."""
        return [self.tables.stages.trip(one, other) for one, other in pairwise(self.groups)]

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
        yield from extreme_splits(self._each)

    def _balanced(self) -> Split:
        """Return the split whose longest stage is shortest if nothing is recomputed; -1 for cuts that there aren't."""
        problem, place = self.tables.problem, {int(cut): i for i, cut in enumerate(self.tables.found.cuts)}
        devices = tuple(map(problem.platform.slowest, self.groups))
        alone = Problem(problem.chain, Platform(devices, problem.platform.levels), Policy(), False, "none")
        return (0, *(place.get(stage.stop, -1) for stage in next(balance(alone)).stages))

    @cached_property
    def updates(self) -> list[Ints]:
        """What the update of each stage takes behind its last backward."""
        return [self.tables.stages.update(*self.tables.stages.joined(group)) for group in self.groups]

    def starts(self) -> Iterator[Split]:
        """Yield splits whose longest stage is shortest, or somewhat longer, and the way through them short."""
        if self.times is not None:
            pairs = zip(self.loads, pairwise(self._shares), strict=True)
            links = [ceil_div(load, lcm(*ends)) for load, ends in pairs]
            yield from short_splits(self._each, self.times, self.trips, links)

    def ways(self, split: Split) -> list[Sequence[Ranges]]:
        """Return the ways to recompute each stage of a split, the quickest first, those later keeping less."""
        pairs = zip(self.groups, pairwise(split), strict=True)
        return [self._options(group).ways(*pair, self.tables.copies(group)) for group, pair in pairs]

    def stages(self, split: Split) -> tuple[Stage, ...]:
        """Return the stages of a split, which recompute what they must."""
        cuts, found = self.tables.found.cuts, []
        for (i, j), group, held in zip(pairwise(split), self.groups, self.held, strict=True):
            recomputed, _ = self._options(group).recomputed(i, j, held, self.tables.copies(group))
            found.append(Stage(int(cuts[i]), int(cuts[j]), group, recomputed))
        return tuple(found)

    def _options(self, group: tuple[int, ...]) -> StageOptions:
        options = self.tables.options(group)
        assert options is not None, "its times were asked for"
        return options
