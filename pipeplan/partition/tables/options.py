"""How long does a stage take per microbatch, given how many microbatches it must hold?

A stage that must hold more of them may have to recompute activations instead of keeping them, and then takes longer.
The partitioners read this trade from tables over pairs of cuts, computed once per class of devices by the one cost
model. Here a stage stores everything or recomputes all of itself; :mod:`.segments` has the finer choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ...cost import memory_model
from ...cost.stage_tables import StageTables
from ...integers import NEVER, IntLike, Ints
from ...problem import ENDLESS, Device, Problem
from ..in_flight import in_flight_limit, memory_counts

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

    def checkpoint(self, start: int, stop: int, in_flight: int, replicas: int) -> Ranges:
        """Return the recomputed segments with which a stage is quickest while each of its replicas holds ``in_flight``
        microbatches."""

    def ways(self, start: int, stop: int, replicas: int) -> Sequence[Ranges]:
        """Return the ways to recompute a stage that can hold one microbatch, the quickest first, each of which keeps
        less of it than those before."""

    def relaxed(self) -> Sequence[tuple[Ints, Ints]]:
        """Return pairs (times, in-flight limits) of tables over pairs of cuts as lower bounds: no stage is quicker, on
        any number of replicas, than the quickest pair whose limit allows what it holds."""


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

    def checkpoint(self, start: int, stop: int, in_flight: int, replicas: int) -> Ranges:
        """Return what the quickest option that can hold ``in_flight`` microbatches recomputes: nothing or all."""
        limits = (tables[min(replicas, len(tables)) - 1] for tables in self.limits)
        option = next(o for o, limit in enumerate(limits) if in_flight <= limit[start, stop])
        return self._recomputed(option, start, stop)

    def ways(self, start: int, stop: int, replicas: int) -> Sequence[Ranges]:
        """Return nothing and all, as far as each fits."""
        limits = (tables[min(replicas, len(tables)) - 1] for tables in self.limits)
        return [self._recomputed(o, start, stop) for o, limit in enumerate(limits) if limit[start, stop] >= 1]

    def _recomputed(self, option: int, start: int, stop: int) -> Ranges:
        return ((int(self.cuts[start]), int(self.cuts[stop])),) if option else ()

    def relaxed(self) -> Sequence[tuple[Ints, Ints]]:
        """Return the options themselves, each with the replicas that take least and with those that hold most."""
        return self._relaxed

    @cached_property
    def _relaxed(self) -> list[tuple[Ints, Ints]]:
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
    step = 0 if policy.steps_apart else int(problem.chain.sums.optimizer_ns[-1])
    if policy.zero:
        differs = step > 0 and policy.update_interval(most) > policy.update_interval()
    else:
        differs = step > 0 if policy.accumulate is not None else step * most > ENDLESS
    return range(1, most + 1) if differs else range(1, 2)


def quickest_replicas(problem: Problem) -> int:
    """Return the number of replicas with which a microbatch pays least for optimizer steps."""
    return problem.most_replicas if problem.policy.zero else 1


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
        limits = []
        for replicas in memory_counts(problem):
            problem.deadline.check()
            limit = in_flight_limit(problem, start, stop, kept, peak, memory, replicas)
            limits.append(np.where(stop > start, limit, 0))
        options.append(tuple(limits))
    return tuple(options)
