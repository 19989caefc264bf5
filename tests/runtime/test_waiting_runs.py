"""Runs whose activations wait in host memory: they train as others do, and hold there, and here, what is planned."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import plan_of, serial, zoo_chain

from pipeplan.cost.roofline import with_offloaded
from pipeplan.errors import BadInput
from pipeplan.plan import Stage
from pipeplan.problem import Variant
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.processes.launch import run_plan

GPT = "gpt-tiny,blocks=2,hidden=32,heads=4,sequence=16,vocabulary=256,tied=false"
RUN = RunOptions(seed=2, device="cpu", timeout_s=60.0, steps=2, lr=0.1)


def chain_with(link):
    """A GPT's, whose stages may have activations in host memory over a ``link`` of so many bytes/s."""
    chain = zoo_chain(GPT, 2)
    return with_offloaded(replace(chain, variants=(Variant(1, False, chain.layers, offloaded=link),)))


def test_one_stage_lets_its_activations_wait_and_the_other_keeps_them():
    chain = chain_with(10**8)
    stages = [Stage(0, 3, (0,), offloaded=True), Stage(3, len(chain), (1,))]
    plan = plan_of(chain, stages, accumulate=4)
    report = run_plan(plan, ModelSpec(GPT), RUN)
    losses, _ = serial(GPT, 2, steps=2, accumulate=4, optimizer="sgd", lr=0.1, seed=2)
    assert report.losses == pytest.approx(losses, abs=1e-5)
    waits, kept = report.activations
    saved = [layer.saved_bytes for layer in chain.layers[:3]]
    assert (waits.planned_host_bytes, waits.measured_host_bytes) == (2 * sum(saved), 2 * sum(saved))
    assert waits.planned_bytes == waits.measured_bytes == 2 * max(saved)  # of two equal blocks
    assert (kept.planned_host_bytes, kept.measured_host_bytes) == (0, 0)
    assert kept.planned_bytes == kept.measured_bytes > 0


def test_segments_are_kept_by_layers_where_activations_wait():
    plan = plan_of(chain_with(10**8), [Stage(0, 3, (0,), ((0, 2),), offloaded=True), Stage(3, 6, (1,))], accumulate=4)
    with pytest.raises(BadInput, match="stage 0 recomputes segments and its activations wait in host memory, where"):
        run_plan(plan, ModelSpec(GPT), RUN)
