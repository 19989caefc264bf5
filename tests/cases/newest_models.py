"""Models that nF1B trains with the newest weights, and their data: all that ranks import, and nothing else."""

import torch
from cases.runtime import mean_square
from oracles.newest_weights import SelfAttention, States
from torch import nn
from torch.nn.utils import parametrizations


def sequence_layers():
    torch.manual_seed(11)
    return [
        States(nn.LSTM, 6, 8), nn.LayerNorm(8), SelfAttention(8, 2), nn.BatchNorm1d(5), States(nn.GRU, 8, 6),
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3),
    ]  # fmt: skip


def sequences(batch):
    return sequence_layers(), torch.zeros(batch, 5, 6), nn.functional.mse_loss


def sequence_data(index, seed):
    generator = torch.Generator().manual_seed(1000 * seed + index)
    return torch.randn(4, 5, 6, generator=generator), torch.randn(4, 5, 3, generator=generator)


def image_layers():
    torch.manual_seed(12)
    layers = [
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(64, 10),
        nn.BatchNorm1d(10), nn.Linear(10, 3),
    ]  # fmt: skip
    return [layer.double() for layer in layers]


def images(batch):
    return image_layers(), torch.zeros(batch, 2, 7, 7, dtype=torch.float64), nn.functional.mse_loss


def image_data(index, seed):
    generator = torch.Generator().manual_seed(1000 * seed + index)
    pair = torch.randn(4, 2, 7, 7, generator=generator), torch.randn(4, 3, generator=generator)
    return pair[0].double(), pair[1].double()


MODELS = {"sequences": (sequences, sequence_layers, sequence_data), "images": (images, image_layers, image_data)}


def normed(batch):
    layers = [nn.Linear(16, 16), parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16)]
    return layers, torch.zeros(batch, 16), mean_square


class Exploding(nn.Module):
    """A layer whose output isn't a number in its sixth use in training: the check for copies, and five microbatches."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return self.linear(x) * (float("nan") if self.calls > 5 else 1.0)


def exploding(batch):
    return [nn.Linear(16, 16), Exploding(), nn.Linear(16, 16)], torch.zeros(batch, 16), mean_square
