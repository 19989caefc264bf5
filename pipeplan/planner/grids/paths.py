"""Which splits over the p devices of one pipeline run a batch of M microbatches, start to end, the soonest?

Splits that drain soon, by a heuristic, and a bound on how soon any contiguous split can.

Legend: p stages, M microbatches, at most ``limit`` of them in the pipeline; U(i, j) forward and backward of the stage
between the cuts i and j, with what it must recompute to hold its microbatches; P the sum of U and of the transfers over
the stages before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from ...cost import time_model
from ...cost.stage_tables import StageTables
from ...integers import NEVER, Ints, ceil_div, smallest
from ...partition.contiguous.contiguous import tables_within
from ...partition.tables.options import StageOptions, held_times
from ...partition.tables.split_paths import least_longest, shortest_split, up_to
from ...partition.tables.stages import SearchTables
from ...plan import Stage
from ...problem import Device, Level, Platform, Problem

_STEPS = (0, 1, 2, 4, 8, 16, 32, 64)  # 256ths by which the longest stage may exceed the shortest possible
_PRECISION = 4096  # a bound is found to this part


@dataclass(frozen=True)
class PipelineTables:
    """How long the stages of one pipeline take: stage s on ``groups[s]``, which is as good as ``problem``'s device s.

    ``trips[s][j]`` is the time of both transfers of a microbatch over cut j between the stages s and s + 1, and
    ``loads[s][j]`` how long they occupy their link at least. ``syncs[s][i, j]`` is what the update of the stage between
    the cuts i and j takes at least. No stage that takes more than ``most_ns`` is in
    the tables; ``exact``: all others are, at their least times.
    """

    problem: Problem
    stage_tables: SearchTables
    groups: tuple[tuple[int, ...], ...]
    microbatches: int
    trips: tuple[Ints, ...]
    loads: tuple[Ints, ...]
    syncs: tuple[Ints, ...]
    most_ns: int
    exact: bool

    @cached_property
    def _options(self) -> dict[Device, StageOptions]:
        return {found.device: found.options for found in self.stage_tables.classes}

    @cached_property
    def _times(self) -> dict[tuple[Device, int], Ints]:
        return {}

    def options(self, stage: int) -> StageOptions:
        """Return the times of all stages on the devices of ``stage``."""
        return self._options[self.problem.platform.devices[stage]]

    def times(self, stage: int, in_flight: int) -> Ints:
        """Return U, shape (cuts, cuts), of ``stage`` while it holds ``in_flight`` microbatches; NEVER if it can't."""
        key = self.problem.platform.devices[stage], in_flight
        if key not in self._times:
            size = len(self.stage_tables.cuts)
            self._times[key] = held_times(self.options(stage), size, in_flight, 1, self.most_ns)
        return self._times[key]

    def in_flight(self, limit: int) -> tuple[int, ...]:
        """Return the most microbatches that each stage holds when ``limit`` are in the pipeline: see :func:`held`."""
        return held(len(self.groups), min(limit, self.microbatches))[0]

    def stages(self, cuts: Sequence[int], in_flight: Sequence[int]) -> tuple[Stage, ...] | None:
        """Return the stages between ``cuts`` (indices) that recompute least; None if one doesn't fit or is too slow."""
        found = []
        for s, (i, j) in enumerate(pairwise(cuts)):
            if j <= i or self.times(s, in_flight[s])[i, j] >= NEVER:
                return None
            start, stop = int(self.stage_tables.cuts[i]), int(self.stage_tables.cuts[j])
            found.append(Stage(start, stop, self.groups[s], self.options(s).checkpoint(i, j, in_flight[s], 1)))
        return tuple(found)


def pipeline_tables(problem: Problem, groups: Sequence[tuple[int, ...]], microbatches: int) -> PipelineTables | None:
    """Return the tables of a pipeline whose stage s runs on ``groups[s]`` for a batch; None when no split fits.

    ``problem`` is that of all devices; ``policy.accumulate`` counts the microbatches of all pipelines. Any split that
    drains sooner than p stages at the shortest possible period has no stage longer than (p + M) / M of that period,
    so longer ones aren't looked at.
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
    one = replace(problem, platform=alone, policy=policy, replicas=False)
    slack = min(Fraction(4), max(Fraction(3, 2), Fraction(count + microbatches, microbatches)))
    found = tables_within(one, slack)
    if found is None:
        return None
    tables, most, exact = found
    cuts = tables.cuts.tolist()
    trips, loads = [], []
    for here, there in pairwise(groups):
        level = platform.level_between(here, there)
        size_of = [0 if platform.blocking else problem.chain.cut_bytes[cut] for cut in cuts]
        moves = np.array([platform.transfer_ns(size, level) for size in size_of], dtype=np.int64)
        trips.append(np.minimum(2 * moves, NEVER))
        loads.append(np.minimum((1 if platform.both_ways(level) else 2) * moves, NEVER))
    stages = StageTables.between(problem, tables.cuts)
    pairs = ((platform.slowest(group), len(group), platform.paths[platform.level_of(group)]) for group in groups)
    syncs = [stages.update(*pair) for pair in pairs]
    return PipelineTables(
        one, tables, tuple(groups), microbatches, tuple(trips), tuple(loads), tuple(syncs), most, exact
    )


def held(stages: int, limit: int, batch: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what ``stages`` stages hold when ``limit`` mini-batches of ``batch`` microbatches are in the pipeline.

    First the most, whatever arrives when: the last stage alone runs every backward right after its forward. Then
    counts that fall towards the last stage, as they often do; simulation says whether they hold.
    """
    most = (limit * batch,) * (stages - 1) + (batch,)
    return most, tuple(batch * min(limit, 2 * (stages - s) - 1) for s in range(stages))


def splits(pipeline: PipelineTables, in_flight: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield splits, as indices of cuts, that may drain soon while stages hold ``in_flight``.

    A drained batch takes about P + (M - 1) * (the longest stage), so for some lengths of the longest stage, the
    shortest possible first, the split of the shortest path. Each is optimal among contiguous splits for its length;
    that one of them drains soonest is a heuristic. O(p n^2) each for n cuts.
    """
    count = len(pipeline.groups)
    times = [pipeline.times(s, in_flight[s]) for s in range(count)]
    shortest = least_longest(times, pipeline.loads)
    if shortest is None:
        return
    seen = set()
    for step in _STEPS:
        found = _shortest_path(pipeline, times, shortest + shortest * step // 256)
        if found is not None and found not in seen:
            seen.add(found)
            yield found


def _shortest_path(pipeline: PipelineTables, times: Sequence[Ints], longest: int) -> tuple[int, ...] | None:
    """Return the cuts of the split whose stages and transfers take least, with no stage or link over ``longest``."""
    trips = [np.where(load <= longest, trip, NEVER) for trip, load in zip(pipeline.trips, pipeline.loads, strict=True)]
    return shortest_split([up_to(longest, table) for table in times], trips)


def drained_bound(pipeline: PipelineTables, least: int = 1, most: int | None = None, enough: int | None = None) -> int:
    """Return a time below which no contiguous split on these groups runs a batch, for any limit in ``least..most``.

    Stage s runs M forwards and backwards between the first forward that reaches it and the last backward that it sends
    on, so no split drains before M U(s) + P(s), nor before the forwards ahead, M U(s) and its all-reduce, nor before a
    link has moved everything. Microbatch m + limit enters when m has left, so not before ceil(M / limit) P(p) either.
    The first stage holds min(limit, M) microbatches, the others at least one, which says what they must recompute. The
    least such time over all splits is bisected; for one time a dynamic program keeps the shortest P for every cut.
    ``enough`` is returned where it is such a time. O(p n^2) for n cuts and each step.
    """
    count, microbatches = len(pipeline.groups), pipeline.microbatches
    held = min(least, microbatches) if count > 1 else 1
    if not pipeline.exact:  # what must be recomputed isn't known
        times = [_bare_times(pipeline, s) for s in range(count)]
    else:
        times = [pipeline.times(s, held if s == 0 else 1) for s in range(count)]
    rounds = 1 if most is None else ceil_div(microbatches, most)
    forward = [
        time_model.forward_ns(pipeline.problem.chain.timed(d.times), 0, pipeline.stage_tables.cuts, d.speed)
        for d in pipeline.problem.platform.devices
    ]
    fastest = np.min(np.stack(forward), axis=0)
    ends = [microbatches * np.where(table >= NEVER, NEVER // microbatches, table) for table in times]
    with_sync = [end + fastest[:, None] + sync for end, sync in zip(ends, pipeline.syncs, strict=True)]
    size = len(pipeline.stage_tables.cuts)

    def possible(total: int) -> bool | None:
        path = np.full(size, NEVER, dtype=np.int64)
        path[0] = 0
        for s, table in enumerate(times):
            allowed = (ends[s] + path[:, None] <= total) & (with_sync[s] <= total)
            path = np.where(allowed, table + path[:, None], NEVER).min(axis=0)
            if s < len(pipeline.trips):
                path = np.where(
                    microbatches * pipeline.loads[s] <= total, np.minimum(path + pipeline.trips[s], NEVER), NEVER
                )
        return (path[-1] < NEVER and rounds * int(path[-1]) <= total) or None

    if enough is not None and enough <= pipeline.most_ns * microbatches and possible(enough - 1) is None:
        return enough
    relaxed = time_model.relative(pipeline.problem)
    low = int(relaxed.chain.sums.forward_ns[-1] + relaxed.chain.sums.backward_ns[-1])
    low = max(1, low * microbatches // (count * math.ceil(relaxed.platform.best_device.speed)))
    beyond = pipeline.most_ns * microbatches  # longer stages are not in the tables
    high = 2 * low
    while high < beyond and possible(high) is None:
        low, high = high + 1, 2 * high
    high = min(high, beyond)
    if possible(high) is None:
        return beyond
    grain = max(1, high // _PRECISION)
    found = smallest(lambda step: possible(step * grain), max(1, low // grain), ceil_div(high, grain))
    return max(1, (found[0] - 1) * grain + 1) if found is not None else beyond


def _bare_times(pipeline: PipelineTables, stage: int) -> Ints:
    problem, cuts = pipeline.problem, pipeline.stage_tables.cuts
    start, stop = cuts[:, None], cuts[None, :]
    device = problem.platform.devices[stage]
    bare = time_model.work_ns(problem.chain.timed(device.times), problem.policy, start, stop, speed=device.speed)
    return np.where(stop > start, bare, NEVER)


def least_drained_ns(pipeline: PipelineTables, cuts: Sequence[int], in_flight: Sequence[int], limit: int) -> int | None:
    """Return what :func:`drained_bound` says of one split whose stages hold ``in_flight``; None if one doesn't fit."""
    path = least = 0
    for s, (i, j) in enumerate(pairwise(cuts)):
        time = int(pipeline.times(s, in_flight[s])[i, j]) if i < j else NEVER
        if time >= NEVER:
            return None
        least = max(least, path + pipeline.microbatches * time)
        path += time + (int(pipeline.trips[s][j]) if s < len(pipeline.trips) else 0)
        if s < len(pipeline.loads):
            least = max(least, pipeline.microbatches * int(pipeline.loads[s][j]))
    return max(least, ceil_div(pipeline.microbatches, limit) * path)
