"""Which tasks need no download? scikit-learn's digits, and the text that Python carries, for six small networks.

Of the digits an MLP, a CNN and a vision transformer; of the text an MLP of characters, an LSTM and a GPT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.zoo.data import corpus
from pipeplan.zoo.model import mixed_seed
from scripts.checks.training_tasks import handwritten

Samples = Callable[[int, int, int], tuple[Tensor, Tensor]]  # (first sample, how many, seed) -> input, target


class Residual(nn.Module):
    """What ``inside`` makes of the normed input is added to it."""

    def __init__(self, width: int, inside: nn.Module) -> None:
        super().__init__()
        self.norm, self.inside = nn.LayerNorm(width), inside

    def forward(self, x: Tensor) -> Tensor:
        """Add."""
        return x + self.inside(self.norm(x))  # type: ignore[no-any-return]  # a tensor


class Attention(nn.Module):
    """Self-attention with four heads."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.causal = nn.Linear(width, 3 * width), nn.Linear(width, width), causal

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = self.enter(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.leave(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # a tensor


class Placed(nn.Module):
    """What ``inside`` makes of the input, with a vector for each place."""

    def __init__(self, inside: nn.Module, places: int, width: int) -> None:
        super().__init__()
        self.inside, self.places = inside, nn.Parameter(0.02 * torch.randn(places, width))

    def forward(self, x: Tensor) -> Tensor:
        """Embed."""
        return self.inside(x) + self.places  # type: ignore[no-any-return]  # a tensor


class Does(nn.Module):
    """A function as a layer."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        """Call it."""
        return self.does(x)


class Recurrent(nn.Module):
    """An LSTM's outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, outputs, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Run over the sequence."""
        return self.lstm(x)[0]  # type: ignore[no-any-return]  # a tensor


def _dense(inputs: int, outputs: int) -> nn.Sequential:
    linear = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    nn.init.zeros_(linear.bias)
    return nn.Sequential(linear, nn.ReLU())


def _blocks(width: int, causal: bool) -> list[nn.Module]:
    def mixing() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return [Residual(width, inside) for _ in range(3) for inside in (Attention(width, causal), mixing())]


def _mlp() -> list[nn.Module]:
    return [nn.Sequential(nn.Flatten(), _dense(64, 64)), *(_dense(64, 64) for _ in range(6)), nn.Linear(64, 10)]


def _cnn() -> list[nn.Module]:
    def convolution(inputs: int, outputs: int, *more: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), *more)

    last = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    pooled = convolution(16, 32, nn.MaxPool2d(2)), convolution(32, 32, nn.MaxPool2d(2), nn.Flatten())
    return [convolution(1, 16), *pooled, last]


def _vit() -> list[nn.Module]:
    patches = nn.Sequential(nn.Unfold(2, stride=2), Does(lambda x: x.transpose(1, 2)), nn.Linear(4, 24))
    head = nn.Sequential(nn.LayerNorm(24), Does(lambda x: x.mean(1)), nn.Linear(24, 10))
    return [Placed(patches, 16, 24), *_blocks(24, False), head]


def _charmlp() -> list[nn.Module]:
    def bent(inputs: int) -> nn.Sequential:
        linear = nn.Linear(inputs, 96)
        nn.init.xavier_normal_(linear.weight, nn.init.calculate_gain("tanh"))
        return nn.Sequential(linear, nn.Tanh())

    first = nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), bent(128))
    return [first, *(bent(96) for _ in range(6)), nn.Linear(96, 128)]


def _head(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128), Does(lambda x: x.transpose(1, 2)))


def _lstm() -> list[nn.Module]:
    return [nn.Embedding(128, 32), Recurrent(32, 64), Recurrent(64, 64), _head(64)]


def _gpt() -> list[nn.Module]:
    embedding = nn.Embedding(128, 32)
    nn.init.normal_(embedding.weight, std=0.02)
    return [Placed(embedding, 16, 32), *_blocks(32, True), _head(32)]


@cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pictures and digits to train on, and 397 that aren't."""
    x, y, more, others = handwritten()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(5))
    pictures, digits = torch.cat([x, more])[order], torch.cat([y, others])[order]
    return pictures[397:], digits[397:], pictures[:397], digits[:397]


@cache
def _order(epoch: int, seed: int) -> Tensor:
    return torch.randperm(1400, generator=torch.Generator().manual_seed(mixed_seed(seed, epoch)))


def _pictures(first: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    places = [int(_order(n // 1400, seed)[n % 1400]) for n in range(first, first + count)]
    return _digits()[0][places], _digits()[1][places]


def _windows(length: int, last_alone: bool, first: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Windows of the first nine tenths of the text, or with seed -1 of the last; targets are the next characters."""
    split = len(corpus()) * 9 // 10
    begin, room = (split, len(corpus()) - split) if seed < 0 else (0, split)
    starts = [begin + mixed_seed(seed, n) % (room - length - 1) for n in range(first, first + count)]
    found = torch.stack([corpus()[x : x + length + 1] for x in starts]).long()
    return found[:, :-1], found[:, -1] if last_alone else found[:, 1:]


@dataclass(frozen=True)
class Task:
    """Layers, made under torch's random state, samples, and how many make an update; ``unseen`` is held out.

    ``rates`` are usual ones of SGD and of AdamW.
    """

    layers: Callable[[], list[nn.Module]]
    samples: Samples
    batch: int
    unseen: Callable[[], tuple[Tensor, Tensor]]
    rates: Mapping[str, float]


def _seeing(layers: Callable[[], list[nn.Module]], sgd: float, adamw: float) -> Task:
    return Task(layers, _pictures, 32, lambda: _digits()[2:], {"sgd": sgd, "adamw": adamw})


def _reading(
    layers: Callable[[], list[nn.Module]], length: int, batch: int, sgd: float, adamw: float, last: bool = False
) -> Task:
    samples = partial(_windows, length, last)
    return Task(layers, samples, batch, partial(samples, 0, 1024 if last else 128, -1), {"sgd": sgd, "adamw": adamw})


TASKS = {
    "mlp": _seeing(_mlp, 0.0125, 0.002),
    "cnn": _seeing(_cnn, 0.05, 0.004),
    "vit": _seeing(_vit, 0.1, 0.004),
    "charmlp": _reading(_charmlp, 8, 64, 0.05, 0.002, last=True),
    "lstm": _reading(_lstm, 24, 16, 0.1, 0.016),
    "gpt": _reading(_gpt, 16, 16, 0.1, 0.004),
}
