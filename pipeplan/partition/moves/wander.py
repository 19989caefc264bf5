"""Which allocation may reach a shorter period? A walk over small changes, worse ones too, to what misses it least.

Any device may hold several stages of any kind, beyond MadPipe, whose one special device is the only one with several
(its section 4.2). Every allocation has a number, what it misses of the period to beat (:mod:`.misfits`), and the walk
goes wherever that grows by less than a threshold, which falls to nothing (threshold accepting; Dueck and Scheuer 1990).
Where nothing is missed the allocation is scheduled. A heuristic without guarantee; deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import inf

from ...plan import Allocation, Stage
from ...problem import Problem

Stages = tuple[Stage, ...]
HOT = 0.1  # of what there is: by how much a step at the start may add to what is missing
STEPS = (1, 1, 1, 2, 2, 3, 4, 6, 8)  # layers by which an end moves
MOST_STAGES_PER_DEVICE = 3  # average; more would only slow the scheduler down
SCHEDULED = 20  # steps that can be made in the time that scheduling an allocation takes, at least
REFUTED = 0.02  # what an allocation counts as missing that may reach the period by its bound, and cannot


def wander(
    problem: Problem,
    start: Allocation,
    misfit: Callable[[Stages, float], float],
    try_: Callable[[Allocation], bool],
    budget: int,
    done: Callable[[], bool],
    seed: int = 0,
    hot: float = HOT,
    times: Callable[[Stages], int] = lambda _: 1,
) -> Allocation:
    """Walk about ``budget`` steps from ``start``; return the last allocation that ``try_`` made the best, or ``start``.

    One that is scheduled counts as :data:`SCHEDULED`, so many ``times`` where its schedule takes long. A step may add
    so much, ``hot``, to what is missing at first. ``misfit`` says what an allocation misses of the period to beat, or
    that it is more than a limit; ``try_`` schedules one and says whether it is the best so far, which shortens the
    period to beat.
    """
    rng, changes = random.Random(seed), _Changes(problem)
    best = current = start.stages
    here = misfit(current, inf)
    refuted: set[Stages] = set()
    step = 0
    while step < budget and not done():
        step += 1
        changed = changes.one(current, rng)
        if changed is None or changed == current:
            continue
        worst = here + hot * (1 - step / budget) ** 2 * rng.random()
        there = misfit(changed, worst)
        if there == 0:
            if changed not in refuted:
                step += SCHEDULED * times(changed)
                if try_(Allocation(changed)):
                    best = current = changed
                    here = misfit(current, inf)
                    continue
            refuted.add(changed)
            there = REFUTED
        if there <= worst:
            current, here = changed, there
    return Allocation(best)


class _Changes:
    """Random small changes of stages of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.work = problem.chain.sums.passes_ns
        self.most = MOST_STAGES_PER_DEVICE * len(problem.platform)
        moves: list[tuple[int, Callable[[Stages, random.Random], Stages | None]]] = [
            (6, self._shift),
            (2, self._assign),
            (2, self._swap),
            (2, self._split),
            (2, self._merge),
        ]
        if problem.replicas:
            moves.append((2, self._replicate))
        if problem.checkpointing != "none":
            moves.append((2, self._whole))
        if problem.checkpointing == "segments":
            moves.append((6, self._segment))
        self.moves = [move for share, move in moves for _ in range(share)]

    def one(self, stages: Stages, rng: random.Random) -> Stages | None:
        """Return ``stages`` changed in one way; None where that way there is nothing, or nothing allowed."""
        changed = rng.choice(self.moves)(stages, rng)
        if changed is None or len(changed) > self.most:
            return None
        return changed if all(self.work[x.stop] > self.work[x.start] for x in changed) else None

    def _shift(self, stages: Stages, rng: random.Random) -> Stages | None:
        if len(stages) < 2:
            return None
        s = rng.randrange(len(stages) - 1)
        one, other = stages[s], stages[s + 1]
        boundary = one.stop + rng.choice(STEPS) * rng.choice((1, -1))
        if not one.start < boundary < other.stop:
            return None
        return (*stages[:s], kept(one, one.start, boundary), kept(other, boundary, other.stop), *stages[s + 2 :])

    def _homes(self, stages: Stages) -> list[tuple[int, ...]]:
        groups = list(dict.fromkeys(stage.devices for stage in stages))
        used = {device for group in groups for device in group}
        free = next((d for d in range(len(self.problem.platform)) if d not in used), None)
        return groups if free is None else [*groups, (free,)]

    def _assign(self, stages: Stages, rng: random.Random) -> Stages | None:
        s = rng.randrange(len(stages))
        return (*stages[:s], replace(stages[s], devices=rng.choice(self._homes(stages))), *stages[s + 1 :])

    def _swap(self, stages: Stages, rng: random.Random) -> Stages | None:
        if len(stages) < 2:
            return None
        s, t = rng.sample(range(len(stages)), 2)
        changed = list(stages)
        changed[s], changed[t] = (
            replace(stages[s], devices=stages[t].devices),
            replace(stages[t], devices=stages[s].devices),
        )
        return tuple(changed)

    def _split(self, stages: Stages, rng: random.Random) -> Stages | None:
        s = rng.randrange(len(stages))
        stage = stages[s]
        if stage.stop - stage.start < 2:
            return None
        at = rng.randrange(stage.start + 1, stage.stop)
        head, tail = kept(stage, stage.start, at), kept(stage, at, stage.stop)
        home = rng.choice(self._homes(stages))
        pair = (replace(head, devices=home), tail) if rng.random() < 0.5 else (head, replace(tail, devices=home))
        return (*stages[:s], *pair, *stages[s + 1 :])

    def _merge(self, stages: Stages, rng: random.Random) -> Stages | None:
        if len(stages) < 2:
            return None
        s = rng.randrange(len(stages) - 1)
        one, other = stages[s], stages[s + 1]
        merged = kept(one if rng.random() < 0.5 else other, one.start, other.stop)
        if self.problem.checkpointing == "segments":
            merged = replace(merged, checkpoint=one.checkpoint + other.checkpoint)
        return (*stages[:s], merged, *stages[s + 2 :])

    def _replicate(self, stages: Stages, rng: random.Random) -> Stages | None:
        groups = list(dict.fromkeys(stage.devices for stage in stages))
        used = {device for group in groups for device in group}
        free = next((d for d in range(len(self.problem.platform)) if d not in used), None)
        group = rng.choice(groups)
        changed = {}
        if free is not None and rng.random() < 0.5:
            changed[group] = (*group, free)
        elif len(group) > 1:
            changed[group] = group[:-1]
            others = [other for other in groups if other != group]
            if others and rng.random() < 0.7:
                other = rng.choice(others)
                changed[other] = (*other, group[-1])
        return tuple(replace(x, devices=changed.get(x.devices, x.devices)) for x in stages) if changed else None

    def _whole(self, stages: Stages, rng: random.Random) -> Stages | None:
        s = rng.randrange(len(stages))
        stage = stages[s]
        whole = () if stage.checkpoint else ((stage.start, stage.stop),)
        return (*stages[:s], replace(stage, checkpoint=whole), *stages[s + 1 :])

    def _segment(self, stages: Stages, rng: random.Random) -> Stages | None:
        """Move an end of a recomputed segment, cut it in two, drop it, or add one."""
        s = rng.randrange(len(stages))
        stage = stages[s]
        found = list(stage.checkpoint)
        if not found or rng.random() < 0.2:
            start = rng.randrange(stage.start, stage.stop)
            stop = min(stage.stop, start + rng.choice(STEPS))
            if any(first < stop and start < last for first, last in found):
                return None
            found.append((start, stop))
        else:
            at = rng.randrange(len(found))
            first, last = found[at]
            how = rng.random()
            if how < 0.15:
                del found[at]
            elif how < 0.3:
                if last - first < 2:
                    return None
                middle = rng.randrange(first + 1, last)
                found[at : at + 1] = [(first, middle), (middle, last)]
            else:
                by = rng.choice(STEPS) * rng.choice((1, -1))
                first, last = (first + by, last) if how < 0.65 else (first, last + by)
                low = found[at - 1][1] if at else stage.start
                high = found[at + 1][0] if at + 1 < len(found) else stage.stop
                first, last = max(first, low), min(last, high)
                if first >= last:
                    return None
                found[at] = (first, last)
        return (*stages[:s], replace(stage, checkpoint=tuple(sorted(found))), *stages[s + 1 :])


def kept(stage: Stage, start: int, stop: int) -> Stage:
    """Return the stage with other layers, of which those are recomputed that were.

    Segments at the stage's ends grow with it; new layers behind a stored one are stored.
    """
    found = []
    for first, last in stage.checkpoint:
        begin = start if first == stage.start else max(start, first)
        end = stop if last == stage.stop else min(stop, last)
        if begin < end:
            found.append((begin, end))
    return replace(stage, start=start, stop=stop, checkpoint=tuple(found))
