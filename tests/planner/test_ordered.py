"""Plans in the best order of passes that is found: checked, bounded, written and run as simulated; and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from cases.even_profile import LAYERS, PROFILE
from cases.files import written

import pipeplan as pp
from pipeplan.check.evaluate import evaluate
from pipeplan.check.validate import check
from pipeplan.errors import BadInput
from pipeplan.files.schedule_csv import written_schedule
from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.planner.drained import plan as drained
from pipeplan.planner.plan import Planned
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.planner.what_if import best_order
from pipeplan.planner.what_if.best_order import best_orders, ordered, ordered_alike
from pipeplan.problem import Chain, Device, Layer, Platform, Policy
from pipeplan.report.searched import ordering
from pipeplan.runtime.engine.asked import run_otherwise
from pipeplan.schedule.kinds import plan_program

UNEVEN = [{**layer, "backward_weight_ns": 900_000, "forward_ns": 10**6 + 10**5 * i} for i, layer in enumerate(LAYERS)]
GIVEN = {"gpus": 2, "mem": "1GB", "bandwidth": "12GB/s", "no_replicas": True, "weights": "flush", "accumulate": 3}


@pytest.fixture
def path(tmp_path):
    return written(tmp_path, {**PROFILE, "layers": UNEVEN}, "profile.json")


@pytest.fixture
def quick(monkeypatch):
    """Few moves, and none of the orders that the open question finds for itself."""
    for module in (drained, best_order):
        monkeypatch.setattr(module, "MOST_ORDERED", 0)
    monkeypatch.setattr(best_order, "synthesize", partial(best_order.synthesize, moves=5000))


def test_a_plan_in_the_best_order_is_no_worse_and_runs_as_simulated(path, tmp_path, quick):
    usual = pp.plan(path, **GIVEN, effort="quick")
    found = pp.plan(path, **GIVEN, effort="quick", schedule="best")
    assert found.period_ns < usual.period_ns
    told = found.plan.provenance.options["order"]
    assert told["bound_ns"] <= told["value_ns"] == found.evaluation.makespan_ns
    assert ordering(found.plan)
    assert not ordering(usual.plan)
    assert all(bound.period_ns <= found.period_ns for bound in found.plan.lower_bounds)
    found.save(tmp_path / "plan.json")
    again = pp.read_plan(tmp_path / "plan.json").plan
    assert (again.schedule.kind, again.schedule) == ("written", found.plan.schedule)
    program = plan_program(again, 3)
    order = tmp_path / "order.csv"
    order.write_text(written_schedule(program))
    assert run_otherwise(again, False, str(order), None).schedule == again.schedule
    alike = ordered_alike(usual.plan)
    assert (alike.schedule.kind, alike.allocation) == ("written", usual.plan.allocation)
    best = simulate_plan(usual.plan, 3, "best")
    assert best.order is not None
    assert best.makespan_ns == told["value_ns"]
    assert best.figures()["order"]["lower_bound_ns"] == told["bound_ns"]


def test_what_no_order_can_be_sought_for_is_refused(path):
    for more, said in (
        (
            {"weights": "2bw"},
            "schedule: the best order drains every mini-batch, which is for weights flush; the policy is",
        ),
        ({"for_": "torch"}, "schedule best orders passes for itself; leave out for_"),
    ):
        with pytest.raises(BadInput, match=said):
            pp.plan(path, **{**GIVEN, **more}, schedule="best")
    with pytest.raises(BadInput, match="plan: the best order drains every mini-batch"):
        ordered_alike(pp.plan(path, **{**GIVEN, "weights": "2bw"}, effort="quick").plan)


def test_backwards_stay_whole_where_their_parts_do_not_fit():
    """What a segment recomputes is free before the one in front of it begins, unless second parts need it."""
    times = [(7, 2, 0, 4, 2), (6, 3, 0, 13, 3), (7, 5, 0, 8, 5), (4, 7, 1, 6, 6)]
    layers = tuple(Layer(f"l{i}", f, b, w, o, backward_weight_ns=k) for i, (f, b, w, o, k) in enumerate(times))
    plan = Plan(
        chain=Chain("four", layers, 12),
        platform=Platform.flat(1, 10**6, 10**9),
        policy=Policy("flush", accumulate=3),
        allocation=Allocation((Stage(0, 4, (0,), ((0, 2), (2, 4))),)),
        pattern=None,
        lower_bounds=(),
        provenance=Provenance("test"),
        schedule=Schedule("1f1b", 3),
    )
    plan = replace(plan, platform=Platform.flat(1, evaluate(plan).devices[0].peak_bytes, 10**9))
    planned = Planned(plan, evaluate(plan))
    assert ordered(planned, elsewhere=False) == planned
    whole = best_orders(plan, 3, placements=("own",))[0].order
    assert (whole.program.split, whole.optimal, whole.value_ns) == (False, True, planned.evaluation.makespan_ns)


def test_its_own_order_recomputes_early_where_no_other_has_room():
    """The second stage's segments never lie in memory together, so that it alone recomputes within its backwards."""
    layers = tuple(Layer(f"l{i}", 2000, 4000, 0, 4, saved_bytes=10) for i in range(4))
    stages = Stage(0, 2, (0,), ((0, 2),)), Stage(2, 4, (1,), ((2, 3), (3, 4)))
    plan = Plan(
        chain=Chain("four", layers, 4),
        platform=replace(Platform.flat(2, 32, 10**9), devices=(Device(32), Device(22))),
        policy=Policy("flush", accumulate=3),
        allocation=Allocation(stages),
        pattern=None,
        lower_bounds=(),
        provenance=Provenance("test"),
        schedule=Schedule("1f1b", 3),
    )
    planned = Planned(plan, check(plan))
    found = ordered(planned, elsewhere=False)
    assert found.plan.schedule.order == ("0F0,0F1,0R0,0B0,0F2,0R1,0B1,0R2,0B2", "1F0,1B0,1F1,1B1,1F2,1B2")
    # the last backward is 4000 shorter, and the first, so that the last forward's output waits and isn't waited for
    assert (planned.evaluation.makespan_ns, found.evaluation.makespan_ns) == (52_016 + 12_000, 52_008 + 8_000)
    assert found.evaluation.devices[0].peak_bytes == 32
