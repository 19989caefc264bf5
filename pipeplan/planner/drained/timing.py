"""How long does a drained mini-batch take by many sets of durations, if every device and link keeps its order?

All sets are timed at once, in a few operations for each level of the steps. Of the durations of a simulated run that is
what was simulated; of others near them a guess, which a search confirms by simulating what comes first. Before there is
a run the order is that of 1F1B, and each direction of a link a link of its own: never more than a run takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import gcd, lcm

import numpy as np

from ...integers import Ints, ceil_div
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
    found = _retiming(path, lane, list(range(length)) * count, last)
    assert found is not None, "it has run"
    return found


def alternating(replicas: Sequence[int], ahead: Sequence[int], microbatches: int) -> Retiming | None:
    """Return the retiming of stages with ``replicas`` that each run ``ahead`` forwards before their first backward, and
    then one backward, one forward in turn; None where these wait for each other.

    Durations are the forwards, the backwards, and the one-way transfers behind all stages but the last.
    """
    common = gcd(*replicas)  # so many pipelines that have nothing in common
    return _alternating(tuple(r // common for r in replicas), tuple(ahead), ceil_div(microbatches, common))


@lru_cache(maxsize=512)
def _alternating(replicas: tuple[int, ...], ahead: tuple[int, ...], microbatches: int) -> Retiming | None:
    stages, count = len(replicas), microbatches
    # steps are numbered by kind (F, B, SEND_F, SEND_B), stage (of a transfer the one before it), microbatch
    backward, there, back = stages * count, 2 * stages * count, (3 * stages - 1) * count
    total = (4 * stages - 2) * count
    path, lane = [-1] * total, [-1] * total
    for s in range(stages):
        for m in range(s * count, (s + 1) * count):
            path[m] = there + m - count if s else -1
            path[backward + m] = (back if s < stages - 1 else 0) + m
        for i in range(min(replicas[s], count)):
            order = list(_in_turn(range(s * count + i, (s + 1) * count, replicas[s]), ahead[s], backward))
            for one, other in pairwise(order):
                lane[other] = one
        if s < stages - 1:
            links = lcm(replicas[s], replicas[s + 1])
            for m in range(s * count, (s + 1) * count):
                path[there + m], path[back + m] = m, backward + count + m
                if m - s * count >= links:
                    lane[there + m], lane[back + m] = there + m - links, back + m - links
    blocks = [*range(2 * stages), *range(2 * stages, 3 * stages - 1), *range(2 * stages, 3 * stages - 1)]
    takes = np.repeat(blocks, count).tolist()
    last = [
        [backward + s * count + max(range(i, count, replicas[s])) for i in range(min(replicas[s], count))]
        for s in range(stages)
    ]
    return _retiming(path, lane, takes, last)


def _in_turn(own: Sequence[int], ahead: int, backward: int) -> Iterator[int]:
    """Yield the steps of a replica in order: some forwards, then a backward and a forward in turn."""
    yield from own[:ahead]
    for place, m in enumerate(own):
        yield backward + m
        yield from own[ahead + place : ahead + place + 1]


def _retiming(
    path: Sequence[int], lane: Sequence[int], takes: Sequence[int], last: Sequence[Sequence[int]]
) -> Retiming | None:
    """Return the retiming of steps behind others (-1: none), or None where some wait for each other."""
    levels = _levels(path, lane)
    if levels is None:
        return None
    order = np.argsort(levels, kind="stable")
    place = np.zeros(len(path) + 1, dtype=np.int64)  # the last entry stands for nothing
    place[order] = np.arange(1, len(path) + 1)
    one, other = (np.concatenate([[0], place[np.array(x)[order]]]) for x in (path, lane))
    return Retiming(
        (one, other),
        np.concatenate([[0], np.array(takes)[order]]),
        tuple((np.cumsum(np.bincount(levels)) + 1).tolist()),
        tuple(place[list(steps)] for steps in last),
    )


def _levels(path: Sequence[int], lane: Sequence[int]) -> list[int] | None:
    """Return how many steps at most come before each, one after the other; None where some wait for each other."""
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
    return levels if len(ready) == len(path) else None
