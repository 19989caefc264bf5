"""Plans of DAGs in the order of layers that is best for stages: what they say, and files."""

import pytest

import pipeplan as pp
from pipeplan.files.plans import load_plan
from pipeplan.planner.claims import derived
from pipeplan.problem import Chain, Layer, Platform

LAYERS = (
    ("enter", 1, 1), ("left", 10, 90), ("right", 10, 90), ("left again", 10, 1), ("right again", 10, 1), ("join", 1, 1),
)  # fmt: skip
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
    assert best.plan.chain.in_own_order() == chain == given.plan.chain
    assert best.plan.provenance.options["layer_order"] == {"orders": 2}
    assert best.plan.chain.order in ((0, 1, 3, 2, 4, 5), (0, 2, 4, 1, 3, 5))
    assert (best.plan.allocation.stages[0].stop, given.period_ns, best.period_ns) == (3, 80, 42)
    exact = [bound for bound in best.plan.lower_bounds if bound.allocation == "contiguous"]
    assert all(bound.period_ns == best.period_ns for bound in exact)
    assert "layer_order" not in given.plan.provenance.options
    best.show()
    assert "in another order than the model's own, the best of 2 that were tried" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kept", "periods"),
    [
        ({"weights": "flush"}, (81, 55)),
        ({"weights": "latest", "schedule": "nf1b"}, (82, 42)),
        ({"weights": "stash", "vertical_sync": True}, (80, 42)),
    ],
    ids=["drained", "nf1b", "vertical-sync"],
)
def test_so_is_what_drains_or_is_simulated(plans, kept, periods):
    chain, _, _ = plans
    given, best = (pp.plan(chain, order=order, **{**ASKED, **kept}) for order in ("given", "best"))
    assert (given.period_ns, best.period_ns) == periods


def test_the_plan_is_read_again_and_its_bounds_are_derived(plans, tmp_path):
    _, _, best = plans
    path = tmp_path / "plan.json"
    path.write_text(best.text())
    plan = load_plan(str(path))
    assert plan.chain == best.plan.chain
    assert derived(plan)[1] == []
