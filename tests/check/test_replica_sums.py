"""How much of sums over replicas has a place beside passes, by figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from cases.lowering import chain_of, plan_of

from pipeplan.check.evaluate import evaluate
from pipeplan.check.replica_sums import exposed_sums, summed_beside
from pipeplan.plan import Stage
from pipeplan.problem import Device, Policy
from pipeplan.report.words import waited_sums

STAGES = (Stage(0, 1, (0, 1)), Stage(1, 2, (2,)))


def replicated(weights, interval, weight_bytes, **policy):
    """Two stages, the first on two devices; a byte takes 1 ns, so a sum takes as many as there are of weights."""
    chain = chain_of([(2 * 10**9, 4 * 10**9), (10**9, 2 * 10**9)])
    layers = (replace(chain.layers[0], weight_bytes=weight_bytes), *chain.layers[1:])
    plan = plan_of(replace(chain, layers=layers), STAGES, Policy(weights, accumulate=interval, **policy))
    levels = tuple(replace(level, bandwidth=10**9) for level in plan.platform.levels)
    return replace(plan, platform=replace(plan.platform, levels=levels))


def test_a_sum_has_what_its_round_leaves_behind_the_last_gradient():
    """One microbatch at a time, 9 s each: update j is used 9 k s after its last gradient, by mini-batch j + 2."""
    for interval, size, enough in (
        (2, 18 * 10**9, None),
        (2, 20 * 10**9, 3),
        (3, 20 * 10**9, None),
        (4, 46 * 10**9, 6),
    ):
        plan = replicated("2bw", interval, size)
        exposed = list(exposed_sums(plan, evaluate(plan)))
        left = interval * 9 * 10**9
        assert [(x.stage, x.sum_ns, x.hidden_ns, x.waited_ns, x.interval) for x in exposed] == (
            [] if enough is None else [(0, size, left, size - left, enough)]
        )


def test_a_second_gradient_needs_room_for_what_is_exchanged_too():
    """All of it at once, or two chunks of two buckets."""
    plan = replicated("2bw", 8, 3 * 10**9)
    most = max(x.peak_bytes for x in evaluate(plan).devices)
    for size, added in ((10**9, 3 * 10**9), (10**6, 4 * 10**6 * 3 * 10**9 // int(plan.chain.sums.parameters[1]))):
        for left, chosen in ((-1, {}), (0, {0: 3 * 10**9})):
            room = most + 3 * 10**9 + added + left
            devices = tuple(Device(room) for _ in range(3))
            policy = replace(plan.policy, bucket_parameters=size)
            assert (
                summed_beside(replace(plan, platform=replace(plan.platform, devices=devices), policy=policy)) == chosen
            )


def test_without_a_second_gradient_or_a_round_all_is_waited_for():
    plan = replicated("2bw", 8, 3 * 10**9)
    assert summed_beside(plan) == {0: 3 * 10**9}
    most = max(x.peak_bytes for x in evaluate(plan).devices)
    for given, end in (
        (replace(plan, platform=replace(plan.platform, devices=tuple(Device(most) for _ in range(3)))), "gradient"),
        (replicated("stash", 8, 3 * 10**9), "count"),
    ):
        assert summed_beside(given) == {}
        found = evaluate(given)
        assert [(x.hidden_ns, x.waited_ns) for x in exposed_sums(given, found)] == [(0, 3 * 10**9)]
        assert waited_sums(given, found).endswith(end)
        assert "375.000 ms for a microbatch" in waited_sums(given, found)
    assert waited_sums(plan, evaluate(plan)) is None
    assert list(exposed_sums(replicated("stash", 8, 0), evaluate(replicated("stash", 8, 0)))) == []
