"""What does a whole allocation cost? Its stages as operations with durations on resources, and what they hold.

The narrow waist of the package: partitioners speak of layers; schedulers, bounds, validator, simulator and runtime read
only a :class:`StageGraph`. The path of one microbatch is stated here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ..integers import ceil_div
from ..plan import OpKind, Stage
from ..problem import Chain, Platform, Policy, connected
from ..units import format_devices
from . import memory_model, time_model
from .saved import saved_bytes


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs on each of its replicas; times in ns per microbatch, sizes in bytes.

    ``kept_bytes`` stays per microbatch in flight; ``peak_bytes`` is what the one in its backward holds at most (equal
    without recomputation). ``sync_period_ns`` is the least period at which the replicas' all-reduces keep up.
    ``update_share_ns`` is the part of ``backward_ns`` that is the microbatch's share of the optimizer's step.
    ``update_ns`` is the time from the last backward of a drained batch to the next batch: the all-reduce, and the
    optimizer's step where it overlaps with that instead of being charged to backwards.
    Schedules that split the backward run its last ``backward_weight_ns`` later, and hold all ``saved_bytes`` of the
    microbatch (recomputed ones too) from the backward's start until then.
    """

    forward_ns: int
    backward_ns: int
    weight_bytes: int
    parameters: int
    kept_bytes: int
    peak_bytes: int
    buffer_bytes: int
    sync_period_ns: int
    update_interval: int
    resource: int
    backward_weight_ns: int = 0
    saved_bytes: int = 0
    update_ns: int = 0
    update_share_ns: int = 0

    @property
    def total_ns(self) -> int:
        """Forward plus backward."""
        return self.forward_ns + self.backward_ns


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on the path of a microbatch: ``stage`` of a SEND is the sender; ``resource`` indexes resources."""

    kind: OpKind
    stage: int
    duration_ns: int
    resource: int


@dataclass(frozen=True, slots=True)
class Resource:
    """What one operation occupies at a time: the devices of a group (each sees every ``replicas``-th microbatch), or a
    link between two groups, which every microbatch uses (``replicas`` 1 and no ``memory_bytes``)."""

    name: str
    devices: tuple[int, ...]
    replicas: int
    memory_bytes: int | None = None

    @property
    def is_link(self) -> bool:
        """Whether this is a link."""
        return self.memory_bytes is None


@dataclass(frozen=True)
class StageGraph:
    """Stages, their resources, and the path ``F_0, SEND_F_0, F_1, ..., B_1, SEND_B_1, B_0`` of one microbatch.

    A transfer stands between neighbours on different devices when its cut has bytes. Resources: the device groups in
    order of first use, then the links (one per unordered pair of groups; per direction when full duplex). ``tied`` are
    the sets of stages that share weights.
    """

    stages: tuple[StageCost, ...]
    operations: tuple[Operation, ...]
    resources: tuple[Resource, ...]
    policy: Policy
    devices: int
    tied: tuple[tuple[int, ...], ...] = ()

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

    def stages_on(self, resource: int) -> list[int]:
        """Return the stages of a device group, in chain order."""
        return [s for s, stage in enumerate(self.stages) if stage.resource == resource]

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

    @property
    def contiguous(self) -> bool:
        """Whether every stage has its devices for itself."""
        return len({stage.resource for stage in self.stages}) == len(self.stages)

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


def stage_graph(chain: Chain, platform: Platform, policy: Policy, stages: Sequence[Stage]) -> StageGraph:
    """Return the stage graph of ``stages``: they cover the chain in order, on equal or disjoint device groups."""
    groups = list(dict.fromkeys(stage.devices for stage in stages))
    transfers = [chain.cut_bytes[one.stop] > 0 and one.devices != other.devices for one, other in pairwise(stages)]
    parts = [
        _stage_cost(chain, platform, policy, stage, groups.index(stage.devices), receives, sends)
        for stage, receives, sends in zip(stages, [False, *transfers], [*transfers, False], strict=True)
    ]
    resources = [_group(platform, devices) for devices in groups]
    links: dict[tuple[int, int], int] = {}

    def link(source: int, target: int) -> int:
        key = (source, target) if platform.full_duplex else (min(source, target), max(source, target))
        if key not in links:
            links[key] = len(resources)
            resources.append(_link(platform, groups[key[0]], groups[key[1]]))
        return links[key]

    forward: list[Operation] = []
    backward: list[Operation] = []
    for s, (stage, part) in enumerate(zip(stages, parts, strict=True)):
        forward.append(Operation("F", s, part.forward_ns, part.resource))
        backward.append(Operation("B", s, part.backward_ns, part.resource))
        if s < len(transfers) and transfers[s]:
            here, there = part.resource, parts[s + 1].resource
            level = platform.level_between(stage.devices, stages[s + 1].devices)
            duration = platform.transfer_ns(chain.cut_bytes[stage.stop], level)
            forward.append(Operation("SEND_F", s, duration, link(here, there)))
            backward.append(Operation("SEND_B", s + 1, duration, link(there, here)))
    parts = _with_tied_sums(chain, platform, policy, stages, parts)
    tied = tied_stages(chain, stages)
    return StageGraph(tuple(parts), (*forward, *reversed(backward)), tuple(resources), policy, len(platform), tied)


def _stage_cost(
    chain: Chain, platform: Platform, policy: Policy, stage: Stage, resource: int, receives: bool, sends: bool
) -> StageCost:
    start, stop, r = stage.start, stage.stop, stage.replicas
    kept, peak, recompute = memory_model.activations(chain, start, stop, stage.checkpoint)
    slowest = platform.slowest(stage.devices)
    speed, timed = slowest.speed, chain.timed(slowest.times)
    if timed is not chain:
        recompute = memory_model.activations(timed, start, stop, stage.checkpoint)[2]
    weight_bytes, parameters = memory_model.weights_of(chain, start, stop)
    bandwidth, _ = platform.paths[platform.level_of(stage.devices)]
    gradient = memory_model.gradient_bytes(policy, weight_bytes, parameters)
    sync_period = time_model.sync_period_ns(policy, gradient, r, bandwidth)
    update = sync_period * policy.update_interval(r)
    if policy.coarsening is not None:
        update = time_model.overlapped_ns(policy, update, time_model.step_ns(timed, start, stop, speed), parameters)
    share = time_model.update_share_ns(policy, time_model.step_ns(timed, start, stop), r)
    return StageCost(
        forward_ns=time_model.forward_ns(timed, start, stop, speed),
        backward_ns=time_model.backward_ns(timed, policy, start, stop, recompute, r, speed),
        weight_bytes=weight_bytes,
        parameters=parameters,
        kept_bytes=kept,
        peak_bytes=peak,
        buffer_bytes=2 * chain.cut_bytes[start] * receives + 2 * chain.cut_bytes[stop] * sends,
        sync_period_ns=sync_period,
        update_interval=policy.update_interval(r),
        resource=resource,
        backward_weight_ns=time_model.backward_weight_ns(timed, policy, start, stop, r, speed),
        saved_bytes=max(peak, saved_bytes(chain, start, stop)),
        update_ns=update,
        update_share_ns=time_model.scaled(share, speed),
    )


def least_load_ns(chain: Chain, platform: Platform, stages: Sequence[Stage]) -> int:
    """Return the most that a device has to do for a microbatch, without recomputation and steps: no period is less."""
    slowest = {devices: platform.slowest(devices) for devices in {stage.devices for stage in stages}}
    loads = dict.fromkeys(slowest, 0)
    for stage in stages:
        sums, start, stop = chain.timed(slowest[stage.devices].times).sums, stage.start, stage.stop
        forward, backward = sums.forward_ns, sums.backward_ns
        loads[stage.devices] += int(forward[stop] - forward[start] + backward[stop] - backward[start])
    floor = 0
    for devices, work in loads.items():
        floor = max(floor, ceil_div(time_model.scaled(work, slowest[devices].speed), len(devices)))
    return floor


def tied_stages(chain: Chain, stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of several stages that hold weights of each other, in order; no stage is in two of them."""
    sets = connected(_holders(stages, layers) for layers in connected(chain.tied))
    return tuple(sorted(tuple(sorted(found)) for found in sets if len(found) > 1))


def _holders(stages: Sequence[Stage], layers: Iterable[int]) -> set[int]:
    return {s for s, stage in enumerate(stages) if any(stage.start <= layer < stage.stop for layer in layers)}


def _with_tied_sums(
    chain: Chain, platform: Platform, policy: Policy, stages: Sequence[Stage], parts: Sequence[StageCost]
) -> list[StageCost]:
    """Return ``parts`` with what the sums of weights in several stages take more than those over one stage's replicas.

    Tied layers are taken to share as many bytes as the smallest of them has, which is the most that they can. A ring
    over all devices that have a copy sums them instead of those over replicas, once for each group of devices.
    """
    more = [0] * len(parts)
    for layers in connected(chain.tied):
        holders = _holders(stages, layers)
        if len(holders) < 2:
            continue
        smallest = min((chain.layers[i] for i in layers), key=lambda layer: layer.weight_bytes)
        gradient = int(memory_model.gradient_bytes(policy, smallest.weight_bytes, smallest.parameter_count))
        devices = sorted({d for s in holders for d in stages[s].devices})
        everywhere = _ring_ns(platform, gradient, devices)
        for s in {parts[s].resource: s for s in sorted(holders)}.values():
            more[s] += everywhere - _ring_ns(platform, gradient, stages[s].devices)
    return [replace(part, update_ns=part.update_ns + ns) for part, ns in zip(parts, more, strict=True)]


def _ring_ns(platform: Platform, size: int, devices: Sequence[int]) -> int:
    bandwidth, _ = platform.paths[platform.level_of(devices)]
    return time_model.ring_all_reduce_ns(size, len(devices), bandwidth)


def updates_end_ns(graph: StageGraph, done_ns: Sequence[int]) -> int:
    """Return when all updates after a drained batch are over, for stages whose last backwards end at ``done_ns``.

    Sums of weights in several stages begin when all of these are done; all-reduces of stages that share devices follow
    each other.
    """
    ready = list(done_ns)
    for tied in graph.tied:
        latest = max(done_ns[s] for s in tied)
        groups = {graph.stages[s].resource for s in tied}
        ready = [max(at, latest) if x.resource in groups else at for at, x in zip(ready, graph.stages, strict=True)]
    ends = [0] * len(graph.resources)
    for at, s in sorted(zip(ready, range(len(ready)), strict=True)):
        stage = graph.stages[s]
        ends[stage.resource] = max(ends[stage.resource], at) + stage.update_ns
    return max(ends)


def _group(platform: Platform, devices: tuple[int, ...]) -> Resource:
    memory = platform.slowest(devices).memory_bytes
    name = f"{'device' if len(devices) == 1 else 'devices'} {format_devices(devices)}"
    return Resource(name, devices, len(devices), memory)


def _link(platform: Platform, one: tuple[int, ...], other: tuple[int, ...]) -> Resource:
    arrow = " -> " if platform.full_duplex else " - "
    return Resource(f"link {format_devices(one)}{arrow}{format_devices(other)}", one + other, 1)
