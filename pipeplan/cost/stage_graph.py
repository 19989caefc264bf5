"""What does a whole allocation cost? Its stages as operations with durations on resources, and what they hold.

The narrow waist of the package: partitioners speak of layers; schedulers, bounds, validator, simulator and runtime read
only a :class:`StageGraph`. The path of one microbatch is stated here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm
from typing import Any

from ..integers import ceil_div
from ..plan import OpKind, Stage
from ..problem import Chain, Platform, Policy, SharedWeights, connected
from ..units import format_devices
from . import memory_model, time_model
from .saved import for_weights_bytes, saved_bytes

NORM_BYTES = 8  # of the one number that all stages sum for the norm of their gradients

BOTH_WAYS, ONE_WAY = " - ", " -> "  # between the ends of a link, in its name


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs on each of its replicas; times in ns per microbatch, sizes in bytes.

    Blocking transfers, and the overhead of messages, are part of ``forward_ns`` and ``backward_ns``.

    What several stages of one group of devices share, as far as that is known, counts in the first of them alone.
    ``waiting_bytes`` are of gradients that wait for those of other stages; ``lent`` are (stage,
    bytes) of the last one on the same devices that begins gradients of weights that this one keeps, of updates to come.
    ``kept_bytes`` stays per microbatch in flight; ``peak_bytes`` is what the one in its backward holds at most (equal
    without recomputation). ``sync_period_ns`` is the least period at which the replicas' all-reduces keep up.
    ``update_share_ns`` is the part of ``backward_ns`` that is the microbatch's share of the optimizer's step.
    ``update_ns`` is the time from the last backward of a drained batch to the next batch: the all-reduce, and the
    optimizer's step where it overlaps with that instead of being charged to backwards. ``step_ns`` is that step where
    it waits for the norm of all gradients.
    Schedules that split the backward run its last ``backward_weight_ns`` later, and hold all ``saved_bytes`` of the
    microbatch (recomputed ones too) from the backward's start until then, and ``split_buffer_bytes`` of more buffers.
    Where the profile says what is needed until then it is ``held_between_bytes``, from the end of the backward's first
    part on, ``gradient_bytes`` of them made by that.
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
    split_buffer_bytes: int = 0
    step_ns: int = 0
    waiting_bytes: int = 0
    held_between_bytes: int | None = None
    gradient_bytes: int = 0
    lent: tuple[tuple[int, int], ...] = ()

    @property
    def total_ns(self) -> int:
        """Forward plus backward."""
        return self.forward_ns + self.backward_ns


Known = dict[tuple[Any, ...], Any]  # what is the same in many graphs: costs of stages, groups, links, transfers


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on the path of a microbatch: ``stage`` of a SEND is the sender; ``resource`` indexes resources."""

    kind: OpKind
    stage: int
    duration_ns: int
    resource: int


@dataclass(frozen=True, slots=True)
class Resource:
    """What one operation occupies at a time: a device of a group, or a link of those between two groups (``ends``).

    Each of ``replicas`` devices or links sees every ``replicas``-th microbatch. Groups of r and s devices have
    lcm(r, s) links: microbatch m takes that from device ``m mod r`` of the one to device ``m mod s`` of the other.
    Where servers (or other units of a level) share links, it is those by which ``devices`` send beyond their unit.
    """

    name: str
    devices: tuple[int, ...]
    replicas: int
    memory_bytes: int | None = None
    ends: tuple[tuple[int, ...], ...] = ()
    arrow: str = BOTH_WAYS

    @property
    def is_link(self) -> bool:
        """Whether this is a link."""
        return self.memory_bytes is None

    def one_name(self, replica: int) -> str:
        """Return the name of one of its devices or links: ``device 3``, ``link 3 - 5``."""
        if not self.is_link:
            return f"device {self.devices[replica]}"
        if self.replicas == 1:
            return self.name
        if not self.ends:
            return f"{self.name}, {replica + 1} of {self.replicas}"
        return "link " + self.arrow.join(str(end[replica % len(end)]) for end in self.ends)


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
        held = memory_model.versioned_bytes(self.policy, cost.weight_bytes, cost.parameters, kept, replicas)
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
        return int(memory_model.host_bytes(self.policy, cost.weight_bytes, cost.parameters, replicas))

    def first_replicas(self) -> StageGraph:
        """Return the graph of the first of equal pipelines alone, each stage on the first of its devices."""
        alone = (
            replace(x, devices=x.devices[:1], replicas=1, ends=tuple(end[:1] for end in x.ends)) for x in self.resources
        )
        return replace(self, resources=tuple(alone))

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
    without ``sharing``: as if servers that share links had one for each pair of their devices and direction, and as if
    blocking transfers stayed on the lowest level.

    Blocking transfers are part of the passes at both their ends: a forward receives, computes and sends. So there are
    no links; a microbatch alone is charged each of them twice. The overhead of messages is part of passes, too.
    """
    groups = list(dict.fromkeys(stage.devices for stage in stages))
    transfers = [chain.cut_bytes[one.stop] > 0 and one.devices != other.devices for one, other in pairwise(stages)]
    ends = zip([False, *transfers], [*transfers, False], strict=True)
    known = {} if known is None else known
    parts = []
    for stage, two, borrowed in zip(stages, ends, borrowed_weights(chain, stages), strict=True):
        home = groups.index(stage.devices)
        key = stage, home, *two, *borrowed
        part = known.get(key)
        if part is None:
            part = known[key] = stage_cost(chain, platform, policy, stage, home, *two, borrowed)
        parts.append(part)
    if chain.tied or policy.clip:
        pairs = zip(parts, _waiting_bytes(chain, policy, stages, parts), _lent(chain, policy, stages), strict=True)
        parts = [replace(part, waiting_bytes=size, lent=lent) for part, size, lent in pairs]
    resources = [_once(known, _group, platform, devices) for devices in groups]
    if platform.blocking or platform.overhead_ns:
        parts = _held(chain, platform, stages, parts, transfers, sharing)
    if platform.blocking:
        transfers = [False] * len(transfers)
    levels = [
        _once(known, Platform.level_between, platform, one.devices, other.devices) if transfer else 0
        for (one, other), transfer in zip(pairwise(stages), transfers, strict=True)
    ]
    outgoing: dict[tuple[int, ...], Resource] = {}
    if sharing and platform.shared_level is not None:
        crossing = [pair for pair, k in zip(pairwise(stages), levels, strict=True) if platform.shares_links(k)]
        outgoing = _shared_links(platform, dict.fromkeys(stage.devices for pair in crossing for stage in pair))
    links: dict[object, int] = {}

    def link(source: int, target: int, level: int) -> int:
        shared = outgoing.get(groups[source]) if platform.shares_links(level) else None
        one_way = (source, target) if platform.both_ways(level) else (min(source, target), max(source, target))
        key: object = shared or one_way
        if key not in links:
            links[key] = len(resources)
            ends = (groups[i] for i in one_way)
            resources.append(shared or _once(known, _link, platform, level, *ends))
        return links[key]

    forward: list[Operation] = []
    backward: list[Operation] = []
    for s, (stage, part) in enumerate(zip(stages, parts, strict=True)):
        forward.append(Operation("F", s, part.forward_ns, part.resource))
        backward.append(Operation("B", s, part.backward_ns, part.resource))
        if s < len(transfers) and transfers[s]:
            here, there = part.resource, parts[s + 1].resource
            duration = _once(known, Platform.transfer_ns, platform, chain.cut_bytes[stage.stop], levels[s])
            forward.append(Operation("SEND_F", s, duration, link(here, there, levels[s])))
            backward.append(Operation("SEND_B", s + 1, duration, link(there, here, levels[s])))
    if not free_sums:
        parts = _with_tied_sums(chain, platform, policy, stages, parts)
    norm_ns = 0
    if policy.clip and not free_sums:
        parts, norm_ns = _with_norm_sum(platform, policy, stages, parts)
    tied = tied_stages(chain, stages)
    operations = (*forward, *reversed(backward))
    return StageGraph(tuple(parts), operations, tuple(resources), policy, len(platform), tied, norm_ns)


def _held(
    chain: Chain,
    platform: Platform,
    stages: Sequence[Stage],
    parts: Sequence[StageCost],
    transfers: Sequence[bool],
    sharing: bool,
) -> list[StageCost]:
    """Return ``parts`` whose passes include what the transfers at their ends keep their devices from computing."""
    waits = [0]
    for (one, other), transfer in zip(pairwise(stages), transfers, strict=True):
        level = platform.level_between(one.devices, other.devices) if sharing else 0
        waits.append(platform.held_ns(chain.cut_bytes[one.stop], level) if transfer else 0)
    both_ends = [before + after for before, after in zip(waits, [*waits[1:], 0], strict=True)]
    return [
        replace(part, forward_ns=part.forward_ns + wait, backward_ns=part.backward_ns + wait)
        for part, wait in zip(parts, both_ends, strict=True)
    ]


def borrowed_weights(chain: Chain, stages: Sequence[Stage]) -> list[list[int]]:
    """Return for each stage which of ``chain.shared`` it uses and an earlier stage on the same devices holds."""
    if not chain.sums.shared:
        return [[] for _ in stages]
    held: dict[tuple[int, ...], set[int]] = {}
    found = []
    for stage in stages:
        used = {n for n, x in enumerate(chain.sums.shared) if x.inside(stage.start, stage.stop)}
        before = held.setdefault(stage.devices, set())
        found.append(sorted(used & before))
        before |= used
    return found


def _waiting_bytes(chain: Chain, policy: Policy, stages: Sequence[Stage], parts: Sequence[StageCost]) -> list[int]:
    """Return what waits in each stage of its gradients, those of shared weights once on a group of devices."""
    if policy.waits_for_norm:
        return [int(memory_model.gradient_bytes(policy, part.weight_bytes, part.parameters)) for part in parts]
    found = [0] * len(stages)
    for shared in chain.ties:
        held: set[tuple[int, ...]] = set()
        for s in _holders(stages, shared.layers) if _on_several(chain, stages, shared) else ():
            stage = stages[s]
            if stage.devices not in held and memory_model.waits(chain, policy, shared, stage.start, stage.stop):
                found[s] += memory_model.shared_gradient(policy, shared)
                if chain.shared is not None:
                    held.add(stage.devices)
    return found


def _on_several(chain: Chain, stages: Sequence[Stage], shared: SharedWeights) -> bool:
    """Whether there are copies: on several groups of devices, or wherever it isn't known what layers share."""
    homes = first_on_devices(stages, _holders(stages, shared.layers))
    return len(homes) > 1 or chain.shared is None


def _lent(chain: Chain, policy: Policy, stages: Sequence[Stage]) -> list[tuple[tuple[int, int], ...]]:
    """Return :attr:`StageCost.lent` of each stage, for weights whose gradients wait for those of no other device."""
    found: list[tuple[tuple[int, int], ...]] = [()] * len(stages)
    for shared in () if policy.drains else chain.ties:
        if policy.updates_together and _on_several(chain, stages, shared):
            continue
        holders = _holders(stages, shared.layers)
        for home in first_on_devices(stages, holders):
            last = max(s for s in holders if stages[s].devices == stages[home].devices)
            if last > home:
                found[home] += ((last, memory_model.shared_gradient(policy, shared)),)
    return found


def stage_cost(
    chain: Chain,
    platform: Platform,
    policy: Policy,
    stage: Stage,
    resource: int,
    receives: bool,
    sends: bool,
    borrowed: Sequence[int],
) -> StageCost:
    """Return what a stage costs that finds the weights ``borrowed`` (of ``chain.shared``) on its devices."""
    start, stop, r = stage.start, stage.stop, stage.replicas
    kept, peak, recompute = memory_model.stage_activations(policy, chain, start, stop, stage.checkpoint)
    slowest = platform.slowest(stage.devices)
    speed, timed = slowest.speed, chain.timed(slowest.times)
    if timed is not chain:
        recompute = memory_model.activations(timed, start, stop, stage.checkpoint)[2]
    weight_bytes, parameters = memory_model.weights_of(chain, start, stop)
    weight_bytes -= sum(chain.sums.shared[n].weight_bytes for n in borrowed)
    parameters -= sum(chain.sums.shared[n].parameters for n in borrowed)
    elsewhere = sum(timed.sums.shared[n].optimizer_ns for n in borrowed)
    path = platform.paths[platform.level_of(stage.devices)]
    gradient = memory_model.gradient_bytes(policy, weight_bytes, parameters)
    sync_period = time_model.sync_period_ns(policy, gradient, r, *path)
    update = sync_period * policy.update_interval(r)
    step = int(time_model.step_ns(timed, policy, start, stop, r, speed, elsewhere)) if policy.steps_apart else 0
    if policy.coarsening is not None and not policy.clip:
        update = time_model.overlapped_ns(policy, update, step, parameters)
    everywhere = policy.engine is not None  # which has buffers also between stages of one device
    between = for_weights_bytes(chain, start, stop)
    share = time_model.step_share_ns(timed, policy, start, stop, r, elsewhere)
    return StageCost(
        forward_ns=time_model.forward_ns(timed, start, stop, speed),
        backward_ns=time_model.backward_ns(timed, policy, start, stop, recompute, r, speed, elsewhere),
        weight_bytes=weight_bytes,
        parameters=parameters,
        kept_bytes=kept,
        peak_bytes=peak,
        buffer_bytes=int(
            memory_model.message_bytes(
                policy,
                chain.cut_bytes[start] * (receives or (everywhere and start > 0)),
                chain.cut_bytes[stop] * (sends or everywhere),
                r,
            )
        ),
        sync_period_ns=sync_period,
        update_interval=policy.update_interval(r),
        resource=resource,
        backward_weight_ns=time_model.backward_weight_ns(timed, policy, start, stop, r, speed, elsewhere),
        saved_bytes=max(peak, saved_bytes(chain, start, stop)),
        split_buffer_bytes=int(memory_model.split_message_bytes(policy, chain.cut_bytes[start] * (start > 0), r)),
        update_ns=update,
        update_share_ns=time_model.scaled(share, speed),
        step_ns=step if policy.clip else 0,
        held_between_bytes=None if between is None else between[0],
        gradient_bytes=0 if between is None else between[1],
    )


def least_load_ns(chain: Chain, platform: Platform, stages: Sequence[Stage]) -> int:
    """Return the most that a device has to do for a microbatch, without recomputation and steps: no period is less."""
    slowest = {devices: platform.slowest(devices) for devices in {stage.devices for stage in stages}}
    loads = dict.fromkeys(slowest, 0)
    for stage in stages:
        passes = chain.timed(slowest[stage.devices].times).sums.passes_ns
        loads[stage.devices] += passes[stage.stop] - passes[stage.start]
    floor = 0
    for devices, work in loads.items():
        floor = max(floor, ceil_div(time_model.scaled(work, slowest[devices].speed), len(devices)))
    return floor


def tied_stages(chain: Chain, stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of several stages that hold weights of each other, in order; no stage is in two of them."""
    return _several(_holders(stages, layers) for layers in connected(chain.tied))


def summed_stages(chain: Chain, stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    """Return of the :func:`tied_stages` those that have copies and sum their gradients: the first on each group of
    devices, where there are several groups."""
    return _several(first_on_devices(stages, _holders(stages, layers)) for layers in connected(chain.tied))


def lending_stages(chain: Chain, stages: Sequence[Stage]) -> list[list[int]]:
    """Return for each stage the earlier ones on the same devices that may keep weights which it uses."""
    found: list[list[int]] = [[] for _ in stages]
    for layers in connected(chain.tied):
        holders = _holders(stages, layers)
        for place, s in enumerate(holders):
            found[s] = sorted({*found[s], *(q for q in holders[:place] if stages[q].devices == stages[s].devices)})
    return found


def _several(sets: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(sorted(found)) for found in connected(x for x in map(set, sets) if len(x) > 1)))


def _holders(stages: Sequence[Stage], layers: Iterable[int]) -> list[int]:
    return [s for s, stage in enumerate(stages) if any(stage.start <= layer < stage.stop for layer in layers)]


def first_on_devices(stages: Sequence[Stage], chosen: Iterable[int]) -> list[int]:
    """Return of the ``chosen`` stages the first on each group of devices, in order."""
    return sorted({stages[s].devices: s for s in sorted(chosen, reverse=True)}.values())


def _with_tied_sums(
    chain: Chain, platform: Platform, policy: Policy, stages: Sequence[Stage], parts: Sequence[StageCost]
) -> list[StageCost]:
    """Return ``parts`` with what the sums of weights in several stages take more than those over one stage's replicas.

    A ring over all devices that have a copy sums them instead of those over replicas, once for each group of devices.
    After a drained batch the sum comes before the update; otherwise it is one more load of every interval, like the
    replicas' sums.
    """
    parts = list(parts)
    for shared in chain.ties:
        homes = first_on_devices(stages, _holders(stages, shared.layers))
        if len(homes) < 2:
            continue
        gradient = memory_model.shared_gradient(policy, shared)
        devices = sorted({d for s in homes for d in stages[s].devices})
        interval = policy.update_interval(max(stages[s].replicas for s in homes))
        for s in homes:
            whole, own = (_ring_ns(platform, gradient, x, 1) for x in (devices, stages[s].devices))
            load, own_load = (_ring_ns(platform, gradient, x, interval) for x in (devices, stages[s].devices))
            if policy.zero:  # where replicas share the steps, they still gather the new weights
                own, own_load = own // 2, own_load // 2
            part = replace(parts[s], update_ns=parts[s].update_ns + whole - own)
            parts[s] = part if policy.drains else replace(part, sync_period_ns=part.sync_period_ns + load - own_load)
    return parts


def _with_norm_sum(
    platform: Platform, policy: Policy, stages: Sequence[Stage], parts: Sequence[StageCost]
) -> tuple[list[StageCost], int]:
    """Return ``parts`` and the time of the sum, over all devices, from which the norm of all gradients is known.

    After a drained batch everybody waits for it; otherwise it is one more load of every interval on each device.
    """
    devices = sorted({d for stage in stages for d in stage.devices})
    if policy.drains:
        return list(parts), _ring_ns(platform, NORM_BYTES, devices, 1)
    firsts = set(first_on_devices(stages, range(len(stages))))
    load = _ring_ns(platform, NORM_BYTES, devices, policy.update_interval(max(stage.replicas for stage in stages)))
    more = [load if s in firsts else 0 for s in range(len(stages))]
    pairs = zip(parts, more, strict=True)
    return [replace(part, sync_period_ns=part.sync_period_ns + ns) for part, ns in pairs], 0


def _ring_ns(platform: Platform, size: int, devices: Sequence[int], interval: int) -> int:
    """Return what each of ``interval`` microbatches has to leave for a sum over ``devices``."""
    path = platform.paths[platform.level_of(devices)]
    return int(time_model.ring_all_reduce_ns(size, len(devices), *path, shared_by=interval))


def updates_end_ns(graph: StageGraph, done_ns: Sequence[int]) -> int:
    """Return when all updates after a drained batch are over, for stages whose last backwards end at ``done_ns``.

    Sums of weights in several stages begin when all of these are done, and so does the update of what stages of one
    group of devices share; all-reduces of stages that share devices follow each other. Where gradients are clipped all
    sums begin then, and when the last is over comes that of the norm, and then the steps.
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
    if not clips:
        return max(ends)
    steps = [0] * len(graph.resources)
    for stage in graph.stages:
        steps[stage.resource] += stage.step_ns
    return max(ends) + graph.norm_ns + max(steps)


def _once(known: Known, make: Callable[..., Any], platform: Platform, *arguments: Any) -> Any:
    """Return what ``make`` makes of the platform and the arguments, remembered in ``known``."""
    key = make, *arguments
    if key not in known:
        known[key] = make(platform, *arguments)
    return known[key]


def _group(platform: Platform, devices: tuple[int, ...]) -> Resource:
    memory = platform.slowest(devices).memory_bytes
    name = f"{'device' if len(devices) == 1 else 'devices'} {format_devices(devices)}"
    return Resource(name, devices, len(devices), memory)


def _link(platform: Platform, level: int, one: tuple[int, ...], other: tuple[int, ...]) -> Resource:
    one_way = platform.both_ways(level)
    arrow = ONE_WAY if one_way else BOTH_WAYS
    name = "link " + arrow.join(map(format_devices, (one, other)))
    return Resource(name, one + other, lcm(len(one), len(other)), ends=(one, other), arrow=arrow)


def _shared_links(platform: Platform, groups: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Resource]:
    """Return the shared links by which each of ``groups`` sends.

    Groups whose devices send by some of the same links have these together. Where microbatches m and n may meet on one
    of them, m = n modulo ``replicas``: as if all that are equal modulo that took one link, which is never less than
    they do. A group inside a unit with one link has 1; a pipeline in every unit has as many as there are units.
    """
    groups = list(groups)
    found: dict[tuple[int, ...], Resource] = {}
    for links in connected({platform.link_of(d) for d in group} for group in groups):
        own = [group for group in groups if platform.link_of(group[0]) in links]
        places: dict[int, list[int]] = {}
        for group in own:
            for place, device in enumerate(group):
                places.setdefault(platform.link_of(device), []).append(place)
        apart = gcd(*map(len, own), *(place - some[0] for some in places.values() for place in some))
        devices = tuple(d for d in range(len(platform)) if platform.link_of(d) in links)
        name = f"link{'s' if len(links) > 1 else ''} of {format_devices(devices)}"
        found |= dict.fromkeys(own, Resource(name, devices, apart))
    return found
