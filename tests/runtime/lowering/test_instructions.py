"""What is decided before a run: orders, versions, updates, and that no order deadlocks. No torch."""

import random
from collections import Counter, deque
from dataclasses import replace

import pytest
from cases.chains import random_problem
from cases.lowering import chain_of, plan_of

from pipeplan.check.evaluate import evaluate
from pipeplan.cost import memory_model
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import BadInput, Infeasible, InvalidPlan
from pipeplan.plan import Schedule, Stage
from pipeplan.planner.plan import make_plan
from pipeplan.problem import WEIGHTS, Platform, Policy
from pipeplan.runtime.lowering.instructions import (
    Agree,
    Backward,
    Forward,
    Receive,
    Reduce,
    ReduceTied,
    Send,
    Update,
    most_versions,
    sentence,
    version_uses,
)
from pipeplan.runtime.lowering.lowered import lowered
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.lowering.segments import Repeat, Repeated
from pipeplan.schedule.pattern import device_uses, in_flight, most_in_flight, starts_of
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from pipeplan.schedule.program import unroll
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.weight_versions import weight_policy


def lists_of(chain, stages, *, weights, interval, microbatches):
    """The stage graph, and every rank's instructions in the order of 1F1B*."""
    devices = 1 + max(d for stage in stages for d in stage.devices)
    platform = Platform.flat(devices, 10**12, 10**9)
    graph = stage_graph(chain, platform, Policy("flush", accumulate=interval), stages)
    pattern = best_one_f_one_b_star(graph)
    program = unroll(graph, pattern, microbatches)
    rules = WEIGHTS["stash"].synced if weights == "vertical" else WEIGHTS[weights]
    return graph, lowered(simulate(program), rules, interval, {d: d for d in range(devices)})


def short(instructions):
    """``F0v0 B0v0 U1``: a list as a staircase would be drawn."""
    words = []
    for x in instructions:
        match x:
            case Forward(_, m, v):
                words.append(f"F{m}v{v}")
            case Backward(_, m, v):
                words.append(f"B{m}v{v}")
            case Reduce(_, v):
                words.append(f"R{v}")
            case Update(_, v):
                words.append(f"U{v}")
            case Send(kind, _, m, peer):
                words.append(f"{kind.lower()}{m}>{peer}")
            case Receive(kind, _, m, peer):
                words.append(f"{kind.lower()}{m}<{peer}")
    return " ".join(words)


TWO_STAGES = [Stage(0, 1, (0,)), Stage(1, 2, (1,))]


def test_flush_of_two_stages_is_1f1b():
    _, lists = lists_of(chain_of([(1, 2), (1, 2)]), TWO_STAGES, weights="flush", interval=3, microbatches=3)
    assert short(lists[0]) == "F0v0 f0>1 F1v0 f1>1 b0<1 B0v0 b1<1 F2v0 f2>1 B1v0 b2<1 B2v0 U1"
    assert short(lists[1]) == "f0<0 F0v0 f1<0 B0v0 b0>0 F1v0 B1v0 b1>0 f2<0 F2v0 B2v0 b2>0 U1"


@pytest.mark.parametrize(
    ("weights", "first", "last"),
    [
        (
            "2bw-uniform",
            "F0v0 F1v0 B0v0 F2v0 B1v0 U1 F3v0 B2v0 F4v1 B3v0 U2 F5v1 B4v1 B5v1 U3",
            "F0v0 B0v0 F1v0 B1v0 U1 F2v0 B2v0 F3v0 B3v0 U2 F4v1 B4v1 F5v1 B5v1 U3",
        ),
        (
            "2bw",
            "F0v0 F1v0 B0v0 F2v0 B1v0 U1 F3v1 B2v0 F4v1 B3v1 U2 F5v2 B4v1 B5v2 U3",
            "F0v0 B0v0 F1v0 B1v0 U1 F2v1 B2v1 F3v1 B3v1 U2 F4v2 B4v2 F5v2 B5v2 U3",
        ),
    ],
)
def test_2bw_of_two_stages(weights, first, last):
    _, lists = lists_of(chain_of([(1, 2), (1, 2)]), TWO_STAGES, weights=weights, interval=2, microbatches=6)
    passes = [[x for x in rank if not isinstance(x, Send | Receive)] for rank in lists]
    assert list(map(short, passes)) == [first, last]


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_stashing_uses_the_versions_of_the_paper(workers):
    """Stage l (from 1) of n uses w^(t-n+l), with vertical sync w^(t-n+1); it stashes n-l+1 versions (PipeDream 3.3)."""
    stages = [Stage(i, i + 1, (i,)) for i in range(workers)]
    chain = chain_of([(10, 20)] * workers)
    for weights in ("stash", "vertical"):
        _, lists = lists_of(chain, stages, weights=weights, interval=1, microbatches=4 * workers)
        for s, rank in enumerate(lists):
            behind = workers - 1 - (s if weights == "stash" else 0)
            for x in rank:
                if isinstance(x, Forward | Backward):
                    assert x.version == max(x.microbatch - behind, 0)
            assert live_versions(rank, s) == (workers - s if weights == "stash" else workers)


def test_stashing_of_two_stages():
    chain = chain_of([(1, 2), (1, 2)])
    _, lists = lists_of(chain, TWO_STAGES, weights="stash", interval=1, microbatches=4)
    passes = [[x for x in rank if not isinstance(x, Send | Receive)] for rank in lists]
    assert short(passes[0]) == "F0v0 F1v0 B0v0 U1 F2v1 B1v0 U2 F3v2 B2v1 U3 B3v2 U4"
    assert short(passes[1]) == "F0v0 B0v0 U1 F1v1 B1v1 U2 F2v2 B2v2 U3 F3v3 B3v3 U4"


def test_newest_weights_in_either_pass_keep_one_version():
    chain = chain_of([(1, 2), (1, 2)])
    _, lists = lists_of(chain, TWO_STAGES, weights="latest", interval=1, microbatches=4)
    passes = [[x for x in rank if not isinstance(x, Send | Receive)] for rank in lists]
    assert short(passes[0]) == "F0v0 F1v0 B0v0 U1 F2v1 B1v1 U2 F3v2 B2v2 U3 B3v3 U4"


def test_replicas_sum_and_update_at_one_place_of_the_total_order():
    stages = [Stage(0, 1, (0, 1)), Stage(1, 2, (2,))]
    _, lists = lists_of(chain_of([(2, 4), (1, 2)]), stages, weights="flush", interval=4, microbatches=4)
    for rank in (0, 1):
        words = short(lists[rank]).split()
        assert words[-2:] == ["R1", "U1"]
        assert Counter(w[:2] for w in words if w[0] in "FB") == Counter(
            {f"{kind}{m}": 1 for kind in "FB" for m in range(rank, 4, 2)}
        )
    assert "R1" not in short(lists[2])


def test_repeated_counts_microbatches_and_versions_on():
    body = [Forward(0, 1, 0), Send("F", 0, 1, 1), Backward(0, 1, 0), Reduce(0, 1), Update(0, 1)]
    assert list(Repeated([Repeat(tuple(body), 2, 2, 1)]))[5:] == [
        Forward(0, 3, 1), Send("F", 0, 3, 1), Backward(0, 3, 1), Reduce(0, 2), Update(0, 2),
    ]  # fmt: skip


def test_sentences_name_the_operation():
    assert sentence(Forward(1, 7, 0)) == "the forward of microbatch 7 on stage 1"
    assert sentence(Receive("B", 0, 3, 1)) == "stage 0's receive of the gradient of microbatch 3 from rank 1"
    assert sentence(Update(2, 5)) == "update 5 of stage 2"


def deadlocks(lists):
    """Walk all lists as if every send waited for its receive, and sums and updates for all replicas; True when stuck.

    The strictest reading of any transport: a run that ends under it ends under every other.
    """
    queues = [deque(rank) for rank in lists]

    def heads():
        return [queue[0] if queue else None for queue in queues]

    moved = True
    while moved:
        moved = False
        for rank, head in enumerate(heads()):
            match head:
                case Forward() | Backward():
                    queues[rank].popleft()
                    moved = True
                case Send(kind, stage, m, peer):
                    back = stage + 1 if kind == "F" else stage - 1
                    if queues[peer] and queues[peer][0] == Receive(kind, back, m, rank):
                        queues[rank].popleft()
                        queues[peer].popleft()
                        moved = True
                case Reduce() | ReduceTied() | Update():
                    holders = [r for r, q in enumerate(queues) if head in q]
                    if all(queues[r][0] == head for r in holders):
                        for r in holders:
                            queues[r].popleft()
                        moved = True
    return any(queues)


def random_stages(rng, layers, devices):
    """Contiguous stages, some replicated, on all of ``devices`` devices."""
    count = rng.randint(1, min(layers, devices))
    cuts = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    marks = [0, *sorted(rng.sample(range(1, devices), count - 1)), devices]
    return [Stage(cuts[i], cuts[i + 1], tuple(range(marks[i], marks[i + 1]))) for i in range(count)]


@pytest.mark.parametrize("seed", range(60))
def test_random_plans_follow_the_rules_of_versions_and_never_deadlock(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(2, 6), rng.randint(1, 5))
    stages = random_stages(rng, len(problem.chain), len(problem.platform))
    platform = Platform.flat(len(problem.platform), 10**12, 10**9)
    graph = stage_graph(problem.chain, platform, Policy("flush", accumulate=1), stages)
    pattern = best_one_f_one_b_star(graph)
    assert pattern is not None
    interval = most_in_flight(graph, starts_of(pattern), pattern.period_ns)
    program = unroll(graph, pattern, 4 * interval)
    for weights in ("2bw", "2bw-uniform", "flush"):
        if weights == "flush":
            program = unroll(graph, pattern, interval)
        lists = lowered(simulate(program), WEIGHTS[weights], interval, {d: d for d in range(len(platform))})
        assert not deadlocks(lists)
        for rank in lists:
            for x in rank:
                if isinstance(x, Forward | Backward) and weights != "2bw":
                    k = x.microbatch + 1  # the field counts from 1 here
                    assert x.version == (max((k - 1) // interval - 1, 0) if weights == "2bw-uniform" else 0)
            for s in {x.stage for x in rank if isinstance(x, Update)}:
                made, seen = 0, {}
                for x in rank if weights == "2bw" else ():  # what the stage has made, for both passes
                    made += isinstance(x, Update) and x.stage == s
                    if isinstance(x, Forward | Backward) and x.stage == s:
                        assert x.version == seen.setdefault(x.microbatch, made)
                assert [x.version for x in rank if isinstance(x, Update) and x.stage == s] == list(
                    range(1, program.microbatches // interval + 1)
                )
                assert sum(version_uses(rank, s).values()) == sum(
                    isinstance(x, Forward | Backward) and x.stage == s for x in rank
                )
                assert live_versions(rank, s) <= (1 if weights == "flush" else 2)


@pytest.mark.parametrize("weights", ["stash", "vertical"])
@pytest.mark.parametrize("seed", range(40))
def test_stashing_keeps_the_versions_that_the_memory_model_counts(seed, weights):
    """Exactly as many without replicas; with them at most, for the order of their updates depends on the times."""
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(2, 6), rng.randint(1, 5))
    stages = random_stages(rng, len(problem.chain), len(problem.platform))
    platform = Platform.flat(len(problem.platform), 10**12, 10**9)
    policy = Policy("stash", accumulate=rng.randint(1, 4), vertical_sync=weights == "vertical")
    graph = stage_graph(problem.chain, platform, Policy("flush", accumulate=1), stages)
    pattern = best_one_f_one_b_star(graph)
    starts, period = starts_of(pattern), pattern.period_ns
    most = max(stage.replicas for stage in stages)
    interval = policy.update_interval(most)
    program = unroll(graph, pattern, 12 * interval)
    ranks = {d: d for d in range(len(platform))}
    rules = WEIGHTS["stash"].synced if weights == "vertical" else WEIGHTS["stash"]
    lists = lowered(simulate(program), rules, interval, ranks)
    assert not deadlocks(lists)
    held = [in_flight(graph, starts, period, s, starts[graph.position["F", s]]) for s in range(len(stages))]
    graph = replace(graph, policy=policy)
    for s, stage in enumerate(stages):
        counted = graph.versions(s, held[s], held[0])
        for d in stage.devices:
            kept = live_versions(lists[d], s)
            assert kept <= counted
            if most == 1:
                assert kept == counted


def test_devices_of_planned_replicas_have_room_for_their_versions():
    """A device's memory, as the planner fills it, holds every version that its instructions keep."""
    seen = Counter()
    for seed in range(26):
        rng = random.Random(seed)
        problem = random_problem(rng, rng.randint(2, 5), rng.randint(2, 4), levels=True, saved=True)
        policy = Policy("stash", accumulate=rng.choice((None, 1, 2, 3)), vertical_sync=rng.random() < 0.3)
        try:
            plan = make_plan(problem.with_policy(policy), "contiguous").plan
        except Infeasible:
            continue
        script = lower_run(plan, 24)
        graph, uses = script.graph, evaluate(plan).devices
        for rank, device in enumerate(script.devices):
            (s,) = script.stages_of(rank)
            stage = graph.stages[s]
            kept = most_versions(list(script.instructions[rank]), s)
            weights = memory_model.versioned_bytes(plan.policy, stage.weight_bytes, stage.parameters, kept)
            use = uses[device]
            assert weights <= use.weights_bytes
            assert weights + use.buffer_bytes + use.activation_bytes <= problem.platform.devices[device].memory_bytes
            replicas = plan.allocation.stages[s].replicas
            seen["replicas"] += replicas > 1
            seen["more than in flight"] += replicas > 1 and kept > max(use.in_flight)
    assert seen["replicas"] >= 15
    assert seen["more than in flight"] >= 1


@pytest.mark.parametrize("seed", range(40))
def test_vertical_sync_keeps_on_every_stage_what_the_first_keeps(seed):
    """Exactly what the memory model counts."""
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(2, 6), rng.randint(1, 5))
    stages = [replace(stage, devices=stage.devices[:1]) for stage in random_stages(rng, len(problem.chain), 5)]
    platform = Platform.flat(5, 10**12, 10**9)
    graph = stage_graph(problem.chain, platform, Policy("stash", accumulate=1, vertical_sync=True), stages)
    pattern = best_one_f_one_b_star(graph)
    program = unroll(graph, pattern, 16)
    ranks = {stage.devices[0]: rank for rank, stage in enumerate(stages)}
    lists = lowered(simulate(program), WEIGHTS["stash"].synced, 1, ranks)
    uses = device_uses(graph, starts_of(pattern), pattern.period_ns, platform)
    for s, stage in enumerate(graph.stages):
        kept = live_versions(lists[s], s)
        assert kept == uses[stages[0].devices[0]].in_flight[0]
        weights = uses[stages[s].devices[0]].weights_bytes
        assert weights == memory_model.versioned_bytes(graph.policy, stage.weight_bytes, stage.parameters, kept)


def live_versions(instructions, stage):
    """The most versions that one rank must keep: those that later passes use, and the newest."""
    own = [x for x in instructions if not isinstance(x, Send | Receive | Reduce) and x.stage == stage]
    newest, most = 0, 1
    for place, x in enumerate(own):
        if isinstance(x, Update):
            newest = x.version
        later = {y.version for y in own[place + 1 :] if not isinstance(y, Update) and y.version <= newest}
        most = max(most, len(later | {newest}))
    return most


def test_too_few_microbatches_per_update_are_refused():
    with pytest.raises(InvalidPlan, match="would need"):
        lists_of(
            chain_of([(1, 2)] * 4),
            [Stage(i, i + 1, (i,)) for i in range(4)],
            weights="2bw",
            interval=1,
            microbatches=12,
        )


def test_prepare_maps_ranks_to_used_devices():
    stages = [Stage(0, 1, (1,)), Stage(1, 2, (3,))]
    script = lower_run(plan_of(chain_of([(1, 2), (1, 2)]), stages, Policy("2bw", accumulate=1)), 3)
    assert script.devices == (1, 3)
    assert script.microbatches == 3
    assert [script.stages_of(rank) for rank in (0, 1)] == [[0], [1]]
    assert [script.ranks_of(s) for s in (0, 1)] == [[0], [1]]
    assert {x.peer for x in script.instructions[0] if isinstance(x, Send)} == {1}


def test_prepare_of_a_drained_schedule_repeats_its_mini_batch():
    chain = chain_of([(1, 2), (1, 2)])
    plan = plan_of(chain, TWO_STAGES, Policy("flush", accumulate=2), Schedule("flush", 2))
    script = lower_run(plan, 3)
    assert script.drains
    assert script.program.microbatches == 2
    assert [x.version for x in script.instructions[0] if isinstance(x, Update)] == [1, 2, 3]
    assert script.planned_period_ns == 6  # one at a time, in this pattern


def test_mixed_precision_agrees_once_on_the_updates_of_all_stages():
    chain = replace(chain_of([(1, 2), (1, 2)]), dtype="bfloat16")
    plan = plan_of(chain, (Stage(0, 1, (0, 1)), Stage(1, 2, (2,))), Policy("flush", accumulate=2, precision="mixed"))
    plan = replace(plan, schedule=Schedule("flush", 2))
    script = lower_run(plan, 2)
    for instructions in script.instructions:
        ends = [
            i for i, x in enumerate(instructions) if isinstance(x, Forward | Backward) and i + 1 < len(instructions)
        ]
        for version in (1, 2):
            place = instructions.index(Agree(version))
            passes = [i for i in ends if script.minibatch(instructions[i]) < version]
            updates = [x for x in instructions[place:] if isinstance(x, Reduce | Update) and x.version == version]
            assert max(passes) < place
            assert isinstance(updates[-1], Update)
            assert script.minibatch(Agree(version)) == version - 1
    assert [type(x) for x in script.instructions[0][-3:]] == [Reduce, Agree, Update]  # the sum goes on meanwhile


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": Policy("2bw", 1, vertical_sync=True)}, "vertical sync goes with --weights stash or latest"),
        ({"policy": Policy("2bw")}, "accumulate is not decided"),
        ({"policy": Policy("2bw", 1, precision="mixed")}, "profiled in float32.*--dtype bfloat16"),
        ({"pattern": None}, "has no pattern"),
        ({"schedule": Schedule("message-driven")}, "the schedule drains every mini-batch, which is for weights flush"),
        (
            {"chain": replace(chain_of([(1, 2), (1, 2)]), tied=((0, 1),)), "policy": Policy("stash", 1)},
            r"layers 0 \(layer0\) and 1 \(layer1\)",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(change, words):
    plan = plan_of(chain_of([(1, 2), (1, 2)]), TWO_STAGES, Policy("2bw", accumulate=1))
    with pytest.raises(BadInput, match=words):
        lower_run(replace(plan, **change), 1)


def test_steps_must_be_positive():
    plan = plan_of(chain_of([(1, 2), (1, 2)]), TWO_STAGES, Policy("2bw", accumulate=1))
    with pytest.raises(BadInput, match="steps: 0"):
        lower_run(plan, 0)


def test_vertical_sync_has_policies_of_its_own():
    assert weight_policy(Policy("stash", vertical_sync=True)) is WEIGHTS["stash"].synced
    assert weight_policy(Policy("latest", vertical_sync=True)) is WEIGHTS["latest"].synced
    assert weight_policy(Policy("latest")) is WEIGHTS["latest"]
