import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipeplan.errors import BadInput
from pipeplan.runtime.training.optimizers import Choice, optimizer_maker, parse_choice, planned_as, schedule_maker


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


def test_any_optimizer_of_torch():
    made = optimizer_maker(parse_choice("AdamW,weight_decay=0.3,lr=0.1", "x"), 0.5)(weights())
    assert isinstance(made, torch.optim.AdamW)
    assert (made.param_groups[0]["lr"], made.param_groups[0]["weight_decay"]) == (0.1, 0.3)
    named = optimizer_maker(Choice("torch.optim:RMSprop"), 0.5)(weights())
    assert isinstance(named, torch.optim.RMSprop)


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
        ("Nothing", "torch.optim has no 'Nothing'"),
        ("Optimizer", "torch.optim has no 'Optimizer'"),
        ("lr_scheduler", "torch.optim has no 'lr_scheduler'"),
        ("LBFGS", "runs the model several times"),
        ("SGD,moment=1", "optimizer SGD: .*moment"),
        ("SGD,momentum=-1", "optimizer SGD: Invalid momentum"),
        ("cases.runtime:none", "module cases.runtime has no 'none'"),
    ],
)
def test_wrong_optimizers_are_bad_input(text, words):
    with pytest.raises(BadInput, match=words):
        optimizer_maker(parse_choice(text, "x"), 0.1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Nothing", "torch.optim.lr_scheduler has no 'Nothing'"),
        ("ReduceLROnPlateau", "follows the loss"),
        ("StepLR", "scheduler StepLR: .*step_size"),
    ],
)
def test_wrong_schedules_are_bad_input(text, words):
    with pytest.raises(BadInput, match=words):
        schedule_maker(parse_choice(text, "x"))


def test_known_optimizers_are_planned_by_the_state_that_they_keep():
    names = ("AdamW,weight_decay=0.1", "Adam,amsgrad=True", "SGD,lr=0.1", "SGD,momentum=0.8", "RMSprop", "a:Adam")
    assert [planned_as(parse_choice(x, "")) for x in names] == ["adam", None, "sgd", "momentum", None, None]
