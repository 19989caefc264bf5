"""Plans whose replicas share gradients and weights: none that brute force finds is sooner, or below a bound."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cases.chains import random_chain
from cases.drained import soonest

import pipeplan as pp
from pipeplan.check.bounds import any_bound
from pipeplan.check.bounds.drained.proofs import drained_bound
from pipeplan.check.evaluate import evaluate
from pipeplan.check.validate import violations
from pipeplan.cost import memory_model
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.cost.time_model import FIXED_NS, STEP_NS
from pipeplan.errors import BadInput, Infeasible
from pipeplan.integers import ceil_div
from pipeplan.plan import Plan, Stage
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Level, Platform, Policy, Problem

MILLION = 10**6


def instance(seed: int, zero: int) -> Problem:
    """A problem of some microseconds, which collectives take, too: 3 or 4 GPUs, some of them in two servers."""
    rng = random.Random(seed)
    chain = random_chain(rng, 3 + seed % 2, optimizer=True, saved=True)
    layers = tuple(
        replace(
            x,
            forward_ns=x.forward_ns * 4000,
            backward_ns=x.backward_ns * 4000,
            optimizer_ns=x.optimizer_ns * 4000,
            parameters=x.weight_bytes // 4,
        )
        for x in chain.layers
    )
    chain = replace(chain, layers=layers)
    level = Level(3, rng.choice((10**6, 10**7)))
    levels = (replace(level, count=2), Level(2, 10**6)) if seed % 3 == 0 else (level,)
    count = 4 if seed % 3 == 0 else 3
    platform = replace(Platform.flat(count, rng.choice((150, 250, 400)), 10**6), levels=levels)
    policy = Policy("flush", rng.randint(2, 5), "adam", zero=zero, bucket_parameters=5)
    return Problem(chain, platform, policy, checkpointing="stages")


@pytest.mark.parametrize(("seed", "zero"), [(0, 0), (1, 1), (0, 2), (1, 3)])
def test_no_plan_is_sooner(seed, zero):
    problem = instance(seed, zero)
    count, times = problem.policy.accumulate, soonest(problem)
    if not times:
        with pytest.raises(Infeasible):
            make_plan(problem, "contiguous")
        return
    best = min(times.values())
    found = make_plan(problem)
    assert violations(found.plan) == []
    assert found.evaluation.makespan_ns <= 1.001 * best
    assert any_bound(problem).period_ns <= ceil_div(best, count)
    for kind, ns in times.items():
        bound = drained_bound(problem, kind)
        assert bound is None or bound.period_ns <= ceil_div(ns, count)
    assert all(bound.period_ns <= found.evaluation.period_ns for bound in found.plan.lower_bounds)


@pytest.mark.parametrize(
    ("policy", "held"),
    [  # 100 parameters on 4 replicas, 10 of them whole at a time; shares are of whole 4 bytes
        (Policy("flush", zero=2), 400 + (100 + 40)),
        (Policy("flush", zero=3), (100 + 2 * 40) + (100 + 40)),
        (Policy("flush", zero=3, optimizer="adam"), (100 + 80) + (100 + 40) + 200),
        (Policy("flush", zero=3, optimizer="adam", precision="mixed"), (52 + 40) + (52 + 20) + 16 * 25),
        (Policy("flush", zero=3, bytes_per_parameter=18, shared_bytes_per_parameter=18), 452 + 3 * 40),
        (Policy("flush", zero=2, bytes_per_parameter=18, shared_bytes_per_parameter=16), 200 + 400 + 40),
    ],
)  # fmt: skip
def test_what_a_replica_holds_of_shared_parts(policy, held):
    policy = replace(policy, bucket_parameters=10)
    assert memory_model.versioned_bytes(policy, 400, 100, 1, 4) == held
    assert memory_model.versioned_bytes(policy, 400, 100, 1, 1) == memory_model.versioned_bytes(
        replace(policy, zero=0, shared_bytes_per_parameter=None), 400, 100, 1, 1
    )
    alone = replace(policy, pipelines=4)
    assert memory_model.versioned_bytes(alone, 400, 100, 1, 1) == held


@pytest.mark.parametrize("zero", [2, 3])
def test_shared_parts_add_up_to_no_less_than_those_of_all(zero):
    policy = Policy("flush", optimizer="adam", zero=zero, bucket_parameters=3)
    for one in range(0, 60, 4):
        for other in range(0, 60, 4):
            parts = [memory_model.versioned_bytes(policy, x, x // 4, 1, 3) for x in (one, other)]
            assert sum(parts) >= memory_model.versioned_bytes(policy, one + other, (one + other) // 4, 1, 3)
            assert parts[0] >= memory_model.versioned_bytes(policy, one, one // 4, 1, 4)


def test_passes_take_what_is_exchanged_in_them():
    """Four buckets of 400 bytes: 4 times what begins it, and three quarters of the bytes at three quarters of the
    bandwidth. Gathers are hidden, scatters aren't."""
    layer = Layer("a", 10**6, 3 * 10**6, 1600, 4, optimizer_ns=400)
    chain, platform = Chain("c", (layer,), 4), Platform.flat(4, MILLION, 10**6)
    once = 4 * (FIXED_NS + 3 * STEP_NS) + 1_600_000
    for zero, forward, backward, update in ((1, 10**6, 3 * 10**6, 2.4e6), (2, 10**6, 3 * 10**6 + once, 1.2e6),
                                            (3, once, 3 * 10**6 + once, 0)):  # fmt: skip
        policy = Policy("flush", 4, zero=zero, bucket_parameters=100)
        (stage,) = stage_graph(chain, platform, policy, [Stage(0, 1, (0, 1, 2, 3))]).stages
        assert (stage.forward_ns, stage.backward_ns, stage.update_ns) == (forward, backward, update)
        assert stage.step_ns == 400 // 4
    (slow,) = stage_graph(
        chain, replace(platform, levels=(Level(4, 10**5),)), replace(policy, zero=2), [Stage(0, 1, (0, 1, 2, 3))]
    ).stages
    assert slow.forward_ns == 10**6
    assert slow.backward_ns == 3 * 10**6 + 4 * (FIXED_NS + 3 * STEP_NS) + 16_000_000
    (alone,) = stage_graph(chain, platform, policy, [Stage(0, 1, (0,))]).stages
    assert alone.forward_ns == 10**6


def decoder(blocks: int = 4) -> Chain:
    """Blocks that are too large for a GPU together, but not their parts."""
    layers = [Layer(f"layers.{i}", 10**7, 2 * 10**7, 400 * MILLION, 1000, saved_bytes=MILLION) for i in range(blocks)]
    return Chain("decoder", tuple(layers), 1000)


ASKED = {"gpus": 4, "mem": "3GB", "bandwidth": "100GB/s", "optimizer": "adam", "batch": 8}


def test_a_plan_says_what_takes_no_pipeline(capsys):
    piped = pp.plan(decoder(), **ASKED, weights="flush")
    found = piped.plan.provenance.options["unpipelined_ns"]
    one = pp.plan(decoder(), **ASKED, zero=3, algorithm="data-parallel")
    assert one.plan.allocation.data_parallel
    assert one.period_ns == found
    assert one.plan.policy.weights == "flush"
    assert one.plan.policy.bucket_parameters == 100 * MILLION
    piped.show()
    shown = " ".join(capsys.readouterr().out.split())
    assert "don't pipeline: ZeRO-3 on 4 GPUs takes" in shown
    assert "--zero 3 --algorithm data-parallel plans it" in shown


@pytest.mark.parametrize("size", [None, "6+12"])
def test_any_sharing_is_the_best_of_all(size, capsys):
    words = ASKED | {"bytes_per_parameter": size, "algorithm": "contiguous"}
    found = pp.plan(decoder(), **words, zero="any")
    taken = found.plan.provenance.options["zero"]
    assert set(taken) == {"0", "1", "2", "3"}
    assert found.period_ns == min(x for x in taken.values() if x is not None) == taken[str(found.plan.policy.zero)]
    own = (3,) if size is None else (1, 3)
    each = {zero: pp.plan(decoder(), **words, weights="flush", zero=zero) for zero in own}
    assert all(taken[str(zero)] == one.period_ns for zero, one in each.items())
    found.show()
    assert "shared      --zero" in capsys.readouterr().out


def test_what_contradicts_is_refused():
    with pytest.raises(BadInput, match="zero 3: replicas exchange parts in their passes with weights flush alone"):
        pp.plan(decoder(), **ASKED, zero=3, weights="2bw")
    with pytest.raises(BadInput, match="zero any: only plan tries them all; pass 0, 1, 2 or 3"):
        pp.compare(decoder(), **{**ASKED, "gpus": "4"}, zero="any")
    with pytest.raises(BadInput, match=r"zero 2 and no.replicas contradict each other"):
        pp.plan(decoder(), **ASKED, zero=2, no_replicas=True)
    plan = pp.plan(decoder(), **ASKED, zero=3).plan
    late = replace(plan, policy=replace(plan.policy, weights="2bw"))
    assert "replicas exchange parts in passes with weights flush (zero 3); they are 2bw" in violations(late)[0]
    assert evaluate(plan).period_ns > 0
    assert isinstance(plan, Plan)
