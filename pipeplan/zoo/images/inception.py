"""Inception v3: convolutions, eleven mixed blocks, head, and on request the auxiliary classifier.

Source: Szegedy et al., Rethinking the Inception Architecture for Computer Vision (2016), in the form of the widely
used implementations (their block names and channel counts).

The auxiliary classifier reads the middle of the network and its logits enter the loss. A chain hands on one tensor, so
its logits travel behind the flattened features through the later layers; that is what a pipeline would relay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..data import pictures_of
from ..model import Factory, Loss, Model, chain, class_loss
from .convolutional import classifier, convolution, least_image

_conv = partial(convolution, epsilon=1e-3)
_AUXILIARY_SHARE = 0.4  # of the auxiliary loss, against 1 of the main one


@dataclass(frozen=True)
class InceptionConfig:
    """Picture size, classes, the auxiliary classifier; ``dropout`` (published: 0.5) is off by default."""

    image: int = 299
    classes: int = 1000
    auxiliary: bool = False
    dropout: float = 0.0


class Branches(nn.Module):
    """Several branches on one input; their outputs are put behind one another by channel."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Return the branches' outputs for ``x`` (batch, channels, height, width)."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _conv(inputs, outputs, 1))


def _block_a(inputs: int, pool: int) -> Branches:
    return Branches(
        _conv(inputs, 64, 1),
        nn.Sequential(_conv(inputs, 48, 1), _conv(48, 64, 5)),
        nn.Sequential(_conv(inputs, 64, 1), _conv(64, 96), _conv(96, 96)),
        _pooled(inputs, pool),
    )


def _block_b(inputs: int) -> Branches:
    return Branches(
        _conv(inputs, 384, 3, 2, 0),
        nn.Sequential(_conv(inputs, 64, 1), _conv(64, 96), _conv(96, 96, 3, 2, 0)),
        nn.MaxPool2d(3, stride=2),
    )


def _block_c(inputs: int, width: int) -> Branches:
    row, column = (1, 7), (7, 1)
    return Branches(
        _conv(inputs, 192, 1),
        nn.Sequential(_conv(inputs, width, 1), _conv(width, width, row), _conv(width, 192, column)),
        nn.Sequential(
            _conv(inputs, width, 1),
            _conv(width, width, column),
            _conv(width, width, row),
            _conv(width, width, column),
            _conv(width, 192, row),
        ),
        _pooled(inputs, 192),
    )


def _block_d(inputs: int) -> Branches:
    return Branches(
        nn.Sequential(_conv(inputs, 192, 1), _conv(192, 320, 3, 2, 0)),
        nn.Sequential(
            _conv(inputs, 192, 1), _conv(192, 192, (1, 7)), _conv(192, 192, (7, 1)), _conv(192, 192, 3, 2, 0)
        ),
        nn.MaxPool2d(3, stride=2),
    )


def _block_e(inputs: int) -> Branches:
    return Branches(
        _conv(inputs, 320, 1),
        nn.Sequential(_conv(inputs, 384, 1), _row_and_column()),
        nn.Sequential(_conv(inputs, 448, 1), _conv(448, 384), _row_and_column()),
        _pooled(inputs, 192),
    )


def _row_and_column() -> Branches:
    return Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1)))


class Auxiliary(nn.Module):
    """The auxiliary classifier: puts its logits behind the flattened features."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.AvgPool2d(5, stride=3), _conv(channels, 128, 1), _conv(128, 768, 5, 1, 0), classifier(768, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, features + classes)."""
        return torch.cat((x.flatten(1), self.body(x)), dim=1)


class Beside(nn.Module):
    """Run ``body`` on the features, of shape (channels, side, side), and pass the logits behind them on."""

    def __init__(self, body: nn.Module, channels: int, side: int) -> None:
        super().__init__()
        self.body = body
        self.shape = (channels, side, side)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, features after ``body`` + classes)."""
        size = self.shape[0] * self.shape[1] * self.shape[2]
        features, logits = x[:, :size].reshape(len(x), *self.shape), x[:, size:]
        return torch.cat((self.body(features).flatten(1), logits), dim=1)


def both_losses(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of the main logits and 0.4 of that of the auxiliary ones, side by side in ``output``."""
    main, auxiliary = output.chunk(2, dim=1)
    return class_loss(main, target) + _AUXILIARY_SHARE * class_loss(auxiliary, target)


def network(config: InceptionConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``conv1a, .., mixed5b, .., mixed7c, head`` and the loss."""
    least_image(config.image, 299 if config.auxiliary else 75)
    return chain(_factories(config), seed), both_losses if config.auxiliary else class_loss


def _factories(config: InceptionConfig) -> Iterator[tuple[str, Factory]]:
    yield "conv1a", partial(_conv, 3, 32, 3, 2, 0)
    yield "conv2a", partial(_conv, 32, 32, 3, 1, 0)
    yield "conv2b", partial(_conv, 32, 64)
    yield "pool1", partial(nn.MaxPool2d, 3, stride=2)
    yield "conv3b", partial(_conv, 64, 80, 1)
    yield "conv4a", partial(_conv, 80, 192, 3, 1, 0)
    yield "pool2", partial(nn.MaxPool2d, 3, stride=2)
    for letter, inputs, pool in (("b", 192, 32), ("c", 256, 64), ("d", 288, 64)):
        yield f"mixed5{letter}", partial(_block_a, inputs, pool)
    yield "mixed6a", partial(_block_b, 288)
    for letter, width in (("b", 128), ("c", 160), ("d", 160), ("e", 192)):
        yield f"mixed6{letter}", partial(_block_c, 768, width)
    last: list[tuple[str, Factory, int]] = [
        ("mixed7a", partial(_block_d, 768), 768),
        ("mixed7b", partial(_block_e, 1280), 1280),
        ("mixed7c", partial(_block_e, 2048), 2048),
        ("head", partial(classifier, 2048, config.classes, config.dropout), 2048),
    ]
    if config.auxiliary:
        yield "auxiliary", partial(Auxiliary, 768, config.classes)
    side = _side_of_mixed6(config.image)
    for name, factory, inputs in last:
        yield name, partial(_beside, factory, inputs, side) if config.auxiliary else factory
        side = side if name != "mixed7a" else _halved(side)


def _beside(factory: Factory, channels: int, side: int) -> Beside:
    return Beside(factory(), channels, side)


def _halved(side: int) -> int:
    return (side - 3) // 2 + 1


def _side_of_mixed6(image: int) -> int:
    """Return height and width of the features of ``mixed6a`` to ``mixed6e``: 17 for 299 pixels."""
    pool1 = _halved(_halved(image) - 2)
    pool2 = _halved(pool1 - 2)
    return _halved(pool2)


MODELS = {
    "inception-v3": Model(InceptionConfig(), network, pictures_of),
    "inception-v3-auxiliary": Model(InceptionConfig(auxiliary=True), network, pictures_of),
}
