"""A small convolutional network with batch norm: seconds to train, and it has buffers, pooling and uneven layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..errors import BadInput
from .data import pictures
from .model import Data, Factory, Loss, Model, chain, class_loss


@dataclass(frozen=True)
class CNNConfig:
    """Sizes: ``width`` channels in the first of ``blocks`` blocks, doubled and at half the resolution in each next."""

    blocks: int = 3
    width: int = 16
    image: int = 32
    classes: int = 10


def convolution(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Return 3 x 3 convolution, batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def network(config: CNNConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``stem, block1, .., pool, head`` and the loss."""
    if config.image >> (config.blocks - 1) < 1:
        raise BadInput(f"image: {config.image} pixels cannot be halved {config.blocks - 1} times")

    def factories() -> Iterator[tuple[str, Factory]]:
        width = config.width
        yield "stem", lambda: convolution(3, width, 1)
        for index in range(1, config.blocks):
            inputs = width << (index - 1)
            yield f"block{index}", lambda inputs=inputs: convolution(inputs, 2 * inputs, 2)  # type: ignore[misc]
        yield "pool", lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        yield "head", lambda: nn.Linear(width << (config.blocks - 1), config.classes)

    return chain(factories(), seed), class_loss


def batches(config: CNNConfig, batch: int) -> Data:
    """Return synthetic pictures."""
    return pictures(batch, config.image, config.classes)


small = Model(CNNConfig(), network, batches)
