"""Layers measured while other processes train the same model: as many as asked for, and none left behind."""

import multiprocessing
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import pipeplan as pp
from pipeplan.api.given.profiling import build_named
from pipeplan.errors import BadInput
from pipeplan.files.profiles import digest, read_profile
from pipeplan.runtime.profiler.measure import measure_model, measured_again
from pipeplan.runtime.profiler.steps import MeasureOptions, Others

ABOUT = {"name": "m", "date": "today"}


def test_a_live_module_is_measured_beside_others_that_train_it(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    steps = []

    def counting(text):
        if text.startswith("step"):
            steps.append(len(multiprocessing.active_children()))

    found = pp.profile(
        model, torch.randn(4, 8), nn.functional.cross_entropy, device="cpu", beside=3, steps=2, say=counting
    )
    assert steps == [2, 2]
    assert multiprocessing.active_children() == []
    assert found.chain.beside == 3
    assert ", beside 2 other processes, " in found.chain.source
    path = tmp_path / "profile.json"
    found.save(path)
    assert read_profile(str(path)) == found.chain
    alone = replace(found.chain, beside=1)
    assert digest(alone) != digest(found.chain)


def failing():
    raise OSError("no such weights")


@pytest.mark.parametrize(
    ("builder", "words"),
    [
        (failing, "a process that trains beside this one failed: OSError: no such weights"),
        (lambda: None, "the model cannot go to other processes: Can't pickle .*; name it instead"),
    ],
)
def test_what_others_cannot_train_is_said(builder, words):
    build = build_named("zoo:small-cnn", 1)
    options = MeasureOptions(steps=1, warmup=1, others=Others(1, partial(measured_again, builder, 1)))
    with pytest.raises(BadInput, match=f"--beside: {words}"):
        measure_model(build, 1, options, **ABOUT)
    assert multiprocessing.active_children() == []


def test_where_it_means_nothing_it_is_refused():
    with pytest.raises(BadInput, match="leave out device, hold, beside and in_flight"):
        pp.profile("zoo:small-cnn", gpu="a100", beside=2)
    with pytest.raises(BadInput, match="beside: 0 isn't a number of processes from 1 to 256"):
        pp.profile("zoo:small-cnn", beside=0)
