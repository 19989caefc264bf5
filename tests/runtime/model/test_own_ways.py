"""What its author's model does beyond layers: types, recomputation, compilation, state; and what is said of it."""

import re
from collections import OrderedDict
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from cases.runtime import Whole
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeplan.check.targets import refuse_chain
from pipeplan.check.units import CannotExpress
from pipeplan.errors import BadInput
from pipeplan.partition.granularity import merge_blocks
from pipeplan.planner.periodic.stated import stated
from pipeplan.problem import Chain, Layer, Platform, Problem
from pipeplan.runtime.model.build.fitting import _evaluated, check_model, fitted
from pipeplan.runtime.model.network import LayerCode, final_outputs
from pipeplan.runtime.model.structure import tensors_in
from pipeplan.runtime.model.trace.trace import trace_module
from pipeplan.runtime.model.trace.traced import traced_model
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions

ONCE = MeasureOptions(steps=1, warmup=0)


def measured(module, x, loss=lambda output, target: output.square().mean()):
    return measure_model(lambda batch: (module, x, loss), len(x), ONCE, name="own", date="today", data=None)


def loaded(module, x):
    return traced_model(module, x, nn.functional.mse_loss, lambda index, seed: None, torch.device("cpu"))


@dataclass
class Scores:
    scores: object
    count: int


class Typed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Scores(self.linear(x).view(2, 2, 4), 3)


def test_an_output_keeps_its_type_and_its_shape():
    module, x = Typed(), torch.randn(4, 4)
    network = trace_module(module, x)
    found = network.structure(final_outputs(network, "cpu", False))
    assert (type(found), found.count) == (Scores, 3)
    assert torch.equal(found.scores, module(x).scores)


class Recomputing(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        self.reentrant = reentrant

    def forward(self, x):
        y = self.first(x)
        return self.inner(y) if self.reentrant is None else checkpoint(self.inner, y, use_reentrant=self.reentrant)


def test_recomputation_of_its_own_is_taken_off_and_said():
    x = torch.ones(2, 4)
    plain = measured(Recomputing(None), x).chain
    for reentrant in (True, False):
        found = measured(Recomputing(reentrant), x)
        assert [y.saved_bytes for y in found.chain.layers] == [y.saved_bytes for y in plain.layers]
        (note,) = found.notes
        assert re.match(
            r"Recomputing recomputes by itself \(torch.utils.checkpoint, first in .*test_own_ways.py:\d+\)", note
        )


def test_layers_that_recompute_by_themselves_are_measured_as_they_are():
    sizes = []
    for reentrant in (None, True, False):
        layers = [nn.Linear(4, 4), Recomputing(reentrant), nn.Linear(4, 4)]
        chain = measured(layers, torch.ones(2, 4)).chain
        assert chain.layers[1].backward_ns > 0
        sizes.append(chain.layers[1].saved_bytes)
    assert sizes[0] > sizes[1] == sizes[2]


def test_a_compiled_module_runs_as_it_is_written_under_its_own_names():
    inner = Recomputing(None)
    compiled = torch.compile(inner)
    model = traced_model(
        compiled, torch.ones(2, 4), nn.functional.mse_loss, lambda index, seed: None, torch.device("cpu")
    )
    assert model.notes == ("Recomputing: compiled by torch.compile, and profiled and run uncompiled",)
    assert {name for layer in model.layers for name in layer.names.values()} == set(compiled.state_dict())


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return torch.round(x * scale), x > 0

    @staticmethod
    def backward(ctx, gradient, _):
        return 3 * gradient, None


class Quantized(Typed):
    def forward(self, x):
        y, positive = Straight.apply(self.linear(x), 2.0)
        return self.linear(y) * positive


def test_a_gradient_of_its_own_stays():
    module, x = Quantized(), torch.randn(2, 4)
    found = []
    for _ in range(2):
        network = trace_module(module, x)
        assert [layer.name for layer in network.layers] == ["linear", "Straight", "linear#2", "mul"]
        values = {0: x}
        for layer in network.layers:
            values |= dict(zip(layer.makes, layer.forward([values[v] for v in layer.reads]), strict=True))
        found += torch.autograd.grad(values[network.outputs[0]].sum(), module.linear.weight)
    (expected,) = torch.autograd.grad(module(x).sum(), module.linear.weight)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)


class Cache:
    def __init__(self, tensor):
        self.keys = tensor


class Caching(Typed):
    def forward(self, x):
        return {"scores": self.linear(x), "past": Cache(x)}


class Branching(Typed):
    def forward(self, x):
        return self.linear(x)[x.sum(1) > 0]


def test_what_a_trace_cannot_keep_is_said_with_the_users_line():
    with pytest.raises(
        BadInput,
        match=r"Caching \(.*test_own_ways.py:\d+\) returns a Cache, which holds tensors .* set use_cache=False",
    ):
        trace_module(Caching(), torch.ones(4, 4))
    with pytest.raises(
        BadInput, match=r"Branching cannot be traced: .* \(.*test_own_ways.py:\d+\)\. Return its layers"
    ):
        trace_module(Branching(), torch.ones(4, 4))


class Stack(nn.Module):
    """An embedding, blocks with a skip over each, and a head of two layers."""

    def __init__(self):
        super().__init__()
        self.tokens, self.drop = nn.Embedding(5, 4), nn.Tanh()
        self.blocks = nn.ModuleList(Recomputing(None) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, x):
        y = self.drop(self.tokens(x))
        for block in self.blocks:
            y = y + block(y)
        return torch.tanh(self.head(self.norm(y)))


def test_a_layer_for_each_block_by_its_own_name():
    x = torch.zeros(2, 3, dtype=torch.int64)
    module = Whole(Stack())
    fine = measured(module, x).chain
    chain = merge_blocks(fine)
    blocks = [f"layers.blocks.{i}" for i in range(3)]
    names = [layer.name for layer in chain.layers]
    assert [x for x in names if "blocks" in x] == blocks, names
    assert names[0] == "layers.tokens..layers.drop"
    assert names[-3:] == ["layers.add#3..layers.norm", "layers.head..layers.tanh", "loss"]
    assert [layer.name for layer in merge_blocks(chain, ["layers.blocks"]).layers] == names
    with pytest.raises(BadInput, match=r"no layers are items of 'layers.rows'; the first ones are layers.tokens"):
        merge_blocks(chain, ["layers.rows"])
    model = fitted(loaded(module, x), chain)
    check_model(model, chain)
    assert [layer.weight_bytes for layer in model.layers] == [layer.weight_bytes for layer in chain.layers]
    problem = Problem(chain, Platform.flat(2, 10**9))
    (allocation,) = stated(problem, "layers.blocks.1")
    assert allocation.stages[1].start == names.index("layers.blocks.1")
    (allocation,) = stated(replace(problem, chain=fine), "layers.blocks.1")
    assert fine.layers[allocation.stages[1].start].name == "layers.blocks.1.first"


def test_what_training_has_joined_is_found_in_an_evaluation_by_what_it_begins_with():
    names = ["conv1", "bn1..relu", "maxpool", "layer1.0.conv1", "layer1.0.bn1..layer1.0.relu"]
    numbered = enumerate(names)
    codes = [LayerCode(name, name, nn.Identity(), lambda _, x: (x,), (i,), (i + 1,)) for i, name in numbered]
    layers = ["conv1", "bn1..relu..maxpool", "layer1.0", "loss"]
    chain = Chain("c", tuple(Layer(name, 1, 1, 0, 1) for name in layers), 1)
    groups = _evaluated(SimpleNamespace(layers=[SimpleNamespace(codes=[code]) for code in codes]), chain)
    assert [[code.name for code in group] for group in groups] == [names[:1], names[1:3], names[3:], []]


def test_the_calls_of_a_shared_part_are_evaluated_where_training_has_them_together():
    """In training its norm's statistics bring both calls into one layer; in evaluation the second comes behind all."""
    read = {"enter": (0, 1), "tower": (1, 2), "div": (2, 3), "tower#1": (1, 4), "div#1": (4, 5)}
    codes = [LayerCode(x, x, nn.Identity(), lambda _, x: (x,), (i,), (j,)) for x, (i, j) in read.items()]
    chain = Chain("c", tuple(Layer(x, 1, 1, 0, 1) for x in ("enter", "tower..tower", "div", "div#1", "loss")), 1)
    groups = _evaluated(SimpleNamespace(layers=[SimpleNamespace(codes=[code]) for code in codes]), chain)
    names = [[code.name for code in group] for group in groups]
    assert names == [["enter"], ["tower", "tower#1"], ["div"], ["div#1"], []]


def test_lazy_parts_get_their_weights_from_the_example_and_tables_dense_gradients():
    torch.manual_seed(0)
    lazy = Whole(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.LazyBatchNorm1d(), nn.LazyLinear(3)))
    network = trace_module(lazy, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert [tuple(p.shape) for layer in network.layers for p in layer.module.parameters()] == [
        (9, 4), (3,), (3,), (3, 4), (3,),
    ]  # fmt: skip
    assert network.notes == ("Embedding(sparse=True): its gradients are dense here, with the same sums",)
    assert int(next(b for name, b in lazy.named_buffers() if "num_batches" in name)) == 0


def test_a_model_that_is_a_script_is_refused_with_what_to_give():
    with pytest.raises(BadInput, match=r"torch\.jit has compiled the whole model; give it"):
        trace_module(torch.jit.script(nn.Sequential(nn.Linear(4, 4))), torch.ones(2, 4))


class Centred(nn.Module):
    def __init__(self, means):
        super().__init__()
        self.linear, self.means = nn.Linear(4, 4), means

    def forward(self, x):
        x = self.linear(x)
        return x - self.means(x)


def means(x):
    with torch.no_grad():
        return x.mean(0)


class Threefold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


@pytest.mark.parametrize(
    ("way", "layer"),
    [
        (means, "middle.mean"), (Threefold.apply, "middle.Threefold"),
        (lambda x: x.mean(0).detach(), ""),
    ],
)  # fmt: skip
def test_plans_for_torch_are_refused_just_where_it_does_not_train_the_model_as_it_is(way, layer):
    from torch.distributed.pipelining import SplitPoint, pipeline  # which takes a second

    x, names = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), ("first", "middle", "last")
    module = Whole(
        nn.Sequential(OrderedDict(zip(names, (nn.Linear(4, 4), Centred(way), nn.Linear(4, 4)), strict=True)))
    )
    chain = measured(module, x).chain
    assert chain.own_ways.removeprefix("layers.") == layer
    module.zero_grad()
    module(x).square().sum().backward()
    try:
        pipe = pipeline(deepcopy(module), (x,), {}, {"layers.last": SplitPoint.BEGINNING})
        y = x
        for stage in (pipe.get_stage_module(i) for i in range(pipe.num_stages)):
            y = next(iter(tensors_in(stage(y))))
        y.square().sum().backward()
        weight = dict(pipe.get_stage_module(0).named_parameters())["layers.first.weight"]
        trains = torch.allclose(weight.grad, module.layers.first.weight.grad)
    except Exception:
        trains = False
    with nullcontext() if trains else pytest.raises(CannotExpress, match="no_grad or autocast, or a gradient"):
        refuse_chain(chain, "torch")
    assert trains == (not layer)
    refuse_chain(chain, "torchtitan")
