"""A model whose layers don't train as its own code does is refused, with the first difference."""

import random

import pytest

torch = pytest.importorskip("torch")

from cases import traced
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from pipeplan.errors import BadInput, CodeFailed
from pipeplan.runtime.engine import comparison
from pipeplan.runtime.model.contract import sample_of
from pipeplan.runtime.model.network import loss_layer
from pipeplan.runtime.model.pieces import pieces_of
from pipeplan.runtime.model.structure import tensors_in
from pipeplan.runtime.model.trace import eager_calls, exported, facts
from pipeplan.runtime.model.trace.author import Author
from pipeplan.runtime.model.trace.compared import apart, compare
from pipeplan.runtime.model.trace.trace import trace_module
from pipeplan.runtime.model.trace.traced import traced_model
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions
from pipeplan.runtime.training.split_stage import SplitStage


class Own(nn.Module):
    """Two linear layers with something in between, and something before."""

    def __init__(self, between=lambda _, x: x, before=lambda _: None, register=None):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between, self.before = between, before
        self.calls, self.register = 0, register

    def forward(self, x):
        self.before(self)
        return self.last(self.between(self, self.first(x)))


class Two(Own):
    def forward(self, x):
        y = self.first(x)
        return self.last(y), y


class Normed(Own):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.between = lambda _, x: self.norm(x)


def checked(module, example=None, loss=functional.mse_loss):
    torch.manual_seed(0)
    example = torch.zeros(3, 4) if example is None else example
    network = trace_module(module, example)
    author = Author.of(module, example, returns_loss=False)
    state = {name: x.clone() for name, x in module.state_dict().items()}
    begun = torch.get_rng_state(), random.getstate()
    try:
        compare(author, apart(network, loss), loss, network.inputs, torch.zeros(3, 4))
    finally:
        assert torch.equal(begun[0], torch.get_rng_state())
        assert begun[1] == random.getstate()
        assert all(p.grad is None for p in module.parameters())
        assert getattr(module, "calls", 0) == 0
    assert not hasattr(module, "balance")
    assert all(torch.equal(x, state[name]) for name, x in module.state_dict().items())
    return network


def hooked(module, x):
    y = x * 1
    y.register_hook(lambda gradient: gradient * 2)
    return y


def with_hook(set_hook):
    module = Own()
    set_hook(module)
    return module


def doubled(*arguments):
    """The hook of a weight, and of a module before or after its backward."""
    return arguments[0] * 2 if len(arguments) == 1 else tuple(2 * x for x in arguments[1])


def remembered(module, x):
    y = x if module.register is None else x + module.register
    module.register = x.detach()
    return y


def noted(module, x):
    module.register = x.mean()
    return x + module.register


class Renormed(Own):
    def __init__(self):
        super().__init__(lambda _, x: x + self.table(torch.zeros(3, dtype=torch.int64)))
        self.table = nn.Embedding(3, 4, max_norm=0.1)


class Balanced(Own):
    """A loss of its own that a part leaves in an attribute, as mixtures of experts do."""

    def forward(self, x):
        y = self.first(x)
        self.balance = y.mean()
        return self.last(y) + self.balance


def drawing(module, x):
    return x + torch.randn(x.shape, generator=module.register)


def counted(module):
    module.calls += 1


def normed(module):
    with torch.no_grad():
        module.first.weight.copy_(functional.normalize(module.first.weight))


SAME = {
    "nothing": Own(), "dropout": Own(lambda _, x: functional.dropout(x)), "batch norm": Normed(),
    "an auxiliary value": Own(noted), "a value that is new": Balanced(), "a hook of a tensor": Own(hooked),
    "a hook of a weight": with_hook(lambda module: module.first.weight.register_hook(doubled)),
    "a hook of a module": with_hook(lambda module: module.last.register_full_backward_hook(doubled)),
    "a hook before a module's": with_hook(lambda module: module.last.register_full_backward_pre_hook(doubled)),
    "another weight": Own(lambda module, x: x @ module.last.weight),
}  # fmt: skip
OTHERWISE = {
    "memory": (Own(remembered), "Own.register goes from one forward to the next"),
    "a counter": (Own(before=counted), "Own.calls goes from one forward to the next"),
    "a weight": (Own(before=normed), "Own changes its weight first.weight in its forward"),
    "a table's norm": (Renormed(), "Renormed changes its weight table.weight in its forward.*; leave out max_norm"),
    "a generator": (Own(drawing, register=torch.Generator()), "Own draws from a generator of its own, register, in"),
    "Python's random": (Own(lambda _, x: x * random.random()), "Own draws from Python's random in its forward"),
}


@pytest.mark.parametrize("name", SAME)
def test_what_trains_alike_passes_and_leaves_no_trace(name):
    module = SAME[name]
    checked(module)
    assert not any(isinstance(x, FakeTensor) for x in vars(module).values()), "a trace leaves none of its tensors"


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_a_trace_loses_is_refused(name):
    module, words = OTHERWISE[name]
    with pytest.raises(BadInput, match=words):
        checked(module)


def test_the_author_may_say_that_nothing_depends_on_what_python_keeps():
    module = Own(before=counted)
    module.fixed_python_state = True
    checked(module)


def test_inputs_of_one_tensor_get_values_of_their_own(monkeypatch):
    """The example of the documentation: labels and tokens are one tensor of zeros."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 4)

        def forward(self, tokens, labels):
            return self.embedding(tokens) + labels[..., None]

    zeros = torch.zeros(3, dtype=torch.int64)
    checked(Pair(), {"tokens": zeros, "labels": zeros})
    monkeypatch.setattr(exported, "own_memory", lambda x: x)
    with pytest.raises(BadInput, match="Pair would train differently from its own code"):
        checked(Pair(), {"tokens": zeros, "labels": zeros})


def test_a_loss_that_a_model_computes_in_16_bits_is_read_in_32_on_both_sides():
    class Scored(Own):
        def forward(self, x):
            return functional.mse_loss(super().forward(x), x)

    options = MeasureOptions(steps=1, dtype=torch.bfloat16)
    profile = measure_model(lambda batch: (Scored(), torch.ones(batch, 4)), 4, options, name="scored", date="-")
    assert sum(layer.weight_bytes for layer in profile.chain.layers) == 2 * 40


def test_lazy_models_are_converted_and_code_that_keeps_its_own_type_is_told_of_autocast():
    def made(between):
        return nn.Sequential(nn.LazyLinear(4), Own(lambda _, x: between(x)))

    def profiled(model):
        options = MeasureOptions(steps=1, dtype=torch.bfloat16)
        build = lambda batch: (model, torch.ones(batch, 4), functional.mse_loss)  # noqa: E731
        return measure_model(build, 4, options, name="made", date="-").chain

    assert sum(layer.weight_bytes for layer in profiled(made(lambda x: x)).layers) == 2 * 60
    with pytest.raises(CodeFailed, match=r"Float and BFloat16; the code makes .*: try --dtype autocast-bfloat16 \("):
        profiled(made(lambda x: x + torch.eye(4)))


def test_constants_that_are_written_through_a_view(monkeypatch):
    class Written(Own):
        def forward(self, x):
            made = torch.zeros(3, 4)
            made[:, :2] = self.first(x)[:, :2]
            return self.last(made)

    checked(Written())
    constants = facts._constants
    monkeypatch.setattr(facts, "_constants", lambda graph, written, changing: constants(graph, written, set()))
    with pytest.raises(BadInput, match="Written would train differently from its own code"):
        checked(Written())


def test_weights_that_no_module_has_are_refused():
    foreign = nn.Linear(4, 4)
    with pytest.raises(BadInput, match=r"Own or its loss trains a tensor of shape \(4, 4\) .*: register it"):
        checked(Own(lambda module, x: x * foreign.weight.mean()))


def test_layers_without_the_hooks_are_refused(monkeypatch):
    monkeypatch.setattr(eager_calls, "HOOK", "no_method_of_tensors")
    monkeypatch.setattr(torch.Tensor, "no_method_of_tensors", None, raising=False)
    with pytest.raises(BadInput, match="in layer first the gradient of first"):
        checked(Own(hooked))


def test_hooks_that_a_first_forward_sets_are_set_once():
    """As transformers sets those that collect hidden states, and marks the model."""

    def collecting(module):
        if not getattr(module, "marked", False):
            module.marked = True
            module.first.register_forward_hook(lambda layer, given, made: 2 * made)

    module = Own(before=collecting)
    checked(module)
    assert not module.first._forward_hooks
    assert not hasattr(module, "marked")


def test_outputs_of_which_a_stage_makes_one_beside_its_loss_keep_their_places():
    module, x = Two(), torch.zeros(3, 4)
    network = trace_module(module, x)

    def loss(output, target):
        return output[0].square().mean() + output[1].mean()

    *before, last = network.layers
    assert last.makes[0] == network.outputs[0]
    assert len(network.outputs) == 2
    final = loss_layer(network, loss)
    pieces = [
        *pieces_of(0, [[code] for code in before], (), {*last.reads, *network.outputs}),
        *pieces_of(len(before), [[last], [final]], (), ()),
    ]
    compare(Author.of(module, x, returns_loss=False), pieces, loss, network.inputs, None)


def test_gradients_come_to_what_is_made_before_what_runs_as_it_is_written():
    class Branching(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() < 1e9 else x

    network = checked(Own(lambda module, x: module.register(x), register=Branching()))
    assert [layer.name for layer in network.layers] == ["first", "register", "last"]
    assert {v for layer in network.layers for v in layer.makes} <= network.trained


def test_a_buffer_that_changes_in_what_runs_as_written_and_is_read_elsewhere_stays_in_one_layer(monkeypatch):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return x * 2 if x.sum() < 1e9 else x

    def counting():
        return Own(lambda module, x: module.register(x) * module.register.seen, register=Counting())

    assert [layer.name for layer in checked(counting()).layers] == ["first", "register..mul", "last"]
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda x: None)
    with pytest.raises(BadInput, match="Own would train differently from its own code"):
        checked(counting())


def compared_in_stages(build, schedule):
    """Compare a model as a run does."""
    torch.manual_seed(0)
    module, example, loss = build(4)
    data = traced.DATA[build]
    model = traced_model(module, example, loss, data, torch.device("cpu"))
    given = data(0, 0)
    x, target = sample_of(given, loss)
    author = Author.of(module, x, returns_loss=False)
    tensors = tensors_in(x), model.data.enter(0, given)[0], target
    comparison.compare_stages(author, traced.in_three(model, schedule), model, torch.device("cpu"), *tensors)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
@pytest.mark.parametrize("build", [traced.tied_transformer, traced.noisy, traced.residual, traced.two_inputs])
def test_the_stages_of_a_run_train_as_the_module_does(build, schedule):
    compared_in_stages(build, schedule)


def test_copies_of_a_weight_that_no_run_would_sum_are_refused(monkeypatch):
    monkeypatch.setattr(comparison, "ties_of", lambda lowered, model: [])
    with pytest.raises(BadInput, match=r"would train differently from its own code: the gradient of "):
        compared_in_stages(traced.entwined, "1f1b")


def test_a_split_backward_that_leaves_weights_out_is_refused(monkeypatch):
    monkeypatch.setattr(SplitStage, "backward_weights", lambda *_: None)
    compared_in_stages(traced.residual, "1f1b")
    with pytest.raises(
        BadInput, match=r"would train differently from its own code: .*it has none, plain training has one"
    ):
        compared_in_stages(traced.residual, "zb1p")
