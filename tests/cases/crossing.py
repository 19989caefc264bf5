"""Models between whose stages more crosses than trained tensors, or less. Ranks import them by name."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

BATCH = 4


class TwoLosses(nn.Module):
    """Its dict of inputs has a mask that every block reads, labels and values for two losses."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.classify, self.estimate = nn.Linear(8, 5), nn.Linear(8, 1)

    def forward(self, ids, mask, labels, values):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.relu(block(x)) * mask.unsqueeze(-1)
        x = x.mean(1)
        first = functional.cross_entropy(self.classify(x), labels)
        second = functional.mse_loss(self.estimate(x).squeeze(-1), values)
        return {"loss": first + 0.5 * second, "first": first, "second": second}


class GraphNet(nn.Module):
    """Every layer gathers along the edges, which are an input that has no dimension for samples."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.leave = nn.Linear(8, 3)

    def forward(self, nodes, edges, labels):
        x = self.enter(nodes)
        source, target = edges[0], edges[1]
        for layer in self.layers:
            gathered = torch.zeros_like(x).index_add(0, target, layer(x)[source])
            x = torch.relu(x + gathered)
        return {"loss": functional.cross_entropy(self.leave(x), labels)}


class Recurrent(nn.Module):
    """A cell that is called for each step, written out, and a head over all states."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 6), nn.Linear(6, 2)

    def forward(self, x):
        state, states = x.new_zeros(x.shape[0], 6), []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            states.append(state)
        return self.head(torch.stack(states, 1))


class Patches(nn.Module):
    """A series is scaled by its own detached mean and deviation, cut into patches, and scaled back at the end."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        mean, scale = x.mean(1, keepdim=True).detach(), x.std(1, keepdim=True).detach() + 1e-5
        x = self.embed(((x - mean) / scale).unfold(1, 4, 4))
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1)) * scale + mean


class Spectral(nn.Module):
    """Complex weights on the spectrum, twice; the only thing between the two is complex."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.one = nn.Parameter(torch.randn(5, dtype=torch.complex64) * 0.3 + 1)
        self.other = nn.Parameter(torch.randn(5, dtype=torch.complex64) * 0.3 + 1)

    def forward(self, x):
        x = torch.fft.rfft(self.enter(x)) * self.one
        return self.leave(torch.fft.irfft((x * x.conj() + x) * self.other, n=8))


class Frozen(nn.Module):
    """Nothing before the first block trains, and what crosses there is one tensor without a gradient."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)
        for part in (self.embed, self.norm):
            part.requires_grad_(False)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x.mean(1))


class Quantised(nn.Module):
    """The straight-through estimate: numbers of the nearest codes, and differences of which one side is detached."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 4), nn.Linear(4, 6)
        self.codes = nn.Embedding(10, 4)

    def forward(self, x):
        made = self.enter(x)
        numbers = torch.cdist(made, self.codes.weight).argmin(1)
        chosen = self.codes(numbers)
        pull = functional.mse_loss(chosen, made.detach()) + 0.25 * functional.mse_loss(chosen.detach(), made)
        out = self.leave(made + (chosen - made).detach())
        return {"loss": functional.mse_loss(out, x) + pull}


def _built(kind, *loss):
    def build(batch):
        torch.manual_seed(3)
        return kind(), DATA[build](0, 0) if not loss else DATA[build](0, 0)[0], *loss

    return build


def _random(index, seed):
    return torch.Generator().manual_seed(1000 * seed + index)


def labelled(index, seed):
    drawn = _random(index, seed)
    return {
        "ids": torch.randint(0, 50, (BATCH, 7), generator=drawn),
        "mask": torch.rand((BATCH, 7), generator=drawn) > 0.3,
        "labels": torch.randint(0, 5, (BATCH,), generator=drawn),
        "values": torch.randn((BATCH,), generator=drawn),
    }


def graphs(index, seed):
    drawn = _random(index, seed)
    nodes, edges = torch.randn((12, 6), generator=drawn), torch.randint(0, 12, (2, 20), generator=drawn)
    return {"nodes": nodes, "edges": edges, "labels": torch.randint(0, 3, (12,), generator=drawn)}


def series(index, seed):
    drawn = _random(index, seed)
    return torch.randn((BATCH, 5, 3), generator=drawn), torch.randn((BATCH, 5, 2), generator=drawn)


def waves(index, seed):
    drawn = _random(index, seed)
    return torch.randn((BATCH, 16), generator=drawn), torch.randn((BATCH, 4), generator=drawn)


def rows(index, seed):
    drawn = _random(index, seed)
    return torch.randn((BATCH, 8), generator=drawn), torch.randn((BATCH, 8), generator=drawn)


def tokens(index, seed):
    drawn = _random(index, seed)
    return torch.randint(0, 20, (BATCH, 6), generator=drawn), torch.randint(0, 3, (BATCH,), generator=drawn)


def points(index, seed):
    return {"x": torch.randn((BATCH, 6), generator=_random(index, seed))}


two_losses, graph_net, quantised = _built(TwoLosses), _built(GraphNet), _built(Quantised)
recurrent, patches = _built(Recurrent, functional.mse_loss), _built(Patches, functional.mse_loss)
spectral, frozen = _built(Spectral, functional.mse_loss), _built(Frozen, functional.cross_entropy)


class Heard(nn.Module):
    """An LSTM over the input, several of whose outputs are read: it trains, and no gradient goes on through it."""

    def __init__(self):
        super().__init__()
        self.states, self.head, self.last = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        states, (last, _) = self.states(x)
        return self.head(states) + self.last(last[0])[:, None]


def heard(batch):
    torch.manual_seed(5)
    return Heard(), torch.zeros(batch, 3, 4), nn.functional.mse_loss


def heard_series(index, seed):
    drawn = _random(index, seed)
    return torch.randn((BATCH, 3, 4), generator=drawn), torch.randn((BATCH, 3, 4), generator=drawn)


DATA = {
    heard: heard_series, two_losses: labelled, graph_net: graphs, recurrent: series, patches: waves, spectral: rows,
    frozen: tokens, quantised: points,
}  # fmt: skip
