"""What does every split take over stages on given groups of GPUs, drained?

Stages recompute as little as lets them hold the microbatches that they are to have ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm

import numpy as np

from ...integers import NEVER, Ints, ceil_div
from ...partition.balance import balance
from ...partition.tables.split_paths import extreme_splits, short_splits, soonest_split
from ...partition.tables.stages import Ranges
from ...plan import Stage
from ...problem import Platform, Policy, Problem
from ...schedule.programs.one_f_one_b import forwards_ahead
from .tables import Group, Split, Tables


@dataclass(frozen=True)
class Layout:
    """Stage s on ``groups[s]``, which may hold several, each holding ``held[s]`` microbatches on every device.

    ``in_turn``: a stage runs exactly so many forwards before its first backward, and then one of each in turn (1F1B).
    """

    tables: Tables
    groups: tuple[Group, ...]
    held: tuple[int, ...]
    in_turn: bool = False

    @staticmethod
    def ahead(tables: Tables, groups: tuple[Group, ...]) -> Layout:
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
        return self._among(x for x in found if x is not None) if all(x is not None for x in found) else None

    @cached_property
    def bare(self) -> list[Ints]:
        """The same, whatever a stage can hold."""
        return self._among(map(self.tables.bare, self.groups))

    def _among(self, tables: Iterable[Ints]) -> list[Ints]:
        """Return the tables of the stages without waits for neighbours on the same GPUs, which send nothing."""
        before, behind = self.tables.stages.waits
        turns = [one == other for one, other in pairwise(self.groups)]
        near = zip(tables, [False, *turns], [*turns, False], strict=True)
        return [np.where(u < NEVER, u - before * early - behind * late, NEVER) for u, early, late in near]

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
        work, shares = self.tables.work, np.cumsum(list(map(len, self.groups)))
        inner = (int(np.abs(work - work[-1] * share // shares[-1]).argmin()) for share in shares[:-1])
        for split in (self._balanced(), (0, *inner, self.tables.size - 1)):
            if all(low < high for low, high in pairwise(split)) and self.fits(split):
                yield split
        yield from extreme_splits(self._each)

    def _balanced(self) -> Split:
        """Return the split whose longest stage is shortest if nothing is recomputed; -1 for cuts that there aren't."""
        problem, place = self.tables.problem, {int(cut): i for i, cut in enumerate(self.tables.cuts)}
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
            if len(set(self.groups)) < len(self.groups):  # it also counts which stages of a GPU are the long ones
                yield from extreme_splits(self._each)

    def ways(self, split: Split) -> list[Sequence[Ranges]]:
        """Return the ways to recompute each stage of a split, the quickest first, those later keeping less."""
        return [self.tables.ways(group, *pair) for group, pair in zip(self.groups, pairwise(split), strict=True)]

    def stages(self, split: Split) -> tuple[Stage, ...]:
        """Return the stages of a split, which recompute what they must."""
        cuts, parts = self.tables.cuts, zip(pairwise(split), self.groups, self.held, strict=True)
        return tuple(
            Stage(int(cuts[i]), int(cuts[j]), group, self.tables.recomputed(group, i, j, held))
            for (i, j), group, held in parts
        )

    def soonest(self, fit: bool = True, enough: int | None = None, rounds: int = 1) -> tuple[int, Split] | None:
        """Return a time (ns) below which no split runs a mini-batch, and a split of which no more can be said; None
        where none fits, or none is below ``enough``. Without ``fit`` stages are ``bare``.

        Stage s runs M forwards and backwards between the first forward that reaches it and the last backward that it
        sends on, so no split drains before P(s) + M U(s), nor before the forwards ahead, M U(s) and its update, nor
        before a link has moved everything. Nor is it over before so many ``rounds`` of all stages, P(p).
        O(p n^2) for n cuts and each step of a bisection.
        """
        tables, count = (self.times if fit else self.bare) or [], self.tables.microbatches
        each = [np.where(table >= NEVER, NEVER // (4 * count), table) for table in tables]
        stages, slowest = self.tables.stages, self.tables.problem.platform.slowest
        fastest = np.min([stages.forward(slowest(group))[0] for group in self.groups], axis=0)
        alone = [count * u + fastest[:, None] + update for u, update in zip(each, self.updates, strict=True)]
        for s, load in enumerate(self.loads):
            alone[s] = np.maximum(alone[s], count * load)
        ends = [count * u for u in each] if not self.in_turn else self._in_turn(each)
        low, beyond = max(1, count * int(self.tables.work[-1]) // len(self.groups)), count * self.tables.most_ns
        most = beyond if enough is None else min(beyond, enough - 1)
        return soonest_split(tables, self.trips, ends, alone, low, most, rounds)

    def _in_turn(self, each: Sequence[Ints]) -> list[Ints]:
        """Return how long behind P a stage's backwards are over that takes one of ``each``, with A for what stages and
        transfers behind it take: in turn it waits a - 1 forwards ahead for its first backward, M U + A - (a - 1) F;
        and as microbatch m + a comes in after m has gone back, it takes ceil(M / a) (U + A)."""
        count, work, stages = self.tables.microbatches, self.tables.work, self.tables.stages
        moves, found = [int(trip[1:-1].min(initial=NEVER)) for trip in self.trips], list[Ints]()
        for s, (group, ahead, u) in enumerate(zip(self.groups, self.held, each, strict=True)):
            device, replicas, path = stages.joined(group)
            forward = stages.exchanging(stages.forward(device), stages.forward(device), replicas, path)[0]
            behind = (work[-1] - work + sum(moves[s:]))[None, :]
            waits = count * u + behind - (ahead - 1) * forward
            found.append(np.maximum.reduce([count * u, waits, ceil_div(count, ahead) * (u + behind)]))
        return found

    def least_ns(self, split: Split, rounds: int) -> int | None:
        """Return what :meth:`soonest` says of one split; None if one of its stages doesn't fit."""
        if self.times is None or not self.fits(split):
            return None
        count, path, least = self.tables.microbatches, 0, 0
        trips = [0, *(int(trip[at]) for trip, at in zip(self.trips, split[1:-1], strict=True))]
        for table, pair, trip in zip(self.times, pairwise(split), trips, strict=True):
            path += trip
            least = max(least, path + count * int(table[pair]))
            path += int(table[pair])
        loads = (int(load[at]) for load, at in zip(self.loads, split[1:-1], strict=True))
        return max(least, rounds * path, count * max(loads, default=0))


def held(stages: int, limit: int, batch: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what ``stages`` stages hold when ``limit`` mini-batches of ``batch`` microbatches are in the pipeline.

    First the most, whatever arrives when: the last stage alone runs every backward right after its forward. Then
    counts that fall towards the last stage, as they often do; simulation says whether they hold.
    """
    most = (limit * batch,) * (stages - 1) + (batch,)
    return most, tuple(batch * min(limit, 2 * (stages - s) - 1) for s in range(stages))
