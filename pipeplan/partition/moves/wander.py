"""Which allocation may reach a shorter period? A walk over small changes, worse ones too, to what misses it least.

Any device may hold several stages of any kind, beyond MadPipe, whose one special device is the only one with several
(its section 4.2). Every allocation has a number, what it misses of the period to beat, and the walk goes wherever that
grows by less than a threshold, which falls to nothing (threshold accepting; Dueck and Scheuer 1990). Where nothing is
missed the allocation is scheduled. A heuristic without guarantee; deterministic.

What stages miss is work, memory and links that they lack, as parts of what there is: 0 just where
:func:`.group_bound.may_reach` is true, and the less above the nearer. Without a stage graph, which takes several times
as long to make, wherever stages cost the same whatever the others are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, lcm

from ...cost import memory_model
from ...cost.group_bound import device_bytes, group_counts
from ...cost.stage_cost import Known, StageCost, least_load_ns, recomputing, stage_cost
from ...cost.stage_graph import StageGraph, stage_graph
from ...integers import ceil_div, extend
from ...plan import Allocation, Stage
from ...problem import Device, Platform, Problem

Stages = tuple[Stage, ...]
MOST_KNOWN = 50_000  # stages whose costs are remembered
Trip = tuple[int, bool, int, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]]
"""Time (ns) one way, whether both directions move at a time, by how many periods rounds end, and both links."""
NO_TRIP: Trip = 0, True, 1, ()


class Misfits:
    """What stages of one problem miss; it remembers what they cost."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        platform, policy = problem.platform, problem.policy
        self._apart = not (
            problem.chain.tied
            or policy.clip
            or platform.blocking
            or platform.overhead_ns
            or platform.shared_level is not None
        )
        self._kinds: dict[Device, int] = {}
        self._homes: dict[tuple[int, ...], tuple[int, int, int]] = {}
        self._stages: dict[tuple[object, ...], StageCost] = {}
        self._trips: dict[tuple[object, ...], Trip] = {}
        self._weights: dict[tuple[object, ...], int] = {}
        self._known: Known = {}
        self._near: dict[int, Stage] = {}  # that missed no more than enough, by id: others differ from them in few

    def of(self, stages: Sequence[Stage], period: int, enough: float = inf) -> float:
        """Return by how much ``stages`` miss ``period`` ns, all in all; 0 where they may reach it.

        What is more than ``enough`` need not be all.
        """
        for known in (self._stages, self._known):
            if len(known) > MOST_KNOWN:
                known.clear()
        if self._apart:
            missing = self._of_stages(stages, period, enough)
            if missing <= enough:
                self._near = {id(stage): stage for stage in stages}
            return missing
        problem = self.problem
        missing = _over(least_load_ns(problem.chain, problem.platform, stages) - 1, period)
        if missing > enough:
            return missing
        graph = stage_graph(problem.chain, problem.platform, problem.policy, stages, known=self._known)
        return _of_graph(graph, period)

    def _of_stages(self, stages: Sequence[Stage], period: int, enough: float) -> float:
        chain, policy, near = self.problem.chain, self.problem.policy, self._near
        changed = dict.fromkeys(x.devices for x in stages if id(x) not in near) if enough < inf else {}
        touched = [x for x in stages if x.devices in changed]
        missing = _over(least_load_ns(chain, self.problem.platform, touched) - 1, period)
        if missing > enough:  # mostly by the work of what has changed alone
            return missing
        groups: dict[tuple[int, ...], list[int]] = {devices: [] for devices in changed}
        for s, stage in enumerate(stages):
            groups.setdefault(stage.devices, []).append(s)
        moved = [0 if one.devices == other.devices else chain.cut_bytes[one.stop] for one, other in pairwise(stages)]
        costs: dict[int, StageCost] = {}
        missing = 0.0
        for devices, own_stages in groups.items():
            for s in own_stages:
                costs[s] = self._cost(stages[s], s > 0 and moved[s - 1] > 0, s < len(moved) and moved[s] > 0)
            sums = [costs[s].sync_period_ns for s in own_stages]
            waits = 0 if policy.updates_together else len(devices) * max(sums)
            missing += _over(sum([costs[s].total_ns for s in own_stages]) + waits, period * len(devices))
            missing += _over(sum(sums), period)
            if missing > enough:
                return missing
        trips = [self._trip(stages[s], stages[s + 1], moved[s]) for s in range(len(moved))]
        links: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for one_way, _, _, ends in trips:
            for key in ends:
                links[key] = links.get(key, 0) + one_way
        for key, load in links.items():
            missing += _over(load, period * lcm(*map(len, key)))
        if missing > enough:
            return missing
        counts, delay = [1] * len(stages), 0
        for s in range(len(stages) - 1, -1, -1):
            own = period * len(stages[s].devices)
            delay = extend(delay, costs[s].total_ns, own)
            counts[s] = max(1, ceil_div(delay, own))
            one_way, both, wide, _ = trips[s - 1] if s else NO_TRIP
            delay = delay + 2 * one_way if both else extend(delay, 2 * one_way, wide * period)
        if policy.most_lifetime is not None:
            missing += _over(delay, policy.most_lifetime * period)
        for devices, own_stages in groups.items():
            if missing > enough:
                break
            missing += self._memory(devices, own_stages, costs, counts)
        return missing

    def _memory(
        self, devices: tuple[int, ...], own: Sequence[int], costs: Mapping[int, StageCost], counts: Sequence[int]
    ) -> float:
        """Return by how much a group lacks memory: what :func:`.group_bound.device_bytes` counts."""
        fixed = most = 0
        for s in own:
            cost = costs[s]
            fixed += cost.buffer_bytes + self._weight(cost, counts[s], counts[0], len(devices))
            held = (counts[s] - 1) * cost.kept_bytes + cost.peak_bytes
            for q in own:
                if q != s:
                    held += (max(counts[s], counts[q] - 1) if q < s else counts[q] - 1) * costs[q].kept_bytes
            most = max(most, held)
        return _over(fixed + most, self.problem.platform.slowest(devices).memory_bytes)

    def _weight(self, cost: StageCost, count: int, of_first: int, replicas: int) -> int:
        policy = self.problem.policy
        held = max(count, of_first) if policy.vertical_sync else count
        key = cost.weight_bytes, cost.parameters, cost.own, held, replicas
        if key not in self._weights:
            kept = memory_model.versions(policy, held, replicas)
            size = memory_model.versioned_bytes(policy, cost.weight_bytes, cost.parameters, kept, replicas, cost.own)
            self._weights[key] = int(size)
        return self._weights[key]

    def _cost(self, stage: Stage, receives: bool, sends: bool) -> StageCost:
        key = stage.start, stage.stop, stage.checkpoint, self._home(stage.devices), receives, sends
        found = self._stages.get(key)
        if found is None:
            problem = self.problem
            given = problem.chain, problem.platform, problem.policy
            if stage.checkpoint:
                stored = self._cost(Stage(stage.start, stage.stop, stage.devices), receives, sends)
                found = recomputing(stored, *given, stage)
            else:
                found = stage_cost(*given, stage, 0, receives, sends, ())
            self._stages[key] = found
        return found

    def _home(self, devices: tuple[int, ...]) -> tuple[int, int, int]:
        """Return what a stage's costs depend on of its devices: how many, the level that joins them, and which kind
        paces them."""
        found = self._homes.get(devices)
        if found is None:
            platform: Platform = self.problem.platform
            kind = self._kinds.setdefault(platform.slowest(devices), len(self._kinds))
            found = self._homes[devices] = len(devices), platform.level_of(devices), kind
        return found

    def _trip(self, one: Stage, other: Stage, moved: int) -> Trip:
        """Return how ``moved`` bytes come from one group to the other."""
        if not moved:
            return NO_TRIP
        here, there = one.devices, other.devices
        found = self._trips.get((moved, here, there))
        if found is None:
            platform: Platform = self.problem.platform
            level = platform.level_between(here, there)
            both = platform.both_ways(level)
            pair = (min(here, there), max(here, there))
            links = ((here, there), (there, here)) if both else (pair, pair)
            found = platform.transfer_ns(moved, level), both, lcm(len(here), len(there)), links
            self._trips[moved, here, there] = found
        return found


def _over(needed: int, there: int) -> float:
    """Return the part of what is there that is needed beside it."""
    return (needed - there) / max(1, there) if needed > there else 0.0


def _of_graph(graph: StageGraph, period: int) -> float:
    counts, lifetime = group_counts(graph, period)
    policy, missing = graph.policy, 0.0
    if policy.most_lifetime is not None:
        missing += _over(lifetime, policy.most_lifetime * period)
    for index, resource in enumerate(graph.resources):
        load = sum(graph.operations[i].duration_ns for i in graph.on_resource[index])
        missing += _over(load, period * resource.replicas) + _over(graph.sync_periods_ns[index], period)
        if resource.memory_bytes is not None:
            missing += _over(device_bytes(graph, index, counts), resource.memory_bytes)
    return missing


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
