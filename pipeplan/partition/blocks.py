"""Which split over equal pipelines drains soonest, if stages are whole blocks and what they recompute is a rule?

Legend: p stages of one pipeline, M microbatches in it; U(i, j) forward and backward of the stage between the cuts i and
j with what it recomputes, F its forward; P the sum of U and of the transfers over the stages before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..cost import memory_model, relaxations
from ..cost.stage_tables import StageTables
from ..integers import NEVER, Ints, ceil_div
from ..problem import Chain, Problem
from .tables.split_paths import extreme_splits, short_splits, soonest_split

Ranges = tuple[tuple[int, int], ...]
Rule = Callable[[int, int], Ranges]  # what is recomputed of ``layers[start:stop]``


@dataclass(frozen=True)
class Activations:
    """Bytes that a stage between two cuts keeps of a microbatch, and holds at its peak, each of shape (cuts, cuts); of
    what isn't a stage they are 0. ``segments`` are rows of (first cut, last cut, start, stop) of layers that run again.
    """

    kept: Ints
    peak: Ints
    segments: Ints

    @staticmethod
    def of(problem: Problem, cuts: Sequence[int], rule: Rule | None) -> Activations:
        """Return those of stages that recompute what ``rule`` says, None: nothing."""
        size, rows = len(cuts), []
        kept, peak = (np.zeros((size, size), dtype=np.int64) for _ in range(2))
        for i in range(size):
            problem.deadline.check()
            for j in range(i + 1, size):
                segments = () if rule is None else rule(cuts[i], cuts[j])
                found = memory_model.stage_activations(problem.policy, problem.chain, cuts[i], cuts[j], segments)
                kept[i, j], peak[i, j], _ = found
                rows += [(i, j, start, stop) for start, stop in segments]
        return Activations(kept, peak, np.array(rows, dtype=np.int64).reshape(-1, 4))

    def again(self, chain: Chain) -> Ints:
        """Return the forwards (ns) that a stage runs again, (cuts, cuts), as long as they are in ``chain``."""
        first, last, start, stop = self.segments.T
        found, forward = np.zeros_like(self.kept), chain.sums.forward_ns
        np.add.at(found, (first, last), forward[stop] - forward[start])
        return found


@dataclass(frozen=True)
class Pipe:
    """One of equal pipelines: stage s, on ``groups[s]``, holds ``in_flight[s]`` microbatches of the ``microbatches``
    that each pipeline runs.

    ``share`` is the part of a device's memory, one in so many, that a stage may fill. With ``ahead`` a stage runs
    exactly ``in_flight`` forwards before its first backward, and then one of each in turn (1F1B).
    """

    tables: StageTables
    activations: Activations
    groups: tuple[tuple[int, ...], ...]
    microbatches: int
    in_flight: tuple[int, ...]
    share: int = 1
    ahead: bool = False

    def _forward(self, group: tuple[int, ...]) -> Ints:
        """Return F on a group."""
        forward = self.tables.forward(self.tables.problem.platform.slowest(group))
        return self.tables.exchanging(forward, forward, *self.tables.joined(group)[1:])[0]

    @cached_property
    def times(self) -> list[Ints]:
        """U, shape (cuts, cuts), of each stage; NEVER where it is none."""
        problem, (before, behind) = self.tables.problem, self.tables.waits
        known: dict[object, Ints] = {}
        found = []
        for s, group in enumerate(self.groups):
            device, count, path = kind = self.tables.joined(group)
            if kind not in known:
                again = self.activations.again(problem.chain.timed(device.times))
                passes = self.tables.forward(device), self.tables.backward(device, len(group), again)
                forward, backward = self.tables.exchanging(*passes, count, path)
                table = forward + backward
                known[kind] = np.where((self.tables.stop > self.tables.start) & (table > 0), table, NEVER)
            enters, leaves = (other != (group,) for other in (self.groups[s - 1 : s], self.groups[s + 1 : s + 2]))
            found.append(np.minimum(known[kind] + before * enters + behind * leaves, NEVER))
        return found

    @cached_property
    def fitting(self) -> list[Ints]:
        """The same, NEVER also where the stage doesn't fit the memory."""
        found, kept, peak = [], self.activations.kept, self.activations.peak
        for group, table, count in zip(self.groups, self.times, self.in_flight, strict=True):
            room = self.tables.problem.platform.slowest(group).memory_bytes // self.share
            fixed = self.tables.weights_bytes(count, len(group)) + self.tables.buffers(len(group))
            found.append(np.where(fixed + memory_model.held_bytes(kept, peak, count) <= room, table, NEVER))
        return found

    @cached_property
    def trips(self) -> list[Ints]:
        """Both transfers of a microbatch over each cut, by the stage before it."""
        return [self.tables.trip(one, other) for one, other in pairwise(self.groups)]

    @cached_property
    def _bare(self) -> Ints:
        """The least time of layers before each cut, without recomputation and optimizer, on any device."""
        relaxed = relaxations.relative(self.tables.problem)
        sums = relaxed.chain.sums
        speed = max(device.speed for device in relaxed.platform.devices)
        work = (sums.forward_ns + sums.backward_ns)[self.tables.stop[0]]
        return np.asarray(work * speed.denominator // speed.numerator)

    def least(self, fit: bool = True, enough: int | None = None) -> tuple[int, tuple[int, ...]] | None:
        """Return a time (ns) below which no split runs a mini-batch, and a split (indices of cuts) of which no more can
        be said; None where none fits, or none is below ``enough``.

        Stage s runs M forwards and backwards between the first forward that reaches it and the last backward that it
        sends on: M U + P. Running a steps ahead, with A for what the stages and transfers behind it take, it waits for
        the first backward: P + M U + A - (a - 1) F. And as microbatch m + a comes in after m has gone back, it takes
        P + ceil(M / a) (U + A). Its update follows M U. The least time that all stages of a split stay within is
        bisected; for one a dynamic program keeps the shortest P at every cut. O(p n^2) for n cuts and each step.
        """
        tables = self.fitting if fit else self.times
        bare, count = self._bare, self.microbatches
        moves = [int(trip[1:-1].min(initial=NEVER)) for trip in self.trips]
        ends, floors = [], []  # what doesn't begin before P, and what may
        for s, (table, held) in enumerate(zip(tables, self.in_flight, strict=True)):
            known = np.where(table >= NEVER, NEVER // (4 * count), table)
            end = count * known
            floors.append(end + self.tables.update(*self.tables.joined(self.groups[s])))
            if self.ahead:
                behind = (bare[-1] - bare + sum(moves[s:]))[None, :]
                end = np.maximum(
                    end + behind - (held - 1) * self._forward(self.groups[s]), ceil_div(count, held) * (known + behind)
                )
            ends.append(end)

        low = max(1, count * int(bare[-1]) // len(self.groups))
        most = NEVER // 8 if enough is None else enough - 1
        return soonest_split(tables, self.trips, ends, floors, low, most)

    def even(self) -> Iterator[tuple[int, ...]]:
        """Yield splits whose longest stage is shortest, or a little longer, and the path as short as that allows."""
        yield from short_splits(self.fitting, self.fitting, self.trips)
        if self.share > 1:  # where it also counts which stages of a device are the long ones
            yield from extreme_splits(self.fitting)

    def work_ns(self, split: Sequence[int]) -> int:
        """Return what the busiest group computes in a mini-batch of a split: less takes none."""
        loads = dict.fromkeys(self.groups, 0)
        for group, table, (i, j) in zip(self.groups, self.times, pairwise(split), strict=True):
            loads[group] += int(table[i, j])
        return self.microbatches * max(loads.values())
