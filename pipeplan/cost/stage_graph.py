"""What does a whole allocation cost? Its stages as operations with durations on resources, and what they hold.

The narrow waist of the package: partitioners speak of layers; schedulers, bounds, validator, simulator and runtime read
only a :class:`StageGraph`. The path of one microbatch is stated here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from ..integers import ceil_div
from ..plan import OpKind, Stage
from ..problem import Chain, Platform, Policy
from . import memory_model, time_model
from .resources import Resource, device_group, link_between, shared_links
from .stage_cost import (
    Known,
    StageCost,
    borrowed_weights,
    lent_gradients,
    stage_cost,
    tied_stages,
    waiting_gradients,
    with_norm_sum,
    with_tied_sums,
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on the path of a microbatch: ``stage`` of a SEND is the sender; ``resource`` indexes resources."""

    kind: OpKind
    stage: int
    duration_ns: int
    resource: int


@dataclass(frozen=True)
class StageGraph:
    """Stages, their resources, and the path ``F_0, SEND_F_0, F_1, ..., B_1, SEND_B_1, B_0`` of one microbatch.

    A transfer stands between neighbours on different devices when its cut has bytes. Resources: the device groups in
    order of first use, then the links (those of an unordered pair of groups; per direction when full duplex; or
    those that servers share for all that they send). ``tied`` are the sets of stages that share weights. ``norm_ns`` is
    what the sum of one number over all devices takes, where drained batches wait for the norm of their gradients.
    """

    stages: tuple[StageCost, ...]
    operations: tuple[Operation, ...]
    resources: tuple[Resource, ...]
    policy: Policy
    devices: int
    tied: tuple[tuple[int, ...], ...] = ()
    norm_ns: int = 0

    @cached_property
    def position(self) -> dict[tuple[OpKind, int], int]:
        """Index on the path of each (kind, stage)."""
        return {(op.kind, op.stage): i for i, op in enumerate(self.operations)}

    @cached_property
    def round_trips(self) -> tuple[tuple[Operation, Operation], ...]:
        """Each operation on the way to the loss, in order, with its partner, the one that comes back over the same
        stage or cut. The path is a palindrome, so operation i's partner is the i-th from its end."""
        half = len(self.operations) // 2
        return tuple(zip(self.operations[:half], reversed(self.operations[half:]), strict=True))

    @cached_property
    def on_resource(self) -> tuple[tuple[int, ...], ...]:
        """Path indices of the operations of each resource."""
        lists: list[list[int]] = [[] for _ in self.resources]
        for i, op in enumerate(self.operations):
            lists[op.resource].append(i)
        return tuple(tuple(x) for x in lists)

    @cached_property
    def summing(self) -> list[int]:
        """The stages with replicas whose sums take time, where updates have an interval and nothing drains."""
        if self.policy.drains or self.policy.open:
            return []
        return [s for s, x in enumerate(self.stages) if x.sync_period_ns and self.resources[x.resource].replicas > 1]

    def stages_on(self, resource: int) -> list[int]:
        """Return the stages of a device group, in chain order."""
        return self._stages_of[resource]

    @cached_property
    def _stages_of(self) -> list[list[int]]:
        lists: list[list[int]] = [[] for _ in self.resources]
        for s, stage in enumerate(self.stages):
            lists[stage.resource].append(s)
        return lists

    def versions(self, stage: int, in_flight: int, of_first: int) -> int:
        """Return the weight versions that a device keeps of ``stage`` when it holds ``in_flight`` microbatches of it.

        Under vertical sync a microbatch uses on every stage what the first had when it entered. So no stage keeps fewer
        versions than the first, of which a device holds ``of_first`` microbatches.
        """
        held = [(stage, in_flight), (0, of_first)] if self.policy.vertical_sync else [(stage, in_flight)]
        return max(
            int(memory_model.versions(self.policy, max(1, n), self.resources[self.stages[s].resource].replicas))
            for s, n in held
        )

    def weights_bytes(self, stage: int, kept: int) -> int:
        """Return what a device holds of ``stage`` with ``kept`` versions of its weights, beside activations and
        buffers: weights, gradients and optimizer state."""
        cost = self.stages[stage]
        replicas = self.resources[cost.resource].replicas
        held = memory_model.versioned_bytes(self.policy, cost.weight_bytes, cost.parameters, kept, replicas, cost.own)
        return int(held) + cost.waiting_bytes

    def lent_bytes(self, stage: int, begun: Callable[[int], int]) -> int:
        """Return the gradients, for updates after the next, that a device holds of weights that ``stage`` keeps.

        ``begun(s)`` microbatches at most have begun their backward in stage s there and not ended it in ``stage``.
        """
        cost = self.stages[stage]
        replicas = self.resources[cost.resource].replicas
        return sum(size * memory_model.updates_over(self.policy, begun(s), replicas) for s, size in cost.lent)

    def host_bytes(self, stage: int) -> int:
        """Return what a device has of ``stage`` in host memory."""
        cost = self.stages[stage]
        replicas = self.resources[cost.resource].replicas
        return int(memory_model.host_bytes(self.policy, cost.weight_bytes, cost.parameters, replicas, cost.own))

    def first_replicas(self) -> StageGraph:
        """Return the graph of the first of equal pipelines alone, each stage on the first of its devices; what they
        share of the state stays shared."""
        replicas = self.policy.pipelines * self.resources[self.stages[0].resource].replicas
        alone = (
            replace(x, devices=x.devices[:1], replicas=1, ends=tuple(end[:1] for end in x.ends)) for x in self.resources
        )
        return replace(self, resources=tuple(alone), policy=replace(self.policy, pipelines=replicas))

    @cached_property
    def recomputing(self) -> frozenset[int]:
        """The stages that run layers again, for some time."""
        return frozenset(s for s, stage in enumerate(self.stages) if stage.recompute_ns)

    @property
    def contiguous(self) -> bool:
        """Whether every stage has its devices for itself."""
        return len({stage.resource for stage in self.stages}) == len(self.stages)

    @cached_property
    def separate(self) -> bool:
        """Whether every stage has its devices, and every cut its links for itself."""
        last = len(self.operations) - 1
        return self.contiguous and all(
            len({min(i, last - i) for i in indices}) <= 1
            for resource, indices in zip(self.resources, self.on_resource, strict=True)
            if resource.is_link
        )

    @cached_property
    def period_floor_ns(self) -> int:
        """Least period that loads and synchronisation allow: the most of load / replicas and sync periods."""
        floor = 0
        for index, resource in enumerate(self.resources):
            load = sum(self.operations[i].duration_ns for i in self.on_resource[index])
            floor = max(floor, ceil_div(load, resource.replicas), self.sync_periods_ns[index])
        return floor

    @cached_property
    def sync_periods_ns(self) -> tuple[int, ...]:
        """Least period at which the all-reduces on each resource keep up; stages that share devices add up."""
        periods = [0] * len(self.resources)
        for stage in self.stages:
            periods[stage.resource] += stage.sync_period_ns
        return tuple(periods)

    @cached_property
    def path_ns(self) -> int:
        """Time of one microbatch alone."""
        return sum(op.duration_ns for op in self.operations)


def stage_graph(
    chain: Chain,
    platform: Platform,
    policy: Policy,
    stages: Sequence[Stage],
    *,
    free_sums: bool = False,
    sharing: bool = True,
    known: Known | None = None,
) -> StageGraph:
    """Return the stage graph of ``stages``: they cover the chain in order, on equal or disjoint device groups.

    ``known`` remembers what stages, groups and links are between graphs of the same chain, platform and policy.

    With ``free_sums`` what sums of weights in several stages take is left out: a relaxation, for searches. So it is
    without ``sharing``: as if servers that share links had one for each pair of their devices and direction, as if
    blocking transfers stayed on the lowest level, and as if what replicas exchange in their passes took no time.

    Blocking transfers are part of the passes at both their ends: a forward receives, computes and sends. So there are
    no links; a microbatch alone is charged each of them twice. The overhead of messages is part of passes, too.
    """
    groups = list(dict.fromkeys(stage.devices for stage in stages))
    cuts = [cut_bytes(chain, *pair) for pair in pairwise(stages)]
    transfers = [
        size > 0 and one.devices != other.devices for size, (one, other) in zip(cuts, pairwise(stages), strict=True)
    ]
    known = {} if known is None else known
    parts = _parts(chain, platform, policy, stages, transfers, known)
    widths = {stage.devices: stage.tensor for stage in stages}
    resources = [_once(known, device_group, platform, devices, widths[devices]) for devices in groups]
    if sharing and policy.sharing.scattered:
        parts = [_exchanging(platform, policy, *x) for x in zip(stages, parts, strict=True)]
    if platform.blocking or platform.overhead_ns:
        parts = _held(cuts, platform, stages, parts, transfers, sharing)
    if platform.blocking:
        transfers = [False] * len(transfers)
    levels = [
        _once(known, Platform.level_between, platform, one.devices, other.devices) if transfer else 0
        for (one, other), transfer in zip(pairwise(stages), transfers, strict=True)
    ]
    outgoing: dict[tuple[int, ...], Resource] = {}
    if sharing and platform.shared_level is not None:
        crossing = [pair for pair, k in zip(pairwise(stages), levels, strict=True) if platform.shares_links(k)]
        outgoing = shared_links(platform, dict.fromkeys(stage.devices for pair in crossing for stage in pair))
    links: dict[object, int] = {}

    def link(source: int, target: int, level: int) -> int:
        shared = outgoing.get(groups[source]) if platform.shares_links(level) else None
        one_way = (source, target) if platform.both_ways(level) else (min(source, target), max(source, target))
        key: object = shared or one_way
        if key not in links:
            links[key] = len(resources)
            ends = (groups[i] for i in one_way)
            resources.append(shared or _once(known, link_between, platform.both_ways(level), *ends))
        return links[key]

    forward: list[Operation] = []
    backward: list[Operation] = []
    for s, part in enumerate(parts):
        forward.append(Operation("F", s, part.forward_ns, part.resource))
        backward.append(Operation("B", s, part.backward_ns, part.resource))
        if s < len(transfers) and transfers[s]:
            here, there = part.resource, parts[s + 1].resource
            duration = _once(known, Platform.transfer_ns, platform, cuts[s], levels[s])
            forward.append(Operation("SEND_F", s, duration, link(here, there, levels[s])))
            backward.append(Operation("SEND_B", s + 1, duration, link(there, here, levels[s])))
    if not free_sums:
        parts = with_tied_sums(chain, platform, policy, stages, parts)
    norm_ns = 0
    if policy.clip and not free_sums:
        parts, norm_ns = with_norm_sum(platform, policy, stages, parts)
    tied = tied_stages(chain, stages)
    operations = (*forward, *reversed(backward))
    return StageGraph(tuple(parts), operations, tuple(resources), policy, len(platform), tied, norm_ns)


def cut_bytes(chain: Chain, one: Stage, other: Stage) -> int:
    """Return what a GPU of a stage sends a GPU of the next, or gets of it: the more of what they have of the cut."""
    return max(chain.of(x.way).cut_bytes[one.stop] for x in (one, other))


def _once(known: Known, make: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Return what ``make`` makes of the arguments, remembered in ``known``, which is of one platform."""
    key = make, first if isinstance(first, bool) else None, *others
    if key not in known:
        known[key] = make(first, *others)
    return known[key]


def _parts(
    chain: Chain, platform: Platform, policy: Policy, stages: Sequence[Stage], transfers: Sequence[bool], known: Known
) -> list[StageCost]:
    """Return what each of ``stages`` costs by itself, ``transfers`` between them or not."""
    groups = list(dict.fromkeys(stage.devices for stage in stages))
    ends = zip([False, *transfers], [*transfers, False], strict=True)
    parts = []
    for stage, two, borrowed in zip(stages, ends, borrowed_weights(chain, stages), strict=True):
        home = groups.index(stage.devices)
        key = stage, home, *two, *borrowed
        part = known.get(key)
        if part is None:
            part = known[key] = stage_cost(chain, platform, policy, stage, home, *two, borrowed)
        parts.append(part)
    if not chain.tied and not policy.clip:
        return parts
    waiting, lent = waiting_gradients(chain, policy, stages, parts), lent_gradients(chain, policy, stages)
    more = zip(parts, waiting, lent, strict=True)
    return [replace(x, waiting_bytes=size, lent=y) if size or y else x for x, size, y in more]


def _exchanging(platform: Platform, policy: Policy, stage: Stage, part: StageCost) -> StageCost:
    """Return a stage's cost whose passes take what its replicas gather meanwhile, and scatter behind them."""
    gradient = memory_model.gradient_bytes(policy, part.weight_bytes, part.parameters)
    path = platform.paths[platform.level_of(stage.devices)]
    forward, backward, behind = map(int, time_model.exchanged_ns(policy, gradient, stage.replicas, *path))
    return replace(part, forward_ns=max(part.forward_ns, forward), backward_ns=max(part.backward_ns, backward) + behind)


def _held(
    cuts: Sequence[int],
    platform: Platform,
    stages: Sequence[Stage],
    parts: Sequence[StageCost],
    transfers: Sequence[bool],
    sharing: bool,
) -> list[StageCost]:
    """Return ``parts`` whose passes include what the transfers at their ends keep their devices from computing."""
    waits = [0]
    for (one, other), size, transfer in zip(pairwise(stages), cuts, transfers, strict=True):
        level = platform.level_between(one.devices, other.devices) if sharing else 0
        waits.append(platform.held_ns(size, level) if transfer else 0)
    both_ends = [before + after for before, after in zip(waits, [*waits[1:], 0], strict=True)]
    return [
        replace(part, forward_ns=part.forward_ns + wait, backward_ns=part.backward_ns + wait)
        for part, wait in zip(parts, both_ends, strict=True)
    ]


def updates_end_ns(graph: StageGraph, done_ns: Sequence[int]) -> int:
    """Return when all updates after a drained batch are over, for stages whose last backwards end at ``done_ns``.

    Sums of weights in several stages begin when all of these are done, and so does the update of what stages of one
    group of devices share; all-reduces of stages that share devices follow each other, and then come their steps. Where
    gradients are clipped all sums begin then, and when the last is over comes that of the norm, and then the steps.
    """
    clips = graph.policy.clip
    ready = [max(done_ns)] * len(done_ns) if clips else list(done_ns)
    for tied in graph.tied:
        latest = max(done_ns[s] for s in tied)
        groups = {graph.stages[s].resource for s in tied}
        if len(groups) == 1:
            ready[tied[0]] = max(ready[tied[0]], latest)
            continue
        ready = [max(at, latest) if x.resource in groups else at for at, x in zip(ready, graph.stages, strict=True)]
    ends = [0] * len(graph.resources)
    for at, s in sorted(zip(ready, range(len(ready)), strict=True)):
        stage = graph.stages[s]
        ends[stage.resource] = max(ends[stage.resource], at) + stage.update_ns
    steps = [0] * len(graph.resources)
    for stage in graph.stages:
        steps[stage.resource] += stage.step_ns
    if clips:
        return max(ends) + graph.norm_ns + max(steps)
    return max(end + own for end, own in zip(ends, steps, strict=True))
