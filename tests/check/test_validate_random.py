"""The validator on random plans, good and bad, against independent judges."""

import random
from dataclasses import replace
from fractions import Fraction

from cases.changes import only, with_memory, with_op, with_policy, with_starts
from cases.plans import fitted, graph_of, greedy_pattern, random_plan
from oracles.schedules import overlaps, peak_activations, weights_table

from pipeplan.check.validate import label, operation_violations, pattern_violations, violations
from pipeplan.plan import Pattern
from pipeplan.schedule.pattern import make_pattern, most_in_flight, resource_use, starts_of


def test_valid_plans_have_no_violation():
    kinds = {"replicas": 0, "checkpoint": 0, "levels": 0, "duplex": 0, "shared": 0, "dag": 0, "speeds": 0, "deep": 0}
    for seed in range(400):
        plan = random_plan(random.Random(seed))
        assert violations(plan) == []
        graph = graph_of(plan)
        kinds["replicas"] += any(s.replicas > 1 for s in plan.allocation.stages)
        kinds["checkpoint"] += any(s.checkpoint for s in plan.allocation.stages)
        kinds["levels"] += len(plan.platform.levels) > 1
        kinds["duplex"] += plan.platform.full_duplex and len(graph.operations) > 2 * len(graph.stages)
        kinds["shared"] += not graph.contiguous
        kinds["dag"] += plan.chain.edges is not None
        kinds["speeds"] += any(d.speed.denominator == 3 for d in plan.platform.devices)
        kinds["deep"] += most_in_flight(graph, starts_of(plan.pattern), plan.pattern.period_ns) > 3
    assert min(kinds.values()) > 40, kinds


def test_any_change_of_a_figure_that_must_follow_is_caught():
    """Durations, kinds, stages, order, count: whatever is changed in a random plan, a sentence says so."""
    for seed in range(200):
        rng = random.Random(seed)
        plan = random_plan(rng)
        operations = plan.pattern.operations
        i = rng.randrange(len(operations))
        op = operations[i]
        only(with_op(plan, i, duration_ns=op.duration_ns + rng.choice((-1, 1))), label(op))
        only(with_op(plan, i, stage=op.stage + 1), f"operation {i} is")
        if i and op.duration_ns:
            early = operations[i - 1].start_ns
            assert any(label(op) in s and "before" in s for s in violations(with_op(plan, i, start_ns=early - 1)))
        cut = Pattern(plan.pattern.period_ns, operations[:i] + operations[i + 1 :])
        only(replace(plan, pattern=cut), f"has {len(operations) - 1} operations")


def moved(rng, starts, period):
    """Path-ordered starts with random delays: good or bad on every resource."""
    delay, result = 0, []
    for start in starts:
        delay += rng.choice((0, 0, 0, 1, rng.randint(0, 2 * period)))
        result.append(start + delay)
    return result


def test_exclusivity_equals_an_unrolled_sweep():
    """The circular test on one period against all operations of many periods laid out in time."""
    clean = dirty = 0
    for seed in range(300):
        rng = random.Random(seed)
        plan = random_plan(rng, optimizer=False)
        if seed % 3 == 0:  # forwards or backwards that take no time
            layers = tuple(replace(x, **{rng.choice(("forward_ns", "backward_ns")): 0}) for x in plan.chain.layers)
            plan = replace(plan, chain=replace(plan.chain, layers=layers))
            if any(graph_stage.total_ns == 0 for graph_stage in graph_of(plan).stages):
                continue
            plan = with_starts(plan, starts_of(plan.pattern))
        graph, period = graph_of(plan), plan.pattern.period_ns
        starts = moved(rng, starts_of(plan.pattern), period) if rng.random() < 0.7 else starts_of(plan.pattern)
        truth = {graph.resources[r].name for r in overlaps(graph, starts, period)}
        found = pattern_violations(graph, make_pattern(graph, starts, period))
        said = {r.name for r in graph.resources if any(r.name in s and ("overlaps" in s or "busy" in s) for s in found)}
        assert said == truth
        clean += not truth
        dirty += bool(truth)
    assert clean > 50
    assert dirty > 50


def test_verdict_equals_an_independent_judge():
    """Valid or not: path, sweep, weights table and sums in exact fractions against the validator, plan by plan."""
    verdicts = {True: 0, False: 0}
    for seed in range(250):
        rng = random.Random(seed)
        plan = random_plan(rng)
        change = rng.choice(("starts", "memory", "accumulate", "none"))
        if change == "starts":
            plan = with_starts(plan, moved(rng, starts_of(plan.pattern), plan.pattern.period_ns))
        elif change == "memory":
            device = rng.randrange(len(plan.platform))
            plan = with_memory(plan, device, plan.platform.devices[device].memory_bytes + rng.randint(-8, 1))
        elif change == "accumulate" and plan.policy.accumulate > 1 and plan.schedule.kind == "pattern":
            plan = with_policy(plan, accumulate=plan.policy.accumulate - rng.randint(0, 1))
            if operation_violations(graph_of(plan), plan.pattern):
                continue  # the optimizer's share of the backward has changed
        plan = replace(plan, lower_bounds=())
        verdict = independently_valid(plan)
        assert (violations(plan) == []) == verdict
        verdicts[verdict] += 1
    assert min(verdicts.values()) > 50, verdicts


def independently_valid(plan):
    graph, starts, period = graph_of(plan), starts_of(plan.pattern), plan.pattern.period_ns
    ends = [start + op.duration_ns for start, op in zip(starts, graph.operations, strict=True)]
    if any(late < end for end, late in zip(ends, starts[1:], strict=False)) or overlaps(graph, starts, period):
        return False
    peaks = peak_activations(graph, starts, period)
    place = {(op.kind, op.stage): i for i, op in enumerate(graph.operations)}
    deepest = 0
    entered = len(plan.allocation.stages[0].devices)
    first = -(-(ends[place["B", 0]] - starts[place["F", 0]]) // (entered * period)), entered
    for index, resource in enumerate(graph.resources):
        if resource.memory_bytes is None:
            continue
        need = peaks[index]
        load = Fraction(0)
        for s, (stage, cost) in enumerate(zip(plan.allocation.stages, graph.stages, strict=True)):
            if stage.devices != resource.devices:
                continue
            held = ends[place["B", s]] - starts[place["F", s]]
            own = -(-held // (len(stage.devices) * period))
            deepest = max(deepest, -(-held // period))
            replicas = len(stage.devices)
            need += weights_table(plan.policy, cost.weight_bytes, cost.parameters, own, replicas, first)
            need += cost.buffer_bytes
            r, gradient = stage.replicas, 2 * cost.parameters if plan.policy.precision == "mixed" else cost.weight_bytes
            level = next(
                k
                for k, size in enumerate(plan.platform.unit_sizes)
                if stage.devices[0] // size == stage.devices[-1] // size
            )
            bandwidth = min(x.bandwidth for x in plan.platform.levels[: level + 1])
            load += -(-Fraction(2 * (r - 1) * gradient * 10**9, r * bandwidth * max(r, plan.policy.accumulate)) // 1)
        if need > min(plan.platform.devices[d].memory_bytes for d in resource.devices) or load > period:
            return False
    return plan.policy.weights != "2bw" or deepest <= plan.policy.accumulate


def test_one_byte_less_is_too_little_and_one_ns_less_too_short():
    tight = 0
    for seed in range(150):
        rng = random.Random(seed)
        plan = random_plan(rng)
        graph = graph_of(plan)
        for index, resource in enumerate(graph.resources):
            if resource.is_link:
                continue
            use = resource_use(graph, starts_of(plan.pattern), plan.pattern.period_ns, index)
            if use.peak_bytes:
                short = with_memory(plan, rng.choice(resource.devices), use.peak_bytes - 1)
                only(replace(short, lower_bounds=()), f"{resource.name} needs", use.peak_bytes - 1)
                tight += 1
        floor = graph.period_floor_ns
        if floor > 1:
            shorter = make_pattern(graph, starts_of(plan.pattern), floor - 1)
            assert any("busy" in s or "all-reduce" in s for s in pattern_violations(graph, shorter))
    assert tight > 150


def test_time_may_be_shifted_and_the_period_is_not_a_matter_of_offsets():
    """Starting everything later by any time changes nothing: a pattern has no first period."""
    for seed in range(100):
        rng = random.Random(seed)
        plan = random_plan(rng)
        later = rng.randint(0, 3 * plan.pattern.period_ns)
        assert violations(with_starts(plan, [start + later for start in starts_of(plan.pattern)])) == []


def test_a_pattern_at_a_longer_period_stays_valid_when_placed_anew():
    for seed in range(60):
        rng = random.Random(seed)
        plan = random_plan(rng, weights=("stash", "latest"))
        graph = graph_of(plan)
        pattern = greedy_pattern(rng, graph, graph.path_ns + graph.period_floor_ns, slack=0)
        assert pattern is not None
        assert violations(fitted(rng, plan.chain, plan.platform, plan.policy, plan.allocation.stages, pattern)) == []
