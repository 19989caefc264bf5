"""Runs whose stages run attention's core again: what they keep is what was measured, and they train as others do."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import largest_difference, plan_of, serial

import pipeplan as pp
from pipeplan.plan import Stage
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan

GPT = "gpt-tiny,blocks=2,hidden=32,heads=4,sequence=16,vocabulary=256,tied=false,attention=unfused"
LLAMA = (
    "hf:LlamaForCausalLM,num_hidden_layers=2,hidden_size=32,intermediate_size=64,num_attention_heads=4,vocab_size=64"
)
LLAMA += ",num_key_value_heads=4,sequence=16,attn_implementation=eager"
DROPPING = f"{GPT},dropout=0.1"
QUICK = {"microbatch": 2, "device": "cpu", "steps": 2, "warmup": 1, "granularity": "block", "selective": True}


def trained(plan, model, **options):
    report = run_plan(plan, ModelSpec(model), RunOptions(seed=2, device="cpu", timeout_s=60.0, steps=2, **options))
    for held in report.activations:
        assert 0 <= held.planned_bytes - held.measured_bytes <= 4  # the loss of a part keeps one number less
    return report


def test_cores_that_run_again_draw_and_train_as_those_that_are_kept():
    plain, again = pp.profile(f"zoo:{DROPPING}", **QUICK).chain.choices
    blocks = [(x.layers[1], x.layers[2]) for x in (plain, again)]
    assert all(one.saved_bytes > other.saved_bytes for one, other in zip(*blocks, strict=True))
    assert all(x.forward_ns > plain.reading_ns for x in (again.layers[0], again.layers[-1]))
    stages = [Stage(0, 2, (0,)), Stage(2, 6, (1,))]
    kept, run_again = (trained(plan_of(x, stages, accumulate=4), DROPPING, lr=0.1) for x in (plain, again))
    assert run_again.losses == kept.losses
    kept, run_again = ([x.measured_bytes for x in report.activations] for report in (kept, run_again))
    assert all(other < one for one, other in zip(kept, run_again, strict=True))


def test_one_stage_runs_cores_again_on_two_processes_and_the_other_keeps_them_on_one(tmp_path):
    chain = pp.profile(f"zoo:{GPT}", tensor="1,2", **QUICK).chain
    assert [(x.tensor, x.selective) for x in chain.variants] == [(1, True), (2, False), (2, True)]
    stages = [Stage(0, 2, (0,), tensor=2, selective=((0, 2),)), Stage(2, 6, (2,))]
    plan = plan_of(chain, stages, accumulate=4)
    losses, state = serial(GPT, 2, steps=2, accumulate=4, optimizer="sgd", lr=0.1, seed=2)
    report = trained(replace(plan, policy=replace(plan.policy, optimizer="sgd")), GPT, lr=0.1, save=tmp_path / "s.pt")
    assert report.losses == pytest.approx(losses, abs=1e-5)
    assert largest_difference(torch.load(tmp_path / "s.pt"), state) <= 1e-5


@pytest.mark.parametrize("model", [f"zoo:{GPT}", LLAMA])
def test_of_two_blocks_in_a_stage_one_runs_its_core_again(model):
    chain = pp.profile(model, **QUICK).chain
    both = enumerate(zip(chain.layers, chain.variants[0].layers, strict=True))
    first, _ = (i for i, (x, y) in both if x.saved_bytes > y.saved_bytes)
    found = []
    for cores in ((), ((first, first + 1),)):
        stage = Stage(0, len(chain), (0,), selective=cores)
        found.append(trained(plan_of(chain, [stage], accumulate=2), model, lr=0.1))
    assert found[0].losses == found[1].losses
    kept, one = (x.activations[0].measured_bytes for x in found)
    assert kept - one == chain.layers[first].saved_bytes - chain.variants[0].layers[first].saved_bytes
