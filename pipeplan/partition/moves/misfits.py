"""By how much do stages miss a period? Work, memory and links that they lack, as parts of what there is.

0 just where :func:`.group_bound.may_reach` is true, and the less above the nearer. Without a stage graph, which takes
several times as long to make, wherever stages cost the same whatever the others are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, lcm

from ...cost import memory_model
from ...cost.group_bound import device_bytes, group_counts, held_together
from ...cost.stage_cost import Known, StageCost, least_load_ns, recomputing, stage_cost
from ...cost.stage_graph import StageGraph, stage_graph
from ...integers import ceil_div, extend
from ...plan import Stage
from ...problem import Device, Platform, Problem

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
        trips = [self._trip(*ends, size) for ends, size in zip(pairwise(stages), moved, strict=True)]
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
        weights = sum(self._weight(costs[s], counts[s], counts[0], len(devices)) for s in own)
        memory = self.problem.platform.slowest(devices).memory_bytes
        return _over(weights + held_together(own, costs, counts), memory)

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
