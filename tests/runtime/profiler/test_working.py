"""What a pass takes beside what its forward keeps, counted on the CPU and from fake tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import pipeplan as pp
from pipeplan.errors import PipeplanError
from pipeplan.problem import Chain, Layer

ROWS, WIDE, CLASSES = 16, 32, 1000


def known():
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, CLASSES))


@pytest.mark.parametrize("way", [{"device": "cpu", "steps": 1}, {"gpu": "h100"}])
def test_gradients_and_temporaries_of_each_layer_are_counted(way):
    """A product's backward has the gradients of both sides and one of its weights; a loss its logits' twice."""
    found = pp.profile(known(), torch.randn(ROWS, WIDE), nn.CrossEntropyLoss(), **way).chain
    first, relu, last, loss = (x.working_bytes for x in found.layers)
    side, logits, weight = 4 * ROWS * WIDE, 4 * ROWS * CLASSES, 4 * WIDE * CLASSES
    assert first >= side + 4 * WIDE * WIDE  # nobody wants the gradient of its input
    assert relu == 2 * side
    assert logits + weight <= last <= logits + side + weight + 4 * CLASSES
    assert loss == pytest.approx(2 * logits, rel=0.01)


def test_a_stage_takes_the_most_of_its_layers():
    """In any range of layers, asked for one by one or in tables."""
    sizes = [3, 9, 0, 4, 1, 7, 2]
    layers = tuple(Layer(str(i), 1, 1, 1, 1, working_bytes=size) for i, size in enumerate(sizes))
    chain = Chain("seven", layers, 1)
    ends = [(i, j) for i in range(7) for j in range(i + 1, 8)]
    assert [chain.working_bytes(i, j) for i, j in ends] == [max(sizes[i:j]) for i, j in ends]
    starts, stops = (torch.tensor(ends).T.numpy())[:]
    assert chain.working_bytes(starts, stops).tolist() == [max(sizes[i:j]) for i, j in ends]


def test_plans_leave_room_for_it():
    """What fits beside nothing else doesn't where a pass works with one byte more than is free."""
    layers = [Layer(str(i), 10, 10, 8, 4, working_bytes=100 * i) for i in range(2)]
    chain = Chain("two", tuple(layers), 4)
    peaks = [x.peak_bytes for x in pp.plan(chain, gpus=1, mem="1000B", accumulate=1, weights="flush").stages]
    assert peaks == [2 * 16 + 8 + 100]
    with pytest.raises(PipeplanError, match="140 B"):
        pp.plan(chain, gpus=1, mem="139B", accumulate=1, weights="flush", checkpointing="none")


def test_stages_of_a_device_work_one_at_a_time():
    layers = [Layer(str(i), 10, 10, 8, 4, working_bytes=100 * i) for i in range(4)]
    words = {"gpus": 2, "mem": "10000B", "weights": "flush", "batch": 4, "schedule": "interleaved", "recompute": "none"}
    found = pp.plan(Chain("four", tuple(layers), 0), split="1,1,1,1", on="0/1/0/1", **words)
    messages = 2 * 3 * 4  # of three ends of stages, for what goes there and its gradient
    assert [x.buffer_bytes for x in found.evaluation.devices] == [messages + 200, messages + 300]
