"""AlexNet, as most train it today: five convolutions, three poolings, three linear layers.

Source: Krizhevsky, One weird trick for parallelizing convolutional neural networks (2014), which is what torchvision
and PipeDream's published profile have: 64 channels in the first convolution and no local response normalisation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from ..data import pictures_of
from ..model import Factory, Loss, Model, chain, class_loss
from .cnn import least_image, plain_relu, to_vector

_CONVOLUTIONS = (  # channels in and out, kernel, stride, padding, pooled afterwards
    (3, 64, 11, 4, 2, True),
    (64, 192, 5, 1, 2, True),
    (192, 384, 3, 1, 1, False),
    (384, 256, 3, 1, 1, False),
    (256, 256, 3, 1, 1, True),
)
_SIDE = 6
_VECTOR = _CONVOLUTIONS[-1][1] * _SIDE**2
_LINEAR = 4096
_LEAST_IMAGE = 63  # what the three poolings leave a pixel of


@dataclass(frozen=True)
class AlexNetConfig:
    """Picture size and classes; ``dropout`` (published: 0.5) is off by default."""

    image: int = 224
    classes: int = 1000
    dropout: float = 0.0


def network(config: AlexNetConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``conv1, pool1, conv2, pool2, conv3, conv4, conv5, pool5, fc6, fc7, fc8`` and the loss."""
    least_image(config.image, _LEAST_IMAGE)

    def factories() -> Iterator[tuple[str, Factory]]:
        for index, (inputs, outputs, kernel, stride, padding, pooled) in enumerate(_CONVOLUTIONS, 1):
            yield f"conv{index}", partial(plain_relu, inputs, outputs, kernel, stride, padding)
            if pooled:
                yield f"pool{index}", partial(nn.MaxPool2d, 3, stride=2)
        yield "fc6", lambda: nn.Sequential(to_vector(_SIDE), *_linear(_VECTOR, config.dropout))
        yield "fc7", lambda: nn.Sequential(*_linear(_LINEAR, config.dropout))
        yield "fc8", partial(nn.Linear, _LINEAR, config.classes)

    return chain(factories(), seed), class_loss


def _linear(inputs: int, dropout: float) -> tuple[nn.Module, ...]:
    return nn.Dropout(dropout), nn.Linear(inputs, _LINEAR), nn.ReLU(inplace=True)


MODELS = {"alexnet": Model(AlexNetConfig(), network, pictures_of)}
