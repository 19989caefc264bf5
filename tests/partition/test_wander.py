"""Walks over what allocations miss: every step is a legal allocation, and a walk finds what small steps up hide."""

import random

import pytest
from cases.chains import random_chain

from pipeplan.check.validate import structure_violations
from pipeplan.partition.moves.wander import wander
from pipeplan.plan import Allocation, Stage
from pipeplan.problem import Platform, Problem


@pytest.mark.parametrize("checkpointing", ["none", "stages", "segments"])
def test_steps_are_legal_and_the_same_every_time(checkpointing):
    chain = random_chain(random.Random(1), 12)
    problem = Problem(chain, Platform.flat(4, 10**6), replicas=checkpointing != "none", checkpointing=checkpointing)
    start = Allocation((Stage(0, 5, (0,)), Stage(5, 9, (1,)), Stage(9, 12, (0,))))
    walks = []
    for _ in range(2):
        seen = []

        def misfit(stages, enough, seen=seen):
            seen.append(stages)
            return 0.01 * (1 + abs(len(stages) - 5) + sum(stage.start % 3 for stage in stages))

        assert wander(problem, start, misfit, lambda _: False, 400, lambda: False) == start
        walks.append(seen)
    assert walks[0] == walks[1]
    kinds = {tuple((stage.start, stage.devices) for stage in stages) for stages in walks[0]}
    assert len(kinds) > 50
    for stages in walks[0]:
        assert structure_violations(chain, problem.platform, problem.policy, stages) == []
        parts = [stage for stage in stages for part in stage.checkpoint if part != (stage.start, stage.stop)]
        assert checkpointing == "segments" or not parts
        assert checkpointing != "none" or not any(stage.checkpoint for stage in stages)


def test_reaches_what_can_only_be_reached_through_worse():
    chain = random_chain(random.Random(2), 10)
    problem = Problem(chain, Platform.flat(2, 10**6), replicas=False, checkpointing="none")
    heights = {4: 0.03, 5: 0.05, 6: 0.04, 7: 0.02, 8: 0.0}  # by the first cut: a hill, and behind it the goal
    found = []

    def misfit(stages, enough):
        return heights.get(stages[0].stop, 0.2)

    def try_(allocation):
        found.append(allocation)
        return True

    start = Allocation((Stage(0, 4, (0,)), Stage(4, 10, (1,))))
    assert wander(problem, start, misfit, try_, 2000, lambda: bool(found)).stages[0].stop == 8
