"""No drained plan whose stages have GPUs of their own is sooner than its bound says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases.drained import drained_instance, soonest

from pipeplan.check.bounds.drained.proofs import drained_bound, quoted
from pipeplan.deadline import NEVER, Deadline, OutOfTime
from pipeplan.integers import ceil_div
from pipeplan.plan import Stage
from pipeplan.planner.drained.run import drained_run
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.schedule.kinds import KINDS


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_sooner(seed: int) -> None:
    """More of them: scripts/checks/drained.py."""
    problem = drained_instance(seed)
    count = problem.policy.accumulate or 1
    times = soonest(problem)
    if not times:
        return
    best = min(times.values())
    found = drained_bound(problem)
    assert found is not None
    assert found.period_ns <= ceil_div(best, count)
    for kind, ns in times.items():
        own = drained_bound(problem, kind)
        assert own is not None
        assert own.period_ns <= ceil_div(ns, count)
        assert own.schedule == kind
        assert own.period_ns >= found.period_ns - ceil_div(found.period_ns, 2048) or KINDS[kind].splits


def test_it_takes_no_longer_than_it_may_and_says_nothing_of_what_cannot_be() -> None:
    late = replace(drained_instance(0), deadline=Deadline.within(0))
    with pytest.raises(OutOfTime):
        drained_bound(late)
    assert list(quoted(late, "1f1b")) == []
    heavy = Chain("heavy", (Layer("l", 1, 2, 10, 0), Layer("m", 1, 2, 10, 0)), 0)
    assert drained_bound(replace(late, chain=heavy, platform=Platform.flat(2, 9, 10**9), deadline=NEVER)) is None


def test_it_counts_what_fills_and_drains() -> None:
    """Four layers of 1 + 2 on four GPUs of their own, no replicas: (m + p - 1) of 3, which is optimal."""
    layers = tuple(Layer(f"l{i}", 1000, 2000, 0, 0) for i in range(4))
    chain, platform = Chain("even", layers, 0), Platform.flat(4, 10**9, 10**9)
    problem = Problem(chain, platform, Policy("flush", 8), replicas=False, checkpointing="none")
    run = drained_run(problem, tuple(Stage(i, i + 1, (i,)) for i in range(4)), "1f1b")
    assert run is not None
    assert run.makespan_ns == 11 * 3000
    found = drained_bound(problem, "1f1b")
    assert found is not None
    assert ceil_div(11 * 3000, 8) - 10 <= found.period_ns <= ceil_div(11 * 3000, 8)


def test_it_counts_what_messages_take_of_gpus() -> None:
    """Two layers of 1 + 2 on GPUs that a message takes 0.5: 8 times 4 at the first one, with the second's own between
    its first forward and its last backward."""
    layers = tuple(Layer(f"l{i}", 1000, 2000, 0, 1) for i in range(2))
    platform = replace(Platform.flat(2, 10**9, 10**18), overhead_ns=500)
    problem = Problem(Chain("two", layers, 0), platform, Policy("flush", 8), replicas=False, checkpointing="none")
    found = drained_bound(problem, "1f1b")
    run = drained_run(problem, tuple(Stage(i, i + 1, (i,)) for i in range(2)), "1f1b")
    assert found is not None
    assert run is not None
    assert 4 * 1000 <= found.period_ns <= ceil_div(run.makespan_ns, 8)
