"""Plans of DAGs in the order of layers that is best for stages: what they say, files, bounds derived anew."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

import pipeplan as pp
from pipeplan.cli import group
from pipeplan.files.plans import load_plan
from pipeplan.planner.what_if.derived import derived
from pipeplan.problem import Chain, Layer, Platform
from pipeplan.report.tables.plan import layer_order

LAYERS = (
    ("enter", 1, 1),
    ("left", 10, 90),
    ("right", 10, 90),
    ("left again", 10, 1),
    ("right again", 10, 1),
    ("join", 1, 1),
)
EDGES = ((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5))
ASKED = {"platform": Platform.flat(2, 10**6, 10**9), "checkpointing": "stages", "no_replicas": True, "accumulate": 2}


@pytest.fixture(scope="module")
def plans():
    """Two branches that are given side by side, so that a cut in the middle is crossed by what is large in both, and
    the plans in the given order and in the best."""
    layers = tuple(Layer(name, time, time, 8, size) for name, time, size in LAYERS)
    chain = Chain("branches", layers, 1, EDGES)
    return chain, *(pp.plan(chain, order=order, **ASKED) for order in ("given", "best"))


def test_the_better_order_is_planned_and_told(plans, capsys):
    chain, given, best = plans
    assert best.period_ns < given.period_ns
    assert best.plan.chain.in_own_order() == chain == given.plan.chain
    about = best.plan.provenance.options["layer_order"]
    assert about == {"ideals": 11, "all": True}
    assert [layer.name for layer in best.plan.chain.layers[1:5]] == ["right", "right again", "left", "left again"]
    assert (best.plan.allocation.stages[0].stop, given.period_ns, best.period_ns) == (3, 80, 42)
    exact = [bound for bound in best.plan.lower_bounds if bound.allocation == "contiguous"]
    assert [bound.any_order for bound in best.plan.lower_bounds] == [True] * len(best.plan.lower_bounds)
    assert all(bound.period_ns == best.period_ns for bound in exact)
    assert "order" not in given.plan.provenance.options
    best.show()
    out = capsys.readouterr().out
    assert "in another order than the model's own; contiguous stages were tried at all 11 cuts of all orders" in out


@pytest.mark.parametrize(
    ("kept", "periods"),
    [
        ({"weights": "flush"}, (81, 55)),
        ({"weights": "latest", "schedule": "nf1b"}, (82, 42)),
        ({"weights": "stash", "vertical_sync": True}, (80, 42)),
    ],
    ids=["drained", "nf1b", "vertical-sync"],
)
def test_what_has_no_bound_for_all_orders_is_planned_in_two(plans, kept, periods):
    chain, _, _ = plans
    given, best = (pp.plan(chain, order=order, **{**ASKED, **kept}) for order in ("given", "best"))
    assert (given.period_ns, best.period_ns) == periods
    assert best.plan.provenance.options["layer_order"] == {"orders": 2}
    assert layer_order(best.plan) == "in another order than the model's own, the best of 2 that were tried"
    assert all(bound.any_order == (bound.allocation == "any") for bound in best.plan.lower_bounds)


def test_the_plan_is_read_again_and_its_bounds_for_every_order_are_derived(plans, tmp_path):
    _, _, best = plans
    path = tmp_path / "plan.json"
    path.write_text(best.text())
    plan = load_plan(str(path))
    assert plan.chain == best.plan.chain
    assert derived(plan)[1] == []
    out = CliRunner().invoke(group, ["show", str(path)]).output
    assert out.count("any order") == 2
    more = (replace(plan.lower_bounds[0], period_ns=47, claimed=True), plan.lower_bounds[1])
    assert derived(replace(plan, lower_bounds=more))[1] == [
        "lower_bounds: 47 ns of class contiguous is more than can be derived (42 ns)"
    ]
