"""Hybrid grids: the planner's choice against brute force, what rules grids out, bounds, placements, overlap."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from cases.chains import random_chain, random_platform
from oracles.grids import every_grid

from pipeplan.check.evaluate import evaluate
from pipeplan.check.validate import violations
from pipeplan.cost.saved import storages
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.deadline import Deadline
from pipeplan.errors import BadInput, Infeasible
from pipeplan.files.plans import plan_text, read_plan
from pipeplan.files.text import write_text
from pipeplan.plan import Stage
from pipeplan.planner.grids.grid_search import make_grid_plan, search_grids, segment_length, why_no_grid
from pipeplan.planner.grids.pipelines import limits
from pipeplan.planner.grids.space import GridConfig, GridProblem, configs, grid_problem, profiles, work_bound
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.problem import Chain, Layer, Level, Platform, Policy, Problem

MS = 10**6
GB = 10**9


def instance(seed: int) -> GridProblem:
    """Return a tiny question whose memory often binds."""
    rng = random.Random(seed)
    layers, devices = rng.randint(2, 5), rng.choice((2, 3, 4, 4))
    chain = random_chain(rng, layers, saved=rng.random() < 0.6, optimizer=rng.random() < 0.5)
    size = 4 * int(chain.sums.weight_bytes[-1]) + 2 * int(storages(chain).totals[-1])
    memory = max(1, int(size * rng.choice((0.2, 0.35, 0.5, 0.7, 1, 3))))
    platform = random_platform(
        rng, devices, memory=(memory, memory), levels=rng.random() < 0.5, latency=rng.random() < 0.3, duplex=True
    )
    policy = Policy("flush", None, rng.choice(("sgd", "adam")), coarsening=rng.choice((None, None, 1)))
    problem = Problem(chain, platform, policy, checkpointing="segments")
    if seed % 4 == 2:
        policy = replace(policy, zero=1)
    offloads = (False, True) if policy.optimizer == "adam" else (False,)
    return GridProblem(problem, profiles([chain]), rng.choice((2, 4, 6, 8)), (1, 2), offloads)


def even(layers: int = 8, time: int = 2 * MS, weights: int = GB, output: int = 10**6, optimizer: int = 0) -> Chain:
    layer = Layer("block", time, 2 * time, weights, output, 10 * output, optimizer_ns=optimizer)
    return Chain("even", (layer,) * layers, output)


def ask(chain: Chain, platform: Platform, batch: int, sizes=(1,), **options) -> GridProblem:
    problem = Problem(chain, platform, Policy("flush"), checkpointing="segments")
    return GridProblem(problem, profiles([chain]), batch, sizes, **options)


@pytest.mark.parametrize("seed", range(1, 8))
def test_the_choice_is_the_best_of_all_grids_splits_segments_and_limits(seed):
    asked = instance(seed)
    found = search_grids(asked, Settings())
    least = min(every_grid(asked), default=None)
    if least is None:  # segments of other shapes than one length per stage might still fit
        assert found.best is None or found.best.batch_ns >= found.bound_ns
        return
    assert found.best is not None
    assert found.best.batch_ns <= least
    assert found.bound_ns <= found.best.batch_ns
    assert found.best.exact


@pytest.mark.parametrize("speed", [Fraction(1, 2), Fraction(3)])
def test_the_bound_by_work_holds_on_devices_of_any_speed(speed):
    bounded = 0
    for seed in range(2):
        asked = instance(seed)
        devices = tuple(replace(device, speed=speed) for device in asked.problem.platform.devices)
        platform = replace(asked.problem.platform, devices=devices)
        asked = replace(asked, problem=replace(asked.problem, platform=platform))
        least = min(every_grid(asked), default=None)
        if least is not None:
            bound = min(work_bound(asked, config) for config in configs(asked))
            assert bound <= least
            bounded += 2 * bound > least
    assert bounded


@pytest.mark.parametrize("seed", range(0, 40, 14))
def test_a_plan_is_valid_and_takes_what_its_table_says(seed, tmp_path):
    asked = instance(seed)
    if search_grids(asked, Settings()).best is None:
        with pytest.raises(Infeasible, match="no grid fits"):
            make_grid_plan(asked)
        return
    plan = make_grid_plan(asked).plan
    options = plan.provenance.options
    assert not violations(plan)
    assert evaluate(plan).makespan_ns == options["grid"]["batch_ns"]
    assert options["bound_ns"] <= options["grid"]["batch_ns"]
    assert {stage.replicas for stage in plan.allocation.stages} == {options["grid"]["data"]}
    assert len(plan.allocation.stages) == options["grid"]["inter"]
    assert plan.schedule.microbatches == plan.policy.accumulate == asked.batch // options["grid"]["microbatch"]
    assert plan.chain.microbatch == options["grid"]["microbatch"]
    path = str(tmp_path / "plan.json")
    write_text(path, plan_text(plan))
    again, found = read_plan(path)
    assert not found
    assert plan_text(again) == plan_text(plan) == plan_text(make_grid_plan(asked).plan)


def test_every_grid_of_all_gpus_has_a_time_or_a_reason():
    outcome = search_grids(ask(even(3), Platform.flat(6, 40 * GB), 8), Settings())
    reasons = {(row.stages, row.pipelines): row.reason for row in outcome.rows}
    assert reasons[2, 3] == "a batch of 8 cannot be shared by 3 pipelines"
    assert reasons[6, 1] == "6 stages are more than the network's 3 layers"
    assert reasons[3, 2] is None
    assert outcome.rows[2].found.batch_ns >= outcome.rows[2].bound_ns
    assert why_no_grid(ask(even(3), Platform.flat(6, 40 * GB), 8, (3,)), 3, 2) == (
        "the 4 samples of each pipeline aren't a multiple of microbatches of 3"
    )


def test_what_is_too_large_names_the_stage_and_how_much():
    outcome = search_grids(ask(even(4, weights=4 * GB), Platform.flat(4, 17 * GB), 8), Settings())
    row = next(row for row in outcome.rows if row.stages == 1)
    assert row.found is None
    assert "stage 0 of layers 0 to 3 needs 32.0" in row.reason
    assert "too much" in row.reason
    with pytest.raises(Infeasible, match="no grid fits: 1 x 2: stage 0 of layers 0 to 3"):
        make_grid_plan(ask(even(4, weights=4 * GB), Platform.flat(2, 7 * GB), 8))


def test_fewer_gpus_are_used_where_no_grid_of_all_is_faster():
    outcome = search_grids(ask(even(4), Platform.flat(5, 40 * GB, 10**12), 8), Settings())
    assert outcome.best.config.gpus == 4
    assert {(row.stages, row.pipelines) for row in outcome.rows} >= {(1, 5), (5, 1)}


def test_large_weights_make_pipelines_and_cheap_ones_data_parallelism():
    platform = Platform.flat(8, 80 * GB)
    assert search_grids(ask(even(weights=3 * GB), platform, 64), Settings()).best.config.pipelines < 8
    assert search_grids(ask(even(weights=1000, output=10**8), platform, 64), Settings()).best.config.stages == 1


def test_offload_is_chosen_only_where_memory_asks_for_it():
    chain = even(weights=GB)
    for memory, offload in ((60 * GB, False), (5 * GB, True)):
        platform = Platform.flat(4, memory)
        problem = Problem(chain, platform, Policy("flush", None, "adam", bucket_parameters=10**6), True, "segments")
        asked = GridProblem(problem, profiles([chain]), 16, (1,), (False, True))
        assert search_grids(asked, Settings()).best.config.offload is offload


def test_offload_is_open_only_where_there_is_state_to_move():
    problem = Problem(even(), Platform.flat(4, 60 * GB), Policy("flush"), checkpointing="segments")
    adam, mixed = (problem.with_policy(Policy("flush", None, *x)) for x in (("adam",), ("sgd", "mixed")))
    for asked, given, expected in (
        (problem, None, (False,)),
        (adam, None, (False, True)),
        (mixed, None, (False, True)),
        (adam, True, (True,)),
        (adam, False, (False,)),
    ):
        found, assumptions = grid_problem(asked, 8, [asked.chain], offload=given)
        assert found.offloads == expected
        assert any("between host and GPU" in line for line in assumptions) == (True in expected)


def test_pipelines_inside_servers_send_over_the_servers_own_links():
    platform = Platform((Platform.flat(1, 80 * GB).devices * 8), (Level(4, 10**11), Level(2, 10**9)))
    chain = even(weights=10**6, output=10**8)
    across, inside = (GridConfig(4, 2, 1, False, placement).groups() for placement in ("stage", "pipeline"))
    assert across[0] == (0, 1)
    assert inside[0] == (0, 4)
    slow, fast = (
        stage_graph(chain, platform, Policy("flush", 8), [Stage(2 * s, 2 * s + 2, groups[s]) for s in range(4)])
        for groups in (across, inside)
    )
    assert slow.operations[slow.position["SEND_F", 1]].duration_ns == 10**8
    assert all(op.duration_ns == 10**6 for op in fast.operations if op.kind.startswith("SEND"))
    best = search_grids(ask(chain, platform, 32), Settings()).best
    assert best.config.stages == 1 or best.config.placement == "pipeline"


def test_overlap_hides_the_shorter_of_sums_and_steps():
    chain = even(weights=GB, optimizer=40 * MS)
    platform = Platform.flat(4, 80 * GB)
    apart = ask(chain, platform, 16, pipelines=2)
    together = replace(
        apart, problem=apart.problem.with_policy(replace(apart.problem.policy, coarsening=1, bucket_parameters=10**7))
    )
    one, other = (make_grid_plan(asked).plan for asked in (apart, together))
    assert evaluate(other).makespan_ns < evaluate(one).makespan_ns
    graph = evaluate(other).graph
    for stage in graph.stages:
        blocks = stage.weight_bytes // GB
        all_reduce, step = blocks * GB * 10**9 // (12 * 10**9), blocks * 40 * MS
        chunks = -(-blocks * GB // 4 // 10**7)
        assert abs(stage.update_ns - (all_reduce + step / chunks)) < 100 * blocks
        assert stage.backward_ns == blocks * 4 * MS


def test_the_work_bound_is_met_by_even_stages_without_transfers():
    chain = replace(even(output=0), input_bytes=0)
    asked = ask(chain, Platform.flat(4, 200 * GB, 10**15), 16, pipelines=1)
    outcome = search_grids(asked, Settings())
    assert outcome.best.config.stages == 4
    assert outcome.best.batch_ns == (16 + 4 - 1) * 12 * MS == outcome.bound_ns
    assert work_bound(asked, outcome.best.config) <= outcome.best.batch_ns
    assert work_bound(asked, GridConfig(1, 1, 1)) == 16 * 48 * MS


def test_the_work_bound_counts_sums_and_steps():
    """48 ms of work for each microbatch, gradients of 8 GB at 1 GB/s, steps of 320 ms on the whole network."""
    chain = even(optimizer=40 * MS)
    asked = ask(chain, Platform.flat(4, 200 * GB, GB), 16)
    assert work_bound(asked, GridConfig(1, 1, 1)) == (16 * 48 + 320) * MS
    assert work_bound(asked, GridConfig(1, 4, 1)) == (4 * 48 + 320 + 12_000) * MS  # 2 * 3/4 * 8 GB
    assert work_bound(asked, GridConfig(2, 2, 1)) == (8 * 48 + 320 + 8_000) * MS // 2
    mixed = replace(asked, problem=asked.problem.with_policy(Policy("flush", precision="mixed")))
    assert work_bound(mixed, GridConfig(1, 4, 1)) == (4 * 48 + 320 + 6_000) * MS  # half as many bytes
    together = replace(asked, problem=asked.problem.with_policy(Policy("flush", coarsening=1)))
    assert work_bound(together, GridConfig(1, 4, 1)) == (4 * 48 + 12_000) * MS
    fast = replace(together, problem=replace(together.problem, platform=Platform.flat(4, 200 * GB, 10**12)))
    assert work_bound(fast, GridConfig(1, 4, 1)) == (4 * 48 + 320) * MS


def test_limits_fixed_numbers_of_pipelines_and_interrupts():
    asked = ask(even(), Platform.flat(8, 80 * GB), 32, (1, 2), limit=3, pipelines=2)
    assert {config.pipelines for config in configs(asked)} == {2}
    plan = make_grid_plan(asked).plan
    assert plan.schedule.limit == 3
    assert [(row["inter"], row["data"]) for row in plan.provenance.options["grids"]] == [(4, 2)]
    three = make_grid_plan(
        ask(even(), Platform.flat(8, 80 * GB), 30, pipelines=3)
    ).plan  # which doesn't divide the GPUs
    assert [(row["inter"], row["data"]) for row in three.provenance.options["grids"]] == [(2, 3)]
    assert limits(4, 100) == [4, 7, 5, 6, 3, 2, 1]
    assert limits(1, 100) == [1]
    assert max(limits(9, 4)) == 4

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    stopped = make_grid_plan(asked, Settings(progress=interrupt)).plan
    assert stopped.provenance.solver_status == "interrupted"
    assert not violations(stopped)
    for looks in (0, 100):
        passing = Deadline(iter([1.0] * looks + [0.0] * 10**6).__next__)
        late = make_grid_plan(replace(asked, problem=replace(asked.problem, deadline=passing))).plan
        assert late.provenance.solver_status == "time limit"
        assert not violations(late)


def test_an_interrupt_before_anything_is_found_stays_one():
    def interrupt() -> float:
        raise KeyboardInterrupt

    asked = ask(even(), Platform.flat(8, 80 * GB), 32)
    with pytest.raises(KeyboardInterrupt):
        search_grids(replace(asked, problem=replace(asked.problem, deadline=Deadline(interrupt))), Settings())


def test_a_batch_that_nothing_divides_is_an_error():
    with pytest.raises(BadInput, match="--batch: a batch of 8 cannot be shared by 3 pipelines"):
        make_grid_plan(ask(even(), Platform.flat(8, 80 * GB), 8, pipelines=3))
    with pytest.raises(BadInput, match="9 pipelines are more than the 8 GPUs"):
        make_grid_plan(ask(even(), Platform.flat(8, 80 * GB), 9, pipelines=9))
    with pytest.raises(BadInput, match="the 7 samples of each pipeline aren't a multiple of microbatches of 2, 4"):
        make_grid_plan(ask(even(), Platform.flat(8, 80 * GB), 7, (2, 4)))


def test_ac_is_the_longest_segment():
    stages = (Stage(0, 4, (0,), ((0, 3), (3, 4))), Stage(4, 8, (1,)))
    assert segment_length(stages) == 3
    assert segment_length(stages[1:]) is None
