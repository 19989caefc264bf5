"""No stages that are placed like a V, or go round and round, drain a mini-batch sooner than their bound says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases.drained import drained_instance, soonest_placed

from pipeplan.check.bounds import any_bound
from pipeplan.check.bounds.drained.proofs import proved, quoted, shape_bound
from pipeplan.check.targets import Shape
from pipeplan.deadline import Deadline
from pipeplan.integers import ceil_div
from pipeplan.plan import Stage
from pipeplan.planner.claims import derived
from pipeplan.planner.drained.run import drained_run
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem


@pytest.mark.parametrize("seed", [0, 4, 6])  # blocking messages and profiles of their own among them
def test_no_placed_stages_are_sooner(seed: int) -> None:
    """More of them: scripts/checks/drained.py --placed."""
    problem = drained_instance(seed, more=1, tied=seed == 0)
    for kind, best in soonest_placed(problem, ("zbv", "interleaved", "interleaved-zb")).items():
        for bound in (proved(problem, "any", kind), any_bound(problem)):
            assert bound is not None
            assert bound.period_ns <= ceil_div(best, problem.policy.accumulate or 1)


def test_whole_layers_what_fills_and_what_fits_count() -> None:
    layers = tuple(Layer(f"l{i}", 1000, 2000, 4, 1, saved_bytes=10, backward_weight_ns=1000) for i in range(9))
    problem = Problem(Chain("nine", layers, 1), Platform.flat(4, 10**9, 10**18), Policy("flush", 8), replicas=False)
    bound = proved(problem, "any", "zbv")
    assert bound is not None
    assert (bound.allocation, bound.schedule, bound.replicas) == ("any", "zbv", False)
    assert 9000 <= bound.period_ns <= 9010  # one GPU has three of nine layers, and may be the first
    assert any_bound(problem).period_ns >= 27000 // 4
    loop = proved(problem, "any", "interleaved")
    assert loop is not None
    assert 9000 <= loop.period_ns <= 9010
    one = proved(replace(problem, chain=replace(problem.chain, layers=layers[:8])), "any", "v-half")
    assert one is not None
    assert one.period_ns > 6000 + 3 * 1000 // 8 - 10  # three ranks before the last begin
    full = proved(replace(problem, platform=Platform.flat(4, 100, 10**18), checkpointing="segments"), "any", "zbv")
    assert full is not None
    assert full.period_ns > bound.period_ns  # eight activations of ten bytes don't fit
    assert proved(replace(problem, platform=Platform.flat(4, 11, 10**18)), "any", "zbv") is None
    late = replace(problem, deadline=Deadline.within(0))
    assert list(quoted(late, "zbv")) == []
    assert [x.allocation for x in quoted(problem, "1f1b")] == ["contiguous"] * 2


def test_updates_go_on_while_the_last_gradient_goes_back() -> None:
    """The second rank sums its gradients, 4000, and steps in 500, beside the first one's last backward of 2000."""
    weights = Layer("b", 1000, 2000, 4000, 0, optimizer_ns=500)
    chain = Chain("four", tuple(weights if i == 1 else Layer("a", 1000, 2000, 0, 0) for i in range(4)), 0)
    problem = Problem(chain, Platform.flat(4, 10**9, 10**9), Policy("flush", 4), checkpointing="none")
    run = drained_run(problem, tuple(Stage(i, i + 1, ((0, 1), (2, 3))[i % 2]) for i in range(4)), "interleaved")
    assert run is not None
    assert run.makespan_ns == shape_bound(problem, "interleaved", Shape(2, 2, 2), np.arange(5)) == 17_500


def test_a_plan_quotes_it_and_a_file_that_says_more_is_refuted() -> None:
    layers = tuple(Layer(f"l{i}", 1000, 2000, 4, 1, saved_bytes=10, backward_weight_ns=1000) for i in range(4))
    problem = Problem(Chain("four", layers, 1), Platform.flat(2, 10**9, 10**18), Policy("flush", 4), replicas=False)
    plan = make_plan(problem, settings=Settings(), effort="quick", schedule="zbv").plan
    own, free = plan.lower_bounds
    assert (own.schedule, free.schedule) == ("zbv", None)
    claimed = replace(plan, lower_bounds=(replace(own, claimed=True), free))
    found, why = derived(claimed)
    assert (found.lower_bounds, why) == (plan.lower_bounds, [])
    more = replace(own, claimed=True, period_ns=own.period_ns + 1)
    assert "can be derived" in derived(replace(plan, lower_bounds=(more, free)))[1][0]
