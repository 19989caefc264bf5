"""What a user states is evaluated like what a search finds: the same scheduler, bounds and validator, or a sentence."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from cases.chains import published, random_chain

from pipeplan.check.validate import violations
from pipeplan.deadline import Deadline
from pipeplan.errors import BadInput, Infeasible
from pipeplan.plan import Plan, ScheduleKind
from pipeplan.planner.plan import STATED, make_plan
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Policy, Problem, Weights

GB = 10**9
CHAIN = Chain("six", tuple(Layer(f"block{i}", 10, 20, 100, 60, saved_bytes=80) for i in range(6)), 60)
FOUR = Problem(CHAIN, Platform.flat(4, GB), checkpointing="segments")


def plan_of(problem: Problem, split: str, schedule: ScheduleKind | None = None, **options: str) -> Plan:
    return make_plan(problem, STATED, {"split": split, **options}, schedule=schedule).plan


def shape(plan: Plan) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(stage.start, stage.stop, stage.devices) for stage in plan.allocation.stages]


def test_the_best_of_all_stated_splits_is_the_exact_contiguous_plan() -> None:
    """Every split into stages on one GPU or two, recomputed or not: brute force by stating all of them."""
    rng, compared = random.Random(3), 0
    for _ in range(4):
        chain = random_chain(rng, 4, largest=9)
        platform = Platform((Device(rng.randint(60, 400)),) * 3, (Level(3, 10**9),))
        problem = Problem(chain, platform, Policy("stash", 4), checkpointing="stages")
        periods = []
        for stages in range(1, 4):
            for cuts in combinations(range(1, len(chain)), stages - 1):
                bounds = [0, *cuts, len(chain)]
                split = ",".join(str(b - a) for a, b in pairwise(bounds))
                for counts, chosen in product(product((1, 2, 3), repeat=stages), product((0, 1), repeat=stages)):
                    if sum(counts) <= 3:
                        again = [f"{bounds[s]}-{bounds[s + 1] - 1}" for s in range(stages) if chosen[s]]
                        options = {"replicas": ",".join(map(str, counts)), "recompute": ",".join(again) or "none"}
                        try:
                            plan = plan_of(problem, split, **options)
                        except Infeasible:
                            continue
                        assert plan.pattern is not None
                        periods.append(plan.pattern.period_ns)
        try:
            best = make_plan(problem, "contiguous").plan
        except Infeasible:
            assert not periods
            continue
        assert best.lower_bounds[0].period_ns == min(periods)
        compared += 1
    assert compared > 2


@pytest.mark.parametrize(
    ("weights", "schedule"),
    [
        ("2bw", None), ("stash", None), ("latest", "pattern"), ("latest", "nf1b"), ("flush", "flush"),
        ("flush", "message-driven"),
    ],
)  # fmt: skip
def test_every_kind_of_schedule_takes_stated_stages(weights: Weights, schedule: ScheduleKind | None) -> None:
    plan = plan_of(FOUR.with_policy(Policy(weights)), "2,1,2,1", schedule, recompute="0-2")
    assert shape(plan) == [(0, 2, (0,)), (2, 3, (1,)), (3, 5, (2,)), (5, 6, (3,))]
    assert [stage.checkpoint for stage in plan.allocation.stages] == [((0, 2),), ((2, 3),), (), ()]
    assert violations(plan) == []
    *drained, everything = [(b.allocation, b.replicas, b.checkpointing) for b in plan.lower_bounds]
    assert everything == ("any", schedule != "nf1b", "segments")
    assert drained == [("contiguous", True, "segments")] * (2 if weights == "flush" else 0)
    assert (plan.provenance.algorithm, plan.provenance.options["split"]) == (STATED, "2,1,2,1")


def test_names_replicas_and_devices_say_the_same_as_counts() -> None:
    assert shape(plan_of(FOUR, "block2,block5")) == shape(plan_of(FOUR, "2,3,1")) == [
        (0, 2, (0,)),
        (2, 5, (1,)),
        (5, 6, (2,)),
    ]  # fmt: skip
    assert shape(plan_of(FOUR, "4,2", replicas="3,1")) == [(0, 4, (0, 1, 2)), (4, 6, (3,))]
    assert shape(plan_of(FOUR, "4,2", replicas="2")) == [(0, 4, (0, 1)), (4, 6, (2, 3))]
    assert shape(plan_of(FOUR, "4,2", on="1-2,0/3")) == [(0, 4, (1, 2, 0)), (4, 6, (3,))]  # not renumbered
    assert shape(plan_of(FOUR, "6")) == [(0, 6, (0,))]


def test_stages_that_share_a_gpu_are_scheduled_by_the_integer_program() -> None:
    plan = plan_of(FOUR, "2,2,2", on="0/1/0", recompute="each")
    assert not plan.allocation.contiguous
    assert plan.provenance.solver_status == "optimal"
    assert plan.pattern is not None
    assert plan.pattern.period_ns == 4 * 40  # four layers of 10 + 10 + 20 on GPU 0
    assert plan.allocation.stages[1].checkpoint == ((2, 3), (3, 4))


REFUSED = {
    "too few layers": ({"split": "2,3"}, "--split: 2,3 are 5 layers, the network has 6"),
    "empty stage": ({"split": "0,6"}, "--split: stage 0 has no layers"),
    "another name": ({"split": "blok3"}, "no layer is called 'blok3'; there is 'block3'"),
    "no such name": ({"split": "zzz"}, "--split: no layer is called 'zzz'"),
    "the first layer": ({"split": "block0"}, r"'block0' \(layer 0\) begins the network"),
    "out of order": ({"split": "block4,block2"}, r"'block2' \(layer 2\) does not come after 'block4' \(layer 4\)"),
    "too many stages": ({"split": "1,1,1,1,2"}, "5 stages take 5 GPUs, the platform has 4; --on says"),
    "too many replicas": ({"split": "3,3", "replicas": "3,2"}, "--replicas: 2 stages take 5 GPUs, the platform has 4"),
    "no replica": ({"split": "3,3", "replicas": "0,2"}, "--replicas: stage 0 has no GPU"),
    "other counts": ({"split": "3,3", "replicas": "1,1,1"}, "--replicas: 1,1,1 is for 3 of the stages, --split says 2"),
    "both": ({"split": "3,3", "replicas": "1,1", "on": "0/1"}, "leave out --replicas"),
    "no number": ({"split": "3,3", "on": "0/x"}, "--on: 'x' in 0/x isn't a number"),
    "backwards": ({"split": "3,3", "on": "0/3-1"}, "--on: '3-1' isn't a range such as 0-3"),
    "endless range": ({"split": "3,3", "on": "0/1-99999999"}, "--on: stage 1 uses GPU 99999999; .* GPUs 0 to 3"),
    "other groups": ({"split": "3,3", "on": "0/1/2"}, "--on: 0/1/2 names GPUs for 3 of the stages, --split says 2"),
    "device twice": ({"split": "3,3", "on": "0,0/1"}, r"stage 0 lists a device twice: \[0, 0\]"),
    "shared in part": ({"split": "3,3", "on": "0,1/1"}, r"device groups \[0, 1\] and \[1\] overlap"),
    "no such device": ({"split": "3,3", "on": "0/4"}, "--on: stage 1 uses GPU 4; the platform has GPUs 0 to 3"),
    "no such layer": ({"split": "3,3", "recompute": "4-6"}, "layer 6 doesn't exist; the network has 0 to 5"),
    "segments out of order": (
        {"split": "3,3", "recompute": "4,0-1"},
        "layer 0 comes after 4; give the ranges in order",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_with_its_place_and_the_numbers(case: str) -> None:
    options, sentence = REFUSED[case]
    with pytest.raises(BadInput, match=sentence):
        make_plan(FOUR, STATED, options)


def test_names_that_several_layers_have_are_refused() -> None:
    layers = tuple(Layer("relu", 1, 1, 0, 1) for _ in range(8))
    with pytest.raises(BadInput, match=r"layers 0, 1, 2, 3, 4, \.\. are all called 'relu'; give counts"):
        make_plan(Problem(Chain("same", layers, 1), FOUR.platform), STATED, {"split": "relu"})


def test_what_other_options_rule_out_is_refused() -> None:
    for problem, options, sentence in (
        (Problem(CHAIN, FOUR.platform, replicas=False), {"replicas": "2,1"}, "stage 0 has 2 GPUs"),
        (Problem(CHAIN, FOUR.platform, checkpointing="none"), {"recompute": "all"}, "--checkpointing none"),
        (Problem(CHAIN, FOUR.platform, checkpointing="stages"), {"recompute": "4"}, "stage 1 recomputes .* stages"),
    ):
        with pytest.raises(BadInput, match=sentence):
            plan_of(problem, "3,3", **options)


def test_what_lacks_memory_says_which_stage_and_how_much_and_what_would_do() -> None:
    layers = tuple(Layer(f"l{i}", 10, 20, 0, 100, saved_bytes=GB) for i in range(6))
    problem = Problem(Chain("wide", layers, 100), Platform.flat(2, 2 * GB), checkpointing="segments")
    with pytest.raises(Infeasible) as caught:
        plan_of(problem, "2,4")
    sentence = str(caught.value)
    assert "stage 1 (layers 2 to 5 (l2 to l5)) on device 1 needs 4.00 GB" in sentence
    assert "2.00 GB more than the 2 GB there" in sentence
    assert "stage 0 (layers 0 to 1 (l0 to l1)) on device 0" in sentence  # by its two buffers
    assert "from 4.01 GB per GPU, with --recompute each" in sentence
    assert violations(plan_of(Problem(problem.chain, Platform.flat(2, 401 * 10**7)), "2,4")) == []
    assert violations(plan_of(problem, "2,4", recompute="each")) == []


def test_layers_that_share_weights_are_the_policys_to_part() -> None:
    tied = Problem(Chain("tied", CHAIN.layers, 60, tied=((0, 5),)), FOUR.platform)
    assert violations(plan_of(tied.with_policy(Policy("flush")), "3,3")) == []
    with pytest.raises(Infeasible, match=r"the stated stages cannot run: layers 0 .* share weights"):
        plan_of(tied.with_policy(Policy("stash")), "3,3")


def test_a_published_profile_as_pipedream_splits_it() -> None:
    """VGG-16 in 15-1, its configuration on 16 GPUs."""
    chain = published("vgg16")
    platform = Platform((Device(16 * GB),) * 16, (Level(4, 10 * GB), Level(4, 125 * 10**7)))
    plan = plan_of(Problem(chain, platform, Policy("stash")), f"31,{len(chain) - 31}", replicas="15,1")
    assert [stage.replicas for stage in plan.allocation.stages] == [15, 1]
    assert violations(plan) == []


def test_no_other_stages_take_the_place_of_stated_ones_when_time_is_up() -> None:
    late = replace(FOUR, deadline=Deadline.within(-1))
    assert shape(plan_of(late, "2,4", on="0/0")) == [(0, 2, (0,)), (2, 6, (0,))]  # one microbatch at a time, if need be
    with pytest.raises(Infeasible, match="the time limit left no time to schedule the stated stages"):
        plan_of(late.with_policy(Policy("flush")), "2,4", "message-driven")
