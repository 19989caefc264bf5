"""What does every split take over stages that each have so many GPUs of their own, next to each other?

Stages recompute as little as lets them hold the microbatches that they are to have ahead. Many are timed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import lcm

import numpy as np

from ..cost import time_model
from ..cost.stage_graph import StageGraph
from ..integers import Ints, ceil_div, extend
from ..partition.contiguous.options import NEVER, StageOptions
from ..partition.contiguous.split_paths import least_longest, shortest_split
from ..partition.contiguous.tables import StageTables
from ..partition.cuts import waits_ns
from ..plan import Stage
from ..problem import Device, Problem
from .drained_run import Run
from .retiming import Retiming, alternating, retimed

SLACK = (0, 1, 2, 4, 8, 16, 32, 64, 96)  # 256ths by which the longest stage may exceed the shortest possible
_LEVEL = 500  # what a level of steps costs of its own, in steps of a split

Split = tuple[int, ...]  # indices of cuts


class Tables:
    """What every stage on neighbouring devices takes, each table computed once, shape (cuts, cuts)."""

    def __init__(self, problem: Problem, found: StageTables, most_ns: int, microbatches: int) -> None:
        self.problem, self.found, self.most_ns, self.microbatches = problem, found, most_ns, microbatches
        self.size = len(found.cuts)
        self._options: dict[Device, StageOptions] = {x.device: x.options for x in found.classes}
        self._known: dict[object, Ints] = {}
        self.retimed: tuple[Run, Retiming] | None = None  # the last

    def options(self, group: Sequence[int]) -> StageOptions | None:
        """Return the times of all stages on a group of devices."""
        return self._options.get(self.problem.platform.slowest(group))

    def times(self, group: Sequence[int], in_flight: int) -> Ints | None:
        """Return U of every stage whose replicas each hold so many microbatches, NEVER if they can't."""
        options, r = self.options(group), len(group)
        if options is None:
            return None
        key = "times", self.problem.platform.slowest(group), r, in_flight
        if key not in self._known:
            self.problem.deadline.check()
            table = np.full((self.size, self.size), NEVER, dtype=np.int64)
            for i in range(self.size - 1):
                stops = np.arange(i + 1, self.size)
                ones = np.ones_like(stops)
                table[i, i + 1 :] = options.work(i, stops, r * ones)(in_flight * ones)
            table[table > r * self.most_ns] = NEVER
            self._known[key] = table
        return self._known[key]

    def forward(self, group: Sequence[int]) -> Ints:
        """Return F of every stage, with what it waits for where transfers block."""
        device = self.problem.platform.slowest(group)
        key = "forward", device
        if key not in self._known:
            cuts, timed = self.found.cuts, self.problem.chain.timed(device.times)
            waits = waits_ns(self.problem, cuts) // 2
            table = time_model.forward_ns(timed, cuts[:, None], cuts[None, :], device.speed)
            self._known[key] = np.asarray(table + waits[:, None] + waits[None, :])
        return self._known[key]

    def update(self, group: Sequence[int]) -> Ints:
        """Return what the update of every stage takes behind its last backward, at least."""
        problem, platform = self.problem, self.problem.platform
        path, device = platform.paths[platform.level_of(group)], platform.slowest(group)
        key = "update", device, path, len(group)
        if key not in self._known:
            gradients = np.maximum(self.found.gradients, 0).astype(object)
            table = np.asarray(time_model.ring_all_reduce_ns(gradients, len(group), *path)).astype(np.int64)
            if problem.policy.steps_apart:
                start, stop = self.found.cuts[:, None], self.found.cuts[None, :]
                timed = problem.chain.timed(device.times)
                step = time_model.step_ns(timed, problem.policy, start, stop, len(group), device.speed)
                table = np.maximum(table, np.asarray(step))
            self._known[key] = table
        return self._known[key]

    def trip(self, one: Sequence[int], other: Sequence[int]) -> Ints:
        """Return both transfers of a microbatch over each cut between two groups; nothing where they block."""
        trips: Ints = self.found.round_trips[self.problem.platform.level_between(one, other)]
        return trips


@dataclass(frozen=True)
class Shares:
    """Stage s on the next ``replicas[s]`` of the devices, running ``ahead[s]`` forwards ahead on each."""

    tables: Tables
    replicas: tuple[int, ...]
    ahead: tuple[int, ...]

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each stage."""
        ends = np.cumsum([0, *self.replicas]).tolist()
        return tuple(tuple(range(low, high)) for low, high in pairwise(ends))

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The microbatches that each replica of a stage holds."""
        count = self.tables.microbatches
        return tuple(min(a, ceil_div(count, r)) for a, r in zip(self.ahead, self.replicas, strict=True))

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
    def steps(self) -> Retiming | None:
        """The steps of a mini-batch; None where these stages wait for each other."""
        return alternating(self.replicas, self.ahead, self.tables.microbatches)

    @property
    def possible(self) -> bool:
        """Whether there may be such stages."""
        return self.times is not None and self.steps is not None

    @cached_property
    def costs(self) -> list[tuple[Ints, Ints, Ints]]:
        """Forward, U and update of each stage."""
        assert self.times is not None
        pairs = zip(self.groups, self.times, strict=True)
        return [(self.tables.forward(group), times, self.tables.update(group)) for group, times in pairs]

    def starts(self) -> Iterator[Split]:
        """Yield splits whose longest stage is shortest, or somewhat longer, and the way through them short."""
        if self.times is None or self.steps is None:
            return
        times = [np.where(x < NEVER, ceil_div(x, r), NEVER) for x, r in zip(self.times, self.replicas, strict=True)]
        shortest, seen = least_longest(times), set()
        if shortest is None:
            return
        for step in SLACK:
            longest = shortest + shortest * step // 256
            allowed = [np.where(x <= longest, u, NEVER) for x, u in zip(times, self.times, strict=True)]
            split = shortest_split(allowed, self.trips)
            if split is not None and split not in seen:
                seen.add(split)
                yield split

    def makespans(self, splits: Sequence[Split], run: Run | None = None) -> Ints:
        """Return the time of a mini-batch of each split, NEVER where one doesn't fit, if devices and links keep the
        order of a ``run``; without one no more than it takes."""
        cuts = np.array(splits, dtype=np.int64).T
        picked = [
            (f[low, high], u[low, high], more[low, high])
            for (f, u, more), low, high in zip(self.costs, cuts[:-1], cuts[1:], strict=True)
        ]
        forward, work, update = (np.stack(x) for x in zip(*picked, strict=True))
        there = [trip[at] // 2 for trip, at in zip(self.trips, cuts[1:-1], strict=True)]
        fits = (work < NEVER).all(axis=0)
        durations = np.concatenate([forward, np.where(fits, work - forward, 0), *(x[None, :] for x in there)])
        steps = self.steps
        if run is not None:
            steps, durations = self._retimed(run), durations[self._rows(run.graph)]
        assert steps is not None, "somebody has asked whether this is possible"
        return np.where(fits, steps.makespans(durations, update), NEVER)

    def _rows(self, graph: StageGraph) -> list[int]:
        """Return for each operation of a graph which row of the durations it takes."""
        count = len(self.replicas)
        first = {"F": 0, "B": count, "SEND_F": 2 * count, "SEND_B": 2 * count - 1}
        return [first[op.kind] + op.stage for op in graph.operations]

    def _retimed(self, run: Run) -> Retiming:
        known = self.tables.retimed
        if known is None or known[0] is not run:
            known = self.tables.retimed = run, retimed(run.timeline)
        return known[1]

    def counts(self, split: Split, slack: Fraction = Fraction(1)) -> tuple[int, ...]:
        """Return what the replicas of a split hold in the pattern of its shortest period, or of one ``slack`` times as
        long, by 1F1B*."""
        problem = self.tables.problem
        assert self.times is not None
        works = [int(u[i, j]) for u, (i, j) in zip(self.times, pairwise(split), strict=True)]
        trips = [int(trip[at]) for trip, at in zip(self.trips, split[1:-1], strict=True)]
        links = [lcm(one, other) for one, other in pairwise(self.replicas)]
        loads = [ceil_div(u, r) for u, r in zip(works, self.replicas, strict=True)]
        loads += [ceil_div(c, n) for c, n in zip(trips, links, strict=True)]
        period = int(max(loads) * slack)
        found, delay = list[int](), 0
        for s in reversed(range(len(works))):
            own = self.replicas[s] * period
            delay = extend(delay, works[s], own)
            found.append(max(1, ceil_div(delay, own)))
            if s:
                both = problem.platform.full_duplex
                delay = delay + trips[s - 1] if both else extend(delay, trips[s - 1], links[s - 1] * period)
        return tuple(reversed(found))

    def stages(self, split: Split) -> tuple[Stage, ...]:
        """Return the stages of a split, which recompute what they must."""
        cuts = self.tables.found.cuts
        found = []
        for (i, j), group, held in zip(pairwise(split), self.groups, self.held, strict=True):
            options = self.tables.options(group)
            assert options is not None, "its times were asked for"
            found.append(Stage(int(cuts[i]), int(cuts[j]), group, options.checkpoint(i, j, held, len(group))))
        return tuple(found)

    def cost(self, splits: int) -> int:
        """Return the effort of timing so many splits, in steps."""
        assert self.steps is not None
        return _LEVEL * len(self.steps.ends) + splits * len(self.steps.takes)
