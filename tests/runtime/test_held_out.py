"""Evaluations while a run trains, on held-out data, of the newest weights."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases import runtime as runtime_cases
from cases.runtime import chain_of, largest_difference, plan_of, uncorrected
from torch import nn

from pipeplan.errors import BadInput
from pipeplan.runtime.engine.job import HeldOutOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan

PLANS = {
    "2bw": {"stages": [(0, 2, (0,)), (2, 5, (1,))], "weights": "2bw"},
    "replicas": {"stages": [(0, 2, (0, 1)), (2, 5, (2,))], "weights": "flush", "accumulate": 2},
    "shared GPUs": {"stages": [(0, 1, (0,)), (1, 3, (1,)), (3, 5, (0,))], "weights": "flush", "accumulate": 2},
}
ASKED = HeldOutOptions("cases.runtime:held_out", 2, 3, "cases.runtime:absolute_error")
STEPS = 8


def judged(state):
    """What plain torch says of a state: mean loss and metric of the module in evaluation."""
    net = nn.Sequential(*runtime_cases.dropping(4)[0])
    net.load_state_dict(state)
    net.eval()
    pairs = [runtime_cases.held_out(m, 0) for m in range(3)]
    with torch.no_grad():
        losses = [float(runtime_cases.mean_square(net(x), y)) for x, y in pairs]
        errors = [float((net(x) - y).abs().mean()) for x, y in pairs]
    return sum(losses) / 3, sum(errors) / 3


@pytest.mark.parametrize("build", ["dropping", "dropping_whole"])
@pytest.mark.parametrize("case", PLANS)
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
    loss, error = judged(names)
    assert report.evaluations[8] == pytest.approx({"loss": loss, "absolute_error": error}, rel=1e-6)
    told = [x for x in heard if x.evaluation is not None]
    assert [x.step for x in told] == [2, 4, 6, 8]


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
