"""Backwards in two parts give the gradients of whole ones, to the bit, and let go of what the second part lacks."""

from __future__ import annotations

import copy
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional as F

from pipeplan.errors import RunFailed
from pipeplan.runtime.model.pieces import Saved
from pipeplan.runtime.model.split_backward import input_part

D = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out, self.ff = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + F.gelu(self.ff(x))


class Beside(nn.Module):
    """One weight at two nodes of which neither feeds the other, one that is scaled by, and a table that is added."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.table = nn.Linear(D, D), nn.Parameter(torch.ones(D)), nn.Embedding(4, D)

    def forward(self, x):
        return (self.linear(x) * self.linear(x.sin())).cos() * self.scale + self.table(torch.zeros(3, dtype=torch.long))


class InARow(nn.Module):
    """A weight that feeds itself, which the first part has to see to, beside others."""

    def __init__(self):
        super().__init__()
        self.again, self.once = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.again(self.once(self.again(x).tanh()))


class Hooked(nn.Module):
    """A hook of the user's changes a gradient on its way, once."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        y = self.one(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return self.two(y)


# the modules, and of how many weights the gradients are there after the first part
MODELS = {
    "transformer": (lambda: nn.Sequential(Block(), Block()), (2, 5, D), 4),  # of norms
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)),
        (2, 3, 6, 6),
        2,
    ),
    "beside each other": (Beside, (3, D), 1),
    "in a row": (InARow, (3, D), 2),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, D)), (3, D), 0),
    "hooked": (Hooked, (3, D), 0),
}


@pytest.mark.parametrize("case", MODELS)
def test_two_parts_are_the_whole_to_the_bit(case):
    torch.manual_seed(0)
    build, shape, early = MODELS[case]
    model = build()
    whole, x = copy.deepcopy(model), torch.randn(*shape)
    entered = x.clone().requires_grad_()
    out = whole(entered)
    gradient = torch.randn_like(out)
    out.backward(gradient)

    leaf, saved = x.clone().requires_grad_(), Saved()
    with saved_tensors_hooks(saved.pack, saved.unpack):
        made = model(leaf)
    part = input_part([(get_gradient_edge(made), gradient.clone())], [leaf], saved)
    made = made.detach()
    assert torch.equal(leaf.grad, entered.grad)
    assert sum(p.grad is not None for p in model.parameters()) == early
    needed = part.needed()
    assert case != "transformer" or len(needed) < len(saved)
    saved.drop_but(needed)
    caught = [weakref.ref(tensor) for tensor in part.gradients()]
    part.run()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert all(x() is None for x in caught)


def test_without_an_entry_all_is_the_second_part():
    table, x = nn.Embedding(4, D), torch.tensor([1, 2])
    saved = Saved()
    with saved_tensors_hooks(saved.pack, saved.unpack):
        made = table(x)
    part = input_part([(get_gradient_edge(made), torch.ones_like(made))], [torch.zeros((), requires_grad=True)], saved)
    assert table.weight.grad is None
    part.run()
    assert table.weight.grad.sum() == 2 * D


@pytest.mark.parametrize("shared", [False, True])
def test_an_end_from_which_nothing_leads_to_what_entered_is_the_second_part(shared):
    """Beside one that does, and with the same weights; one end passes on what entered."""
    torch.manual_seed(0)
    one = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
    other = one if shared else nn.Linear(D, D)
    x, constant = torch.randn(3, D), torch.randn(3, D)

    def ends(entered):
        with nn.utils.parametrize.cached():
            beside = other(constant).sin()
            return [one(entered).cos(), beside, beside * 2, entered]

    weights = list({*one.parameters(), *other.parameters()})
    entered = x.clone().requires_grad_()
    out = ends(entered * 1)
    gradients = [torch.randn_like(y) for y in out]
    torch.autograd.backward(out, gradients)
    expected = [entered.grad, *(w.grad for w in weights)]
    for w in weights:
        w.grad = None

    leaf, saved = x.clone().requires_grad_(), Saved()
    with saved_tensors_hooks(saved.pack, saved.unpack):
        made = ends(leaf * 1)
    part = input_part(list(zip(map(get_gradient_edge, made), gradients, strict=True)), [leaf], saved)
    assert all(w.grad is None for w in weights if w.dim() > 1)
    del made
    saved.drop_but(part.needed())
    part.run()
    for found, there in zip([leaf.grad, *(w.grad for w in weights)], expected, strict=True):
        assert torch.allclose(found, there, atol=1e-6)


def test_what_was_changed_in_place_is_told():
    x = torch.ones(3, requires_grad=True)
    saved = Saved()
    with saved_tensors_hooks(saved.pack, saved.unpack):
        y = x * 2
        made = y.sin()
    y.detach().add_(1)
    with pytest.raises(RunFailed, match=r"shape \(3,\) that a backward needs was changed in place"):
        input_part([(get_gradient_edge(made), torch.ones(3))], [x], saved)
