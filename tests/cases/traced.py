"""Models that are no lists of layers, and plain training of them to compare with. Ranks import them by name."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer
from pipeplan.runtime.engine.asked import under
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.model.network import tied_layers
from pipeplan.runtime.training.update.optimizers import optimizer_maker


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Residual(nn.Module):
    """Two residual blocks, a skip over both, and one weight that nobody uses."""

    def __init__(self, channels=4):
        super().__init__()
        self.enter = nn.Conv2d(1, channels, 3, padding=1)
        self.one, self.other = Block(channels), Block(channels)
        self.leave = nn.Linear(2 * channels, 3)
        self.idle = nn.Linear(2, 2)
        self.register_buffer("scale", torch.full((channels, 1, 1), 0.5))
        self.register_buffer("shift", torch.full((channels, 1, 1), 0.1), persistent=False)

    def forward(self, x):
        x = self.enter(x)
        y = self.other(self.one(x) * self.scale + self.shift)
        return self.leave(torch.cat((x, y * self.scale), dim=1).mean(dim=(2, 3)))


def residual(batch):
    torch.manual_seed(3)
    return Residual(), torch.zeros(batch, 1, 6, 6), functional.cross_entropy


class Branches(nn.Module):
    """Two branches side by side, of which a pipeline may run either first."""

    def __init__(self, channels=4):
        super().__init__()
        self.enter = nn.Conv2d(1, channels, 3, padding=1)
        self.left, self.left_norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.right = nn.Conv2d(channels, channels, 1)
        self.leave = nn.Linear(2 * channels, 3)

    def forward(self, x):
        x = self.enter(x)
        left = self.left_norm(self.left(x))
        right = torch.tanh(self.right(x))
        return self.leave(torch.cat((left, right), dim=1).mean(dim=(2, 3)))


def branches(batch):
    torch.manual_seed(5)
    return Branches(), torch.zeros(batch, 1, 6, 6), functional.cross_entropy


def other_residual(batch):
    """The same but for its second block, which is wider in the middle."""
    module, x, loss = residual(batch)
    module.other.first, module.other.norm = nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5)
    module.other.second = nn.Conv2d(5, 4, 1)
    return module, x, loss


class Reconnected(Residual):
    def forward(self, x):
        x = self.enter(x)
        z = self.one(x) * self.scale + self.shift
        y = self.other(z)
        return self.leave(torch.cat((z, y * self.scale), dim=1).mean(dim=(2, 3)))


def reconnected(batch):
    """The same layers with a skip from another place."""
    return Reconnected(), torch.zeros(batch, 1, 6, 6), functional.cross_entropy


def images(index, seed):
    generator = torch.Generator().manual_seed(100 * seed + index)
    return torch.randn(4, 1, 6, 6, generator=generator), torch.randint(3, (4,), generator=generator)


class Noisy(nn.Module):
    """Statistics, and chance in a module and in functions: its evaluation has fewer operations than its training."""

    def __init__(self):
        super().__init__()
        self.enter, self.block, self.drop, self.leave = nn.Conv2d(1, 4, 3), Block(4), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x):
        x = functional.dropout(self.enter(x), 0.3, self.training)
        x = self.drop(self.block(x) + x)
        x = functional.dropout(x + 1, 0.3, self.training) if self.training else x * 1.5
        return self.leave(x.mean(dim=(2, 3)))


def noisy(batch):
    torch.manual_seed(6)
    return Noisy(), torch.zeros(batch, 1, 6, 6), functional.cross_entropy


class Widening(Noisy):
    """Part of it in 32 bits, whatever the type of its weights, and a constant that stays in 32 bits."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.1]))

    def forward(self, x):
        x = self.block(self.enter(x)) * self.scale
        y = x.float() * torch.tensor([0.7123])
        y = (y - y.mean(dim=1, keepdim=True)).to(x.dtype)
        return self.leave((x + y).mean(dim=(2, 3)))


def widening(batch):
    torch.manual_seed(6)
    return Widening(), torch.zeros(batch, 1, 6, 6), functional.cross_entropy


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x, mask):
        batch, length, width = x.shape
        parts = self.mix(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (y.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for y in parts)
        scores = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).masked_fill(mask, float("-inf"))
        y = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, length, width)
        return x + self.leave(y)


class Transformer(nn.Module):
    """Tokens that are read at both ends, a mask of constants and of tokens, and a head that shares its weight."""

    def __init__(self, width=8, vocabulary=11, length=5, blocks=2, tied=None):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Attention(width, 2) for _ in range(blocks))
        self.again = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied is not None:
            self.head.weight = getattr(self, tied).weight
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, width), requires_grad=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1) | (tokens == 0)[:, None, None, :]
        mask = mask & ~torch.eye(length, dtype=torch.bool)
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x * self.frozen + self.again(tokens))


def text_loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def transformer(batch):
    torch.manual_seed(5)
    return Transformer(), torch.zeros(batch, 5, dtype=torch.int64), text_loss


def tied_transformer(batch):
    torch.manual_seed(5)
    return Transformer(tied="again"), torch.zeros(batch, 5, dtype=torch.int64), text_loss


def entwined(batch):
    torch.manual_seed(5)
    return Transformer(tied="tokens"), torch.zeros(batch, 5, dtype=torch.int64), text_loss


def tokens(index, seed):
    generator = torch.Generator().manual_seed(100 * seed + index)
    return torch.randint(11, (4, 5), generator=generator), torch.randint(11, (4, 5), generator=generator)


class TwoInputs(nn.Module):
    """Two inputs of different types, two outputs, and a target of two tensors."""

    def __init__(self):
        super().__init__()
        self.words, self.numbers = nn.Embedding(5, 6), nn.Linear(3, 6)
        self.middle, self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 4)

    def forward(self, words, numbers):
        x = torch.tanh(self.words(words) + self.numbers(numbers))
        y = torch.tanh(self.middle(x))
        return {"one": self.one(y), "two": self.two(x * y)}


def two_losses(output, target):
    return functional.mse_loss(output["one"], target[0]) + functional.mse_loss(output["two"], target[1])


def two_inputs(batch):
    torch.manual_seed(7)
    return TwoInputs(), (torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, 3)), two_losses


def pairs(index, seed):
    generator = torch.Generator().manual_seed(100 * seed + index)
    inputs = torch.randint(5, (4,), generator=generator), torch.randn(4, 3, generator=generator)
    return inputs, (torch.randn(4, 2, generator=generator), torch.randn(4, 4, generator=generator))


class SharedNorm(nn.Module):
    """The statistics of one batch norm, which is called twice."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def norm(self, x):
        return functional.batch_norm(x, self.mean, self.variance, training=True)

    def forward(self, x):
        return self.norm(self.two(self.norm(self.one(x))))


def shared_norm(batch):
    torch.manual_seed(1)
    return SharedNorm(), torch.zeros(batch, 4), functional.mse_loss


class PowerIterated(nn.Module):
    """The old spectral norm: each forward changes the vectors by which the next one divides its weight."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.utils.spectral_norm(nn.Linear(4, 8)), nn.Linear(8, 4)

    def forward(self, x):
        return self.leave(self.enter(x).tanh())


def power_iterated(batch):
    torch.manual_seed(1)
    return PowerIterated(), torch.zeros(batch, 4), functional.mse_loss


def vectors(index, seed):
    generator = torch.Generator().manual_seed(100 * seed + index)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)


@dataclass
class Judged:
    """What a model returns that computes its loss itself; no type that torch knows."""

    loss: Tensor | None
    scores: Tensor


class Batch(UserDict):
    """Keywords as a tokenizer gives them."""


class Averaging(nn.Module):
    """State that forwards change: in place, by a new tensor, a count, and a norm's that averages over all batches."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None)
        self.middle, self.last = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("largest", torch.ones(()))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, rows, labels=None):
        x = self.norm(self.first(rows))
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.calls += 1
        x = x * (1 + self.average) / self.calls
        before = self.largest
        self.largest = torch.maximum(0.9 * self.largest, x.detach().abs().max())
        x = checkpoint(self.middle, x * before / self.largest, use_reentrant=True)
        scores = self.last(x)
        return Judged(None if labels is None else functional.cross_entropy(scores, labels), scores)


def averaging(batch):
    """A model without a loss of ours, and an example batch."""
    torch.manual_seed(2)
    return Averaging(), Batch(rows=torch.zeros(batch, 4), labels=torch.zeros(batch, dtype=torch.int64))


def labelled(index, seed):
    generator = torch.Generator().manual_seed(100 * seed + index)
    return Batch(labels=torch.randint(3, (4,), generator=generator), rows=torch.randn(4, 4, generator=generator))


class Attending(nn.Module):
    """Heads by views that aren't in the order of memory, as the kernel for attention reads them."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 24), nn.Linear(8, 4)

    def forward(self, x):
        q, k, v = (y.unflatten(2, (2, 4)).transpose(1, 2) * 1.5 for y in self.enter(x).chunk(3, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.leave(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], 8))


def attending(batch):
    torch.manual_seed(1)
    return Attending(), torch.zeros(batch, 6, 4), functional.mse_loss


def sequences(index, seed):
    generator = torch.Generator().manual_seed(100 * seed + index)
    return torch.randn(4, 6, 4, generator=generator), torch.randn(4, 6, 4, generator=generator)


@dataclass
class WithLoss:
    loss: Tensor


class Recurrent(nn.Module):
    """A loop that writes its states into a tensor of zeros, and a mask that is made of ones and zeros."""

    def __init__(self, hidden=8):
        super().__init__()
        self.tokens, self.cell, self.head = nn.Embedding(11, 6), nn.GRUCell(6, hidden), nn.Linear(hidden, 11)

    def forward(self, inputs, labels):
        x = self.tokens(inputs)
        states, state = torch.zeros(*x.shape[:2], self.cell.hidden_size), torch.zeros(len(x), self.cell.hidden_size)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            states[:, t] = state
        counted = torch.ones(x.shape[1])
        counted[:2] = 0
        losses = functional.cross_entropy(self.head(states).transpose(1, 2), labels, reduction="none")
        return WithLoss((losses * counted).sum(1).mean())


def recurrent(batch):
    torch.manual_seed(4)
    tokens = torch.zeros(batch, 5, dtype=torch.int64)
    return Recurrent(), {"inputs": tokens, "labels": tokens}


def next_tokens(index, seed):
    x, labels = tokens(index, seed)
    return {"inputs": x, "labels": (x * 3 + 1 + labels // 10) % 11}


DATA = {
    recurrent: next_tokens, attending: sequences, averaging: labelled, branches: images, residual: images,
    noisy: images, widening: images, transformer: tokens, tied_transformer: tokens, entwined: tokens, two_inputs: pairs,
    shared_norm: vectors, power_iterated: vectors,
}  # fmt: skip


def serial(build, *, steps, accumulate, optimizer, lr, version=None, stage_of=None, data=None):
    """Train in one process; return (losses per microbatch, state).

    ``version(stage, microbatch)`` is how many updates the weights have had that a microbatch is run with, and
    ``stage_of(name)`` the stage of a weight; without them, all updates before its own mini-batch. ``data`` is its own.
    """
    module, _, *losses_given = build(4)
    loss, data = losses_given[0] if losses_given else None, data or DATA[build]
    module.train()
    names = [name for name, _ in module.named_parameters()]
    parameters = list(module.parameters())
    newest = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in parameters]
    trained = [i for i, p in enumerate(parameters) if p.requires_grad]
    stepper = optimizer_maker(optimizer, lr)([newest[i] for i in trained])
    history = [[p.detach().clone() for p in newest]]
    losses = []
    for step in range(steps):
        module.zero_grad()
        for m in range(step * accumulate, (step + 1) * accumulate):
            with torch.no_grad():
                for i, p in enumerate(parameters):
                    stage = stage_of(names[i]) if stage_of else None
                    p.copy_(history[step if stage is None else version(stage, m)][i])
            if loss is None:
                output = module(**data(m, 0))
                value = output["loss"] if isinstance(output, dict) else output.loss
            else:
                x, target = data(m, 0)
                value = loss(module(*x) if isinstance(x, tuple) else module(x), target)
            losses.append(float(value.detach()))
            (value / accumulate).backward()
        for i in trained:
            newest[i].grad = None if parameters[i].grad is None else parameters[i].grad.clone()
        stepper.step()
        history.append([p.detach().clone() for p in newest])
    with torch.no_grad():
        for p, value in zip(parameters, history[-1], strict=True):
            p.copy_(value)
    return losses, module.state_dict()


def in_three(model, schedule):
    """A run of a loaded model under a drained schedule, in three stages that recompute all but their first layers."""
    from .runtime import plan_of  # which imports what only some need

    layers = tuple(Layer(x.name, 2, 4, x.weight_bytes, 4, backward_weight_ns=1) for x in model.layers)
    chain = Chain("in three", layers, 4, tied=tuple(tied_layers([x.module for x in model.layers])))
    count = len(layers)
    bounds = pairwise([0, max(1, count // 3), max(2, 2 * count // 3), count])
    stages = [Stage(a, b, (i,), ((a + 1, b),) if b > a + 1 else ()) for i, (a, b) in enumerate(bounds)]
    return lower_run(under(plan_of(chain, stages, accumulate=4), schedule), 1)
