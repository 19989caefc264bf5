"""Losses with weights: they are the last stage's, planned, trained, clipped, saved and resumed as plain torch does."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import chain_of, largest_difference, plan_of
from torch import nn
from torch.nn import functional

from pipeplan.errors import BadInput
from pipeplan.plan import Stage
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.loading import chain_model
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions


class Margin(nn.Module):
    """ArcFace: classes as directions; what it has seen of each is a buffer, and dropout draws in it."""

    def __init__(self):
        super().__init__()
        self.classes, self.drop = nn.Linear(16, 5, bias=False), nn.Dropout(0.0)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, output, target):
        self.seen += functional.one_hot(target, 5).sum(0)
        cosine = functional.linear(functional.normalize(output), functional.normalize(self.classes.weight))
        angle = torch.acos(cosine.clamp(-0.999, 0.999)) + 0.2 * functional.one_hot(target, 5)
        return functional.cross_entropy(self.drop(10 * torch.cos(angle)), target)


class Uncertain(nn.Module):
    """Two losses, weighted by what is learned about each."""

    def __init__(self):
        super().__init__()
        self.spread = nn.Parameter(torch.zeros(2))

    def forward(self, output, target):
        one, two = output if isinstance(output, tuple) else output.chunk(2, -1)
        losses = torch.stack([functional.cross_entropy(one, target), (two.sum(-1) - target).square().mean()])
        return (losses * torch.exp(-self.spread) + self.spread).sum()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.first(x), self.second(x)


def listed(batch):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16)), torch.zeros(batch, 8), Margin()


def traced(batch):
    torch.manual_seed(2)
    return Two(), torch.zeros(batch, 8), Uncertain()


def vectors(index, seed):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(4, 8, generator=generator), torch.randint(5, (4,), generator=generator)


def plain(build, steps, clip):
    model, _, loss = build(4)
    weights = [*model.parameters(), *loss.parameters()]
    optimizer, losses = torch.optim.Adam(weights, 0.02), []
    for step in range(steps):
        optimizer.zero_grad()
        for index in range(2 * step, 2 * step + 2):
            x, target = vectors(index, 0)
            value = loss(model(x), target)
            losses.append(float(value.detach()))
            (value / 2).backward()
        nn.utils.clip_grad_norm_(weights, clip)
        optimizer.step()
    return losses, {**model.state_dict(), **{f"loss.{k}": x for k, x in loss.state_dict().items()}}


@pytest.mark.parametrize(("build", "recomputed"), [(listed, False), (listed, True), (traced, True)])
def test_a_loss_trains_with_its_model(build, recomputed, tmp_path):
    chain = chain_of(build, 4, data=vectors)
    end = len(chain)
    assert chain.layers[-1].name == "loss"
    assert chain.layers[-1].parameters == sum(x.numel() for x in build(4)[2].parameters())
    again = ((2, end),) if recomputed else ()
    plan = plan_of(chain, [Stage(0, 2, (0,)), Stage(2, end, (1,), again)], accumulate=2, optimizer="adam")
    spec = ModelSpec(f"{__name__}:{build.__name__}", f"{__name__}:vectors")
    options = RunOptions(steps=2, lr=0.02, clip_norm=0.5, checkpoint=tmp_path / "c", save=tmp_path / "s")
    first = run_plan(plan, spec, options)
    report = run_plan(plan, spec, replace(options, steps=4, resume=True))
    losses, state = plain(build, 4, 0.5)
    assert [*first.losses, *report.losses] == pytest.approx(losses, abs=1e-6)
    assert largest_difference(torch.load(tmp_path / "s"), state) <= 1e-6
    assert all(x.measured_bytes <= x.allowed_bytes for x in report.activations)
    assert all(x.measured_bytes == x.planned_bytes for x in report.states)


def test_where_a_loss_cannot_have_weights_one_sentence_says_so():
    with pytest.raises(
        BadInput, match=r"Margin: a loss with weights is computed in 32 bits, .* under autocast instead"
    ):
        measure_model(listed, 4, MeasureOptions(dtype=torch.bfloat16), name="x", date="today", data=vectors)
    layers, x, loss = listed(4)
    named = nn.Sequential()
    for name, layer in zip(("body", "tanh", "loss"), layers, strict=True):
        named.add_module(name, layer)
    with pytest.raises(BadInput, match=r"Margin: its weights are saved as loss\.NAME, which the model has, too"):
        chain_model(named, x, loss, vectors)
