"""DenseNet-121: each dense layer appends its features to what it got, so one growing tensor goes down the chain.

Source: Huang et al., Densely Connected Convolutional Networks (2017), Table 1 (DenseNet-BC).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..data import pictures_of
from ..model import Factory, Loss, Model, chain, class_loss
from .cnn import classifier, convolution, least_image, plain_convolution, stem

_BLOCKS = (6, 12, 24, 16)
_BOTTLENECK = 4


@dataclass(frozen=True)
class DenseNetConfig:
    """Features added per dense layer, picture size and classes."""

    growth: int = 32
    image: int = 224
    classes: int = 1000


class Dense(nn.Module):
    """Norm, ReLU and convolution twice (1 x 1, 3 x 3); the new features are put behind the old ones."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_activation(inputs),
            convolution(inputs, _BOTTLENECK * growth, 1),
            plain_convolution(_BOTTLENECK * growth, growth, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (batch, channels, height, width) with ``growth`` more channels."""
        return torch.cat((x, self.body(x)), dim=1)


def _activation(channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.BatchNorm2d(channels), nn.ReLU(inplace=True)


def network(config: DenseNetConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``stem, dense1_1, .., transition1, .., head`` and the loss."""
    least_image(config.image, 32)

    def factories() -> Iterator[tuple[str, Factory]]:
        channels = 2 * config.growth
        yield "stem", partial(stem, channels)
        for part, count in enumerate(_BLOCKS, 1):
            for index in range(1, count + 1):
                yield f"dense{part}_{index}", partial(Dense, channels, config.growth)
                channels += config.growth
            if part < len(_BLOCKS):
                yield f"transition{part}", partial(_transition, channels)
                channels //= 2
        yield "head", partial(_head, channels, config.classes)

    return chain(factories(), seed), class_loss


def _transition(channels: int) -> nn.Sequential:
    return nn.Sequential(*_activation(channels), plain_convolution(channels, channels // 2, 1), nn.AvgPool2d(2))


def _head(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(*_activation(channels), *classifier(channels, classes))


MODELS = {"densenet121": Model(DenseNetConfig(), network, pictures_of)}
