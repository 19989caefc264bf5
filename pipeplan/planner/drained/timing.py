"""How long does a drained mini-batch take by many sets of durations, if every device and link keeps its order?

All sets are timed at once, in a few operations for each level of the steps. Of the durations of a simulated run that is
what was simulated; of others near them a guess, which a search confirms by simulating what comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...integers import Ints
from ...schedule.program import Step
from ...schedule.timeline import Timeline


@dataclass(frozen=True)
class Retiming:
    """The steps of a mini-batch, level by level.

    Step k comes behind ``before[0][k]`` on its microbatch's path and ``before[1][k]`` on its device or link (0:
    nothing), both of an earlier level, and takes the duration ``takes[k]``. Level l ends before ``ends[l]``.
    ``last[s]`` are the steps with which stage s is done, one for each replica.
    """

    before: tuple[Ints, Ints]
    takes: Ints
    ends: tuple[int, ...]
    last: tuple[Ints, ...]

    def makespans(self, durations: Ints, updates: Ints) -> Ints:
        """Return the time of a mini-batch (ns) by each of K sets of ``durations``, of shape (kinds of steps, K), and of
        ``updates`` behind the last backward of each stage, (stages, K), as if no update waited for another."""
        end = np.zeros((len(self.takes), durations.shape[1]), dtype=np.int64)
        low, (path, lane) = 1, self.before
        for high in self.ends:
            level = np.maximum(end[path[low:high]], end[lane[low:high]])
            level += durations[self.takes[low:high]]
            end[low:high] = level
            low = high
        done = [end[last].max(axis=0) + update for last, update in zip(self.last, updates, strict=True)]
        found: Ints = np.max(np.stack(done), axis=0)
        return found


def retimed(timeline: Timeline) -> Retiming:
    """Return the retiming of a simulated run; durations are those of its program's operations, in order."""
    program = timeline.program
    graph, length, count = program.graph, len(program.operations), program.microbatches
    path, lane = [-1] * (count * length), [-1] * (count * length)
    for m in range(count):
        for position, needed in enumerate(program.needs):
            if needed:  # what else a backward needs is in its own lane
                path[m * length + position] = m * length + needed[0]
    for one in program.lanes:
        steps = [step.microbatch * length + step.position for step in one.steps]
        for before, step in pairwise(steps):
            lane[step] = before
    last: list[list[int]] = [[] for _ in graph.stages]
    for s, position in enumerate(program.release):
        ends: dict[int, Step] = {}
        replicas = graph.resources[graph.stages[s].resource].replicas
        for m in range(count):
            ends[m % replicas] = max(ends.get(m % replicas, Step(m, position)), Step(m, position), key=timeline.end_ns)
        last[s] = [step.microbatch * length + step.position for step in ends.values()]
    levels = _levels(path, lane)
    order = np.argsort(levels, kind="stable")
    place = np.zeros(len(path) + 1, dtype=np.int64)  # the last entry stands for nothing
    place[order] = np.arange(1, len(path) + 1)
    behind, after = (np.concatenate([[0], place[np.array(x)[order]]]) for x in (path, lane))
    takes = np.tile(np.arange(length), count)[order]
    ends_at = tuple((np.cumsum(np.bincount(levels)) + 1).tolist())
    return Retiming((behind, after), np.concatenate([[0], takes]), ends_at, tuple(place[steps] for steps in last))


def _levels(path: Sequence[int], lane: Sequence[int]) -> list[int]:
    """Return how many steps at most come before each, one after the other, behind others (-1: none)."""
    waiting, levels = [0] * len(path), [0] * len(path)
    after: list[list[int]] = [[] for _ in path]
    for before in (path, lane):
        for step, other in enumerate(before):
            if other >= 0:
                waiting[step] += 1
                after[other].append(step)
    ready = [step for step, count in enumerate(waiting) if not count]
    for step in ready:
        for other in after[step]:
            levels[other] = max(levels[other], levels[step] + 1)
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return levels
