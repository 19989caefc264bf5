"""Plans that targets can express: none that brute force finds is shorter, or below their bound, and each is one."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from fractions import Fraction

import pytest
from cases.target_plans import every_plan, network

from pipeplan.check.targets import TARGETS, as_run_by, target_violations
from pipeplan.check.validate import check, violations
from pipeplan.errors import BadInput, Ended, Infeasible
from pipeplan.plan import Schedule
from pipeplan.planner.claims import derived
from pipeplan.planner.drained.block_search import BlockSearch
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.planner.plan import make_plan
from pipeplan.planner.what_if.target import (
    make_target_plan,
    priced,
    target_bound,
    unrestricted,
    with_price,
)
from pipeplan.problem import Chain, Device, Layer, LayerTimes, Level, Platform, Policy, Problem, SharedWeights
from pipeplan.report.searched import restriction


@pytest.mark.parametrize(
    ("name", "memory"), [("megatron", 1000), ("torchtitan", 1700), ("deepspeed", 1000), ("torch", 1700), ("torch", 900)]
)
def test_the_best_of_all_plans_of_the_class_is_found_and_none_is_below_its_bound(name, memory):
    chain = network(memory)
    problem = Problem(chain, Platform.flat(3, memory, 10**10), Policy("flush", accumulate=6), checkpointing="segments")
    every = list(every_plan(as_run_by(problem, name), name))
    best = min((period for *_, period in every), default=None)
    for kind in {kind for kind, *_ in every}:
        assert (target_bound(as_run_by(problem, name), name, kind) or 0) <= min(
            x for other, _, x in every if other == kind
        )
    if best is None:
        with pytest.raises(Infeasible, match=f"no plan that {name} can express fits: .* more than there is"):
            make_target_plan(problem, name)
        return
    found = make_target_plan(problem, name)
    plan, bound = found.plan, found.plan.lower_bounds[0]
    assert violations(plan) == target_violations(plan, name) == []
    assert bound.allocation == name
    assert bound.period_ns <= best
    assert best <= found.evaluation.period_ns <= best * 1.02
    claims = tuple(replace(bound, claimed=bound.allocation == name) for bound in plan.lower_bounds)
    assert derived(replace(plan, lower_bounds=claims))[1] == []


def bounds_and_soonest(chain, platform, name, kind="interleaved", checkpointing="none"):
    """Yield the bound on mini-batches of 4 of each shape with several stages on a GPU, and the least of all plans."""
    problem = as_run_by(Problem(chain, platform, Policy("flush", accumulate=4), checkpointing=checkpointing), name)
    search = BlockSearch(problem, name, TARGETS[name], (kind,), Settings())
    every = list(every_plan(problem, name))
    for config in search.configs:
        periods = [period for kind, shape, period in every if (kind, shape) == (config.kind, config.shape)]
        if periods:
            yield search.chunked_bound(config), 4 * min(periods)


def test_many_stages_on_a_gpu_are_looked_at_where_all_have_as_many_blocks():
    block = network().layers[1]
    layers = [replace(block, name="embedding"), *(replace(block, name=f"block{i}") for i in range(20))]
    chain = Chain("deep", (*layers, replace(block, name="head")), 8)
    problem = Problem(chain, Platform.flat(2, 10**6, 10**9), Policy("flush", accumulate=4))
    search = BlockSearch(problem, "megatron", TARGETS["megatron"], ("interleaved",), Settings())
    assert {x.shape.chunks for x in search.configs if x.shape.ranks == 2} == {2, 3, 4, 5, 10}


def test_the_last_unit_may_share_a_stage_with_what_it_would_wait_for():
    chain = network()
    layers = tuple(replace(x, output_bytes=50 if x.name == "norm" else 0) for x in chain.layers)
    platform = replace(Platform.flat(2, 10**6, 10**9), blocking=True)
    found = list(bounds_and_soonest(replace(chain, layers=layers), platform, "torchtitan"))
    assert len(found) == 2
    assert all(bound <= soonest for bound, soonest in found)


def test_a_slow_gpu_saves_more_where_it_steps_shared_weights_once():
    layers = [replace(x, forward_ns=10, backward_ns=20, weight_bytes=100, output_bytes=0) for x in network().layers]
    layers[-1] = replace(layers[-1], forward_ns=1, backward_ns=1, weight_bytes=0)
    for i in (1, 3):
        layers[i] = replace(layers[i], optimizer_ns=40, parameters=25)
    chain = Chain("decoder", tuple(layers), 30, tied=((1, 3),), shared=(SharedWeights((1, 3), 100, 25),))
    platform = Platform((Device(10**6, Fraction(1, 2)),) * 2, (Level(2, 10**9),))
    assert [bound <= soonest for bound, soonest in bounds_and_soonest(chain, platform, "megatron")] == [True, True]


def test_stages_around_a_turn_wait_for_nothing_there():
    chain = network()
    layers = tuple(replace(x, output_bytes=50, saved_bytes=0) for x in chain.layers)
    platform = replace(Platform.flat(2, 10**6, 10**9), blocking=True)
    found = list(bounds_and_soonest(replace(chain, layers=layers), platform, "torchtitan", "zbv"))
    assert len(found) == 1
    assert all(bound <= soonest for bound, soonest in found)


def test_a_gpu_recomputes_in_times_of_its_own():
    own = LayerTimes("", (2,) * 8, (2,) * 8, (0,) * 8, (0,) * 8)
    platform = Platform((Device(1700, times=own),) * 2, (Level(2, 10**12),))
    found = list(bounds_and_soonest(network(), platform, "megatron", checkpointing="segments"))
    assert len(found) == 1
    assert all(bound <= soonest for bound, soonest in found)


def test_a_bound_on_a_class_is_checked_like_others():
    problem = Problem(network(), Platform.flat(2, 10**6, 10**9), Policy("flush", accumulate=4))
    plan = make_target_plan(problem, "deepspeed").plan
    bound = plan.lower_bounds[0]
    short = replace(bound, period_ns=bound.period_ns + 1, claimed=True)
    assert "is more than can be derived" in derived(replace(plan, lower_bounds=(short,)))[1][0]
    assert any("runs 1f1b; the schedule is message-driven" in x for x in violations(
        replace(plan, schedule=Schedule("message-driven", 4, 2))
    ))  # fmt: skip


def test_memory_is_what_the_target_s_runtime_holds():
    """Torch has M buffers for what comes in and M for its gradients; a microbatch keeps its output."""
    problem = Problem(network(), Platform.flat(2, 10**6, 10**9), Policy("flush", accumulate=4), replicas=False)
    plans = {name: make_target_plan(problem, name, kinds=("1f1b",)) for name in ("megatron", "torchtitan", "torch")}
    for name, planned in plans.items():
        plan, use = planned.plan, planned.evaluation.devices
        cut = plan.chain.cut_bytes[plan.allocation.stages[0].stop]
        buffers = [2 * cut, 2 * cut] if name == "megatron" else [4 * cut, 6 * cut]
        assert [one.buffer_bytes for one in use] == buffers
        line = "\n".join(restriction(plan, planned.evaluation))
        assert ("buffers for all microbatches" in line) == (name != "megatron")
    delayed = replace(plans["torch"].plan, policy=Policy("2bw", accumulate=4, engine="torch"), schedule=Schedule())
    assert "torch drains every mini-batch, for weights flush; the policy is 2bw" in violations(delayed)[0]


def test_servers_tied_weights_and_what_nobody_can_do():
    platform = Platform((Platform.flat(1, 10**6).devices[0],) * 4, (Level(2, 10**10), Level(2, 10**9)))
    problem = Problem(network(tied=True), platform, Policy("flush"), checkpointing="none")
    apart = make_target_plan(problem, "megatron").plan
    assert apart.policy.accumulate == 16
    assert {stage.checkpoint for stage in apart.allocation.stages} == {()}
    together = make_target_plan(problem, "torchtitan").plan
    assert together.allocation.stages[0].stop >= 7
    with pytest.raises(BadInput, match="--for torch: with 16 microbatches an update on 4 GPUs, no shape"):
        make_target_plan(
            replace(problem, replicas=False, policy=Policy("flush", accumulate=16)), "torch", kinds=("interleaved",)
        )
    with pytest.raises(Infeasible, match="layers 0 and 6 share weights, which torch has in one stage"):
        make_target_plan(replace(problem, platform=Platform.flat(2, 500, 10**9)), "torch", kinds=("1f1b",))


def test_the_price_is_that_of_the_same_updates():
    problem = Problem(network(), Platform.flat(2, 10**6, 10**9), Policy("flush", accumulate=4))
    plan = with_price(make_target_plan(problem, "torch"), unrestricted(problem)).plan
    price = plan.provenance.options["price"]
    assert set(price) == {"flush", "2bw"}
    assert all(0 < value <= check(plan).period_ns for value in price.values())


def test_a_plan_is_there_before_the_search_and_before_its_price():
    problem = Problem(network(), Platform.flat(2, 10**6, 10**9), Policy("flush", accumulate=4))
    heard = []

    def first(planned):
        heard.append(planned)
        raise Ended(signal.SIGTERM)

    found = make_target_plan(problem, "megatron", found=first)
    assert found == heard[0]
    assert (found.plan.provenance.solver_status, violations(found.plan)) == ("interrupted", [])

    def ended(line):
        raise Ended(signal.SIGTERM)

    assert priced(problem, found, "megatron", Settings(progress=ended)) == found


@pytest.mark.parametrize(("name", "binds"), [("torch", True), ("megatron", False)])
def test_what_makes_a_plan_much_longer_is_said(name, binds):
    said = (
        "`embedding` and `head` share weights, which .* can't split: untie them, or --for megatron or --for deepspeed"
    )
    problem = Problem(
        network(tied=True), Platform.flat(2, 10**6, 10**12), Policy("flush", accumulate=8), False, checkpointing="none"
    )
    found = priced(problem, make_target_plan(problem, name), name, Settings())
    (line,) = [x for x in restriction(found.plan, found.evaluation) if x.startswith("binds")]
    assert bool(re.match(f"binds +{said}", line)) == binds, line


def test_drained_plans_without_restriction_are_no_longer_than_grids():
    """A fast start and a slow network of alike blocks, where split backwards drain sooner than any pattern's order."""
    layers = tuple(Layer(f"layers.{i}", 1000, 2000, 100, 40, saved_bytes=90) for i in range(8))
    problem = Problem(Chain("alike", layers, 30), Platform.flat(4, 10**6, 10**9), Policy("flush", accumulate=8), False)
    free, patterns = make_plan(problem), make_plan(problem, schedule="flush")
    target = make_target_plan(problem, "torch")
    assert free.plan.schedule.kind == "zbv"
    assert violations(free.plan) == []
    assert free.evaluation.period_ns <= target.evaluation.period_ns < patterns.evaluation.period_ns
    price = with_price(target, unrestricted(problem)).plan.provenance.options["price"]
    assert price["flush"] == target.evaluation.period_ns
