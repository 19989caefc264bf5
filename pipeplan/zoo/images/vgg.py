"""VGG: convolutions with ReLU, pooling, three linear layers; every one a layer of the chain.

Source: Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition (2015), Table 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from ...errors import BadInput
from ..data import pictures_of
from ..model import Factory, Loss, Model, chain, class_loss
from .cnn import least_image, plain_relu, to_vector

_CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_CHANNELS = (64, 128, 256, 512, 512)
_SIDE = 7
_VECTOR = _CHANNELS[-1] * _SIDE**2
_LINEAR = 4096


@dataclass(frozen=True)
class VGGConfig:
    """The depth (11, 13, 16, 19), picture size and classes; ``dropout`` (published: 0.5) is off by default."""

    depth: int = 16
    image: int = 224
    classes: int = 1000
    dropout: float = 0.0


def network(config: VGGConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``conv1_1, .., pool5, fc6, fc7, fc8`` and the loss."""
    if config.depth not in _CONVOLUTIONS:
        raise BadInput(f"depth: there is no VGG-{config.depth}, only {', '.join(map(str, _CONVOLUTIONS))}")
    least_image(config.image, 32)

    def factories() -> Iterator[tuple[str, Factory]]:
        inputs = 3
        for block, (count, outputs) in enumerate(zip(_CONVOLUTIONS[config.depth], _CHANNELS, strict=True), 1):
            for index in range(1, count + 1):
                yield f"conv{block}_{index}", partial(plain_relu, inputs, outputs)
                inputs = outputs
            yield f"pool{block}", partial(nn.MaxPool2d, 2)
        yield "fc6", lambda: nn.Sequential(to_vector(_SIDE), _linear(_VECTOR, config.dropout))
        yield "fc7", partial(_linear, _LINEAR, config.dropout)
        yield "fc8", partial(nn.Linear, _LINEAR, config.classes)

    return chain(factories(), seed), class_loss


def _linear(inputs: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, _LINEAR), nn.ReLU(inplace=True), nn.Dropout(dropout))


MODELS = {"vgg16": Model(VGGConfig(), network, pictures_of)}
