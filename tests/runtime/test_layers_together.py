"""Plans whose layers several processes run together: real runs against plain training of the whole model."""

from dataclasses import replace
from functools import cache

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import largest_difference, plan_of, serial

import pipeplan as pp
from pipeplan.plan import Stage
from pipeplan.problem import Platform
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.training.state.checkpoint import newest

GPT = (
    "gpt-tiny,blocks=2,hidden=32,heads=4,sequence=16,vocabulary=200,tied=true"  # embedding, 2 blocks, norm, head, loss
)
LLAMA = "llama-tiny,blocks=2,hidden=32,heads=4,groups=2,feed_forward=48,sequence=16,vocabulary=300"
CLOSE = 1e-5  # sums of parts come in another order


@cache
def profiled(model):
    found = pp.profile(f"zoo:{model}", gpu="h100", microbatch=2, tensor="1,2", name=model)
    return found.chain, found.chain.part(found.chain.variants[0])


def planned(model, stages, tensor=2, **policy):
    """A plan whose stages run on so many GPUs for each device that they name."""
    chain = profiled(model)[tensor - 1]
    plan = plan_of(chain, [x if isinstance(x, Stage) else Stage(*x) for x in stages], accumulate=4, **policy)
    return replace(plan, platform=Platform.flat(len(plan.platform) * tensor, 10**12).grouped(tensor))


def trained(plan, model, steps, **options):
    given = {"steps": steps, "device": "cpu", "seed": 2, "timeout_s": 60.0, **options}
    return run_plan(plan, ModelSpec(f"zoo:{model}"), RunOptions(**given))


def as_planned(report, activations=True):
    assert report.activations
    assert report.states
    for held in report.activations if activations else ():
        assert 0 <= held.planned_bytes - held.measured_bytes <= 4  # the loss keeps one number less than torch's
    for state in report.states:
        assert state.measured_bytes <= state.planned_bytes


def test_two_stages_of_two_train_a_tied_gpt_as_one_process_and_go_on_alone(tmp_path):
    folder, saved = tmp_path / "run", tmp_path / "state.pt"
    plan = planned(GPT, [(0, 2, (0,)), (2, 6, (1,))], optimizer="adam")
    about = {"steps": 5, "accumulate": 4, "optimizer": "adam", "lr": 0.002, "seed": 2, "clip": 0.5}
    norms = []
    losses, state = serial(GPT, 2, **about, norms=norms)
    report = trained(plan, GPT, 3, lr=0.002, clip_norm=0.5, checkpoint=folder)
    as_planned(report)
    assert report.losses == pytest.approx(losses[:12], abs=CLOSE)
    assert report.gradient_norms == pytest.approx(norms[:3], rel=CLOSE)
    whole = {name: tuple(x.shape) for name, x in state.items()}
    checkpoint = newest(folder)
    assert checkpoint.position.step == 3
    read = {}
    for name in checkpoint.files:
        read |= torch.load(f"{checkpoint.path}/{name}", weights_only=True)["model"]
    assert {name: tuple(x.shape) for name, x in read.items()} == {k: v for k, v in whole.items() if k in read}
    alone = planned(GPT, [(0, 6, (0,))], tensor=1, optimizer="adam")
    report = trained(alone, GPT, 5, lr=0.002, clip_norm=0.5, checkpoint=folder, resume=True, save=saved)
    assert report.losses == pytest.approx(losses[12:], abs=CLOSE)
    assert largest_difference(torch.load(saved), state) <= CLOSE


def test_a_llama_goes_on_in_parts_with_replicas_that_share_their_steps(tmp_path):
    folder, saved = tmp_path / "run", tmp_path / "state.pt"
    alone = planned(LLAMA, [(0, 6, (0,))], tensor=1, optimizer="adam")
    losses, state = serial(LLAMA, 2, steps=4, accumulate=4, optimizer="adam", lr=0.002, seed=2, clip=0.5)
    trained(alone, LLAMA, 2, lr=0.002, clip_norm=0.5, checkpoint=folder)
    plan = planned(LLAMA, [Stage(0, 6, (0, 1), ((1, 3),))], optimizer="adam")
    plan = replace(plan, policy=replace(plan.policy, zero=1))
    report = trained(plan, LLAMA, 4, lr=0.002, clip_norm=0.5, checkpoint=folder, resume=True, save=saved)
    assert report.losses == pytest.approx(losses[8:], abs=CLOSE)
    as_planned(report, activations=False)  # over groups of heads a CPU's attention keeps more than the planned GPU's
    assert largest_difference(torch.load(saved), state) <= CLOSE
