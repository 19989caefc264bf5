"""Runs of models of which inputs are read late, integers and complex numbers cross cuts, or nothing trains before one;
in real processes, against plain training."""

from dataclasses import replace
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from cases import crossing
from cases.crossing import DATA
from cases.runtime import chain_of, largest_difference, plan_of, simulated_version
from cases.traced import serial

from pipeplan.check.validate import check
from pipeplan.plan import Stage
from pipeplan.runtime.engine.asked import under
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.loading import load_model
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan

CUTS = {
    crossing.two_losses: "blocks.1",
    crossing.graph_net: "zeros_like#3",
    crossing.recurrent: "select#3",
    crossing.patches: "blocks.1.self_attn.linear",
    crossing.spectral: "mul#2",
    crossing.frozen: "blocks.0",
    crossing.quantised: "codes",
}


def name_of(build):
    return next(name for name, found in vars(crossing).items() if found is build)


def profile_of(build, split=False):
    return chain_of(build, 4, data=DATA[build], split=split)


def position(profile, name):
    return [layer.name for layer in profile.layers].index(name)


def cut_at(profile, *names):
    bounds = [0, *(position(profile, name) for name in names), len(profile)]
    return [(start, stop, (s,)) for s, (start, stop) in enumerate(pairwise(bounds))]


def spec_of(build):
    return ModelSpec(f"cases.crossing:{name_of(build)}", f"cases.crossing:{DATA[build].__name__}")


def trains(plan, build, tmp_path, *, steps=2, accumulate=4, difference=0.0, serially=(), **options):
    """Assert that a run does as plain training does."""
    options = RunOptions(steps=steps, lr=0.1, save=tmp_path / "trained.pt", **options)
    report = run_plan(plan, spec_of(build), options)
    how = {"steps": steps, "accumulate": accumulate, "optimizer": "sgd", "lr": 0.1, "data": DATA[build]}
    losses, state = serial(build, **how, **dict(serially))
    assert max(abs(x - y) for x, y in zip(report.losses, losses, strict=True)) <= difference
    assert largest_difference(torch.load(tmp_path / "trained.pt"), state) <= difference
    return report


@pytest.mark.parametrize("build", CUTS, ids=name_of)
def test_whatever_crosses_a_cut_trains_as_the_module_does(build, tmp_path):
    """Weights that both stages have are summed in another order."""
    profile = profile_of(build)
    plan = plan_of(profile, cut_at(profile, CUTS[build]), weights="flush", accumulate=4)
    report = trains(plan, build, tmp_path, difference=1e-7 if build is crossing.recurrent else 0.0)
    assert all(x.measured_bytes <= x.planned_bytes for x in report.activations)


def test_inputs_cross_no_cut_and_gradients_come_back_to_what_trains_alone():
    profile, model = profile_of(crossing.two_losses), load_model(spec_of(crossing.two_losses), 4, 0)
    assert [profile.layers[i].name for i in profile.inputs] == [
        "input values", "input labels", "input mask", "input ids",
    ]  # fmt: skip
    cut = model.cut(position(profile, "blocks.1"))
    assert [str(spec) for spec in cut.specs] == ["float32 (4, 7, 8)"]
    assert profile.cut_bytes[position(profile, "blocks.1")] == cut.forward.nbytes == cut.backward.nbytes
    model, profile = load_model(spec_of(crossing.quantised), 4, 0), profile_of(crossing.quantised)
    cut = model.cut(position(profile, "codes"))
    assert [(str(spec), v in cut.trained) for v, spec in zip(cut.values, cut.specs, strict=True)] == [
        ("float32 (4, 4)", True), ("int64 (4,)", False),
    ]  # fmt: skip
    model, profile = load_model(spec_of(crossing.frozen), 4, 0), profile_of(crossing.frozen)
    assert model.cut(position(profile, "blocks.0")).trained == ()
    assert model.cut(position(profile, "blocks.0")).backward.nbytes == 1
    assert model.cut(position(profile, "blocks.1")).trained


@pytest.mark.parametrize(
    ("build", "weights"),
    [(crossing.two_losses, "stash"), (crossing.frozen, "stash"), (crossing.spectral, "2bw")],
)
def test_late_weights_are_those_of_the_plan(build, weights, tmp_path):
    profile = profile_of(build)
    stages = cut_at(profile, CUTS[build])
    plan = plan_of(profile, stages, weights=weights, accumulate=None if weights == "stash" else 3)
    interval = plan.policy.accumulate
    model = load_model(spec_of(build), 4, 0)
    homes = {
        name: s
        for s, (start, stop, _) in enumerate(stages)
        for layer in model.layers[start:stop]
        for name in layer.names.values()
    }
    version = simulated_version(plan, 5 * interval)
    serially = {"version": version, "stage_of": lambda name: homes.get(name, 0)}
    trains(plan, build, tmp_path, steps=5, accumulate=interval, serially=serially, difference=1e-6)


KINDS = {
    crossing.two_losses: ("interleaved", "zb1p", "message-driven", "replicas"),
    crossing.frozen: ("zb1p", "replicas"),
    crossing.quantised: ("interleaved", "message-driven"),
}


@pytest.mark.parametrize(
    ("build", "kind"),
    [pytest.param(x, kind, id=f"{name_of(x)}-{kind}") for x, kinds in KINDS.items() for kind in kinds],
)
def test_every_schedule_runs_them(build, kind, tmp_path):
    """Several stages of a rank read the same; replicas sum in another order; what messages drive recomputes, too."""
    profile = profile_of(build, kind == "zb1p")
    middle, end = position(profile, CUTS[build]), len(profile)
    stages = [Stage(0, middle, (0,)), Stage(middle, end, (1,))]
    options, difference = {}, 0.0
    if kind == "message-driven":
        stages = [replace(stages[0], checkpoint=((1, middle),)), replace(stages[1], checkpoint=((middle, end - 2),))]
    elif kind == "replicas":
        stages, difference = [Stage(0, middle, (0,)), Stage(middle, end, (1, 2))], 1e-7
    elif kind == "interleaved":
        bounds = [0, middle - 1, middle, middle + 1, end]
        stages = [Stage(bounds[s], bounds[s + 1], (s % 2,)) for s in range(4)]
    plan = plan_of(profile, stages, weights="flush", accumulate=4)
    if kind == "message-driven":
        plan, options = under(plan, kind, 3), {"link_delay_s": 0.001}
    elif kind in ("zb1p", "interleaved"):
        plan = under(plan, kind)
    check(plan)
    trains(plan, build, tmp_path, difference=difference, **options)


def test_a_layer_into_which_no_gradient_goes_has_one_backward_for_all_its_outputs(tmp_path):
    profile = profile_of(crossing.heard, True)
    plan = under(plan_of(profile, cut_at(profile, "head"), weights="flush", accumulate=4), "zb1p")
    trains(plan, crossing.heard, tmp_path)
