"""Models whose builds do what is hard to put off, and data for them."""

from functools import cache
from threading import Thread

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

WIDTH = 8


class Awkward(nn.Module):
    """Initialises after construction, by its values, by others' values, in parts, in copies and with own generators."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.normed = weight_norm(nn.Linear(width, width))
        self.spectral = spectral_norm(nn.Linear(width, width))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, width, 0.0, batch_first=True), 2)
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.table = nn.Parameter(torch.randn(width, width, generator=torch.Generator().manual_seed(5)) / width**0.5)
        self.register_buffer("mask", torch.tril(torch.ones(width, width)).view(1, width, width), persistent=False)
        self.plain = torch.arange(float(width)).repeat(2, 1)
        nn.init.orthogonal_(self.layers[0].weight)
        nn.init.trunc_normal_(self.layers[1].weight, std=0.5, a=-1.0, b=1.0)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.layers[1].weight
        self.apply(self.again)
        with torch.no_grad():
            self.layers[0].weight[2].fill_(3.0)
            self.layers[2].weight[torch.tensor([True] * 3 + [False] * (width - 3))] = 7.0
            self.layers[2].weight.copy_(self.layers[2].weight.flip(0) + self.layers[1].weight.t())
        if self.table.abs().max() > 0:
            self.scale = nn.Parameter(torch.full((width,), self.table.std().item()))

    def again(self, module):
        if isinstance(module, nn.Linear) and module is not self.layers[0]:
            module.bias.data.zero_() if module.bias is not None else None
            if module is self.layers[2]:
                module.weight.data.normal_(0, 0.02)
                module.weight.data /= 3

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.scale + self.plain[0]
        x = self.spectral(self.normed(x)) @ self.table * self.mask[0, -1]
        return self.head(self.recurrent(self.encoder(x))[0])


def awkward(batch):
    return Awkward(), torch.zeros(batch, 3, WIDTH), mean_square


def sequences(index, seed):
    generator = torch.Generator().manual_seed(1000 * seed + index)
    return torch.randn(2, 3, WIDTH, generator=generator), torch.zeros(2, 3, WIDTH)


def mean_square(output, target):
    return ((output - target) ** 2).mean()


@cache
def shared_table():
    """A table that a module keeps for all models, made with the first of them."""
    return torch.arange(float(WIDTH)) / WIDTH


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        shared_table()

    def forward(self, x):
        return self.linear(x) + shared_table()


def cached(batch):
    return [Cached(), nn.Linear(WIDTH, WIDTH)], torch.zeros(batch, WIDTH), mean_square


def looking(batch):
    """Layers whose build reads memory itself, which nothing can be put off for."""
    layers = [Cached(), nn.Linear(WIDTH, WIDTH)]
    layers[1].weight.data.copy_(torch.from_numpy(layers[0].linear.weight.detach().numpy() * 2))
    return layers, torch.zeros(batch, WIDTH), mean_square


def in_threads(batch):
    layers, x, loss = cached(batch)
    drawing = Thread(target=nn.init.ones_, args=(layers[1].weight,))
    drawing.start()
    drawing.join()
    return layers, x, loss


def with_statistics(batch):
    """Layers whose build runs them, to see what comes out."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)]
    nn.Sequential(*layers)(torch.ones(2, WIDTH))
    return layers, torch.zeros(batch, WIDTH), mean_square


def unfitting(batch):
    return [nn.Linear(WIDTH, WIDTH), nn.Linear(4, 4)], torch.zeros(batch, WIDTH), mean_square


def on_meta(batch):
    with torch.device("meta"):
        layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    return layers, torch.zeros(batch, WIDTH), mean_square


def with_table_on_meta(batch):
    layers, x, loss = on_meta(batch)
    layers[0].register_buffer("lost", torch.zeros(3, device="meta"), persistent=False)
    return layers, x, loss


def vectors(index, seed):
    generator = torch.Generator().manual_seed(1000 * seed + index)
    return torch.randn(4, WIDTH, generator=generator), torch.zeros(4, WIDTH)


# --- large enough to be put off -------------------------------------------------------------------------------------

LARGE = 300


class Wide(nn.Module):
    """A residual network with tied weights, of layers above what is made at once."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(LARGE, LARGE), nn.Linear(LARGE, LARGE)
        self.last = nn.Linear(LARGE, LARGE)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.randn(LARGE, LARGE))

    def forward(self, x):
        return self.last(x + torch.relu(self.second(torch.relu(self.first(x)))))


def wide(batch):
    return Wide(), torch.zeros(batch, LARGE), mean_square


def wide_on_meta(batch):
    with torch.device("meta"):
        return Wide(), torch.zeros(batch, LARGE, device="cpu"), mean_square


def wide_vectors(index, seed):
    generator = torch.Generator().manual_seed(1000 * seed + index)
    return torch.randn(4, LARGE, generator=generator), torch.zeros(4, LARGE)
