"""Long programs from short ones: the same instructions as if all had been listed. No torch."""

import random
from itertools import pairwise

import pytest
from cases.chains import random_problem
from cases.lowering import chain_of

from pipeplan.cost.stage_graph import stage_graph
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.problem import Platform, Policy
from pipeplan.runtime.lowering import segments
from pipeplan.runtime.lowering.instructions import (
    Backward,
    Forward,
    Receive,
    Save,
    Send,
    Update,
    most_versions,
    version_uses,
)
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.lowering.segments import Repeat, Repeated, continued
from pipeplan.schedule.pattern import most_in_flight, starts_of
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star

BODY = (Forward(0, 0, 0), Send("F", 0, 0, 1), Receive("B", 0, 0, 1), Backward(0, 0, 0), Update(0, 1))
REPEATED = Repeated([Repeat(BODY[:1]), Repeat(BODY, 3, 2, 1, 5, 7), Repeat((Save(9),))])
LISTED = [
    Forward(0, 0, 0),
    *(
        x
        for turn in range(3)
        for m, v in [(5 + 2 * turn, 7 + turn)]
        for x in (Forward(0, m, v), Send("F", 0, m, 1), Receive("B", 0, m, 1), Backward(0, m, v), Update(0, v + 1))
    ),
    Save(9),
]


def test_a_listing_is_what_it_lists():
    assert list(REPEATED) == [REPEATED[i] for i in range(len(REPEATED))] == LISTED
    assert REPEATED[-1] == Save(9)
    assert REPEATED[3:5] == LISTED[3:5]
    with pytest.raises(IndexError):
        REPEATED[len(LISTED)]
    assert list(REPEATED.changed(lambda some: (x for x in some if isinstance(x, Send)))) == [
        x for x in LISTED if isinstance(x, Send)
    ]
    assert REPEATED.uses(0) == version_uses(LISTED, 0)
    assert list(REPEATED.kinds()) == [BODY[0], *BODY, Save(9)]
    assert REPEATED.short() == [*LISTED[:11], Save(8)]
    assert REPEATED.longest == len(BODY)


def test_what_does_not_go_on_as_before_is_no_round():
    shorter = list(Repeated([Repeat(BODY, 4, 1, 1)]))
    longer = list(Repeated([Repeat(BODY, 5, 1, 1)]))
    assert list(continued(shorter, longer, 1, 1, 3)) == list(Repeated([Repeat(BODY, 7, 1, 1)]))
    assert continued(shorter, longer[:-1], 1, 1, 3) is None
    assert continued(shorter, longer, 2, 1, 3) is None
    assert continued(shorter, shorter, 1, 1, 3) is None


def random_plan(seed):
    """A plan with weights that outlive an update, on random stages, some of them replicated."""
    rng = random.Random(seed)
    problem = random_problem(rng, layers=rng.randint(3, 8), devices=4)
    layers, stages, device = len(problem.chain), [], 0
    count = rng.randint(2, min(4, layers))
    cuts = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    for start, stop in pairwise(cuts):
        replicas = rng.choice([1, 1, 2, 3])
        stages.append(Stage(start, stop, tuple(range(device, device + replicas))))
        device += replicas
    platform = Platform.flat(device, 10**15, rng.choice([10**9, 10**7]))
    loose = stage_graph(problem.chain, platform, Policy("flush", accumulate=4), stages)
    pattern = best_one_f_one_b_star(loose)
    held = most_in_flight(loose, starts_of(pattern), pattern.period_ns)
    weights = rng.choice(["stash", "2bw"])
    policy = Policy(weights, accumulate=2 * held + 3 if weights == "2bw" else rng.randint(1, 3))
    graph = stage_graph(problem.chain, platform, policy, stages)
    pattern = best_one_f_one_b_star(graph)
    return Plan(problem.chain, platform, policy, Allocation(tuple(stages)), pattern, (), Provenance("x"), Schedule())


@pytest.mark.parametrize("seed", range(9))
def test_a_long_run_is_put_together_from_a_short_one(seed, monkeypatch):
    plan = random_plan(seed)
    steps = 400 // lower_run(plan, 1).interval
    monkeypatch.setattr(segments, "LEAST", 10)
    short = lower_run(plan, steps, every=steps * 2 // 3)
    monkeypatch.setattr(segments, "LEAST", 10**6)
    full = lower_run(plan, steps, every=steps * 2 // 3)
    assert full.program.microbatches > 200
    for rank, (one, other) in enumerate(zip(short.instructions, full.instructions, strict=True)):
        assert list(one) == list(other)
        for s in full.stages_of(rank):
            assert one.uses(s) == version_uses(other, s)
            assert most_versions(one.short(), s) == most_versions(other, s)


def test_most_long_runs_are_put_together(monkeypatch):
    monkeypatch.setattr(segments, "LEAST", 10)
    found = [lower_run(plan, 4000 // lower_run(plan, 1).interval).program for plan in map(random_plan, range(5))]
    assert sum(program.microbatches < 2000 for program in found) >= 4


def test_a_run_of_a_million_microbatches_takes_no_longer_to_prepare():
    stages = tuple(Stage(i, i + 1, (i,)) for i in range(4))
    chain, platform, policy = (
        chain_of([(100, 200)] * 4, 10),
        Platform.flat(4, 10**12, 10**9),
        Policy("2bw", accumulate=4),
    )
    pattern = best_one_f_one_b_star(stage_graph(chain, platform, policy, stages))
    plan = Plan(chain, platform, policy, Allocation(stages), pattern, (), Provenance("x"), Schedule())
    script = lower_run(plan, 250_000)
    assert script.program.microbatches < 1000
    assert sum(len(part.instructions) for listing in script.instructions for part in listing.parts) < 30_000
    assert len(script.instructions[0]) == 10**6 * 4 + 250_000
    assert script.instructions[0][-1] == Update(0, 250_000)
