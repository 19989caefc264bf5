from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import largest_difference, plan_of, serial, zoo_chain
from torch import nn

import pipeplan as pp
from pipeplan.choices import OPTIMIZERS
from pipeplan.errors import BadInput
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions
from pipeplan.runtime.training.update.optimizers import (
    Choice,
    check_state,
    optimizer_maker,
    parse_choice,
    planned_as,
    schedule_maker,
)
from pipeplan.runtime.training.update.stepper import Rates, is_elementwise
from pipeplan.runtime.training.weights.buckets import is_large


def weights():
    return [nn.Parameter(torch.ones(2))]


def test_choices_are_names_with_python_literals():
    assert parse_choice("SGD", "x") == Choice("SGD")
    assert parse_choice("AdamW,betas=(0.9,0.95),fused=None,eps=1e-6", "x") == Choice(
        "AdamW", (("betas", (0.9, 0.95)), ("fused", None), ("eps", 1e-6))
    )
    assert parse_choice("cases:make,mode='a,b'", "x") == Choice("cases:make", (("mode", "a,b"),))


@pytest.mark.parametrize(
    "text", ["", ",lr=1", "SGD,0.9", "SGD,lr=", "SGD,lr=open('x')", "SGD,**{'a':1}", "SGD,a=1)+f("]
)
def test_other_texts_are_refused(text):
    with pytest.raises(BadInput, match=r"^--optimizer: .*Name,option=value"):
        parse_choice(text, "--optimizer")


def test_a_plans_optimizers():
    kinds = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam}
    for name, kind in kinds.items():
        made = optimizer_maker(name, 0.5)(weights())
        assert type(made) is kind
        assert made.param_groups[0]["lr"] == 0.5
        assert made.param_groups[0].get("momentum", 0) == (0.9 if name == "momentum" else 0)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, row in OPTIMIZERS.items() for kind in row.kinds])
def test_the_state_of_an_optimizer_is_what_its_row_says(name, kind):
    row = OPTIMIZERS[name]
    choice = Choice(kind, row.options)
    assert planned_as(choice) == name
    parameters = [nn.Parameter(torch.ones(64, 96)), nn.Parameter(torch.ones(96))]
    made = optimizer_maker(choice, 0.01)(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    kept = sum(x.numel() for p in parameters for x in made.state[p].values() if is_large(x))
    counted = row.eighths * sum(p.numel() for p in parameters)
    assert 8 * kept == counted if row.elementwise else 8 * kept <= counted
    assert is_elementwise(optimizer_maker(choice, 0.01)) == row.elementwise
    check_state(choice, parameters, "stage 0")


def test_who_says_no_learning_rate_gets_that_of_torch_but_of_sgd():
    weights = [nn.Parameter(torch.ones(2, 2))]
    rates = {"sgd": 0.1, "momentum": 0.1, "adam": 1e-3, "rmsprop": 1e-2, "adafactor": 1e-2, "muon": 1e-3}
    assert {x: optimizer_maker(x, None)(weights).param_groups[0]["lr"] for x in OPTIMIZERS} == rates
    assert optimizer_maker(Choice("AdamW", (("lr", 2e-3),)), None)(weights).param_groups[0]["lr"] == 2e-3


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_weights_of_which_more_is_kept_than_plans_count_are_refused(name):
    with pytest.raises(
        BadInput, match=rf"optimizer {name.lower()}: keeps [\d,]+ numbers for the 108 weights of stage 1"
    ):
        check_state(Choice(name), [torch.ones(3, 3), torch.ones(99)], "stage 1")


def test_plans_of_small_matrices_are_refused_as_their_runs_are():
    def build(batch):
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)), torch.zeros(batch, 64), nn.functional.mse_loss

    chain = measure_model(build, 2, MeasureOptions(steps=1, warmup=0), name="x", date="").chain
    assert [x.matrix_state for x in chain.layers] == [(192, 4224), (72, 264), (0, 0)]
    with pytest.raises(BadInput, match=r"optimizer adafactor: keeps 72 numbers for the 260 weights of stage 1, whose"):
        pp.plan(chain, gpus=2, mem="1GB", optimizer="adafactor", split="1,2")
    counted = {"gpus": 2, "split": "1,2", "bytes_per_parameter": 12}
    for asked in ({"gpus": 1}, counted):
        assert pp.plan(chain, mem="1GB", optimizer="adafactor", **asked).plan.policy.optimizer == "adafactor"


def muon_and_adamw(named):
    """As torch's own documentation of Muon has it."""
    both = [
        torch.optim.Muon([p for _, p in named if p.ndim == 2], 0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for _, p in named if p.ndim != 2], 0.01, weight_decay=0.1),
    ]
    return SimpleNamespace(step=lambda: [one.step() for one in both]), None


@pytest.mark.parametrize(
    ("name", "stepping"),
    [("Muon", muon_and_adamw), ("Adafactor", lambda named: (torch.optim.Adafactor([p for _, p in named], 0.01), None))],
)
def test_optimizers_of_whole_matrices_train_as_in_one_process(name, stepping, tmp_path):
    plan = plan_of(zoo_chain("gpt-tiny", 4), [(0, 4, (0,)), (4, 8, (1,))], weights="flush", accumulate=2)
    options = RunOptions(steps=4, lr=0.01, optimizer=Choice(name), save=tmp_path / "x.pt")
    report = run_plan(plan, ModelSpec("gpt-tiny"), options)
    losses, state = serial("gpt-tiny", 4, steps=4, accumulate=2, optimizer="sgd", lr=0.01, stepping=stepping)
    assert list(report.losses) == losses
    assert largest_difference(torch.load(tmp_path / "x.pt"), state) == 0
    assert all(x.measured_bytes <= x.planned_bytes for x in report.states)


def test_any_optimizer_of_torch():
    made = optimizer_maker(parse_choice("AdamW,weight_decay=0.3,lr=0.1", "x"), 0.5)(weights())
    assert isinstance(made, torch.optim.AdamW)
    assert (made.param_groups[0]["lr"], made.param_groups[0]["weight_decay"]) == (0.1, 0.3)
    named = optimizer_maker(Choice("torch.optim:RMSprop"), 0.5)(weights())
    assert isinstance(named, torch.optim.RMSprop)


def test_how_another_device_stepped_is_no_part_of_what_is_resumed():
    rates = Rates(weights(), optimizer_maker("adam", 0.5), None)
    before = rates.groups
    rates.restore([{**before[0], "lr": 0.25, "fused": True}], None)
    assert rates.groups == [{**before[0], "lr": 0.25}]
    assert not before[0]["fused"], "CPUs step as they did"


def test_any_schedule_of_torch_and_ones_own():
    optimizer = optimizer_maker("sgd", 1.0)(weights())
    schedule = schedule_maker(parse_choice("StepLR,step_size=1,gamma=0.5", "x"))(optimizer)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    schedule = schedule_maker(parse_choice("cases.runtime:rates_doubled,times=3", "x"))(optimizer)
    assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Nothing", "torch.optim has no 'Nothing'"), ("Optimizer", "torch.optim has no 'Optimizer'"),
        ("lr_scheduler", "torch.optim has no 'lr_scheduler'"), ("LBFGS", "runs the model several times"),
        ("SparseAdam", "SparseAdam takes sparse gradients alone, which are made dense here"),
        ("SGD,moment=1", "optimizer SGD: .*moment"), ("SGD,momentum=-1", "optimizer SGD: Invalid momentum"),
        ("cases.runtime:none", "module cases.runtime has no 'none'"),
    ],
)  # fmt: skip
def test_wrong_optimizers_are_bad_input(text, words):
    with pytest.raises(BadInput, match=words):
        optimizer_maker(parse_choice(text, "x"), 0.1)


@pytest.mark.parametrize(
    ("text", "words"),
    [("Nothing", "torch.optim.lr_scheduler has no 'Nothing'"), ("StepLR", "scheduler StepLR: .*step_size")],
)
def test_wrong_schedules_are_bad_input(text, words):
    with pytest.raises(BadInput, match=words):
        schedule_maker(parse_choice(text, "x"))


def test_known_optimizers_are_planned_by_the_state_that_they_keep():
    names = (
        "AdamW,weight_decay=0.1", "Adam,amsgrad=True", "SGD,lr=0.1", "SGD,momentum=0.8", "RMSprop,centered=True",
        "a:Adam",
    )  # fmt: skip
    assert [planned_as(parse_choice(x, "")) for x in names] == ["adam", None, "sgd", "momentum", None, None]
