"""What do all stages, cuts and groups of devices cost? The tables that a search over contiguous allocations reads.

Everything here holds for every period, so one search computes it once. Stages begin and end at the n + 1 ``cuts``
(0 and L included); tables over pairs of cuts are indexed ``[first cut, last cut]``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import isqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost import memory_model
from ...integers import Ints, most_in_common
from ...problem import Device, Platform, Problem
from ..cuts import legal_cuts, round_trips_ns, spread_cuts
from ..in_flight import memory_counts
from .options import NEVER, FewOptions, StageOptions, replica_counts, stage_limits, stage_times
from .orders import Order, Orders

_MOST_ENTRIES = 9 * 10**7  # of all tables together, of 8 bytes each
_SPREAD = 1000  # cuts that are looked at where all are too many


@dataclass(frozen=True)
class DeviceClass:
    """The groups of devices whose slowest speed and smallest memory are the same, and how long stages take on them.

    A stage on the devices ``a..b-1`` takes all of them that are at least as fast and as large as the class, so
    ``replicas[a, b]`` names a group. It is 0 where the first or the last device isn't taken, or no device is as slow or
    none as small as the class. Without replicas there is the one row ``replicas[0, b]`` of single devices b - 1.
    """

    options: StageOptions
    device: Device
    eligible: frozenset[int]  # the devices that are at least as good
    replicas: Ints


@dataclass(frozen=True)
class StageTables:
    """All that a decision reads and that doesn't depend on the period; stages start and stop at ``cuts`` alone."""

    problem: Problem
    cuts: Ints
    classes: tuple[DeviceClass, ...]
    best: StageOptions  # on ``best_device``
    best_device: Device  # as fast as the fastest and as large as the largest
    gradients: Ints  # (n + 1, n + 1) bytes that replicas of a stage exchange
    round_trips: Ints  # (levels, n + 1) ns that both directions of a cut take on links, over each level
    spans: Ints  # like replicas: the level that joins devices a..b-1
    outer_spans: Ints  # the level that joins devices a-1..b-1: what the cut before a stage spans at least
    uniform: bool  # whether only the number of devices counts
    orders: Orders  # in which stages may take devices
    complete: bool = True  # whether all legal cuts are here

    def select(self, index: Ints) -> StageTables:
        """Return the same tables with the cuts ``index`` alone."""
        return replace(
            self,
            cuts=self.cuts[index],
            classes=tuple(replace(x, options=x.options.select(index)) for x in self.classes),
            best=self.best.select(index),
            gradients=self.gradients[np.ix_(index, index)],
            round_trips=self.round_trips[:, index],
            complete=self.complete and len(index) == len(self.cuts),
        )

    def in_order(self, order: Order) -> StageTables:
        """Return the same tables for stages that take devices in ``order``, whose positions they call devices."""
        devices = self.orders.along_kinds(order)
        if devices == self.problem.platform.devices:
            return self
        platform = replace(self.problem.platform, devices=devices)
        groups = _groups(platform, self.problem.replicas)
        pairs = zip(self.classes, groups, strict=True)
        classes = tuple(replace(x, eligible=found.eligible, replicas=found.replicas) for x, found in pairs)
        return replace(self, problem=replace(self.problem, platform=platform), classes=classes)


def stage_tables(problem: Problem) -> StageTables:
    """Return the tables of ``problem`` over all its legal cuts; over some of them where they would take a gigabyte.

    Where segments are allowed, stages are taken to hold and to recompute nothing: a relaxation, in whose place
    :mod:`.segments` puts what they may really do.
    """
    chain, platform = problem.chain, problem.platform
    cuts = legal_cuts(problem)
    count, most = len(cuts), _most_cuts(problem)
    if count > most:
        index = spread_cuts(problem, cuts, min(_SPREAD, 3 * most // 4))
        assert index is not None, "these are fewer"
        cuts = cuts[index]
    gradients = memory_model.gradient_of(chain, problem.policy, cuts[:, None], cuts[None, :])
    round_trips = [
        [min(NEVER, trip) for trip in round_trips_ns(chain, platform, cuts, level)]
        for level in range(len(platform.levels))
    ]
    devices, spans = len(platform), platform.spans
    outer = np.zeros_like(spans)
    if len(platform.levels) > 1:  # untouched zeros take no memory
        outer[1:] = spans[:-1]
    if not problem.replicas:  # the stage on device b - 1 alone
        outer = np.array([[0, 0, *(spans[b - 2, b] for b in range(2, devices + 1))]], dtype=np.int64)
        spans = np.zeros_like(outer)
    best = platform.best_device

    @cache
    def times_on(pace: Device) -> tuple[tuple[Ints, ...], ...]:
        return stage_times(problem, cuts, pace)

    @cache
    def limits_of(memory: int) -> tuple[tuple[Ints, ...], ...]:
        return stage_limits(problem, cuts, memory)

    def options_of(device: Device) -> StageOptions:
        return FewOptions(cuts, times_on(replace(device, memory_bytes=0)), limits_of(device.memory_bytes))

    classes = tuple(
        DeviceClass(options_of(x.device), x.device, x.eligible, x.replicas) for x in _groups(platform, problem.replicas)
    )
    uniform = len(platform.levels) == 1 and len(set(platform.devices)) == 1
    trips = np.array(round_trips, dtype=np.int64) * (not platform.blocking)
    return StageTables(
        problem,
        cuts,
        classes,
        options_of(best),
        best,
        np.asarray(gradients),
        trips,
        spans,
        outer,
        uniform,
        Orders.of(platform, len(cuts)),
        complete=count == len(cuts),
    )


def _most_cuts(problem: Problem) -> int:
    """Return how many cuts the tables may be over, by their number and that of what is held while they are read."""
    platform = problem.platform
    paces, memories = {(x.speed, x.times) for x in platform.devices}, {x.memory_bytes for x in platform.devices}
    tables = len(replica_counts(problem)) * len(paces) + len(memory_counts(problem)) * len(memories)
    return isqrt(_MOST_ENTRIES // ((2 if problem.checkpointing == "stages" else 1) * tables + 9))


class _Group(NamedTuple):
    """Groups of devices that are as good: see :class:`DeviceClass`."""

    device: Device
    eligible: frozenset[int]
    replicas: Ints


def _groups(platform: Platform, replicas: bool) -> list[_Group]:
    """Return each class of device groups; as many, and in the same order, for every order of the same devices.

    Within a class a stage needs no other devices than all the eligible ones from its first to its last: moving the
    first ones up into a gap keeps speed and memory and shortens the way to the next stage. A class has a least memory
    and, of each profile of devices' own that is in it, a least speed.
    """
    devices = platform.devices
    if not replicas:
        kinds = sorted(dict.fromkeys(devices), key=repr)
        return [
            _Group(
                x,
                frozenset(d for d, y in enumerate(devices) if y == x),
                np.array([[0, *(int(y == x) for y in devices)]], dtype=np.int64),
            )
            for x in kinds
        ]
    profiles = sorted(dict.fromkeys(x.times for x in devices), key=repr)
    speeds = [[None, *sorted({x.speed for x in devices if x.times == times})] for times in profiles]
    memories = sorted({x.memory_bytes for x in devices})
    found = []
    for least in product(*speeds):
        of_profile = dict(zip(profiles, least, strict=True))
        taken = [speed is not None and x.speed >= speed for x in devices for speed in [of_profile[x.times]]]
        for memory in memories:
            eligible = np.array([y and x.memory_bytes >= memory for x, y in zip(devices, taken, strict=True)])
            needed = [np.array([x.memory_bytes == memory for x in devices])]
            for times, speed in of_profile.items():
                if speed is not None:
                    needed.append(np.array([x.times == times and x.speed == speed for x in devices]))
            groups = _between(eligible)
            groups[~(eligible[:, None] & np.concatenate([[False], eligible])[None, :])] = 0
            for some in needed:
                groups[_between(eligible & some) <= 0] = 0
            groups[groups < 0] = 0
            if groups.any():
                members = [d for d in range(len(devices)) if eligible[d]]
                slowest = replace(platform.slowest(members), memory_bytes=memory)
                found.append(_Group(slowest, frozenset(members), groups))
    assert found
    return found


def _between(which: npt.NDArray[np.bool_]) -> Ints:
    """Return how many of the devices a..b-1 are ``which``, shape (P, P + 1)."""
    table = np.concatenate([[0], np.cumsum(which.astype(np.int64))]).astype(np.int64)
    return table[None, :] - table[:-1, None]


def closed(tables: StageTables, level: int, period: int) -> Ints:
    """Return the round trips over ``level``, NEVER for those that no links between two groups can carry once per
    ``period``."""
    problem, round_trips = tables.problem, tables.round_trips[level]
    load = round_trips // 2 if problem.platform.both_ways(level) else round_trips
    links = most_in_common(len(problem.platform)) if problem.replicas else 1
    return np.where(load <= min(links * period, NEVER - 1), round_trips, NEVER)


def longest_delay(problem: Problem, period: int) -> int:
    """Return the longest life of an activation that the policy's accumulation allows (2bw: section 3)."""
    accumulate = problem.policy.accumulate
    if problem.policy.weights != "2bw" or accumulate is None:
        return NEVER - 1
    return min(period * accumulate, NEVER - 1)


def largest_synced_gradients(problem: Problem, period: int) -> Ints:
    """Return the most gradient bytes that replicas can sum at ``period``, by level and replica count 0..P."""
    policy, count = problem.policy, len(problem.platform)
    return np.array(
        [
            [2**62, *(memory_model.largest_synced_gradient(policy, period, r, *path) for r in range(1, count + 1))]
            for path in problem.platform.paths
        ],
        dtype=np.int64,
    )
