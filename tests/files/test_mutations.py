"""Whatever single field of a plan is changed is refused with its place, or on a list with the reason why it is right.

A sample, the same each time; ``scripts/checks/plan_mutations.py`` makes every change.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from cases.mutations import PLACE, document_of, judged_edit, kinds, makers, mutations, reason_of, refusal

from pipeplan.schedule.kinds import KINDS as KINDS_OF_SCHEDULES

SAMPLE = 16  # changes of each kind of plan

MAKERS = makers()


@pytest.mark.parametrize("kind", MAKERS)
def test_every_change_of_a_field_is_refused_with_its_place_or_right(kind, tmp_path):
    document = document_of(MAKERS[kind]())
    assert refusal(document, tmp_path) == []
    every = list(mutations(document))
    assert len(every) > 900
    refused = 0
    for place, change, edited in random.Random(kind).sample(every, SAMPLE):
        found = refusal(edited, tmp_path)
        refused += bool(found)
        for sentence in found:
            assert PLACE.search(sentence), (place, change, sentence)
        assert found or reason_of(place, change), f"{place}: {change} is accepted, and nothing says why"
    assert refused > SAMPLE / 2


def test_the_figures_of_what_is_accepted_are_those_of_an_oracle(tmp_path):
    ends = Counter()
    for seed in range(100):
        ended, wrong = judged_edit(random.Random(seed), tmp_path)
        ends[ended] += 1
        assert not wrong, seed
    assert ends["accepted"] > 12
    assert ends["counted anew"] > 1


def test_the_plans_are_of_many_kinds():
    plans = kinds().values()
    assert len(plans) >= 12
    assert {plan.schedule.kind for plan in plans} == set(KINDS_OF_SCHEDULES)
    assert {plan.policy.weights for plan in plans} == {"2bw", "stash", "latest", "flush"}
    allocations = [plan.allocation for plan in plans]
    assert not all(allocation.contiguous for allocation in allocations)
    stages = [stage for allocation in allocations for stage in allocation.stages]
    assert any(stage.replicas > 1 for stage in stages)
    assert any(stage.checkpoint not in ((), ((stage.start, stage.stop),)) for stage in stages)
    assert any(plan.policy.offload for plan in plans)
