"""A list of layers whose author says which matrices are parted among ranks, and how."""

import torch
from torch import nn

HIDDEN, WORDS, LENGTH = 16, 24, 6


class Block(nn.Module):
    """Attention of two heads, and a feed-forward part; a rank has as many heads as it has columns for."""

    def __init__(self, scaled=False):
        super().__init__()
        self.scale = nn.LayerNorm(HIDDEN // 2) if scaled else nn.Identity()
        self.norm = nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value, self.project = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x):
        y = self.norm(x)
        heads = (z(y).unflatten(-1, (-1, HIDDEN // 2)).transpose(1, 2) for z in (self.query, self.key, self.value))
        attended = self.scale(nn.functional.scaled_dot_product_attention(*heads, is_causal=True))
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def layers(scaled=False):
    return nn.Sequential(nn.Embedding(WORDS, HIDDEN), Block(), Block(scaled), nn.Linear(HIDDEN, WORDS))


def build(batch):
    return layers(), data(0, 0, batch)[0], loss


def scaled(batch):
    return layers(True), data(0, 0, batch)[0], loss


def data(index, seed, batch=2):
    generator = torch.Generator().manual_seed(1000 * seed + index)
    x = torch.randint(WORDS, (batch, LENGTH + 1), generator=generator)
    return x[:, :-1], x[:, 1:]


def plan():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel  # which takes a second

    columns = ("query", "key", "value", "up")
    return {
        "0": RowwiseParallel(),
        **{f"*.{x}": ColwiseParallel() for x in columns},
        **{f"*.{x}": "rowwise" for x in ("project", "down")},
    }


def whole_plan():
    return {**plan(), "2.scale": "replicated_with_grad_allreduce"}


def misspelt():
    return {"*.upp": "colwise"}
