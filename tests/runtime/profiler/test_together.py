"""Parts of layers measured by as many processes as run each layer together: they agree on every step, their bytes are
those that are estimated, and a plan of them runs as it says."""

import multiprocessing
import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import pipeplan as pp
from pipeplan.errors import BadInput, CodeFailed
from pipeplan.files.profiles import read_profile
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.model.network import chain_network
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.profiler.beside import measured_together
from pipeplan.runtime.profiler.measure import profile_network
from pipeplan.runtime.profiler.steps import MeasureOptions

OWN = "cases.parted:build,tensor_plan=cases.parted:plan"
QWEN = (
    "hf:Qwen3ForCausalLM,num_hidden_layers=1,hidden_size=16,intermediate_size=24,num_attention_heads=4,head_dim=8,"
    "num_key_value_heads=2,vocab_size=256,sequence=8,max_position_embeddings=8,tie_word_embeddings=false"
)
QUICK = {"microbatch": 2, "device": "cpu", "steps": 2, "warmup": 1, "granularity": "block"}
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers isn't installed")


@pytest.mark.parametrize("model", [OWN, pytest.param(QWEN, marks=needs_transformers)])
def test_measured_parts_are_planned_and_run_with_the_bytes_that_they_have(tmp_path, model):
    data = "cases.parted:data" if model is OWN else None
    beside = 2 if model is OWN else 1  # each imports all of transformers
    found = pp.profile(model, tensor="1,2", data=data, beside=beside, **QUICK)
    assert multiprocessing.active_children() == []
    found.save(tmp_path / "profile.json")
    (part,) = read_profile(str(tmp_path / "profile.json")).variants
    (estimated,) = pp.profile(model, gpu="h100", microbatch=2, tensor=2, granularity="block").chain.variants
    assert (part.tensor, part.layers) == (2, found.chain.variants[0].layers)
    for one, other in zip(part.layers, estimated.layers, strict=True):
        assert (one.name, one.weight_bytes, one.output_bytes) == (other.name, other.weight_bytes, other.output_bytes)
        assert one.forward_ns > 0
        assert one.exchanges == ()  # the passes have taken them along
    split = [2, len(found) - 2] if model is OWN else [len(found)]
    asked = {"gpus": 2 * len(split), "mem": "1GB", "tensor": 2, "batch": 4, "weights": "flush"}
    planned = pp.plan(tmp_path / "profile.json", **asked, split=",".join(map(str, split)))
    assert [(len(x.gpus), x.tensor) for x in planned.stages] == [(2, 2)] * len(split)
    report = run_plan(
        planned.plan, ModelSpec(model, data), RunOptions(steps=2, lr=0.1, seed=1, device="cpu", timeout_s=60.0)
    )
    assert report.losses
    for held in report.activations:
        assert 0 <= held.planned_bytes - held.measured_bytes <= 4  # the loss of a part keeps one number less
    assert all(state.measured_bytes <= state.planned_bytes for state in report.states)


@pytest.mark.parametrize("hold", ["all", "one"])
def test_rounds_are_as_many_as_the_first_process_has(hold):
    """It warms up twice and measures three steps, whatever this one would have done by its own clock."""
    said = []

    def told(value):
        said.append(value)
        return [True, True, False, False, False, None][(len(said) - 1) % 6]

    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    first = SimpleNamespace(ranks=2, told=told)
    options = MeasureOptions(steps=1, warmup=0, seconds=0.0, hold=hold, together=first)
    x = torch.randn(2, 4)
    found, one, _ = profile_network(chain_network(layers, x), nn.functional.mse_loss, options, torch.zeros(2, 1))
    assert one == (hold == "one")
    assert [layer.steps for layer in found] == [3, 3, 3]
    own = [False, None, None, None, None, None]
    assert said == own * (3 if one else 1)


def test_whether_layers_fit_is_for_the_first_to_say():
    layers = nn.Sequential(nn.Linear(4, 4))
    options = MeasureOptions(steps=1, warmup=0)
    for fits in (True, False):
        said = iter([not fits])
        first = SimpleNamespace(ranks=2, told=lambda value, said=said: next(said, value))
        network = chain_network(layers, torch.randn(2, 4))
        _, one, _ = profile_network(network, nn.functional.mse_loss, replace(options, together=first))
        assert one == (not fits)


def fails(how, together):
    if together.place == 1:
        how()
    return together.exchange(torch.ones(1), "all-reduce")


def raises():
    raise CodeFailed("the second one doesn't")


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (raises, CodeFailed, "--tensor 2: the second one doesn't"),
        (partial(int, "x"), BadInput, "--tensor 2: ValueError: invalid literal"),
        (partial(os._exit, 3), BadInput, "--tensor 2: a process was ended"),
    ],
)
def test_one_that_fails_ends_all_with_its_words(how, kind, words):
    with pytest.raises(kind, match=words):
        measured_together(partial(fails, how), 2, "cpu")
    assert multiprocessing.active_children() == []


def test_what_isn_t_measured_is_said():
    with pytest.raises(BadInput, match="which degrees are there to be measured"):
        pp.profile(OWN, tensor="any", **QUICK)
    with pytest.raises(BadInput, match="sequence_parallel: parts of layers are estimated"):
        pp.profile(OWN, tensor="1,2", sequence_parallel=True, **QUICK)
    with pytest.raises(BadInput, match="experts: parts of layers are estimated"):
        pp.profile(OWN, experts="1,8", **QUICK)
