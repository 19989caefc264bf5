from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases.chains import published, random_chain, random_problem, uneven_chain
from cases.contiguous import (
    assert_attains,
    assert_brute_force_agrees_on_segments,
    assert_schedules,
    segments_problem,
    varied_problem,
)
from oracles.partition import checkpoints, contiguous_optimum

from pipeplan.check.bounds import quick_proof
from pipeplan.check.evaluate import evaluate
from pipeplan.check.validate import violations
from pipeplan.cost import memory_model
from pipeplan.integers import plain
from pipeplan.partition.contiguous.contiguous import smallest_period
from pipeplan.partition.granularity import merge_articulation
from pipeplan.partition.recompute.labels import Units, labels_from
from pipeplan.partition.recompute.lowest_peaks import lowest_peaks
from pipeplan.partition.recompute.pareto import Resolution, pareto, unbeaten
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.schedule.program import unroll
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import lane_use

WHOLE = Resolution(exact=2**40)


def test_equals_brute_force() -> None:
    """On more instances: scripts/checks/contiguous.py."""
    assert sum(assert_brute_force_agrees_on_segments(seed) for seed in range(5)) >= 2


def test_equals_brute_force_where_replicas_stash_versions() -> None:
    """The more replicas, the more versions they keep between updates, and the more a stage has to recompute."""
    recomputed = 0
    for seed in range(6, 10):
        problem = segments_problem(seed)
        policy = replace(problem.policy, weights="stash", vertical_sync=False, accumulate=(None, 1, 2, 3, 5)[seed % 5])
        problem = replace(problem, policy=policy, replicas=True)
        found, truth = smallest_period(problem), contiguous_optimum(problem)
        assert (found is None) == (truth is None), seed
        if found is not None and truth is not None:
            assert found.claimed_period_ns == found.lower_bound_ns == truth[0], seed
            recomputed += any(stage.checkpoint and stage.replicas > 1 for stage in found.stages)
    assert recomputed >= 1


def test_segments_are_better_than_stages_somewhere() -> None:
    shorter = mixed = 0
    for seed in range(15):
        problem = varied_problem(seed)
        if problem.checkpointing == "none":
            continue
        stages, segments = (smallest_period(replace(problem, checkpointing=mode)) for mode in ("stages", "segments"))
        if stages is not None:
            assert segments is not None
            assert segments.claimed_period_ns is not None
            assert stages.claimed_period_ns is not None
            assert segments.claimed_period_ns <= stages.claimed_period_ns
            shorter += segments.claimed_period_ns < stages.claimed_period_ns
        if segments is not None:
            mixed += any(
                len(s.checkpoint) > 1 or s.checkpoint not in ((), ((s.start, s.stop),)) for s in segments.stages
            )
    assert shorter
    assert mixed >= 2


@pytest.mark.parametrize("seed", [9, 10])
def test_what_the_quick_search_finds_is_proved_by_the_fine_one(seed: int) -> None:
    """The search that keeps few labels finds the best plan here, and alone couldn't prove it."""
    rng = random.Random(seed)
    problem = random_problem(
        rng,
        rng.choice((12, 16, 20, 26)),
        rng.choice((2, 3, 4)),
        checkpointing="segments",
        replicas=rng.random() < 0.5,
        saved=True,
        edges=False,
    )
    layers = tuple(
        replace(
            x,
            forward_ns=x.forward_ns * 7 + rng.randint(0, 40),
            backward_ns=x.backward_ns * 9 + rng.randint(0, 30),
            saved_bytes=None if x.saved_bytes is None else x.saved_bytes + rng.randint(3, 40),
            saves=None,
        )
        for x in problem.chain.layers
    )
    more = [replace(x, memory_bytes=x.memory_bytes * rng.choice((1, 2, 3))) for x in problem.platform.devices]
    platform = replace(problem.platform, devices=tuple(more))
    found = smallest_period(replace(problem, chain=replace(problem.chain, layers=layers), platform=platform))
    assert found is not None
    assert found.lower_bound_ns == found.claimed_period_ns


@pytest.mark.parametrize("seed", range(0, 300, 24))
def test_the_scheduler_and_the_validator_agree(seed: int) -> None:
    problem = replace(varied_problem(seed), checkpointing="segments")
    problem = problem.with_policy(replace(problem.policy, accumulate=problem.policy.accumulate or 4))
    found = smallest_period(problem)
    if found is not None:
        assert_schedules(problem, found)


def test_what_a_segment_keeps_is_said_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its input is held already."""
    known = memory_model.segment

    def segment(chain: Chain, start: Any, stop: Any, held: bool = False, inside: bool = False) -> tuple[Any, Any, Any]:
        keeps, *others = known(chain, start, stop, held, inside)
        return plain(np.asarray(keeps) + 8), *others

    monkeypatch.setattr(memory_model, "segment", segment)
    for seed in range(96, 240, 48):
        test_the_scheduler_and_the_validator_agree(seed)


@pytest.mark.parametrize("weights", ["2bw", "stash", "latest"])
def test_plans_hold_from_the_search_to_the_simulation(weights: str) -> None:
    rng = random.Random(7)
    planned = 0
    for _ in range(4):
        chain = uneven_chain(rng, 9, 5, 10)
        platform = Platform.flat(4, rng.randint(60, 160), 10**9)
        policy = Policy(weights, 4)  # type: ignore[arg-type]
        problem = Problem(chain, platform, policy, checkpointing="segments")
        found = smallest_period(problem)
        if found is None:
            continue
        plan = make_plan(problem, "contiguous", schedule="pattern" if weights == "latest" else None).plan
        assert violations(plan) == []
        assert plan.pattern is not None
        planned += any(stage.checkpoint for stage in plan.allocation.stages)
        figures = evaluate(plan)
        assert plan.pattern.period_ns == plan.provenance.claimed_period_ns
        timeline = simulate(unroll(figures.graph, plan.pattern, 40))
        for device in {d for stage in plan.allocation.stages for d in stage.devices}:
            assert lane_use(timeline, device).peak_bytes == figures.devices[device].peak_bytes
    assert planned


@pytest.mark.parametrize("seed", range(30))
def test_labels_are_the_pareto_set_of_all_segments(seed: int) -> None:
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(1, 6), edges=seed % 2 == 0, saved=seed % 3 > 0, zero_times=True)
    problem = Problem(chain, Platform.flat(1, 1), checkpointing="segments")
    count = len(chain)
    free = np.full(count + 1, 2**60)
    lowest_peak = lowest_peaks(Units.of(chain))
    for start in range(count):
        labels, _ = labels_from(Units.of(chain), start, np.arange(count + 1), free, free, WHOLE)
        assert labels is not None
        assert labels.exact
        for stop in range(start + 1, count + 1):
            every = {
                memory_model.activations(chain, start, stop, ranges) for ranges in checkpoints(problem, start, stop)
            }
            best = {
                x for x in every if not any(y != x and all(a <= b for a, b in zip(y, x, strict=True)) for y in every)
            }
            lowest, stored = np.flatnonzero(lowest_peak[start].position == stop).tolist()
            assert lowest_peak[start].peak[lowest] == min(peak for _, peak, _ in every)
            for own, label in ((lowest_peak[start], lowest), (lowest_peak[start], stored)):
                figures = memory_model.activations(chain, start, stop, own.ranges(label))
                assert figures[1] <= own.peak[label]
                assert figures[0] <= own.kept[label]
                assert figures[2] == own.cost[label]
            assert lowest_peak[start].ranges(stored) == ()
            at = np.flatnonzero(labels.position == stop).tolist()
            found = {(int(labels.kept[i]), int(labels.peak[i]), int(labels.cost[i])) for i in at}
            assert found >= best
            holds = any(x.saves and i in x.saves for i, x in enumerate(chain.layers))
            assert found == best or holds, "more only where holding the output may pay off later"
            for i in at:
                assert memory_model.activations(chain, start, stop, labels.ranges(i)) == (
                    labels.kept[i],
                    labels.peak[i],
                    labels.cost[i],
                )


def test_caps_drop_what_is_above_them_and_nothing_else() -> None:
    rng = random.Random(5)
    for _ in range(20):
        chain = random_chain(rng, 6, saved=True)
        units, positions, free = Units.of(chain), np.arange(7), np.full(7, 2**60)
        cost, peak = np.full(7, rng.randint(0, 15)), np.full(7, rng.randint(10, 60))
        every, _ = labels_from(units, 0, positions, free, free, WHOLE)
        some, _ = labels_from(units, 0, positions, cost, peak, WHOLE)
        assert every is not None
        assert some is not None
        rows = [set(zip(x.position, x.kept, x.peak, x.cost, strict=True)) for x in (every, some)]
        assert rows[1] == {x for x in rows[0] if x[3] <= cost[0] and x[2] <= peak[0]}


def test_work_is_counted_and_limited() -> None:
    chain = random_chain(random.Random(2), 8, saved=True)
    free = np.full(9, 2**60)
    labels, tried = labels_from(Units.of(chain), 0, np.arange(9), free, free, WHOLE)
    assert labels is not None
    assert labels_from(Units.of(chain), 0, np.arange(9), free, free, WHOLE, tried)[0] is not None
    assert labels_from(Units.of(chain), 0, np.arange(9), free, free, WHOLE, tried - 1)[0] is None


@pytest.mark.parametrize(
    ("size", "largest"), [(0, 40), (1, 40), (5, 40), (200, 40), (1500, 40), (1500, 10**6), (3000, 300)]
)
def test_pareto_keeps_one_of_each_that_nothing_beats(size: int, largest: int) -> None:
    rows = np.random.default_rng(size).integers(0, largest, size=(3, size))
    kept, peak, cost = rows
    chosen = pareto(kept, peak, cost)
    smaller = (rows[:, chosen, None] <= rows[:, None, :]).all(axis=0)
    beaten = (smaller & (rows[:, chosen, None] != rows[:, None, :]).any(axis=0)).any(axis=0)
    found = {tuple(rows[:, i]) for i in chosen}
    assert len(found) == len(chosen)
    assert found == {tuple(rows[:, i]) for i in range(size) if not beaten[i]}
    same, exact = unbeaten(kept, peak, cost, WHOLE)
    assert exact
    assert {tuple(rows[:, i]) for i in same} == found


def test_buckets_keep_true_labels_and_the_lowest_in_bytes() -> None:
    rng = np.random.default_rng(1)
    kept, peak, cost = rng.integers(0, 10**6, size=(3, 4000))
    chosen, exact = unbeaten(kept, peak, cost, Resolution(exact=10, cost_buckets=12, peak_buckets=5))
    assert not exact
    assert 0 < len(chosen) <= 60
    assert int(kept[chosen].min()) == int(kept.min())
    whole, _ = unbeaten(kept, peak, cost, WHOLE)
    slack = 10**6 // 12 + 10**6 // 5 + 2
    for i in whole.tolist():  # every label of the front has one nearby that keeps no more
        assert any(kept[j] <= kept[i] and cost[j] <= cost[i] + slack and peak[j] <= peak[i] + slack for j in chosen)


def decoder(blocks: int) -> Chain:
    block = Layer("block", 1000, 2000, 40, 50, 700)
    return Chain(
        "decoder", (Layer("embedding", 50, 100, 90, 50, 1), *(block,) * blocks, Layer("head", 900, 1800, 90, 1, 300)), 1
    )


def test_a_decoder_recomputes_only_as_many_blocks_as_it_must() -> None:
    chain, periods = decoder(12), []
    for memory in (1600, 2000, 2200, 3000, 6000, 20000):
        found = smallest_period(
            Problem(chain, Platform.flat(4, memory, 10**9), replicas=False, checkpointing="segments")
        )
        assert found is not None
        assert found.lower_bound_ns == found.claimed_period_ns
        periods.append(found.claimed_period_ns or 0)
    assert periods == sorted(periods, reverse=True)
    assert len(set(periods)) >= 3


def test_layers_that_keep_nothing_need_memory_for_their_weights_alone() -> None:
    chain = Chain("stateless", (Layer("a", 1, 2, 1, 0, saved_bytes=0),) * 2, 0)
    found = smallest_period(Problem(chain, Platform.flat(2, 3), replicas=False, checkpointing="segments"))
    assert found is not None
    assert found.lower_bound_ns == found.claimed_period_ns == 3  # two microbatches in flight at the first stage


def test_many_layers_give_a_plan_that_does_not_claim_to_be_optimal() -> None:
    rng = random.Random(3)
    layers = tuple(
        Layer(f"layer{i}", rng.randint(10, 300), rng.randint(20, 600), rng.randint(1, 20), rng.randint(1, 50), 200)
        for i in range(120)
    )
    problem = Problem(
        Chain("large", layers, 10), Platform.flat(4, 12800, 10**9), replicas=False, checkpointing="segments"
    )
    found, whole = smallest_period(problem), smallest_period(replace(problem, checkpointing="stages"))
    assert found is not None
    assert whole is not None
    assert found.claimed_period_ns is not None
    assert found.lower_bound_ns is not None
    assert whole.claimed_period_ns is not None
    assert found.lower_bound_ns < found.claimed_period_ns < whole.claimed_period_ns
    assert_attains(problem, found)
    plan = make_plan(problem, "contiguous").plan
    assert plan.lower_bounds[0].allocation == "contiguous"
    assert plan.lower_bounds[0].period_ns < plan.pattern.period_ns  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "plans", "ratio"), [("vgg16", 6, 1.1737), ("resnet50", 9, 1.0709)])
def test_published_profiles_reach_the_known_periods(name: str, plans: int, ratio: float) -> None:
    chain = replace(merge_articulation(published(name), saved="input"), input_bytes=0)
    work = int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])
    ratios = []
    for devices in (2, 4, 8):
        for memory in (3, 6, 12):
            problem = Problem(chain, Platform.flat(devices, memory * 10**9), checkpointing="segments")
            found = smallest_period(problem)
            if found is not None and found.claimed_period_ns is not None:
                assert found.lower_bound_ns == found.claimed_period_ns
                ratios.append(found.claimed_period_ns * devices / work)
    assert len(ratios) == plans
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= ratio


def test_a_long_chain_is_recomputed_in_segments() -> None:
    """510 layers on GPUs that hold a third of what they keep: near what no plan of any kind can beat."""
    rng = random.Random(3)
    figures = ((1, 30), (2, 60), (0, 9), (1, 20), (10, 90))
    layers = tuple(Layer(f"layer{i}", *(rng.randint(*span) for span in figures)) for i in range(510))
    chain, platform = Chain("long", layers, 10), Platform.flat(4, 14000, 10**9)
    problem = Problem(chain, platform, replicas=False, checkpointing="segments")
    found = smallest_period(problem)
    assert found is not None
    assert_attains(problem, found)
    assert found.claimed_period_ns is not None
    assert found.claimed_period_ns < 1.07 * quick_proof(problem).period_ns
    assert sum(len(stage.checkpoint) for stage in found.stages) > 10
