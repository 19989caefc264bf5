"""What ranges of layers keep by the memory model, against what autograd keeps of them in a real stage."""

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases.plans import random_checkpoint
from cases.runtime import Whole, plan_of, sized_chain, stage_of, zoo_chain
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from pipeplan import zoo
from pipeplan.cost import memory_model
from pipeplan.cost.saved import saved_bytes
from pipeplan.files.profile_rules import check_chain
from pipeplan.plan import Stage
from pipeplan.problem import Chain
from pipeplan.runtime.engine.job import RunOptions
from pipeplan.runtime.measure.recorder import HeldBytes
from pipeplan.runtime.model.build.spec import ModelSpec
from pipeplan.runtime.model.trace.trace import trace_module
from pipeplan.runtime.processes.launch import run_plan
from pipeplan.runtime.profiler.saved import saved_values, sized_layers


class Of(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Recurrent(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden)

    def forward(self, x):
        return self.lstm(x)[0]


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inside = nn.Linear(width, 3 * width)

    def forward(self, x):
        return functional.scaled_dot_product_attention(*self.inside(x).chunk(3, dim=-1))


def square(y, _):
    return y.square().mean()


def stacks():
    """Stacks by name: layers, and the shape of their input."""
    linear = [nn.Linear(12, 12) for _ in range(20)]
    return {
        "relu": ([linear[0], nn.ReLU(), linear[1], nn.ReLU(), nn.ReLU(), nn.Sigmoid(), linear[2], nn.Tanh()], (6, 12)),
        "dropout": ([linear[3], nn.Dropout(0.5), nn.Dropout(0.2), nn.ReLU(), nn.Dropout(0.1), linear[4]], (6, 12)),
        "norms": ([nn.LayerNorm(12), nn.GELU(), linear[5], nn.BatchNorm1d(12), nn.ReLU(), linear[6]], (6, 12)),
        "softmax": ([linear[7], nn.Softmax(-1), nn.Softmax(-1), linear[8], nn.LogSoftmax(-1)], (6, 12)),
        "in place": (
            [nn.Sequential(linear[9], nn.ReLU(inplace=True)), linear[10],
             nn.Sequential(nn.LayerNorm(12), nn.ELU(inplace=True)), nn.Identity(), linear[11]],
            (6, 12),
        ),
        "views": (
            [linear[12], nn.ReLU(), nn.Unflatten(1, (3, 4)), nn.Identity(), Of(lambda x: x[:]),
             nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Identity(), nn.ReLU()],
            (6, 12),
        ),
        "parts": (
            [linear[13], Of(lambda x: x[:, :4]), nn.Linear(4, 12), nn.Tanh(), Of(lambda x: x[:2]), nn.ReLU(),
             Of(lambda x: (2 * x)[:, 3:]), nn.Linear(9, 7), Of(lambda x: x[:, :1].expand(2, 9)), nn.Linear(9, 2)],
            (6, 12),
        ),
        "recurrent": ([Recurrent(12, 8), nn.ReLU(), Recurrent(8, 6), Of(lambda x: x[-1]), nn.Linear(6, 3)], (5, 4, 12)),
        "convolutions": (
            [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(),
             nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)],
            (3, 2, 12, 12),
        ),
        "attention": ([Attention(12), nn.ReLU(), Attention(12), nn.LayerNorm(12), Attention(12)], (3, 5, 12)),
    }  # fmt: skip


ZOO = [
    ("small-cnn", 4), ("gpt-tiny", 2), ("gpt-tiny,tied=true", 2), ("llama-tiny", 2), ("resnet50,image=32", 2),
    ("densenet121,image=32", 2), ("gnmt,hidden=16,vocabulary=130,sequence=6", 2),
    ("awd-lm,hidden=24,embedding=16,vocabulary=130,sequence=6", 2),
]  # fmt: skip


def model_of(name, batch):
    torch.manual_seed(3)
    if name in (all_stacks := stacks()):
        layers, shape = all_stacks[name]
        return nn.Sequential(*layers), torch.randn(shape), square, torch.zeros(1)
    model = zoo.load(name)
    layers, _, loss = model(batch)
    x, target = model.data(batch)(0, 0)
    return layers, x, loss, target


def counted(layers, x, loss, target, start, stop, checkpoint):
    """Bytes held behind the forward of ``layers[start:stop]`` as a stage, and the most until its backward's end.

    The backward runs only where something is recomputed: without, it releases and nothing else.
    """
    with torch.no_grad():
        for layer in layers[:start]:
            x = layer(x)
        x = x.contiguous().clone()  # as it arrives
        out = x
        for layer in layers[start:stop]:
            out = layer(out)
    activations, with_loss = HeldBytes(), stop == len(layers) + 1
    stage = stage_of(
        list(layers[start:stop]),
        x,
        loss=loss if with_loss else None,
        checkpoint=checkpoint,
        start=start,
        index=int(start > 0),
        out=out,
        activations=activations,
    )
    out = stage.forward(0, 0, x, target if with_loss else None, counted=True)
    held = activations.held_bytes
    if checkpoint:
        stage.backward(0, 0, None if with_loss else torch.ones_like(out))
        assert activations.held_bytes == 0
    return held, activations.peak_bytes


def timed(chain):
    """The same chain with times, as the checks want them."""
    return replace(chain, layers=tuple(replace(x, forward_ns=1) for x in chain.layers))


@pytest.mark.parametrize("name", list(stacks()))
def test_every_range_of_a_stack_keeps_what_autograd_keeps(name):
    layers, x, loss, target = model_of(name, 0)
    chain = sized_chain(layers, x, loss, target)
    check_chain(timed(chain), "p")
    for start in range(len(chain)):
        for stop in range(start + 1, len(chain) + 1):
            held, _ = counted(layers, x, loss, target, start, stop, ())
            assert saved_bytes(chain, start, stop) == held, (start, stop)


@pytest.mark.parametrize(("name", "batch"), ZOO)
def test_ranges_of_the_zoo_keep_what_autograd_keeps(name, batch):
    layers, x, loss, target = model_of(name, batch)
    chain = sized_chain(layers, x, loss, target)
    check_chain(timed(chain), "p")
    rng = random.Random(name)
    for _ in range(2 if len(layers) > 12 else 4):
        start, stop = sorted(rng.sample(range(len(chain) + 1), 2))
        held, _ = counted(layers, x, loss, target, start, stop, ())
        assert saved_bytes(chain, start, stop) == held, (start, stop)


@pytest.mark.parametrize(("name", "batch"), [*((x, 0) for x in stacks()), *ZOO[:3]])
def test_parts_of_a_stage_hold_what_the_model_says(name, batch):
    """Stored runs and recomputed segments in turns: an output that a run keeps is the next segment's kept input."""
    layers, x, loss, target = model_of(name, batch)
    chain = sized_chain(layers, x, loss, target)
    rng = random.Random(name)
    for _ in range(12):
        start, stop = sorted(rng.sample(range(len(chain) + 1), 2))
        checkpoint = random_checkpoint(rng, start, stop) or ((start, stop),)
        kept, peak, _ = memory_model.activations(chain, start, stop, checkpoint)
        assert (kept, peak) == counted(layers, x, loss, target, start, stop, checkpoint), (start, stop, checkpoint)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        y = self.norm(x).relu()
        q, k, v = self.second(y).chunk(3, dim=-1)
        return x + (self.first(q).sigmoid() * k).flatten(1) + v.tanh() * y


def dag_range(network, start, stop):
    """Bytes that autograd keeps of layers ``start..stop-1`` of a traced network, what enters made by copies."""
    values = dict(enumerate(network.inputs))
    for layer in network.layers[:start]:
        outputs = layer.forward([values[v] for v in layer.reads])
        values |= {v: y.detach() for v, y in zip(layer.makes, outputs, strict=True)}
    values = {v: y.clone().requires_grad_(start > 0 and y.is_floating_point()) for v, y in values.items()}
    permanent = {
        t.untyped_storage()._cdata
        for layer in network.layers
        for t in (*layer.module.parameters(), *layer.module.buffers())
    }
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in network.layers[start:stop]:
            values |= dict(zip(layer.makes, layer.forward([values[v] for v in layer.reads]), strict=True))
    return sum(storage.nbytes() for key, storage in kept.items() if key not in permanent)


@pytest.mark.parametrize("name", ["residual", "resnet50,image=32", "gpt-tiny,blocks=2"])
def test_ranges_of_a_dag_keep_what_autograd_keeps(name):
    if name == "residual":
        layers = nn.Sequential(nn.Linear(8, 8), Residual(8), nn.ReLU(), Residual(8), nn.Linear(8, 2))
        x, loss, target = torch.randn(4, 8), square, torch.zeros(1)
    else:
        layers, x, loss, target = model_of(name, 2)
    network = trace_module(Whole(layers), x).with_loss(loss, target)
    sizes = tuple(sized_layers(network, *saved_values(network, "cpu")))
    dag = Chain(name, sizes, sum(y.nbytes for y in network.inputs), network.edges())
    check_chain(timed(dag), "p")
    rng = random.Random(5)
    pairs = [(i, j) for i in range(len(dag)) for j in range(i + 1, len(dag) + 1)]
    for start, stop in rng.sample(pairs, min(len(pairs), 40)) if len(dag) < 40 else rng.sample(pairs, 4):
        assert saved_bytes(dag, start, stop) == dag_range(network, start, stop), (start, stop)


@pytest.mark.parametrize("segments", [(), ((0, 1),), ((1, 2),)])
def test_a_run_holds_what_was_planned_where_stages_end_with_a_relu(segments):
    """Every block of the network ends with a ReLU, whose output the stage keeps, beside the next stage's own input."""
    chain = zoo_chain("small-cnn", 8)
    assert chain.layers[1].saves is not None
    assert 1 in chain.layers[1].saves
    plan = plan_of(chain, [Stage(0, 2, (0,), segments), Stage(2, 6, (1,))], weights="flush", accumulate=4)
    report = run_plan(plan, ModelSpec("small-cnn"), RunOptions(steps=2, lr=0.01))
    assert len(report.activations) == 2
    assert [x.measured_bytes for x in report.activations] == [x.planned_bytes for x in report.activations]
