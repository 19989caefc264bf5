"""Schedules with several features at once, beside a plain loop; ``scripts/checks/training_matrix.py`` runs all."""

from itertools import combinations

import pytest

torch = pytest.importorskip("torch")

from cases.training_matrix import FEATURES, PERIODIC, SCHEDULES, Case, difference, planned, tolerance

SETS = (
    "recompute zero tied bf16 loader", "recompute replicas clip fp16 resume", "zero clip fp16 loader resume tied",
    "replicas tied bf16 clip loader resume", "recompute replicas tied fp16 loader", "recompute zero clip bf16 resume",
)  # fmt: skip
WITHOUT = {"2bw-uniform": {"fp16"}, "stash": {"fp16", "clip", "tied", "replicas", "zero"}}
CASES = [
    Case(
        schedule,
        frozenset(SETS[index % len(SETS)].split() + ["autocast"] * (index >= len(SETS)))
        - WITHOUT.get(schedule, {"zero", "replicas"} if index >= 2 * len(SETS) else set()),
    )
    for index, schedule in enumerate(SCHEDULES)
]


def test_every_two_features_go_together_somewhere():
    together = {pair for case in CASES for pair in combinations(sorted(case.features), 2)}
    never = {("bf16", "fp16"), ("replicas", "zero")}  # the latter has replicas
    assert {tuple(sorted(pair)) for pair in combinations(FEATURES, 2)} - together == never
    assert {case.schedule for case in CASES} == set(SCHEDULES) > set(PERIODIC)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.schedule)
def test_a_schedule_trains_as_a_plain_loop_does(case, tmp_path):
    assert case.refused() is None
    loss, weight, full = difference(case, tmp_path)
    assert max(loss, weight) <= tolerance(case, planned(case))
    assert full <= 1
