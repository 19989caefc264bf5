"""Runs in which everything blocks: updates of replicas have a place in the total order, and nothing moves past them."""

import pytest

torch = pytest.importorskip("torch")  # which the makers of plans import

from cases.blocking import deadlock, run_deadlock
from cases.runtime import plan_of, zoo_chain

from pipeplan.runtime.lowering import lowered, lowered_run
from pipeplan.runtime.lowering.lowered_run import lower_run

ON_FIVE = [(0, 2, (0,)), (2, 4, (1, 2)), (4, 6, (3, 4))]
GOES_BACK = [(0, 2, (0, 1)), (2, 4, (2,)), (4, 5, (0, 1)), (5, 6, (3,))]


@pytest.fixture(scope="module")
def chain():
    return zoo_chain("small-cnn", 4)


@pytest.mark.parametrize(
    ("stages", "weights", "accumulate"),
    [
        (ON_FIVE, "2bw", 6), (ON_FIVE, "2bw", 12), (ON_FIVE, "stash", None), (GOES_BACK, "2bw", 12),
        (GOES_BACK, "stash", None),
    ],
)  # fmt: skip
def test_updates_of_replicas_stay_where_all_have_them(stages, weights, accumulate, chain, monkeypatch):
    monkeypatch.setattr(lowered_run, "summed_beside", lambda *_: {})  # as without room for that
    plan = plan_of(chain, stages, weights=weights, accumulate=accumulate)
    assert run_deadlock(plan) == []
    move = lowered._sends_before_updates
    monkeypatch.setattr(lowered, "_sends_before_updates", lambda x, _: move(x, set(range(len(stages)))))
    found = deadlock(lower_run(plan, 6))
    assert len(found) > 1
    assert any("update" in words for words in found)
    assert all(words.startswith("rank ") and "; rank " in words for words in found)
