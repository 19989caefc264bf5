"""By how much layers have moved since a plan was made, and what a run between two profiles is told to be."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.runtime import chain_of, plan_of

from pipeplan.api import bracket
from pipeplan.api.bracket import period_now
from pipeplan.api.given.profiles import Profile
from pipeplan.check.bounds import any_bound
from pipeplan.cli import group
from pipeplan.errors import BadInput
from pipeplan.files.plans import plan_text
from pipeplan.problem import Problem
from pipeplan.runtime.model.build.spec import ModelSpec

MODEL = ModelSpec("cases.runtime:dropping", "cases.runtime:vectors")


def slower(chain, factor):
    times = ("forward_ns", "backward_ns")
    return replace(chain, layers=tuple(replace(x, **{t: factor * getattr(x, t) for t in times}) for x in chain.layers))


@pytest.fixture
def plan():
    chain = replace(chain_of(runtime_cases.dropping, 4), device="some CPU, 1 thread", beside=2, in_flight=3)
    return plan_of(chain, [(0, 2, (0,)), (2, 5, (1,))], weights="stash")


def test_the_layers_are_measured_as_the_plans_profile_was(plan, monkeypatch):
    asked = []

    def profile(name, **options):
        asked.append((name, options))
        return Profile(slower(plan.chain, 3))

    monkeypatch.setattr(bracket, "profile", profile)
    assert period_now(plan, MODEL) == pytest.approx(3, rel=0.01)  # messages take as long as before
    [(name, options)] = asked
    assert name == "cases.runtime:dropping"
    kept = {"microbatch": 4, "data": "cases.runtime:vectors", "device": "cpu", "beside": 2, "in_flight": 3}
    assert options.items() >= (kept | {"dtype": None, "optimizer": "sgd", "split_backward": False}).items()
    assert period_now(plan, ModelSpec("gpt-tiny")) == pytest.approx(3, rel=0.01)
    assert asked[1][0] == "zoo:gpt-tiny"


def test_layers_that_are_others_cannot_be_compared(plan, monkeypatch):
    other = replace(plan.chain, layers=tuple(replace(x, name=f"{x.name}a") for x in plan.chain.layers))
    monkeypatch.setattr(bracket, "profile", lambda *_, **__: Profile(other))
    with pytest.raises(BadInput, match="the plan was made from another profile than test: its layers differ"):
        period_now(plan, MODEL)
    with pytest.raises(BadInput, match="run layers of the plan together"):
        period_now(replace(plan, chain=replace(plan.chain, tensor=2)), MODEL)


def test_a_run_between_two_profiles_says_what_it_is(plan, tmp_path):
    bound = any_bound(Problem(plan.chain, plan.platform, plan.policy))
    path = tmp_path / "plan.json"
    path.write_text(plan_text(replace(plan, chain=replace(plan.chain, beside=1), lower_bounds=(bound,))))
    line = ["run", str(path), "--model", MODEL.build, "--data", MODEL.data, "--steps", "40", "--bracket"]
    done = CliRunner().invoke(group, line, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert " by a profile right before, " in done.stdout
    refused = CliRunner().invoke(group, [*line, "--evaluate"])
    assert refused.exit_code == 2
    assert "without --evaluate" in refused.output
