"""Evaluations while a run trains, on held-out data, of the newest weights or their average; what follows of them."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.runtime import chain_of, largest_difference, plan_of, uncorrected
from torch import nn

from pipeplan.errors import BadInput
from pipeplan.runtime.engine.job import HeldOutOptions, RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.update.optimizers import Choice, parse_choice

PLANS = {
    "2bw": {"stages": [(0, 2, (0,)), (2, 5, (1,))], "weights": "2bw"},
    "replicas": {"stages": [(0, 2, (0, 1)), (2, 5, (2,))], "weights": "flush", "accumulate": 2},
    "shared GPUs": {"stages": [(0, 1, (0,)), (1, 3, (1,)), (3, 5, (0,))], "weights": "flush", "accumulate": 2},
}
ASKED = HeldOutOptions("cases.runtime:held_out", 2, 3, "cases.runtime:absolute_error")
STEPS = 8


def judged(state, average):
    """What plain torch says of a state: mean loss and metric of the module in evaluation."""
    net = nn.Sequential(*runtime_cases.dropping(4)[0])
    net.load_state_dict(state | average)
    net.eval()
    pairs = [runtime_cases.held_out(m, 0) for m in range(3)]
    with torch.no_grad():
        losses = [float(runtime_cases.mean_square(net(x), y)) for x, y in pairs]
        errors = [float((net(x) - y).abs().mean()) for x, y in pairs]
    return sum(losses) / 3, sum(errors) / 3


@pytest.mark.parametrize(
    ("case", "build"), [("2bw", "dropping"), ("replicas", "dropping"), ("shared GPUs", "dropping_whole")]
)
def test_evaluations_are_those_of_plain_torch_and_change_nothing(case, build, tmp_path):
    """Dropout and batch statistics are those of evaluation; training goes on as without any."""
    make = getattr(runtime_cases, build)
    chain = chain_of(make, 4)
    stages = [(a, len(chain) if b == 5 else b, on) for a, b, on in PLANS[case]["stages"]]
    plan = plan_of(chain, **PLANS[case] | {"stages": stages}, optimizer="momentum")
    model, heard = ModelSpec(f"cases.runtime:{build}", "cases.runtime:vectors"), []
    options = uncorrected(steps=STEPS, lr=0.05, every=2, save=tmp_path / "x.pt", checkpoint=tmp_path / "c")
    plain = run_plan(plan, model, options)
    state = torch.load(tmp_path / "x.pt")
    report = run_plan(plan, model, replace(options, checkpoint=tmp_path / "d", held_out=ASKED), heard.append)
    assert report.losses == plain.losses
    assert largest_difference(torch.load(tmp_path / "x.pt"), state) == 0
    assert list(report.evaluations) == [2, 4, 6, 8]
    names = {name.partition(".")[2] if build == "dropping_whole" else name: x for name, x in state.items()}
    loss, error = judged(names, {})
    assert report.evaluations[8] == pytest.approx({"loss": loss, "absolute_error": error}, rel=1e-6)
    told = [x for x in heard if x.evaluation is not None]
    assert [x.step for x in told] == [2, 4, 6, 8]
    assert report.best_step == min(report.evaluations, key=lambda step: report.evaluations[step]["loss"])
    if case == "2bw":
        best = uncorrected(steps=1, lr=0.05, checkpoint=tmp_path / "d" / "best", resume=True, evaluates=True)
        assert math.isfinite(run_plan(plan, model, best).losses[0])


def test_weights_that_evaluation_has_in_another_layer_are_the_trained_ones(tmp_path):
    chain = chain_of(runtime_cases.shifted, 4)
    assert len(chain) == 4
    model = ModelSpec("cases.runtime:shifted", "cases.runtime:vectors")
    options = uncorrected(steps=2, lr=0.05, save=tmp_path / "x.pt", held_out=replace(ASKED, metrics=None))
    report = run_plan(plan_of(chain, [(0, 4, (0,))], accumulate=2), model, options)
    net = runtime_cases.shifted(4)[0].eval()
    net.load_state_dict(torch.load(tmp_path / "x.pt"))
    pairs = [runtime_cases.held_out(m, 0) for m in range(3)]
    losses = [float(runtime_cases.mean_square(net(x), y).detach()) for x, y in pairs]
    assert report.evaluations[2] == pytest.approx({"loss": sum(losses) / 3}, rel=1e-6)
    with pytest.raises(BadInput, match="in evaluation its layer linear has two, which another rank trains"):
        run_plan(plan_of(chain, [(0, 2, (0,)), (2, 4, (1,))], accumulate=2), model, options)


def test_a_plateau_is_of_the_highest_where_evaluations_are_judged_by_that():
    plateau, asked = Choice("ReduceLROnPlateau", (("patience", 0),)), replace(ASKED, watched="accuracy", highest=True)
    highest = RunOptions(steps=2, scheduler=plateau, held_out=asked)
    assert dict(highest.rates.options) == {"patience": 0, "mode": "max"}
    assert replace(highest, held_out=ASKED).rates == plateau
    said = Choice("ReduceLROnPlateau", (("mode", "min"),))
    assert replace(highest, scheduler=said).rates == said


def test_a_resumed_run_has_the_same_average_plateau_and_patience(tmp_path):
    """On another plan, too: the rate falls where plain torch's would, the average is that of torch's AveragedModel."""
    chain = chain_of(runtime_cases.dropping, 4)
    plan = plan_of(chain, [(0, 5, (0,))], weights="flush", accumulate=2, optimizer="adam")
    other = plan_of(chain, [(0, 2, (0, 1)), (2, 5, (2,))], weights="flush", accumulate=2, optimizer="adam")
    other = replace(other, policy=replace(other.policy, zero=1))
    model = ModelSpec("cases.runtime:dropping", "cases.runtime:vectors")
    options = uncorrected(
        steps=STEPS, lr=0.05, ema=0.8, averaged=True, save=tmp_path / "one.pt", checkpoint=tmp_path / "c",
        scheduler=parse_choice("ReduceLROnPlateau,patience=0,factor=0.5,threshold=0.5", ""), warmup=2,
        held_out=replace(ASKED, metrics=None),
    )  # fmt: skip
    heard = []
    whole = run_plan(plan, model, options, heard.append)
    rates = [x.learning_rate for x in heard if x.evaluation is None]

    values, plateau = [whole.evaluations[step]["loss"] for step in (2, 4, 6)], []
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.05)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
    for value in values:
        schedule.step(value)
        plateau += [optimizer.param_groups[0]["lr"]] * 2
    assert rates == pytest.approx([0.025, 0.05, *plateau])

    averages = torch.load(tmp_path / "one.pt")
    loss, _ = judged(averages, {})
    assert whole.evaluations[8] == pytest.approx({"loss": loss}, rel=1e-6)
    part = replace(options, checkpoint=tmp_path / "d", save=tmp_path / "two.pt")
    run_plan(plan, model, replace(part, steps=4))
    rest = run_plan(plan, model, replace(part, resume=True))
    assert rest.losses == whole.losses[8:]
    assert rest.evaluations == {step: whole.evaluations[step] for step in (6, 8)}
    assert largest_difference(torch.load(tmp_path / "two.pt"), averages) == 0
    again = run_plan(other, model, replace(part, checkpoint=tmp_path / "c", steps=10, resume=True))
    assert list(again.evaluations) == [10]
    last = uncorrected(steps=3, lr=0.05, averaged=True, evaluates=True, resume=True, checkpoint=tmp_path / "d")
    losses = run_plan(other, model, last).losses
    assert len(losses) == 6
    assert losses == pytest.approx(run_plan(plan, model, last).losses)
    run_plan(plan, model, uncorrected(steps=2, lr=0.05, checkpoint=tmp_path / "e"))
    with pytest.raises(BadInput, match="there is no running average of"):
        run_plan(plan, model, replace(last, checkpoint=tmp_path / "e"))


def test_a_run_ends_where_evaluations_get_no_better(tmp_path):
    """At a rate of 0 none does; what had been seen before a resume counts."""
    plan = plan_of(chain_of(runtime_cases.healthy, 4), [(0, 3, (0,)), (3, 6, (1,))], weights="2bw")
    model = ModelSpec("cases.runtime:healthy", "cases.runtime:vectors")
    options = uncorrected(steps=12, lr=0.0, checkpoint=tmp_path, held_out=replace(ASKED, every=1, patience=3))
    run_plan(plan, model, replace(options, steps=2))
    report = run_plan(plan, model, replace(options, resume=True))
    assert (report.steps, report.ended_early, report.best_step) == (2, True, 1)
    assert sorted(x.name for x in tmp_path.iterdir() if x.is_dir()) == ["best", "step-00000002", "step-00000004"]
    with pytest.raises(BadInput, match="gives loss, absolute_error, and no 'accuracy'"):
        run_plan(plan, model, replace(options, checkpoint=None, held_out=replace(ASKED, watched="accuracy")))


def test_an_average_is_that_of_torch(tmp_path):
    from pipeplan.runtime.training.update.optimizers import AVERAGE, averaging, optimizer_maker

    net = nn.Linear(3, 2)
    made = averaging(optimizer_maker("adam", 0.1), 0.9)(list(net.parameters()))
    theirs = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(5):
        net(torch.ones(1, 3)).sum().backward()
        made.step()
        theirs.update_parameters(net)
    for mine, their in zip(net.parameters(), theirs.module.parameters(), strict=True):
        assert torch.equal(made.state[mine][AVERAGE], their)
