import random
from dataclasses import replace

import pytest
from cases.plans import graph_of, random_plan

from pipeplan.check.evaluate import evaluate, evaluate_simulated, gap
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.deadline import NEVER
from pipeplan.plan import Allocation, Bound, Plan, Provenance, Schedule, Stage
from pipeplan.problem import Chain, Layer, Platform, Policy, SharedWeights
from pipeplan.schedule.pattern import device_uses, make_pattern, most_in_flight, starts_of
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from pipeplan.schedule.program import unroll
from pipeplan.schedule.programs import deciding as steady
from pipeplan.schedule.programs.deciding import nf1b
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import flush_makespan_ns, run_uses


def drained(stages, microbatches, layers=None, weights=0, transfer=0):
    """A flush plan of layers of F 1 and B 2 with the 1F1B* pattern, or one microbatch at a time on shared devices."""
    count = layers or max(stage.stop for stage in stages)
    chain = Chain("c", tuple(Layer(f"{i}", 1, 2, weights, transfer, 1) for i in range(count)), 0)
    platform = Platform.flat(1 + max(d for stage in stages for d in stage.devices), 10**6, 10**9)
    policy = Policy("flush", accumulate=microbatches)
    graph = stage_graph(chain, platform, policy, stages)
    if graph.contiguous:
        pattern = best_one_f_one_b_star(graph)
    else:
        starts = [sum(op.duration_ns for op in graph.operations[:i]) for i in range(len(graph.operations))]
        pattern = make_pattern(graph, starts, graph.path_ns)
    allocation = Allocation(tuple(stages))
    return Plan(chain, platform, policy, allocation, pattern, (), Provenance("hand"), Schedule("flush", microbatches))


@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_a_drained_mini_batch_fills_and_drains(microbatches):
    plan = drained([Stage(i, i + 1, (i,)) for i in range(3)], microbatches)
    result = evaluate(plan)
    assert result.makespan_ns == (microbatches + 2) * 3
    assert result.period_ns == -(-result.makespan_ns // microbatches)


def test_replicas_reduce_their_gradients_after_the_last_backward():
    # 4 microbatches in two rounds of 3 ns, then 2(r-1)/r * 50 bytes at 1 byte/ns
    assert evaluate(drained([Stage(0, 1, (0, 1))], 4, weights=50)).makespan_ns == 6 + 52
    # the load per update is rounded up per microbatch: 50 / 4 = 12.5 -> 13, four times
    assert evaluate(drained([Stage(0, 1, (0, 1))], 5, weights=50)).makespan_ns == 9 + 50
    assert evaluate(drained([Stage(0, 1, (0, 1, 2))], 1, weights=0)).makespan_ns == 3  # two replicas have nothing


def test_stages_of_the_same_devices_reduce_one_after_the_other():
    stages = [Stage(0, 1, (0, 1)), Stage(1, 2, (0, 1))]
    whole = evaluate(drained([Stage(0, 2, (0, 1))], 2, weights=50)).makespan_ns
    assert whole == 6 + 100
    # the second stage's backward ends at 4, the first one's at 6: 4 + 50 + 50
    assert evaluate(drained(stages, 2, weights=50)).makespan_ns == 104


def test_an_all_reduce_hides_behind_the_drain():
    """The last stage is done first; its gradients travel while the first stage is still running backward."""
    stages = [Stage(0, 3, (0,)), Stage(3, 4, (1, 2))]
    alone = evaluate(drained(stages, 3, weights=0)).makespan_ns
    assert evaluate(drained(stages, 3, weights=3)).makespan_ns == alone
    assert evaluate(drained(stages, 3, weights=300)).makespan_ns > alone + 200


def tied(plan, *pairs):
    return replace(plan, chain=replace(plan.chain, tied=pairs))


def test_gradients_of_weights_in_several_stages_are_summed_once_more_over_all_of_them():
    """A ring of the holders, when the last of them is done, instead of the one over each stage's replicas."""
    apart = drained([Stage(i, i + 1, (i,)) for i in range(3)], 4, weights=50)
    alone = evaluate(apart).makespan_ns
    assert evaluate(tied(apart, (0, 2))).makespan_ns == alone + 50
    assert evaluate(tied(apart, (0, 1), (1, 2))).makespan_ns == alone + 67  # 4/3 of 50
    assert evaluate(tied(apart, (1, 2))).makespan_ns == alone - 2 + 50  # stage 1 is done 2 ns before stage 0
    together = drained([Stage(0, 2, (0,)), Stage(2, 3, (1,))], 4, weights=50)
    assert evaluate(tied(together, (0, 1))).makespan_ns == evaluate(together).makespan_ns
    # two replicas of the first stage sum their 50 bytes in 50 ns; three devices in 67
    replicated = drained([Stage(0, 1, (0, 1)), Stage(1, 2, (2,))], 4, weights=50)
    found = evaluate(tied(replicated, (0, 1))).makespan_ns
    assert found == evaluate(replicated).makespan_ns + 67 - 50


def test_weights_on_the_same_devices_are_summed_and_held_once():
    one = [Stage(0, 1, (0, 1)), Stage(1, 2, (2,)), Stage(2, 3, (0, 1))]
    plan = drained(one, 2, weights=50)
    assert evaluate(tied(plan, (0, 2))).makespan_ns == evaluate(plan).makespan_ns
    assert [stage.update_ns for stage in graph_of(tied(plan, (0, 2))).stages] == [50, 0, 50]
    assert [stage.update_ns for stage in graph_of(tied(plan, (0, 1), (1, 2))).stages] == [50 + 67 - 50, 67, 50]
    known = tied(plan, (0, 2))
    known = replace(known, chain=replace(known.chain, shared=(SharedWeights((0, 2), 50),)))
    assert [(stage.update_ns, stage.weight_bytes) for stage in graph_of(known).stages] == [(50, 50), (0, 50), (0, 0)]
    assert [x.weights_bytes for x in evaluate(known).devices] == [100, 100, 100]
    assert [x.weights_bytes for x in evaluate(tied(plan, (0, 2))).devices] == [200, 200, 100]


def test_the_smallest_of_the_tied_layers_says_what_they_share():
    plan = tied(drained([Stage(i, i + 1, (i,)) for i in range(3)], 4, weights=50), (0, 2))
    layers = list(plan.chain.layers)
    layers[0] = replace(layers[0], weight_bytes=400)
    plan = replace(plan, chain=replace(plan.chain, layers=tuple(layers)))
    assert [stage.update_ns for stage in graph_of(plan).stages] == [50, 0, 50]
    mixed = replace(plan.policy, precision="mixed")  # 2 bytes for each of 12 parameters
    assert [stage.update_ns for stage in graph_of(replace(plan, policy=mixed)).stages] == [24, 0, 24]


def test_figures_follow_from_stages_and_starts():
    for seed in range(100):
        rng = random.Random(seed)
        plan = random_plan(rng)
        graph, starts, period = graph_of(plan), starts_of(plan.pattern), plan.pattern.period_ns
        result = evaluate(replace(plan, provenance=Provenance("other", seconds=3.0), lower_bounds=()))
        assert result.graph == graph
        assert result.devices == tuple(device_uses(graph, starts, period, plan.platform))
        assert result.most_in_flight == most_in_flight(graph, starts, period)
        if plan.schedule.kind == "pattern":
            assert result.makespan_ns is None
            assert (result.period_ns == period) if not graph.summing else (result.period_ns >= period)
            continue
        timeline = simulate(unroll(graph, plan.pattern, plan.policy.accumulate))
        assert result.makespan_ns == flush_makespan_ns(timeline)
        load = sum(graph.sync_periods_ns) * max(stage.update_interval for stage in graph.stages)
        steps = max(sum(x.step_ns for x in graph.stages if x.resource == own) for own in range(len(graph.resources)))
        assert timeline.makespan_ns <= result.makespan_ns <= timeline.makespan_ns + load + steps
        assert result.period_ns * plan.policy.accumulate >= result.makespan_ns


def test_the_gap_is_relative_to_the_bound():
    assert gap(150, Bound("any", True, "none", 100)) == 0.5
    assert gap(100, Bound("any", True, "none", 100)) == 0.0


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("limit", [1, 3])
def test_gradients_of_a_mini_batch_are_received_as_one_message(batch, limit):
    """Each end of a cut has room for the activations of one microbatch and the gradients of all."""
    chain = Chain("c", tuple(Layer(f"{i}", 3, 4, 0, size, 1) for i, size in enumerate((7, 5, 0))), 0)
    stages = tuple(Stage(i, i + 1, (i,)) for i in range(3))
    policy = Policy("latest", accumulate=batch)
    schedule = Schedule("nf1b", batch, limit)
    plan = Plan(chain, Platform.flat(3, 10**6), policy, Allocation(stages), None, (), Provenance("hand"), schedule)
    assert [use.buffer_bytes for use in evaluate(plan).devices] == [x * (1 + batch) for x in (7, 7 + 5, 5)]


@pytest.mark.parametrize(("vertical_sync", "weights"), [(False, [10, 10, 10]), (True, [50, 50, 50])])
def test_a_run_too_short_to_repeat_is_charged_what_the_limit_admits(monkeypatch, vertical_sync, weights):
    """Each stage is a little slower than the one before, so that more and more wait until the limit is reached."""
    monkeypatch.setattr(steady, "MOST_STEPS", 0)
    chain = Chain("slower", tuple(Layer(f"{i}", 300 + i, 600 + i, 5, 3, 7) for i in range(3)), 0)
    stages, platform = tuple(Stage(i, i + 1, (i,)) for i in range(3)), Platform.flat(3, 10**6, 10**9)
    graph = stage_graph(chain, platform, Policy("latest", 2, vertical_sync=vertical_sync), stages)
    run = steady.steady_nf1b(graph, 2, 8)
    assert (run.repeats, run.timeline.program.microbatches) == (False, 2 * (4 * 8 + 4))
    result = evaluate_simulated(graph, Schedule("nf1b", 2, 8), platform, NEVER)
    assert [use.in_flight for use in result.devices] == [(16,), (16,), (2,)]
    assert [use.activation_bytes for use in result.devices] == [7 * 16, 7 * 16, 7 * 2]
    assert [use.weights_bytes for use in result.devices] == weights
    seen = [use.weights_bytes for use in run_uses(simulate(nf1b(graph, 400, 2, 8)), platform)]
    assert all(most <= charged for most, charged in zip(seen, weights, strict=True))
    assert result.most_in_flight == 16
    assert result.period_ns == 302 + 602
