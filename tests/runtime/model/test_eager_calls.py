"""What no trace can look into runs as written, as one layer: equal to plain torch, and the rest is cut as ever."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pipeplan.errors import BadInput, CodeFailed
from pipeplan.runtime.model.trace.trace import trace_module
from pipeplan.runtime.profiler.measure import measure_model
from pipeplan.runtime.profiler.steps import MeasureOptions


class Parts(nn.Module):
    """Four layers of which the second one is another's."""

    def __init__(self, part=None):
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 4), part or nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return self.inner(x) if x.sum() > 0 else self.inner(x) * 2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        weight, choice = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = choice == number
            y[own] = expert(x[own]) * weight[own].unsqueeze(-1)
        return y


class Early(Parts):
    def forward(self, x):
        x = self.a(x)
        if x.mean() > 5:
            return self.d(x)
        x = self.c(x)
        return self.d(x)


class Twice(Parts):
    def forward(self, x):
        if x.sum() > 100:
            return super().forward(x)
        return super().forward(x)


class Counted(Parts):
    def forward(self, x):
        x = self.a(x)
        times = min(int(x.abs().max() * 3), 1)
        for _ in range(times + 1):
            x = self.c(x)
        return self.d(x)


class Looped(Parts):
    def forward(self, x):
        for part in (self.a, self.c):
            x = part(x)
            if x.isnan().any():
                x = x.nan_to_num()
        return self.d(x)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.states, self.head = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 9)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.tokens(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, _ = self.states(packed)
        states, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return self.head(states)


class Aligned(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x, labels):
        scores = self.head(self.enter(x).relu()).log_softmax(-1).transpose(0, 1)
        known = labels >= 0
        given = torch.full((x.shape[0],), x.shape[1])
        flat = labels.masked_select(known)
        return nn.functional.ctc_loss(scores, flat, given, known.sum(-1))


class Mapped(Parts):
    def forward(self, x):
        x = torch.vmap(lambda row: self.c(row))(self.a(x))
        x = x.relu()
        return self.d(x)


class Penalised(Parts):
    def forward(self, x):
        x = self.a(x)
        inside = x.detach().requires_grad_()
        energy = self.c(inside).tanh().sum()
        (gradient,) = torch.autograd.grad(energy, inside, create_graph=True)
        return self.d(x + gradient)


class Ragged(Parts):
    def forward(self, x):
        x = self.a(x)
        rows = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
        rows = self.c(rows)
        x = rows.values()
        return self.d(x)


X = (torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),)
AUDIO = torch.randn(2, 9, 4), torch.tensor([[1, 2, -1], [3, -1, -1]])


class OneLine(Parts):
    def forward(self, x):
        x = self.a(x)
        if x.mean() > 0: x = self.b(x)  # fmt: skip  # noqa: E701
        return self.d(self.c(x))


class Over(nn.Module):
    """No line is known of what a trace says of its map, when all is over."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x):
        return torch.vmap(lambda w, v: v @ w, in_dims=(0, None))(self.weights, x)


class Borrowing(Parts):
    """Its hook reads a weight of the whole, which is none of the hooked layer's."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))
        self.c.register_forward_pre_hook(lambda module, given: (given[0] + self.shift,))
        self.c.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,))


class Queued(Parts):
    """What goes into its queue, at a place that is counted, comes out of nothing; later forwards read it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.ones(9, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        x = self.c(self.b(self.a(x)) @ self.queue.clone().T @ self.queue.clone())
        with torch.no_grad():
            place = int(self.place)
            self.queue[place : place + 3] = x[:3]
            self.place[0] = (place + 3) % 9
        return self.d(x)


CASES = {
    "a queue": (Queued, X, ["a", "b", "clone..wrap_with_set_grad_enabled", "d"]),
    "a branch in one line": (OneLine, X, ["a", "forward", "c", "d"]),
    "a whole forward": (Over, X, ["forward"]),
    "a hook with others' weights": (Borrowing, X, ["a", "b", "c", "d"]),
    "a branch on values": (lambda: Parts(Branching()), X, ["a", "b.Branching", "c", "d"]),
    "a mixture of experts": (lambda: Parts(Experts()), X, ["a", "b.Experts", "c", "d"]),
    "a scripted module": (
        lambda: Parts(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))),
        X,
        ["a", "b.RecursiveScriptModule", "c", "d"],
    ),
    "an early end": (Early, X, ["a", "forward"]),
    "a class above": (Twice, X, ["forward"]),
    "a number of times": (Counted, X, ["a", "forward", "d"]),
    "a branch in a loop": (Looped, X, ["a", "forward", "c", "forward", "d"]),
    "packed sequences": (
        Packed,
        (torch.randint(9, (3, 5)), torch.tensor([5, 2, 3])),
        ["input lengths", "input x", "forward", "head"],
    ),
    "an alignment": (
        Aligned,
        AUDIO,
        ["input x", "enter", "relu", "head", "log_softmax", "input labels", "ge", "forward"],
    ),
    "a map": (Mapped, X, ["forward", "relu", "d"]),
    "gradients inside": (Penalised, X, ["a", "forward", "add", "d"]),
    "nested tensors": (Ragged, X, ["a", "forward", "d"]),
}


def trained(output, module, x):
    """Return what a step gives: the outputs, the gradient for each weight, and the buffers."""
    gradients = torch.autograd.grad(output.square().sum(), list(module.parameters()), allow_unused=True)
    return [output, *gradients, *(buffer.clone() for buffer in module.buffers())]


def run(network, x):
    values = dict(enumerate(network.inputs))
    for layer in network.layers:
        values |= dict(zip(layer.makes, layer.forward([values[v] for v in layer.reads]), strict=True))
    return values[network.outputs[0]]


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_traced_is_one_layer_that_runs_as_written(name):
    make, x, layers = CASES[name]
    torch.manual_seed(0)
    module = make()
    state = {k: v.clone() for k, v in module.state_dict().items()}
    network = trace_module(module, x)
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    found = [layer.name.split("#")[0] for layer in network.layers]
    assert sorted(name.split("forward_")[0] + "forward" * ("forward_" in name) for name in found) == sorted(layers)
    assert "runs as it is written" in "".join(network.notes) or "run as they are written" in "".join(network.notes)
    here = trained(run(network, x), module, x)
    module.load_state_dict(state)
    there = trained(module(*x), module, x)
    assert [a is None for a in here] == [b is None for b in there]
    assert all(a is None or torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_a_hook_with_others_weights_shares_them():
    network = trace_module(Borrowing(), *X)
    holders = [x.name for x in network.layers if any("shift" in name for name, _ in x.module.named_parameters())]
    assert holders == ["c"]


class Gathering(nn.Module):
    """What is written into a constant eagerly comes with its gradient to what crosses a cut."""

    def __init__(self):
        super().__init__()
        self.gate, self.one, self.head = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        weight, choice = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number in range(2):
            own = choice == number
            y[own] = weight[own, None] * self.one(x[own])
        return self.head(y)


def test_gradients_come_to_all_that_an_eager_call_reads():
    network = trace_module(Gathering(), torch.randn(5, 4))
    names = {value: layer.name for layer in network.layers for value in layer.makes}
    assert {"softmax", "max"} <= {names[value].split("#")[0] for value in network.trained if value in names}


class Chosen(nn.Module):
    def forward(self, x):
        return torch.stack([row for row in x if row.sum() > 0])


def test_shapes_that_change_later_are_refused_with_both():
    torch.manual_seed(0)
    _, chosen, *_ = trace_module(Parts(Chosen()), X).layers
    message = r"Chosen gave tensors of shapes \(9, 4\), and of \(\d, 4\) for the example; put what depends on values"
    with pytest.raises(BadInput, match=message):
        chosen.forward([torch.ones(9, 4)])


class Sloped(Parts):
    def forward(self, x):
        return self.d(torch.func.grad(lambda y: self.c(y).tanh().sum())(self.a(x)))


def test_gradients_of_torch_func_are_refused_where_what_is_saved_is_counted():
    message = (
        r"torch.func.grad, vjp, jacrev and hessian can't run in a forward here, .*; use torch.autograd.grad\(..., c"
    )
    build = lambda batch: (Sloped(), torch.ones(6, 4), nn.functional.l1_loss)  # noqa: E731
    with pytest.raises(CodeFailed, match=message):
        measure_model(build, 6, MeasureOptions(steps=1, warmup=0), name="x", date="")


def test_what_torch_says_of_a_branch_is_said_in_words():
    assert "it branches on the values of a tensor (" in trace_module(Parts(Branching()), X).notes[0]
    assert "transforms of torch.func aren't made of torch's operations" in trace_module(Mapped(), X).notes[0]


def test_an_estimate_which_has_no_values_says_so():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(BadInput, match=r"Branching cannot be traced: .*it needs values"):
        trace_module(Parts(Branching()), torch.ones(2, 4))
