"""Is a plan right? The one judge: a sentence for each broken rule, with the operation, the resource and the numbers.

It rebuilds everything from the chain, the platform and the starts, trusts no reported figure, needs no tolerance (all
times are integers), and imports no scheduler. A plan without a pattern, whose GPUs decide as they go, is judged through
its simulated timeline. Rules: ALGORITHMS section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..cost import time_model
from ..cost.resources import Resource
from ..cost.stage_cost import borrowed_weights
from ..cost.stage_graph import Operation, StageGraph
from ..errors import InvalidPlan
from ..names import shown
from ..plan import Pattern, Plan, Stage, TimedOp
from ..problem import CLIPPED_TOGETHER, Chain, Platform, Policy
from ..registry import Late
from ..schedule.kinds import graph_of, kind_of, refused, too_long
from ..schedule.pattern import DeviceUse, most_in_flight, resource_use, starts_of
from .classes import bound_violations
from .evaluate import Evaluation, evaluate

format_bytes = Late("units:format_bytes")


def tied_violations(chain: Chain, policy: Policy, stages: Sequence[Stage]) -> list[str]:
    """Return which layers share weights although their stages, on different devices, would let copies drift apart."""
    if policy.updates_together:
        return []
    found = []
    for one, other in chain.tied:
        holders = [
            next((s for s, stage in enumerate(stages) if stage.start <= layer < stage.stop), None)
            for layer in (one, other)
        ]
        if None in holders or len({stages[s].devices for s in holders if s is not None}) > 1:
            names = [f"{layer} ({shown(chain.layers[layer].name)})" for layer in (one, other)]
            found.append(
                f"layers {names[0]} and {names[1]} share weights but are in stages {holders[0]} and {holders[1]} on "
                "different GPUs; only --weights 2bw and flush can keep copies equal"
            )
    return found


def kept_together(chain: Chain, policy: Policy) -> str | None:
    """Return in a sentence which layers the policy keeps on one GPU because they share weights; None for none."""
    if policy.updates_together or not chain.tied:
        return None
    widest = max(chain.tied, key=lambda pair: (pair[1] - pair[0], pair))
    one, other = (f"{i} ({shown(chain.layers[i].name)})" for i in widest)
    more = len(chain.tied) - 1
    others = f" (and {more} more pair{'s' if more > 1 else ''})" if more else ""
    return f"layers {one} and {other}{others} share weights and must stay on one GPU under --weights {policy.weights}"


def check(plan: Plan) -> Evaluation:
    """Return the figures of ``plan``; raise InvalidPlan with every violation when it has any."""
    result, found = judged(plan)
    if result is None or found:
        raise InvalidPlan(found)
    return result


def violations(plan: Plan) -> list[str]:
    """Return one sentence for each rule that ``plan`` breaks; an empty list means that it is valid."""
    return judged(plan)[1]


def judged(plan: Plan) -> tuple[Evaluation | None, list[str]]:
    """Return the figures of ``plan``, None where broken rules leave them without meaning, and its :func:`violations`.

    Structure is judged first: times and memory have no meaning on stages that don't cover the chain.
    """
    found = [
        *structure_violations(plan.chain, plan.platform, plan.policy, plan.allocation.stages),
        *schedule_violations(plan),
    ]
    if found:
        return None, found
    graph = graph_of(plan)
    endless = too_long(len(graph.operations), plan.schedule)
    if endless is not None:
        return None, [f"schedule: {endless}"]
    if kind_of(plan).build is not None:
        reason = refused(graph, plan.schedule)
        if reason is not None:
            return None, [reason]
        result = evaluate(plan, graph)
        found = simulated_violations(result)
    elif plan.pattern is None:
        return None, ["the plan has no pattern: nothing says when its operations run"]
    else:
        found = operation_violations(graph, plan.pattern) or pattern_violations(graph, plan.pattern)
        if found:
            return None, found
        result = evaluate(plan, graph)
    return result, [*found, *bound_violations(plan, None if found else result.period_ns)]  # bounds are of valid plans


def simulated_violations(result: Evaluation) -> list[str]:
    """Return where a plan that runs by simulation has not the memory that ``result`` says it needs."""
    graph, found = result.graph, []
    for index, resource in enumerate(graph.resources):
        if not resource.is_link:
            alike: dict[DeviceUse, list[int]] = {}
            for device in resource.devices:
                alike.setdefault(result.devices[device], []).append(device)
            for use, devices in alike.items():
                name = f"each of devices {', '.join(map(str, devices))} of {resource.name}"
                name = f"device {devices[0]} of {resource.name}" if len(devices) == 1 else name
                name = _each(resource) if len(alike) == 1 else name
                found += _over(name, graph.stages_on(index), use)
    return found


def structure_violations(chain: Chain, platform: Platform, policy: Policy, stages: Sequence[Stage]) -> list[str]:
    """Return what is wrong with the stages themselves: cover, devices, segments, empty stages, tied layers."""
    if not stages:
        return ["the plan has no stages"]
    unsaid = unsaid_of_variants(chain, platform)
    if unsaid is not None:
        return [unsaid]
    found = []
    position = 0
    for s, stage in enumerate(stages):
        if stage.start != position:
            found.append(f"stage {s} starts at layer {stage.start}; the layers before it end at {position}")
        if not 0 <= stage.start < stage.stop <= len(chain):
            found.append(
                f"stage {s} is layers [{stage.start}, {stage.stop}) of {len(chain)}: empty or outside the chain"
            )
            return found
        position = stage.stop
        own = chain.names.get((stage.tensor, bool(stage.selective), stage.offloaded))
        if own is None or (stage.selective and not own.either and stage.selective != ((stage.start, stage.stop),)):
            found.append(f"stage {s} is of tensor degree {stage.tensor}; the profile has no such variant")
            return found
        found += _device_violations(s, stage, platform)
        if stage.replicas > 1 and chain.changed:
            found.append(f"stage {s} has {stage.replicas} GPUs; {chain.one_of_each}; plan with --no-replicas")
        found += _range_violations(f"stage {s} recomputes", stage, stage.checkpoint)
        found += _range_violations(f"stage {s} runs the cores again of", stage, stage.selective)
        found += [
            f"stage {s} recomputes layers [{first}, {last}), and runs the cores of some of them again"
            for first, last in stage.checkpoint
            if 0 < sum(max(0, min(b, last) - max(a, first)) for a, b in stage.selective) < last - first
        ]
    found += _idle_violations(chain, platform, policy, stages)
    if position != len(chain):
        found.append(f"the last stage ends at layer {position}; the chain has {len(chain)} layers")
    groups = list(dict.fromkeys((stage.members, stage.tensor) for stage in stages))
    for i, (one, _) in enumerate(groups):
        for other, _ in groups[i + 1 :]:
            if set(one) & set(other):
                found.append(
                    f"device groups {list(one)} and {list(other)} overlap; stages that share a device share all of them"
                )
    return found + tied_violations(chain, policy, stages)


def unsaid_of_variants(chain: Chain, platform: Platform) -> str | None:
    """Return in words why stages can't each have a variant of their own; None where they can, or there are none."""
    if not chain.variants:
        return None
    reasons = {
        "layers share weights, of which groups of other degrees would have other parts": (chain.tied or chain.shared)
        and max(x.width for x in chain.variants) > 1,
        "ranks share experts or sequences": any(x.width > x.tensor for x in chain.variants),
        "GPUs differ": len(set(platform.devices)) > 1,
        "servers share links": platform.shared_level is not None,
        "messages keep GPUs from computing": platform.blocking or platform.overhead_ns,
    }
    found = [why for why, there in reasons.items() if there]
    return f"a tensor degree for each stage isn't planned where {' and '.join(found)}" if found else None


def schedule_violations(plan: Plan) -> list[str]:
    """Return where the kind of schedule and the weights policy contradict each other."""
    schedule, policy = plan.schedule, plan.policy
    if policy.coarsening is not None and not policy.drains:
        return [f"sums overlap with steps after drained batches, for weights flush; the policy is {policy.weights}"]
    if policy.sharing.scattered and not policy.drains:
        return [f"replicas exchange parts in passes with weights flush (zero {policy.zero}); they are {policy.weights}"]
    if policy.engine is not None and not policy.drains:
        return [f"{policy.engine} drains every mini-batch, for weights flush; the policy is {policy.weights}"]
    shared = policy.shared_bytes_per_parameter
    if shared is not None and not (policy.zero and 0 <= shared <= (policy.bytes_per_parameter or 0)):
        return [
            f"policy: {shared} shared bytes per parameter are no part of {policy.bytes_per_parameter} with zero "
            f"{policy.zero}"
        ]
    if policy.clip and not policy.updates_together:
        return [CLIPPED_TOGETHER.format(weights=policy.weights)]
    kind, found = kind_of(plan), []
    if policy.weights not in kind.weights:
        return [kind.refusal.format(weights=policy.weights)]
    if kind.in_mini_batches:
        if schedule.microbatches is None or schedule.microbatches < 1:
            said = "missing" if schedule.microbatches is None else schedule.microbatches
            return [f"schedule.microbatches is {said}; {schedule.kind} needs those of a mini-batch, at least 1"]
        if schedule.microbatches != policy.accumulate:
            found.append(
                f"the schedule {'drains' if kind.drains else 'runs'} mini-batches of {schedule.microbatches} "
                f"microbatches, but the policy updates weights every {policy.accumulate}"
            )
    if kind.build is not None and plan.pattern is not None:
        found.append(f"the schedule is {schedule.kind}, which has no pattern, but the plan has one")
    if kind.written != (schedule.order is not None):
        said = "missing" if schedule.order is None else "given"
        found.append(f"schedule.order is {said}; {'a' if kind.written else 'only a'} written schedule has one")
    if kind.limit is None and schedule.limit is not None:
        found.append(f"schedule.limit is {schedule.limit}; {schedule.kind} holds what its order says and has no limit")
    if kind.limit is not None and (schedule.limit is None or schedule.limit < 1):
        said = "missing" if schedule.limit is None else schedule.limit
        found.append(
            f"schedule.limit is {said}; {schedule.kind} needs the {kind.limit.nouns}{kind.limit.where} that it admits, "
            "at least 1"
        )
    return found


def _device_violations(s: int, stage: Stage, platform: Platform) -> list[str]:
    devices, inside = stage.members, platform.unit_sizes[0]
    if not devices:
        return [f"stage {s} has no device"]
    found = [
        f"stage {s} uses device {d}; the platform has devices 0 to {len(platform) - 1}"
        for d in devices
        if not 0 <= d < len(platform)
    ]
    if len(set(devices)) != len(devices):
        found.append(f"stage {s} lists a device twice: {list(devices)}")
    if any(d // inside != (d + stage.tensor - 1) // inside for d in stage.devices):
        found.append(f"stage {s} has groups of {stage.tensor} devices that cross servers of {inside}: {list(devices)}")
    return found


def _idle_violations(chain: Chain, platform: Platform, policy: Policy, stages: Sequence[Stage]) -> list[str]:
    found = []
    for s, (stage, borrowed) in enumerate(zip(stages, borrowed_weights(chain, stages), strict=True)):
        known = [d for d in stage.devices if 0 <= d < len(platform)]
        own = chain.of(stage.way)
        timed = own.timed(platform.slowest(known).times) if known else own
        elsewhere = sum(timed.sums.shared[n].optimizer_ns for n in borrowed)
        if time_model.Passes(timed, policy, stage.start, stage.stop, elsewhere_ns=elsewhere).work_ns() == 0:
            found.append(f"stage {s} takes no time; merge its layers into a neighbouring stage")
    return found


def _range_violations(what: str, stage: Stage, ranges: tuple[tuple[int, int], ...]) -> list[str]:
    found, position = [], stage.start
    for first, last in ranges:
        if not (position <= first < last <= stage.stop):
            found.append(
                f"{what} layers [{first}, {last}), "
                f"which is empty, out of order or outside its layers [{stage.start}, {stage.stop})"
            )
        position = max(position, last)
    return found


def operation_violations(graph: StageGraph, pattern: Pattern) -> list[str]:
    """Return where the pattern's operations are not those of the stages: kind, stage, order, duration, period."""
    found = []
    if pattern.period_ns < 1:
        found.append(f"the period is {pattern.period_ns} ns; it must be at least 1")
    if len(pattern.operations) != len(graph.operations):
        found.append(f"the pattern has {len(pattern.operations)} operations; the stages need {len(graph.operations)}")
        return found
    for i, (have, need) in enumerate(zip(pattern.operations, graph.operations, strict=True)):
        if (have.kind, have.stage) != (need.kind, need.stage):
            found.append(f"operation {i} is {label(have)}; the path has {label(need)} there")
        elif have.duration_ns != need.duration_ns:
            found.append(f"{label(have)} lasts {have.duration_ns} ns; its layers take {need.duration_ns} ns")
        elif have.start_ns < 0:
            found.append(f"{label(have)} starts at {have.start_ns} ns, before time 0")
    return found


def pattern_violations(graph: StageGraph, pattern: Pattern) -> list[str]:
    """Return every breach of the rules of a valid pattern: path, exclusivity, memory, updates, synchronisation."""
    return [
        *_path(graph, pattern),
        *_exclusivity(graph, pattern),
        *_memory(graph, pattern),
        *_updates(graph, pattern),
        *_synchronisation(graph, pattern),
    ]


def _path(graph: StageGraph, pattern: Pattern) -> list[str]:
    return [
        f"{label(late)} starts at {late.start_ns} ns, before {label(early)} ends "
        f"at {early.start_ns + early.duration_ns} ns"
        for early, late in pairwise(pattern.operations)
        if late.start_ns < early.start_ns + early.duration_ns
    ]


def _exclusivity(graph: StageGraph, pattern: Pattern) -> list[str]:
    """Operations of one resource never overlap: sorted by offset in its period, each ends before the next starts."""
    found = []
    for resource, indices in zip(graph.resources, graph.on_resource, strict=True):
        period = resource.replicas * pattern.period_ns
        load = sum(pattern.operations[i].duration_ns for i in indices)
        if load > period:
            found.append(f"{_each(resource)} is busy {load} ns in each of its periods of {period} ns")
            continue
        ops = sorted((pattern.operations[i] for i in indices), key=lambda op: (op.start_ns % period, op.duration_ns))
        for one, other in pairwise([*ops, ops[0]]):
            gap = (other.start_ns - one.start_ns) % period
            if len(ops) > 1 and gap < one.duration_ns and (gap or other.duration_ns):
                found.append(
                    f"{label(one)} (offset {one.start_ns % period} ns, {one.duration_ns} ns long) overlaps "
                    f"{label(other)} (offset {other.start_ns % period} ns) on {resource.name}, "
                    f"whose period is {period} ns"
                )
    return found


def _each(resource: Resource) -> str:
    if resource.replicas == 1:
        return resource.name
    return f"each {'pair ' if resource.is_link else ''}of {resource.name}"


def _memory(graph: StageGraph, pattern: Pattern) -> list[str]:
    found = []
    for index, resource in enumerate(graph.resources):
        if resource.is_link:
            continue
        use = resource_use(graph, starts_of(pattern), pattern.period_ns, index)
        found += _over(_each(resource), graph.stages_on(index), use)
    return found


def _over(name: str, stages: Sequence[int], use: DeviceUse) -> list[str]:
    """Say how a device that holds ``stages`` is over its memory, if it is."""
    if use.over_bytes <= 0:
        return []
    held = ", ".join(f"stage {s} with {n} in flight" for s, n in zip(stages, use.in_flight, strict=True))
    return [
        f"{name} needs {format_bytes(use.peak_bytes)} ({use.peak_bytes} bytes: weights "
        f"{format_bytes(use.weights_bytes)}, activations {format_bytes(use.activation_bytes)}, buffers "
        f"{format_bytes(use.buffer_bytes)}; {held}) but has {format_bytes(use.memory_bytes)} "
        f"({use.memory_bytes} bytes)"
    ]


def _updates(graph: StageGraph, pattern: Pattern) -> list[str]:
    policy = graph.policy
    if not policy.rules.within_update:
        return []
    needed = most_in_flight(graph, starts_of(pattern), pattern.period_ns)
    if policy.accumulate is not None and policy.accumulate >= needed:
        return []
    return [
        f"{policy.weights} accumulates {policy.accumulate} microbatches per update, but {needed} are in flight at one "
        f"stage; with fewer than {needed} a third weight version would be needed"
    ]


def _synchronisation(graph: StageGraph, pattern: Pattern) -> list[str]:
    found = []
    for index, (resource, needed) in enumerate(zip(graph.resources, graph.sync_periods_ns, strict=True)):
        if needed > pattern.period_ns:
            stages = graph.stages_on(index)
            who = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))} together"
            found.append(
                f"{who} on {resource.name} need{'s' if len(stages) == 1 else ''} {needed} ns of gradient all-reduce "
                f"per microbatch, more than the period of {pattern.period_ns} ns"
            )
    return found


def label(op: Operation | TimedOp) -> str:
    """Return how sentences name an operation: ``F of stage 2``."""
    return f"{op.kind} of stage {op.stage}"
