"""What does every stage take on a group of GPUs in a drained plan, and what does it recompute?

As little as lets it hold the microbatches that it is to have ahead, or what a rule says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, cached_property
from math import ceil

import numpy as np

from ...cost import memory_model, relaxations, time_model
from ...cost.stage_tables import StageTables
from ...integers import NEVER, Ints
from ...partition.contiguous.contiguous import tables_within
from ...partition.tables.stages import DeviceClass, Ranges, StageOptions, held_times
from ...problem import Device, LayerTimes, Level, Platform, Problem

Split = tuple[int, ...]  # indices of cuts
Group = tuple[int, ...]  # the GPUs of a stage


class Tables:
    """What every stage takes on a group of devices of which it has one part in ``parts`` of the memory, in one of equal
    pipelines that runs so many ``microbatches``; tables have shape (cuts, cuts).

    Stages recompute as little as lets them hold theirs, by the options of their class. No stage that takes more
    than ``most_ns`` is in them; ``exact``: all others are, at their least times. ``alike``: replicas don't count.
    """

    def __init__(
        self,
        stages: StageTables,
        microbatches: int,
        parts: int = 1,
        most_ns: int = NEVER,
        exact: bool = True,
        classes: Sequence[DeviceClass] = (),
        alike: bool = False,
    ) -> None:
        self.stages, self.problem, self.cuts, self.size = stages, stages.problem, stages.stop[0], stages.stop.size
        self.microbatches, self.parts, self.most_ns, self.exact = microbatches, parts, most_ns, exact
        self._options, self._alike = {x.device: x.options for x in classes}, alike

    def _copies(self, group: Group) -> int:
        """Return the replicas of a stage on a group that its times are to know."""
        return 1 if self._alike else len(group)

    def _known(self, group: Group) -> StageOptions | None:
        return self._options.get(_part(self.problem.platform.slowest(group), self.parts))

    def times(self, group: Group, in_flight: int) -> Ints | None:
        """Return U of every stage whose replicas each hold so many microbatches, NEVER if they can't; None where the
        group is none that is known."""
        options, r = self._known(group), self._copies(group)
        if options is None:
            return None

        def known() -> Ints:
            self.problem.deadline.check()
            return held_times(options, self.size, in_flight, r, self.most_ns)

        device, count, path = self.stages.joined(group)
        before, behind = self.stages.waits
        own = self.stages.once(("waited", device), lambda: self.stages.forward(device) + before // 2 + behind // 2)
        whole = self.stages.once(("held", device, r, in_flight), known)
        forward, backward = self.stages.exchanging(own, whole - own, count, path)
        return np.asarray(np.minimum(NEVER, forward + backward))

    def bare(self, group: Group) -> Ints:
        """Return U of every stage that recomputes no more than it must, whatever it can hold."""
        table = self.stages.work(self.problem.platform.slowest(group))
        return np.where(self.stages.stop > self.stages.start, table, NEVER)

    def recomputed(self, group: Group, start: int, stop: int, in_flight: int) -> Ranges:
        """Return what a stage between two cuts recomputes to hold so many microbatches."""
        options = self._known(group)
        assert options is not None, "its times were asked for"
        return options.recomputed(start, stop, in_flight, self._copies(group))[0]

    def ways(self, group: Group, start: int, stop: int) -> Sequence[Ranges]:
        """Return the ways to recompute a stage, the quickest first, those later keeping less."""
        options = self._known(group)
        return () if options is None else options.ways(start, stop, self._copies(group))

    def load(self, one: Group, other: Group) -> Ints:
        """Return how long a microbatch keeps the link between two groups busy over each cut, at least."""
        platform, trip = self.problem.platform, self.stages.trip(one, other)
        return trip // 2 if platform.both_ways(platform.level_between(one, other)) else trip

    @cached_property
    def work(self) -> Ints:
        """The least time of the layers before each cut, without recomputation and optimizer, on any device."""
        relaxed = relaxations.relative(self.problem)
        speed, sums = max(device.speed for device in relaxed.platform.devices), relaxed.chain.sums
        work = (sums.forward_ns + sums.backward_ns)[self.cuts]
        return np.asarray(work * speed.denominator // speed.numerator)


class Rule:
    """What every stage recomputes: ``ranges(start, stop)`` of ``layers[start:stop]``."""

    def __init__(self, stages: StageTables, ranges: Callable[[int, int], Ranges]) -> None:
        self.stages, self.ranges = stages, ranges
        self.on = cache(self._on)

    def _on(self, times: LayerTimes | None) -> Ints:
        """Return bytes that a stage keeps of a microbatch and holds at its peak, and ns that it runs again, as long as
        passes take a device with such ``times``, shape (3, cuts, cuts), 0 where there is no stage."""
        problem, cuts = self.stages.problem, self.stages.stop[0].tolist()
        chain, found = problem.chain.timed(times), np.zeros((3, len(cuts), len(cuts)), dtype=np.int64)
        for i, start in enumerate(cuts):
            problem.deadline.check()
            for j, stop in enumerate(cuts[i + 1 :], i + 1):
                ranges = self.ranges(start, stop)
                found[:, i, j] = memory_model.stage_activations(problem.policy, chain, start, stop, ranges)
        return found


class RuledTables(Tables):
    """Those of stages that recompute what a ``rule`` says."""

    def __init__(self, rule: Rule, microbatches: int, parts: int) -> None:
        super().__init__(rule.stages, microbatches, parts, NEVER // 8 // microbatches)
        self.rule = rule
        self._bare: dict[object, Ints] = {}

    def times(self, group: Group, in_flight: int) -> Ints:
        """Return U of every stage that fits."""
        device = self.problem.platform.slowest(group)
        kept, peak, _ = self.rule.on(device.times)
        fixed = self.stages.weights_bytes(in_flight, len(group)) + self.stages.buffers(len(group))
        fits = fixed + memory_model.held_bytes(kept, peak, in_flight) <= device.memory_bytes // self.parts
        return np.where(fits, self.bare(group), NEVER)

    def bare(self, group: Group) -> Ints:
        """Return U of every stage."""
        device, count, path = kind = self.stages.joined(group)
        if kind not in self._bare:
            backward = self.stages.backward(device, count, self.rule.on(device.times)[2])
            work = np.add(*self.stages.exchanging(self.stages.forward(device), backward, count, path))
            stage = (self.stages.stop > self.stages.start) & (work > 0)
            self._bare[kind] = np.where(stage, np.minimum(work + sum(self.stages.waits), NEVER), NEVER)
        return self._bare[kind]

    def recomputed(self, group: Group, start: int, stop: int, in_flight: int) -> Ranges:
        """Return what the rule says."""
        return self.rule.ranges(int(self.cuts[start]), int(self.cuts[stop]))


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
    if found is None:
        return None
    stages = StageTables.between(problem, found[0].cuts)
    return Tables(stages, microbatches, parts, *found[1:], found[0].classes)


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
    if found is None:
        return None
    stages = StageTables.between(problem, found[0].cuts)
    return Tables(stages, microbatches, 1, *found[1:], found[0].classes, True)


def work_floor_ns(problem: Problem, groups: Sequence[Group], whole: bool = True) -> int:
    """Return a time below which equal pipelines on groups of GPUs drain no mini-batch, from its work alone; where
    backwards aren't ``whole`` a stage may have passes left when the last gradient has gone back.

    With U(s) the time of a stage and P(s) that of those before it a batch takes at least M U(s) + P(s). Work in all is
    W = sum of U(s), and the largest of these is least when they are equal: W / (1 - (1 - 1/M)^p). Nor is it less than
    the mean over the stages of M U(s) and the update behind it, or M times the largest layer. Of stages that share GPUs
    all but the first may sum gradients while others still compute, and the way through them is not looked at.
    """
    relaxed, policy, platform = relaxations.relative(problem), problem.policy, problem.platform
    chain, p, pipelines = relaxed.chain, len(set(groups)), len(groups[0])
    count, several = (policy.accumulate or 1) // pipelines, p < len(groups)
    speed = max(device.speed for device in relaxed.platform.devices)
    passes = int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])
    step = Fraction(time_model.whole_step_ns(chain, 0, len(chain)), policy.sharers(pipelines)) / speed
    gradient: int = memory_model.gradient_of(chain, policy, 0, len(chain))
    turns = policy.sharing.update * (pipelines - 1) * (gradient > 0) * (not several)
    paths = {platform.paths[platform.level_of(group)] for group in groups}
    sums = turns * min(Fraction(gradient * 10**9, pipelines * bandwidth) + latency for bandwidth, latency in paths)
    update = max(sums, step * (not several)) if policy.overlaps else sums + step
    drain = passes / (1 - Fraction(count - 1, count) ** p) if whole and not several else 0
    largest = max(layer.forward_ns + layer.backward_ns for layer in chain.layers)
    return ceil(max(drain / speed, (count * passes / speed + update) / p, count * largest / speed))


def _part(device: Device, parts: int) -> Device:
    return device if parts == 1 else replace(device, memory_bytes=device.memory_bytes // parts)
