"""Which better allocation can small changes of a good one reach? Any device may hold several stages of any kind.

Beyond MadPipe, whose one special device is the only one with several stages (its section 4.2): replicated and
recomputed stages may share devices too. A heuristic without guarantee: it starts from a good plan, walks to better
neighbours, and jumps when none is better. It schedules nothing itself, but is handed a function that does.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from ...plan import Allocation, Stage
from ...problem import Problem

Stages = tuple[Stage, ...]
Cut = Callable[[Stage, int, int], Stage]  # of a stage the one that has other layers
Move = Callable[[Problem, Stages, Sequence[int], Cut], Iterator[Stages]]
STEPS = (1, -1, 2, -2, 4, -4, 8, -8)  # layers by which a boundary moves
SCHEDULED = 50  # candidates that can be looked at in the time that scheduling one takes
MANY_STAGES = 48  # of more so many are moved at a time
_REMEMBERED = 256  # allocations whose neighbours are kept: a walk over few of them comes to the same again and again
MOST_STAGES_PER_DEVICE = 3  # average; more would only slow the scheduler down


def local_search(
    problem: Problem,
    start: Allocation,
    lower_bound: Callable[[Allocation], int | None],
    try_: Callable[[Allocation], bool],
    budget: int,
    done: Callable[[], bool],
    seed: int = 0,
    patience: int | None = None,
    parts: bool = False,
) -> int:
    """Walk from ``start`` to better allocations; return how many candidates were looked at, about ``budget`` at most.

    One that is scheduled counts :data:`SCHEDULED` more, and those seen before count where there is no other.

    ``lower_bound`` bounds an allocation's period from below without scheduling it, or says None when it cannot become
    the best; ``try_`` schedules it and says whether it is the best so far. Neighbours are tried in the order of their
    bounds; when none is better, the search goes on from two random moves away from the best. It ends after
    ``patience`` candidates in a row that cannot become the best by their bounds. Deterministic, but for ``done``, which
    ends it too. With ``parts`` stages keep what they recompute in part when their layers change, else they recompute
    all or nothing; and neighbours may exchange layers.
    """
    rng = random.Random(seed)
    changed = lru_cache(maxsize=_REMEMBERED)(partial(_changed, problem, rng=rng, parts=parts))
    best = current = start.stages
    seen = {current}
    looked = hopeless = 0
    while looked < budget and (patience is None or hopeless < patience) and not done():
        hopeful: list[tuple[int, int, Stages]] = []
        neighbours, before = _neighbours(changed(current), rng), len(seen)
        for neighbour in neighbours:
            if neighbour in seen:
                continue
            seen.add(neighbour)
            looked += 1
            bound = lower_bound(Allocation(neighbour))
            hopeless = hopeless + 1 if bound is None else 0
            if bound is not None:
                hopeful.append((bound, len(hopeful), neighbour))
            if looked >= budget:
                break
        if len(seen) == before:
            looked, hopeless = looked + len(neighbours), hopeless + len(neighbours)
        improved = False
        for _, _, neighbour in sorted(hopeful):
            looked += SCHEDULED
            if try_(Allocation(neighbour)):
                best = current = neighbour
                improved = True
                break
            if looked >= budget or done():
                return looked
        if not improved:
            current = best
            for _ in range(2):
                options = _neighbours(changed(current), rng)
                if options:
                    current = rng.choice(options)
            looked += 1
    return looked


def _neighbours(changed: Sequence[tuple[Stages, bool]], rng: random.Random) -> list[Stages]:
    """Return the allocations one move away, in random order."""
    found = list(changed)
    rng.shuffle(found)
    return [stages for stages, allowed in found if allowed]


def _changed(problem: Problem, stages: Stages, rng: random.Random, parts: bool = False) -> list[tuple[Stages, bool]]:
    """Return what each move makes of ``stages``, and whether that may be looked at.

    Of very many stages some are moved, and none to another's devices, which would take long to schedule.
    """
    moves: tuple[Move, ...] = (_shifted, _reassigned, _swapped, _split, _merged, _replicated, _recomputed)
    where: Sequence[int] = range(len(stages))
    if len(stages) > MANY_STAGES:
        moves = (_shifted, _merged, _replicated, _recomputed)
        where = sorted(rng.sample(where, MANY_STAGES))
    elif parts:
        moves = (*moves, _exchanged)
    limit = MOST_STAGES_PER_DEVICE * len(problem.platform)
    found = (changed for move in moves for changed in move(problem, stages, where, kept if parts else _whole))
    total, before = _work(problem), set(map(id, stages))
    return [(changed, len(changed) <= limit and _take_time(total, changed, before)) for changed in found]


def _work(problem: Problem) -> list[int]:
    """Return the time of the layers before each position."""
    return problem.chain.sums.passes_ns


def _whole(stage: Stage, start: int, stop: int) -> Stage:
    """Return the stage with other layers, recomputed as a whole if it was recomputed at all."""
    return replace(stage, start=start, stop=stop, checkpoint=((start, stop),) if stage.checkpoint else ())


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


def _take_time(total: Sequence[int], stages: Stages, known: Container[int]) -> bool:
    """Whether all stages take time, as those whose ids are ``known`` do."""
    return all(total[stage.stop] > total[stage.start] for stage in stages if id(stage) not in known)


def _groups(stages: Stages) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(stage.devices for stage in stages))


def _homes(problem: Problem, stages: Stages) -> list[tuple[int, ...]]:
    """Return the device groups in use, and the first unused device of each kind."""
    groups = _groups(stages)
    used = {device for group in groups for device in group}
    kinds: dict[object, int] = {}
    for d, device in enumerate(problem.platform.devices):
        if d not in used:
            kinds.setdefault(device, d)
    return groups + [(d,) for d in kinds.values()]


def _shifted(problem: Problem, stages: Stages, where: Sequence[int], cut: Cut) -> Iterator[Stages]:
    for s in where:
        if s == len(stages) - 1:
            break
        one, other = stages[s], stages[s + 1]
        for step in STEPS:
            boundary = one.stop + step
            if one.start < boundary < other.stop:
                pair = (cut(one, one.start, boundary), cut(other, boundary, other.stop))
                yield stages[:s] + pair + stages[s + 2 :]


def _reassigned(problem: Problem, stages: Stages, where: Sequence[int], cut: Cut) -> Iterator[Stages]:
    for s in where:
        stage = stages[s]
        for home in _homes(problem, stages):
            if home != stage.devices:
                yield (*stages[:s], replace(stage, devices=home), *stages[s + 1 :])


def _swapped(problem: Problem, stages: Stages, where: Sequence[int], cut: Cut) -> Iterator[Stages]:
    for at, s in enumerate(where):
        one = stages[s]
        for t in where[at + 1 :]:
            if stages[t].devices != one.devices:
                exchanged = list(stages)
                exchanged[s] = replace(one, devices=stages[t].devices)
                exchanged[t] = replace(stages[t], devices=one.devices)
                yield tuple(exchanged)


def _split(problem: Problem, stages: Stages, where: Sequence[int], cut: Cut) -> Iterator[Stages]:
    """Cut a stage at an eighth, a quarter or half of its time and give head or tail to other devices, or to its own.

    On its own devices both parts can be interleaved with what else is there, which one stage cannot.
    """
    total = _work(problem)
    for s in where:
        stage = stages[s]
        work = total[stage.stop] - total[stage.start]
        cuts = set()
        for share in (1, 2, 4, 6, 7):
            aim = total[stage.start] + work * share // 8
            cuts.add(min(range(stage.start, stage.stop), key=lambda i: abs(total[i] - aim)))
        for place in sorted(cuts - {stage.start}):
            head, tail = cut(stage, stage.start, place), cut(stage, place, stage.stop)
            for home in _homes(problem, stages):
                yield (*stages[:s], replace(head, devices=home), tail, *stages[s + 1 :])
                if home != stage.devices:
                    yield (*stages[:s], head, replace(tail, devices=home), *stages[s + 1 :])


def _merged(problem: Problem, stages: Stages, where: Sequence[int], cut: Cut) -> Iterator[Stages]:
    for s in where:
        if s == len(stages) - 1:
            break
        for keep in (stages[s], stages[s + 1]):
            yield (*stages[:s], cut(keep, stages[s].start, stages[s + 1].stop), *stages[s + 2 :])


def _replicated(problem: Problem, stages: Stages, where: Sequence[int], cut: Cut) -> Iterator[Stages]:
    """Give a group an unused device, take one from it, or move one to another group."""
    if not problem.replicas:
        return
    groups = list(dict.fromkeys(stages[s].devices for s in where))
    used = {device for stage in stages for device in stage.devices}
    spare = next((d for d in range(len(problem.platform)) if d not in used), None)
    for group in groups:
        if len(group) > 1:
            yield _regrouped(stages, {group: group[:-1]})
        if spare is not None:
            yield _regrouped(stages, {group: (*group, spare)})
        for other in groups:
            if other != group and len(group) > 1:
                yield _regrouped(stages, {group: group[:-1], other: (*other, group[-1])})


def _regrouped(stages: Stages, groups: dict[tuple[int, ...], tuple[int, ...]]) -> Stages:
    return tuple(
        replace(stage, devices=groups[stage.devices]) if stage.devices in groups else stage for stage in stages
    )


def _exchanged(problem: Problem, stages: Stages, where: Sequence[int], cut: Cut) -> Iterator[Stages]:
    """Let two neighbours exchange as much time on both sides of their cut: each then has two stages."""
    total = _work(problem)
    for s in where[:-1]:
        one, other = stages[s], stages[s + 1]
        if one.devices == other.devices:
            continue
        least = min(total[one.stop] - total[one.start], total[other.stop] - total[other.start])
        for share in (8, 4, 2):
            before = bisect_left(total, total[one.stop] - least // share, one.start, one.stop)
            behind = bisect_left(total, total[one.stop] + least // share, one.stop, other.stop)
            if one.start < before < one.stop < behind < other.stop:
                tail = replace(cut(one, before, one.stop), devices=other.devices)
                head = replace(cut(other, one.stop, behind), devices=one.devices)
                parts = (cut(one, one.start, before), tail, head, cut(other, behind, other.stop))
                yield stages[:s] + parts + stages[s + 2 :]


def _recomputed(problem: Problem, stages: Stages, where: Sequence[int], cut: Cut) -> Iterator[Stages]:
    """Recompute a stage as a whole, or store it as a whole."""
    if problem.checkpointing == "none":
        return
    for s in where:
        stage = stages[s]
        whole = () if stage.checkpoint else ((stage.start, stage.stop),)
        yield (*stages[:s], replace(stage, checkpoint=whole), *stages[s + 1 :])
