"""Random valid plans of many kinds, and random patterns good and bad, for the tests that judge every part by another.

``random_plan`` knows no scheduler: it places operations one after the other wherever their resource is free.
"""

from __future__ import annotations

import random
from dataclasses import replace

from cases.chains import random_chain, random_platform

from pipeplan.check.bounds import quick_proof
from pipeplan.check.evaluate import evaluate_simulated
from pipeplan.cost.stage_graph import StageGraph, stage_graph
from pipeplan.deadline import NEVER
from pipeplan.plan import Allocation, Bound, Pattern, Plan, Provenance, Schedule, ScheduleKind, Stage
from pipeplan.problem import Chain, Device, Layer, Platform, Policy, Problem
from pipeplan.schedule.pattern import device_uses, make_pattern, most_in_flight, starts_of
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star

WEIGHTS = ("2bw", "stash", "latest", "flush")


def straight(layers=8, devices=4, checkpoint=()):
    """A balanced plan, one stage per device, that recomputes the given segments."""
    chain = Chain("straight", tuple(Layer(f"l{i}", 2, 4, 8, 1, saved_bytes=3) for i in range(layers)), 1)
    platform = Platform.flat(devices, 10**9, 10**9)
    policy = Policy("2bw", accumulate=16)
    each = layers // devices
    stages = tuple(
        Stage(d * each, (d + 1) * each, (d,), tuple(s for s in checkpoint if d * each <= s[0] < (d + 1) * each))
        for d in range(devices)
    )
    pattern = best_one_f_one_b_star(stage_graph(chain, platform, policy, stages))
    return Plan(chain, platform, policy, Allocation(stages), pattern, (), Provenance("test"))


def reading_the_input_late(rng: random.Random, chain: Chain) -> Chain:
    """Return the DAG with the network's input, instead of what it read, for some layer beside the first."""
    late = rng.randint(1, len(chain) - 1)
    layers = list(chain.layers)
    layers[late] = replace(layers[late], saved_bytes=None, saves=None, view_of=None)
    edges = tuple(edge for edge in chain.edges or () if edge[1] != late)
    return replace(chain, layers=tuple(layers), edges=edges)


def random_checkpoint(rng: random.Random, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Return random recomputed segments of ``layers[start:stop]``: often none, sometimes all of it."""
    if rng.random() < 0.4:
        return ()
    if rng.random() < 0.3:
        return ((start, stop),)
    edges = sorted(rng.sample(range(start, stop + 1), min(stop + 1 - start, rng.choice((2, 2, 4)))))
    return tuple(zip(edges[::2], edges[1::2], strict=False))


def random_stages(
    rng: random.Random,
    layers: int,
    devices: int,
    *,
    replicas: bool = True,
    checkpoint: bool = True,
    shared: bool = False,
) -> tuple[Stage, ...]:
    """Return stages that cover ``layers`` layers on devices in order; ``shared`` puts several stages on one group."""
    groups = []
    free = list(range(devices))
    while free and (not groups or rng.random() < 0.95):
        count = min(len(free), rng.choice((1, 1, 1, 2, 3)) if replicas else 1)
        groups.append(tuple(free[:count]))
        free = free[count:]
    most = min(layers, len(groups) + (3 if shared else 0))
    count = max(rng.randint(1, most), rng.randint(1, most))
    cuts = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    homes = [rng.choice(groups) for _ in range(count)] if shared else groups[:count]
    return tuple(
        Stage(i, j, home, random_checkpoint(rng, i, j) if checkpoint else ())
        for i, j, home in zip(cuts, cuts[1:], homes, strict=False)
    )


def greedy_pattern(rng: random.Random, graph: StageGraph, period: int, slack: float = 0.2) -> Pattern | None:
    """Return a pattern that respects path and exclusivity, each operation at the first free place; or None."""
    starts: list[int] = []
    clock = 0
    for v, op in enumerate(graph.operations):
        step = graph.resources[op.resource].replicas * period
        others = [(starts[u], graph.operations[u].duration_ns) for u in graph.on_resource[op.resource] if u < v]
        if op.duration_ns > step:
            return None
        delay = rng.randrange(step) if rng.random() < slack else 0
        for start in range(clock + delay, clock + delay + step):
            if all(length <= (start - begin) % step <= step - op.duration_ns for begin, length in others):
                break
        else:
            return None
        starts.append(start)
        clock = start + op.duration_ns
    return make_pattern(graph, starts, period)


def random_policy(rng: random.Random, weights: tuple[str, ...] = WEIGHTS) -> Policy:
    """Return a random policy whose ``accumulate`` is decided."""
    policy = Policy(
        weights=rng.choice(weights),
        accumulate=rng.randint(1, 8),
        optimizer=rng.choice(("sgd", "momentum", "adam")),
        precision=rng.choice(("fp32", "mixed")),
        offload=rng.random() < 0.3,
        vertical_sync=rng.random() < 0.3,
        bucket_parameters=rng.choice((1, 16 * 10**6)),
    )
    return replace(policy, zero=int(policy.update_interval() % 3 == 0))


def random_plan(
    rng: random.Random,
    *,
    weights: tuple[str, ...] = WEIGHTS,
    replicas: bool = True,
    checkpoint: bool = True,
    shared: bool | None = None,
    duplex: bool = True,
    optimizer: bool = True,
    most_layers: int = 7,
    most_devices: int = 5,
) -> Plan:
    """Return a valid plan: any kind of chain, platform, policy, stages and order, often just fitting its memory."""
    layers = max(rng.randint(1, most_layers), rng.randint(1, most_layers))
    devices = rng.randint(1, most_devices)
    chain = random_chain(rng, layers, edges=rng.random() < 0.5, saved=rng.random() < 0.5, optimizer=optimizer)
    if chain.edges and rng.random() < 0.3:
        chain = reading_the_input_late(rng, chain)
    if rng.random() < 0.15:  # synchronisation matters
        chain = replace(chain, layers=tuple(replace(x, weight_bytes=40 * x.weight_bytes) for x in chain.layers))
    platform = random_platform(rng, devices, levels=True, latency=True, speeds=True, duplex=duplex)
    policy = random_policy(rng, weights)
    shared = rng.random() < 0.5 if shared is None else shared
    stages = random_stages(rng, layers, devices, replicas=replicas, checkpoint=checkpoint, shared=shared)
    while True:
        graph = stage_graph(chain, platform, policy, stages)
        pattern = None
        period = max(1, graph.period_floor_ns + rng.choice((0, 0, 1, 2, rng.randint(0, 30))))
        while pattern is None:
            pattern = greedy_pattern(rng, graph, period)
            period += 1
        depth = most_in_flight(graph, starts_of(pattern), pattern.period_ns)
        if policy.weights != "2bw" or depth <= (policy.accumulate or 0):
            break
        policy = replace(policy, accumulate=depth + rng.choice((0, 0, 3)))
    return fitted(rng, chain, platform, policy, stages, pattern)


def fitted(
    rng: random.Random, chain: Chain, platform: Platform, policy: Policy, stages: tuple[Stage, ...], pattern: Pattern
) -> Plan:
    """Return the plan on devices whose memory is just enough, or more."""
    graph = stage_graph(chain, platform, policy, stages)
    uses = device_uses(graph, starts_of(pattern), pattern.period_ns, platform)
    memories = [use.peak_bytes + rng.choice((0, 0, 1, 50)) for use in uses]
    devices = tuple(Device(m, d.speed) for m, d in zip(memories, platform.devices, strict=True))
    platform = replace(platform, devices=devices)
    problem = Problem(chain, platform, policy, True, "segments")
    return Plan(
        chain=chain,
        platform=platform,
        policy=policy,
        allocation=Allocation(stages),
        pattern=pattern,
        lower_bounds=(quick_bound(problem),),
        provenance=Provenance("random"),
        schedule=Schedule("flush", policy.accumulate) if policy.weights == "flush" else Schedule(),
    )


def quick_bound(problem: Problem) -> Bound:
    """Return a bound of class any that takes no time."""
    period = quick_proof(problem).period_ns
    return Bound("any", problem.replicas, problem.checkpointing, period, any_interval=problem.policy.open)


def random_simulated_plan(rng: random.Random, kind: ScheduleKind | None = None) -> Plan:
    """Return a valid plan of kind ``nf1b`` or ``message-driven``, often just fitting its memory."""
    kind = kind or rng.choice(("nf1b", "message-driven"))
    plain = kind == "nf1b"
    layers, devices = max(rng.randint(1, 6), rng.randint(1, 6)), rng.randint(1, 4)
    chain = random_chain(rng, layers, edges=rng.random() < 0.3, saved=rng.random() < 0.5, optimizer=True)
    platform = random_platform(rng, devices, levels=True, latency=True, speeds=True, duplex=True)
    policy = replace(random_policy(rng, ("latest",) if plain else ("flush",)), accumulate=rng.randint(1, 6))
    stages = random_stages(rng, layers, devices, replicas=not plain, shared=not plain and rng.random() < 0.4)
    schedule = Schedule(kind, policy.accumulate, rng.randint(1, len(stages) + 2))
    return fitted_simulated(rng, chain, platform, policy, stages, schedule)


def fitted_simulated(
    rng: random.Random,
    chain: Chain,
    platform: Platform,
    policy: Policy,
    stages: tuple[Stage, ...],
    schedule: Schedule,
) -> Plan:
    """Return the plan of stages under a schedule that is simulated, on devices whose memory is just enough, or more."""
    result = evaluate_simulated(stage_graph(chain, platform, policy, stages), schedule, platform, NEVER)
    memories = [use.peak_bytes + rng.choice((0, 0, 1, 50)) for use in result.devices]
    platform = replace(
        platform, devices=tuple(Device(m, d.speed) for m, d in zip(memories, platform.devices, strict=True))
    )
    bound = quick_bound(Problem(chain, platform, policy, True, "segments"))
    return Plan(chain, platform, policy, Allocation(stages), None, (bound,), Provenance("random"), schedule)


def graph_of(plan: Plan) -> StageGraph:
    """Return the stage graph of a plan."""
    return stage_graph(plan.chain, plan.platform, plan.policy, plan.allocation.stages)
