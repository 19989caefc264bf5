"""What do all stages, cuts and groups of devices cost? The tables that a search over contiguous allocations reads.

Everything here holds for every period, so one search computes it once. Stages begin and end at the n + 1 ``cuts``
(0 and L included); tables over pairs of cuts are indexed ``[first cut, last cut]``. A stage that must hold more
microbatches may have to recompute activations instead of keeping them, and then takes longer: that trade stands in
tables as well, one for each class of devices. Here a stage stores everything or recomputes all of itself;
:mod:`.segments` has the finer choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import isqrt
from typing import Protocol

import numpy as np

from ...cost import memory_model, relaxations
from ...cost.stage_tables import StageTables, largest_synced_gradient
from ...integers import NEVER, IntLike, Ints, ceil_div, most_in_common
from ...plan import Stage
from ...problem import ENDLESS, Device, Problem
from ..cuts import counts_standing, in_flight_limit, legal_cuts, round_trips_ns, spread_cuts
from ..devices.orders import Order, Orders
from ..devices.states import DeviceKinds, DeviceStates

Work = Callable[[Ints], Ints]  # least times of some stages, given how many microbatches they hold
Ranges = tuple[tuple[int, int], ...]


class StageOptions(Protocol):
    """How long every stage between two cuts takes on devices of one class, by the microbatches that it holds."""

    @property
    def by_replicas(self) -> bool:
        """Whether the time of a stage, or what it can hold, depends on its replicas beyond their number."""

    def select(self, index: Ints) -> StageOptions:
        """Return the options of the stages between the cuts ``index`` alone."""

    def work(self, start: int, stops: Ints, replicas: Ints) -> Work:
        """Return a function from in-flight counts to the least times of the stages from cut ``start`` to ``stops``,
        NEVER where they don't fit; ``replicas`` and the counts have the shape of ``stops`` last."""

    def recomputed(self, start: int, stop: int, in_flight: int, replicas: int) -> tuple[Ranges, Ranges]:
        """Return the recomputed segments with which a stage is quickest while each of its replicas holds ``in_flight``
        microbatches, and the runs of layers whose cores run again then, where layers may do so."""

    def ways(self, start: int, stop: int, replicas: int) -> Sequence[Ranges]:
        """Return the ways to recompute a stage that can hold one microbatch, the quickest first, each of which keeps
        less of it than those before."""

    @property
    def relaxed(self) -> Sequence[tuple[Ints, Ints]]:
        """Pairs (times, in-flight limits) of tables over pairs of cuts as lower bounds: no stage is quicker, on any
        number of replicas, than the quickest pair whose limit allows what it holds."""


@dataclass(frozen=True)
class FewOptions:
    """A few options for every stage ``layers[cuts[i]:cuts[j]]`` on devices of one class, the quickest first.

    Option o takes ``times[o][r][i, j]`` ns per microbatch with r + 1 replicas, and fits while at most
    ``limits[o][r][i, j]`` microbatches are in flight on each (0: never). The last r stands for all beyond, so there is
    one where the replicas don't matter. Option 0 stores everything, option 1 recomputes the whole stage.
    """

    cuts: Ints
    times: tuple[tuple[Ints, ...], ...]
    limits: tuple[tuple[Ints, ...], ...]

    @property
    def by_replicas(self) -> bool:
        """Whether the time of a stage, or what it can hold, depends on its replicas beyond their number."""
        return len(self.times[0]) > 1 or len(self.limits[0]) > 1

    def select(self, index: Ints) -> FewOptions:
        """Return the options of the stages between the cuts ``index`` alone."""
        both = np.ix_(index, index)
        times, limits = (
            tuple(tuple(table[both] for table in tables) for tables in options) for options in (self.times, self.limits)
        )
        return FewOptions(self.cuts[index], times, limits)

    def work(self, start: int, stops: Ints, replicas: Ints) -> Work:
        """Return the least time of stages as a function of what they hold (see :class:`StageOptions`)."""
        rows = [
            (with_replicas(times, start, stops, replicas), with_replicas(limits, start, stops, replicas))
            for times, limits in zip(self.times, self.limits, strict=True)
        ]

        def least(in_flight: Ints) -> Ints:
            time, limit = rows[-1]
            least: Ints = np.where(in_flight <= limit, time, NEVER)
            for time, limit in rows[-2::-1]:
                np.copyto(least, time, where=in_flight <= limit)
            return least

        return least

    def recomputed(self, start: int, stop: int, in_flight: int, replicas: int) -> tuple[Ranges, Ranges]:
        """Return what the quickest option that can hold ``in_flight`` microbatches recomputes, nothing or all, and all
        of the stage, of whose cores nothing else is known."""
        return self._fitting(start, stop, in_flight, replicas)[0], self._whole(start, stop)

    def ways(self, start: int, stop: int, replicas: int) -> Sequence[Ranges]:
        """Return nothing and all, as far as each fits."""
        return self._fitting(start, stop, 1, replicas)

    def _fitting(self, start: int, stop: int, in_flight: int, replicas: int) -> list[Ranges]:
        limits = (tables[min(replicas, len(tables)) - 1] for tables in self.limits)
        ways = zip(((), self._whole(start, stop)), limits, strict=False)
        return [way for way, limit in ways if in_flight <= limit[start, stop]]

    def _whole(self, start: int, stop: int) -> Ranges:
        return ((int(self.cuts[start]), int(self.cuts[stop])),)

    @cached_property
    def relaxed(self) -> Sequence[tuple[Ints, Ints]]:
        """The options themselves, each with the replicas that take least and with those that hold most."""
        return [
            (np.minimum(times[0], times[-1]), np.maximum.reduce(limits))  # times grow or shrink with the replicas
            for times, limits in zip(self.times, self.limits, strict=True)
        ]


def with_replicas(tables: Sequence[Ints], start: int, stops: Ints, replicas: Ints) -> Ints:
    """Return what ``tables`` (by replicas, the last for all beyond) say of the stages from cut ``start``; 0 counts as
    one replica. ``stops`` has the shape of ``replicas`` last."""
    found: Ints
    if len(tables) == 1:
        found = tables[0][start][stops]
    else:
        found = np.stack([table[start] for table in tables])[np.clip(replicas, 1, len(tables)) - 1, stops]
    return found


def held_times(options: StageOptions, size: int, in_flight: int, replicas: int, most_ns: int) -> Ints:
    """Return U of every stage between two of ``size`` cuts, shape (cuts, cuts), whose replicas each hold so many
    microbatches; NEVER where they can't, or take more than ``most_ns`` each."""
    table = np.full((size, size), NEVER, dtype=np.int64)
    for i in range(size - 1):
        stops = np.arange(i + 1, size)
        ones = np.ones_like(stops)
        table[i, i + 1 :] = options.work(i, stops, replicas * ones)(in_flight * ones)
    table[table > replicas * most_ns] = NEVER
    return table


def stage_times(tables: StageTables, device: Device) -> tuple[tuple[Ints, ...], ...]:
    """Return :attr:`FewOptions.times` of stages on devices as fast; NEVER: no stage."""
    problem = tables.problem
    waits = tables.waits[0] + tables.waits[1]
    stage = tables.stop > tables.start
    options = []
    for again in (0, tables.again(device))[: 1 + (problem.checkpointing == "stages")]:
        times = []
        for replicas in replica_counts(problem):
            problem.deadline.check()
            work = tables.work(device, replicas, again)
            idle = ~stage | (work == 0)  # a stage without work would leave orders ambiguous
            times.append(np.where(idle, NEVER, work + waits))
        options.append(tuple(times))
    return tuple(options)


def replica_counts(problem: Problem) -> range:
    """Return the replica counts between which a stage's time differs: all, or one alone where it never does.

    With shared steps it differs only where more replicas make updates rarer, with updates at their limit only where
    the steps of all replicas take more than a nanosecond of each microbatch.
    """
    policy, most = problem.policy, problem.most_replicas
    step = 0 if policy.drains else int(problem.chain.sums.optimizer_ns[-1])
    if policy.zero:
        differs = step > 0 and policy.update_interval(most) > policy.update_interval()
    else:
        differs = step > 0 if policy.accumulate is not None else step * most > ENDLESS
    return range(1, most + 1) if differs else range(1, 2)


def stage_limits(tables: StageTables, memory: int) -> tuple[tuple[Ints, ...], ...]:
    """Return :attr:`FewOptions.limits` of stages on devices of ``memory`` bytes, stored and, where allowed, recomputed.

    Where segments are allowed, one choice stands for all: nothing to hold and nothing to recompute, a relaxation.
    """
    problem, (start, stop) = tables.problem, (tables.start, tables.stop)
    choices: list[tuple[IntLike, IntLike]] = [(0, 0) if problem.checkpointing == "segments" else (tables.kept,) * 2]
    if problem.checkpointing == "stages":
        keeps, transient, _ = memory_model.segment(problem.chain, start, stop)
        choices.append((keeps, keeps + transient))
    options = []
    for kept, peak in choices:
        standing, limits = counts_standing(problem), dict[int, Ints]()
        for replicas in dict.fromkeys(standing):
            problem.deadline.check()
            limit = in_flight_limit(problem, start, stop, kept, peak, memory, replicas)
            limits[replicas] = np.where(stop > start, limit, 0)
        options.append(tuple(limits[replicas] for replicas in standing))
    return tuple(options)


_MOST_ENTRIES = 9 * 10**7  # of all tables together, of 8 bytes each
SPREAD = 1000  # cuts that are looked at where all are too many
_FEW_SPREAD = 64  # cuts all over the chain, at least, where tables take long
_MOST_NEAR = 160  # and cuts near the ends of stages


@dataclass(frozen=True)
class DeviceClass:
    """How long stages take on the groups of devices of one floor (:mod:`.states`), which are as good as ``device``."""

    options: StageOptions
    device: Device


@dataclass(frozen=True)
class SearchTables:
    """All that a decision reads and that doesn't depend on the period; stages start and stop at ``cuts`` alone."""

    problem: Problem
    cuts: Ints
    classes: tuple[DeviceClass, ...]  # by floor
    best: StageOptions  # on ``best_device``
    best_device: Device  # as fast as the fastest and as large as the largest
    gradients: Ints  # (n + 1, n + 1) bytes that replicas of a stage exchange
    round_trips: Ints  # (levels, n + 1) ns that both directions of a cut take on links, over each level
    work: Ints  # (n + 1,) ns that the layers before each cut take at least on a device of relative speed 1
    states: DeviceStates  # what stages can take in one order, the platform's if no other is said
    orders: Orders | None  # to search in turn, where there are several
    complete: bool = True  # whether all legal cuts are here
    uniform: tuple[SearchTables, ...] = ()  # those of each variant, where stages choose; floors are these then

    @property
    def variants(self) -> tuple[SearchTables, ...]:
        """The tables of each variant that stages may have."""
        return self.uniform or (self,)

    def of_variants(self, uniform: Sequence[SearchTables]) -> SearchTables:
        """Return the same tables for stages that choose among variants, each with its own."""
        return replace(self, uniform=tuple(uniform), classes=tuple(x.classes[0] for x in uniform))

    def select(self, index: Ints) -> SearchTables:
        """Return the same tables with the cuts ``index`` alone."""
        return replace(
            self,
            cuts=self.cuts[index],
            classes=tuple(replace(x, options=x.options.select(index)) for x in self.classes),
            best=self.best.select(index),
            gradients=self.gradients[np.ix_(index, index)],
            round_trips=self.round_trips[:, index],
            work=self.work[index],
            complete=self.complete and len(index) == len(self.cuts),
            uniform=tuple(x.select(index) for x in self.uniform),
        )

    def in_order(self, order: Order) -> SearchTables:
        """Return the same tables for stages that take devices in ``order``."""
        return replace(self, states=replace(self.states, order=order), orders=None)


def stage_tables(problem: Problem, some: Ints | None = None) -> SearchTables:
    """Return the tables of ``problem`` over all its legal cuts, or ``some``; fewer where they would take a gigabyte.

    Where segments are allowed, stages are taken to hold and to recompute nothing: a relaxation, in whose place
    :mod:`.segments` puts what they may really do.
    """
    chain, platform = problem.chain, problem.platform
    legal = legal_cuts(problem)
    cuts, count, most = legal if some is None else some, len(legal), most_cuts(problem)
    if len(cuts) > most:
        index = spread_cuts(problem, cuts, min(SPREAD, 3 * most // 4))
        assert index is not None, "these are fewer"
        cuts = cuts[index]
    if chain.variants:
        return _of_stages_that_choose(problem, cuts, count == len(cuts))
    stages = StageTables.between(problem, cuts)
    round_trips = [
        [min(NEVER, trip) for trip in round_trips_ns(chain, platform, cuts, level)]
        for level in range(len(platform.levels))
    ]
    best = platform.best_device

    times_on, limits_of = cache(partial(stage_times, stages)), cache(partial(stage_limits, stages))

    def options_of(device: Device) -> StageOptions:
        return FewOptions(cuts, times_on(replace(device, memory_bytes=0)), limits_of(device.memory_bytes))

    kinds = DeviceKinds.on(platform, problem.replicas)
    slowest = [kinds.slowest(floor) for floor in range(len(kinds.floors))]
    trips = np.array(round_trips, dtype=np.int64) * (not platform.blocking)
    relaxed, orders = relaxations.relative(problem), Orders.of(problem)
    speeds = tuple(x.speed for x in relaxed.platform.devices)
    return SearchTables(
        problem,
        cuts,
        tuple(DeviceClass(options_of(x), x) for x in slowest),
        options_of(best),
        best,
        stages.gradients,
        trips,
        (relaxed.chain.sums.forward_ns + relaxed.chain.sums.backward_ns)[cuts],
        DeviceStates(kinds, tuple(range(len(platform))), problem.replicas, speeds),
        orders if orders.count > 1 else None,
        complete=count == len(cuts),
    )


def _of_stages_that_choose(problem: Problem, cuts: Ints, complete: bool) -> SearchTables:
    """Return :func:`stage_tables` of stages that each have one of the variants of their layers."""
    own = [
        replace(x, chain=x.chain.otherwise) if x.chain.either and x.checkpointing == "segments" else x
        for x in problem.uniform
    ]  # where some cores run again and some do not these are what is more
    uniform = [replace(stage_tables(x, cuts), complete=complete) for x in own]
    sums = relaxations.by_gpu(problem.chain).sums
    return replace(
        uniform[0],
        problem=problem,
        round_trips=np.minimum.reduce([x.round_trips for x in uniform]),
        work=(sums.forward_ns + sums.backward_ns)[cuts],
        states=replace(uniform[0].states, variants=tuple(problem.chain.names), single=not problem.replicas),
    ).of_variants(uniform)


def thinned(tables: SearchTables, stages: Sequence[Stage] = (), turn: int = 0) -> SearchTables:
    """Return tables between few cuts: some all over the chain, and about :data:`_MOST_NEAR` near the ends of
    ``stages``, others each ``turn`` where there are more."""
    problem, cuts = tables.problem, legal_cuts(tables.problem)
    index = spread_cuts(problem, cuts, max(_FEW_SPREAD, len(problem.platform)))
    if index is None:
        return tables
    if stages:
        index = np.union1d(index, near(cuts, stages, turn))
    if tables.complete:
        return tables.select(index)
    return replace(stage_tables(problem, cuts[index]), states=tables.states, orders=tables.orders)


def near(cuts: Ints, stages: Sequence[Stage], turn: int, most: int = _MOST_NEAR) -> Ints:
    """Return the indices of cuts 0, 1, 2, 4, .. cuts away from the ends of ``stages``, up to half a stage, so that
    stages can move far and settle exactly: about as many as are the ``most``, others each ``turn``."""
    ends = np.searchsorted(cuts, [*(stage.start for stage in stages), stages[-1].stop])
    steps = [2**k for k in range(max(1, (len(cuts) // (2 * len(stages))).bit_length()))]
    some = steps[turn % (turns := ceil_div(len(steps) * 2 * len(ends), most)) :: turns]
    away = np.array([-x for x in some] + [0, *some])
    return np.unique((ends[:, None] + away).clip(0, len(cuts) - 1))


def most_cuts(problem: Problem) -> int:
    """Return how many cuts the tables may be over, by their number and that of what is held while they are read."""
    platform = problem.platform
    paces, memories = {(x.speed, x.times) for x in platform.devices}, {x.memory_bytes for x in platform.devices}
    tables = len(replica_counts(problem)) * len(paces) + len(set(counts_standing(problem))) * len(memories)
    tables *= len(problem.chain.choices)
    most = _MOST_ENTRIES if problem.policy.pipelines == 1 else _MOST_ENTRIES // 10  # groups' devices are searched again
    return isqrt(most // ((2 if problem.checkpointing == "stages" else 1) * tables + 9))


def carried(problem: Problem, round_trips: Ints, level: int, period: int) -> Ints:
    """Return the ``round_trips`` over ``level``, NEVER for those that no links between two groups can carry once per
    ``period``."""
    load = round_trips // 2 if problem.platform.both_ways(level) else round_trips
    links = most_in_common(len(problem.platform)) if problem.replicas else 1
    return np.where(load <= min(links * period, NEVER - 1), round_trips, NEVER)


def longest_delay(problem: Problem, period: int) -> int:
    """Return the longest life of an activation that the policy allows (2bw: section 3)."""
    return min(period * (problem.policy.most_lifetime or NEVER), NEVER - 1)


def largest_synced_gradients(problem: Problem, period: int) -> Ints:
    """Return the most gradient bytes that replicas can sum at ``period``, by level and replica count 0..P."""
    policy, count = problem.policy, len(problem.platform)
    return np.array(
        [
            [2**62, *(largest_synced_gradient(policy, period, r, *path) for r in range(1, count + 1))]
            for path in problem.platform.paths
        ],
        dtype=np.int64,
    )
