"""nF1B against the closed forms of TiMePReSt, corrected (ALGORITHMS section 8): all W, N in 2..8."""

from __future__ import annotations

from math import ceil

import pytest
from cases.schedules import balanced, held, picture, staircase

from pipeplan.errors import BadInput
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.program import Step
from pipeplan.schedule.programs.deciding import nf1b
from pipeplan.schedule.simulate import simulate

MINI_BATCHES = 20
ALL = [(workers, batch) for workers in range(2, 9) for batch in range(2, 9)]


def unlimited(workers, batch, backward):
    """A run whose mini-batch takes ``backward`` time points backward; a time point is ``batch`` ns."""
    return simulate(nf1b(balanced(workers, batch, backward), MINI_BATCHES * batch, batch, 10**6))


def backward_start(timeline, mini_batch, stage):
    """Time point, from 1, of the start of a mini-batch's backward on a stage, both from 1."""
    program = timeline.program
    step = Step(mini_batch * program.batch - 1, program.position["B", stage - 1])
    start, rest = divmod(timeline.begin_ns(step), program.batch)
    assert rest == 0
    return start + 1


def test_staircase():
    assert picture(simulate(nf1b(balanced(3, 2, 1), 6, 2)), unit=2) == staircase("""
        F0 F1 F2 F3 F4 F5 B1 .  .  B3 .  .  B5
        .  F0 F1 F2 F3 B1 F4 F5 B3 .  .  B5
        .  .  F0 F1 B1 F2 F3 B3 F4 F5 B5
    """)


@pytest.mark.parametrize(("workers", "batch"), ALL)
def test_forwards_of_the_first_mini_batches_and_every_backward(workers, batch):
    timeline = unlimited(workers, batch, 1)
    last = timeline.program.position["F", workers - 1]
    first_forwards = [timeline.end_ns(Step(m, last)) // batch for m in (batch - 1, 2 * batch - 1)]
    assert first_forwards[0] == workers + batch - 1  # f1
    assert first_forwards[1] - batch == workers + batch  # f2, from the mini-batch's own start
    for k in range(1, MINI_BATCHES + 1):
        for s in range(1, workers + 1):
            assert backward_start(timeline, k, s) == workers - 1 + k * (batch + 1) + (workers - s)


@pytest.mark.parametrize(("workers", "batch"), ALL)
def test_version_difference(workers, batch):
    """The newest mini-batch whose update is everywhere when mini-batch k starts its backward is k - v."""
    for backward in (1, 2 * batch):
        timeline = unlimited(workers, batch, backward)
        k = MINI_BATCHES - 2
        begin = backward_start(timeline, k, workers)
        finished = [j for j in range(1, k) if backward_start(timeline, j, 1) + backward <= begin]
        assert k - max(finished) == ceil(workers * backward / (batch + backward))


def test_the_papers_formula_is_wrong_in_three_cases_alone():
    differing = [(w, n) for w, n in ALL if (w + n - 2) // n != ceil(w / (n + 1))]
    assert differing == [(6, 2), (8, 2), (8, 3)]


@pytest.mark.parametrize(("workers", "batch"), ALL)
def test_peak_activations(workers, batch):
    for backward in (1, 2 * batch):
        expected = [batch + (workers - s) * (backward + 1) for s in range(1, workers + 1)]
        assert held(unlimited(workers, batch, backward)) == expected


def test_with_realistic_backwards_it_holds_more_than_1f1b_unless_limited():
    assert held(unlimited(4, 4, 8)) == [31, 22, 13, 4]
    assert held(simulate(nf1b(balanced(4, 4, 8), 80, 4))) == [16, 16, 13, 4]  # at most 4 mini-batches admitted


def test_4_4_microbatches_c_and_d_of_mini_batch_3_start_on_weights_1():
    timeline = unlimited(4, 4, 1)
    updates = [timeline.end_ns(Step(4 * k - 1, timeline.program.position["B", 0])) for k in (1, 2)]
    made = [sum(end <= timeline.begin_ns(Step(8 + m, 0)) for end in updates) for m in range(4)]
    assert made == [0, 0, 1, 1]


def test_one_backward_sends_one_gradient():
    program = nf1b(balanced(3, 2, 3, 1), 12, 3)
    assert program_deadlock(program) == []
    sends = [lane for lane in program.lanes if lane.device is None]
    assert sum(len(lane.steps) for lane in sends) == 2 * (12 + 4)


@pytest.mark.parametrize(
    ("microbatches", "batch", "limit", "message"),
    [(7, 2, None, "7 microbatches are not a whole number of mini-batches of 2"), (4, 2, 0, "limit: 0")],
)
def test_bad_options(microbatches, batch, limit, message):
    with pytest.raises(BadInput, match=message):
        nf1b(balanced(2, 1, 1), microbatches, batch, limit)
