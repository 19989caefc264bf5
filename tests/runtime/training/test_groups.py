"""Groups of weights that optimizers treat differently, warm-up and schedules: as torch does it in one process."""

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import largest_difference, plan_of, serial, two_rates, zoo_chain
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from pipeplan.errors import BadInput
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.loading import load_model
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.rank import groups_by, without_decay
from pipeplan.runtime.training.update.optimizers import Choice, parse_choice, rates_maker

GPT = "gpt-tiny,blocks=2,hidden=32,heads=2,sequence=16,tied=true"
STEPS, WARMUP, LR = 6, 3, 0.01
ADAMW = parse_choice("AdamW,weight_decay=0.5,eps=1e-4,fused=True", "here")


@pytest.fixture(scope="module")
def chain():
    return zoo_chain(GPT, 2)


@pytest.fixture(scope="module")
def model():
    return load_model(ModelSpec(GPT), 2, 0)


def rates(make, updates, lr=1.0):
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = make(optimizer)
    found = []
    for _ in range(updates):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def warmed_cosine(optimizer):
    """By hand: the rate of each update as a factor."""
    cosine = [0.5 * (1 + torch.cos(torch.tensor(torch.pi * k / (STEPS - WARMUP))).item()) for k in range(STEPS)]
    factors = [(k + 1) / WARMUP for k in range(WARMUP)] + cosine
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: factors[k])


# --- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_rates_rise_before_a_schedule_begins():
    cosine = rates(lambda x: CosineAnnealingLR(x, 4), 4)
    make = rates_maker(Choice("CosineAnnealingLR"), 3, 7)
    assert rates(make, 7) == pytest.approx([1 / 3, 2 / 3, 1, *cosine])
    assert rates(rates_maker(None, 4, 9), 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert rates_maker(None, 0, 5) is None
    assert rates_maker(None, 1, 5) is None  # all of it in the first update
    given = rates_maker(Choice("CosineAnnealingLR", (("T_max", 2),)), 0, 7)
    assert rates(given, 3) == pytest.approx([1, 0.5, 0])
    assert len(rates(rates_maker(Choice("OneCycleLR", (("max_lr", 1.0),)), 2, 8), 8)) == 8
    with pytest.raises(BadInput, match="warmup: 5 updates are all of the run's 5"):
        rates_maker(None, 5, 5)


# --- groups -----------------------------------------------------------------------------------------------------------


def test_words_choose_weights_by_their_names_and_by_their_modules_classes(model):
    found = without_decay(model, ("norm", "BIAS"))
    spared = {name for name, group in found.place.items() if group}
    assert found.options == ({}, {"weight_decay": 0.0})
    assert "head.weight" not in found.place  # it is the embedding's
    assert {"block0.norm1.weight", "norm.weight", "norm.bias"} & spared
    assert all("norm" in name or "bias" in name for name in spared)
    assert not any("norm" in name or "bias" in name for name in found.place.keys() - spared)
    assert without_decay(model, ("layernorm",)).place != without_decay(model, ("bias",)).place
    with pytest.raises(BadInput, match="no decay: no weight's name, nor its module's class, has 'nrom' in it"):
        without_decay(model, ("bias", "nrom"))


def test_groups_of_ones_own(model):
    found = groups_by(model, "cases.runtime:two_rates")
    assert found.options == ({"lr": 0.005}, {})
    assert {name.partition(".")[0] for name, group in found.place.items() if group == 0} == {"embedding"}
    with pytest.raises(BadInput, match=r"parameter groups: cases.runtime:half_a_group left embedding\S+ out"):
        groups_by(model, "cases.runtime:half_a_group")


# --- training ---------------------------------------------------------------------------------------------------------


def spared(named):
    kept = [p for name, p in named if "norm" not in name and "bias" not in name]
    others = [p for name, p in named if "norm" in name or "bias" in name]
    optimizer = AdamW(
        [{"params": kept}, {"params": others, "weight_decay": 0.0}], lr=LR, weight_decay=0.5, eps=1e-4
    )  # so large, rounding doesn't decide steps
    return optimizer, warmed_cosine(optimizer)


def two(named):
    optimizer = SGD(two_rates(named), lr=LR, momentum=0.9)
    return optimizer, warmed_cosine(optimizer)


CASES = {
    "no decay": ({"no_decay": ("norm", "bias"), "optimizer": ADAMW}, spared),
    "of one's own": (
        {"groups": "cases.runtime:two_rates", "optimizer": parse_choice("SGD,momentum=0.9,foreach=True", "here")},
        two,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_with_another_split_as_in_one_process(case, chain, tmp_path):
    """The embedding, which the head shares, is in the second and in the first split on different GPUs."""
    given, stepping = CASES[case]
    options = {
        "lr": LR, "seed": 1, "warmup": WARMUP, "scheduler": Choice("CosineAnnealingLR"), "checkpoint": tmp_path / "c",
        "save": tmp_path / "s", **given,
    }  # fmt: skip
    first, then = ([(0, 1, (0,)), (1, 6, (1,))], [(0, 6, (0,))])
    plans = [plan_of(chain, stages, accumulate=2, optimizer="adam") for stages in (first, then)]
    scheduled = {**options, "scheduler": Choice("CosineAnnealingLR", (("T_max", STEPS - WARMUP),))}
    begun = run_plan(plans[0], ModelSpec(GPT), RunOptions(steps=4, **scheduled))
    ended = run_plan(plans[1], ModelSpec(GPT), RunOptions(steps=STEPS, resume=True, **options))
    losses, state = serial(GPT, 2, steps=STEPS, accumulate=2, optimizer=None, lr=LR, seed=1, stepping=stepping)
    assert [*begun.losses, *ended.losses] == pytest.approx(losses, abs=1e-5)
    assert largest_difference(torch.load(tmp_path / "s"), state) <= 1e-5


def test_without_a_decay_there_is_nothing_to_be_spared(chain):
    plan = plan_of(chain, [(0, 6, (0,))], optimizer="adam")
    with pytest.raises(BadInput, match="no decay: Adam has no weight decay that norm could be without"):
        run_plan(plan, ModelSpec(GPT), RunOptions(steps=1, lr=0.1, no_decay=("norm",)))
    with pytest.raises(BadInput, match="no decay: the parameter groups set it already"):
        run_plan(
            plan, ModelSpec(GPT), RunOptions(steps=1, lr=0.1, no_decay=("norm",), groups="cases.runtime:two_rates")
        )
