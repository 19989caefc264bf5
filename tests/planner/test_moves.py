"""Plans that go on from others': what moves, and that nothing about as good moves less."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

import pipeplan as pp
from pipeplan.check.validate import judged
from pipeplan.errors import BadInput
from pipeplan.plan import Allocation
from pipeplan.planner.plan import Planned
from pipeplan.planner.what_if.carry import carried
from pipeplan.planner.what_if.moves import SHARE, moved, nearest
from pipeplan.problem import Chain, Layer

MACHINE = {"mem": "1GB", "bandwidth": "100GB/s", "optimizer": "adam", "weights": "2bw", "accumulate": 16}
ONE_EACH = {"no_replicas": True, "algorithm": "contiguous", "checkpointing": "none"}


def network(seed, layers=14):
    rng = random.Random(seed)
    return Chain(
        f"seed {seed}",
        tuple(Layer(f"l{i}", rng.randint(50, 60) * 1000, 100_000, 4 * rng.randint(1, 900), 64) for i in range(layers)),
        64,
    )


def planned(chain, gpus, **asked):
    return pp.plan(chain, gpus=gpus, **MACHINE, **{**ONE_EACH, **asked}).plan


@pytest.mark.parametrize("seed", range(2))
def test_no_cuts_about_as_good_move_less(seed):
    chain = network(seed)
    before, plan = planned(chain, "4"), planned(chain, "3")
    found = Planned(plan, judged(plan)[0])
    made, moves, first = nearest(found, before)
    limit = found.evaluation.period_ns * (1 + SHARE)
    assert judged(made.plan)[1] == []
    assert made.evaluation.period_ns <= limit
    assert moves.coming <= first.coming <= moved(plan, plan.allocation.stages, before).coming
    least = first.coming
    for cuts in combinations(range(1, len(chain)), 2):
        own = zip(pairwise((0, *cuts, len(chain))), plan.allocation.stages, strict=True)
        stages = tuple(replace(x, start=a, stop=b) for (a, b), x in own)
        coming = moved(plan, stages, before).coming
        if coming < least:
            period = carried(replace(plan, allocation=Allocation(stages)), plan.chain).period_ns
            least = coming if period is not None and period <= limit else least
    assert moves.coming <= least


def test_units_take_the_places_of_those_that_have_what_they_get():
    chain = network(7)
    before = planned(chain, "2x2")
    at = [2, 3, 0, 1]  # as another search may have them
    stages = tuple(replace(x, devices=(at[x.devices[0]],)) for x in before.allocation.stages)
    before = replace(before, allocation=replace(before.allocation, stages=stages))
    plan = planned(chain, "2x2")
    made, moves, _ = nearest(Planned(plan, judged(plan)[0]), before)
    assert moves.coming == 0
    assert made.plan.allocation.stages == stages
    assert moves.held == sum(3 * layer.weight_bytes for layer in chain.layers)  # with both of Adam's


def test_what_a_checkpoint_says_isnt_said_again(tmp_path):
    place = tmp_path / "step-00000007"
    place.mkdir()
    before = pp.plan(network(1), gpus="4", **MACHINE, algorithm="contiguous")
    before.save(place / "plan.json")
    going_on = pp.plan(resume_from=str(tmp_path), gpus="3", algorithm="contiguous")
    assert going_on.plan.policy == before.plan.policy
    assert going_on.plan.platform.levels[0].bandwidth == before.plan.platform.levels[0].bandwidth
    again = pp.plan(resume_from=str(place), gpus="4", algorithm="contiguous")
    assert again.plan.provenance.options["resumed"]["coming_bytes"] == 0
    for asked, why in (
        ({"gpus": "3", "batch": 8}, "the checkpoint's plan says batch"),
        ({}, "gpus says how many GPUs are left"),
        ({"gpus": "3", "for_": "megatron"}, "leave out for"),
        ({"gpus": "2x2"}, "has one server"),
        ({"gpus": "3", "resume_from": str(tmp_path / "none")}, "has none with the plan of its run"),
    ):
        with pytest.raises(BadInput, match=why):
            pp.plan(**{"resume_from": str(tmp_path), **asked})
    with pytest.raises(BadInput, match="leave out PROFILE"):
        pp.plan(network(1), resume_from=str(tmp_path), gpus="3")
