"""Convolutional networks of pictures that are chains: a small one, AlexNet, VGG, ResNet and DenseNet; one block, or
convolution, is a layer.

``small-cnn`` trains in seconds, and has what bigger ones have: buffers, pooling, and layers of uneven cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BadInput
from ..data import pictures_of
from ..model import Factory, Model, class_loss, network

_LINEAR = 4096
Size = int | tuple[int, int]


def convolution(
    inputs: int, outputs: int, kernel: Size = 3, stride: int = 1, padding: Size | None = None, epsilon: float = 1e-5
) -> nn.Sequential:
    """Return convolution without bias, batch norm and ReLU; the padding keeps the size unless it is given.

    The ReLU works in place: batch norm saves its input, not its output, so the memory is free to take.
    """
    if padding is None:
        padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        plain_convolution(inputs, outputs, kernel, stride, padding),
        nn.BatchNorm2d(outputs, eps=epsilon),
        nn.ReLU(inplace=True),
    )


def plain_convolution(
    inputs: int, outputs: int, kernel: Size, stride: int = 1, padding: Size = 0, bias: bool = False
) -> nn.Conv2d:
    """Return a convolution initialised for a ReLU after it (He et al. 2015)."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=bias)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def stem(outputs: int) -> nn.Sequential:
    """Return the start of large picture networks: to a quarter of the picture's resolution and ``outputs`` channels."""
    return nn.Sequential(convolution(3, outputs, 7, 2), nn.MaxPool2d(3, stride=2, padding=1))


def classifier(inputs: int, classes: int, dropout: float = 0.0) -> nn.Sequential:
    """Return global average pooling and a linear layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(inputs, classes))


def plain_relu(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> nn.Sequential:
    """Return a convolution with a bias, and ReLU, as before batch norm was there."""
    return nn.Sequential(plain_convolution(inputs, outputs, kernel, stride, padding, bias=True), nn.ReLU(inplace=True))


def to_vector(side: int) -> nn.Sequential:
    """Return what gives linear layers their ``side`` squared: at 224 pixels the adaptive pooling changes nothing."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten())


def least_image(image: int, least: int) -> None:
    """Raise BadInput if pictures of ``image`` pixels squared are smaller than the network's ``least``."""
    if image < least:
        raise BadInput(f"image: {image} pixels are too few for this network; it takes {least} at least")


@dataclass(frozen=True)
class CNNConfig:
    """Sizes: ``width`` channels in the first of ``blocks`` blocks, doubled and at half the resolution in each next."""

    blocks: int = 3
    width: int = 16
    image: int = 32
    classes: int = 10


def small_network(config: CNNConfig) -> Iterator[tuple[str, Factory]]:
    """Yield the layers ``stem, block1, .., pool, head``."""
    least_image(config.image, 1 << (config.blocks - 1))
    width = config.width
    yield "stem", partial(convolution, 3, width)
    for index in range(1, config.blocks):
        yield f"block{index}", partial(convolution, width, 2 * width, stride=2)
        width *= 2
    yield "pool", lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    yield "head", partial(nn.Linear, width, config.classes)


# --- AlexNet ----------------------------------------------------------------------------------------------------------


_ALEXNET = (  # channels in and out, kernel, stride, padding, pooled afterwards
    (3, 64, 11, 4, 2, True),
    (64, 192, 5, 1, 2, True),
    (192, 384, 3, 1, 1, False),
    (384, 256, 3, 1, 1, False),
    (256, 256, 3, 1, 1, True),
)


@dataclass(frozen=True)
class AlexNetConfig:
    """Picture size and classes; ``dropout`` (published: 0.5) is off by default.

    As most train it today: Krizhevsky, One weird trick for parallelizing convolutional neural networks (2014), which is
    what torchvision and PipeDream's published profile have, without local response normalisation.
    """

    image: int = 224
    classes: int = 1000
    dropout: float = 0.0


def alexnet(config: AlexNetConfig) -> Iterator[tuple[str, Factory]]:
    """Yield the layers ``conv1, pool1, conv2, pool2, conv3, conv4, conv5, pool5, fc6, fc7, fc8``."""
    least_image(config.image, 63)  # what the three poolings leave a pixel of

    def wide(inputs: int) -> tuple[nn.Module, ...]:
        return nn.Dropout(config.dropout), nn.Linear(inputs, _LINEAR), nn.ReLU(inplace=True)

    for index, (inputs, outputs, kernel, stride, padding, pooled) in enumerate(_ALEXNET, 1):
        yield f"conv{index}", partial(plain_relu, inputs, outputs, kernel, stride, padding)
        if pooled:
            yield f"pool{index}", partial(nn.MaxPool2d, 3, stride=2)
    yield "fc6", lambda: nn.Sequential(to_vector(6), *wide(256 * 6**2))
    yield "fc7", lambda: nn.Sequential(*wide(_LINEAR))
    yield "fc8", partial(nn.Linear, _LINEAR, config.classes)


# --- VGG --------------------------------------------------------------------------------------------------------------


_VGG = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


@dataclass(frozen=True)
class VGGConfig:
    """The depth (11, 13, 16, 19), picture size and classes; ``dropout`` (published: 0.5) is off by default.

    Source: Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition (2015), Table 1.
    """

    depth: int = 16
    image: int = 224
    classes: int = 1000
    dropout: float = 0.0


def vgg(config: VGGConfig) -> Iterator[tuple[str, Factory]]:
    """Yield the layers ``conv1_1, .., pool5, fc6, fc7, fc8``."""
    if config.depth not in _VGG:
        raise BadInput(f"depth: there is no VGG-{config.depth}, only {', '.join(map(str, _VGG))}")
    least_image(config.image, 32)

    def wide(inputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(inputs, _LINEAR), nn.ReLU(inplace=True), nn.Dropout(config.dropout))

    inputs = 3
    for block, (count, outputs) in enumerate(zip(_VGG[config.depth], (64, 128, 256, 512, 512), strict=True), 1):
        for index in range(1, count + 1):
            yield f"conv{block}_{index}", partial(plain_relu, inputs, outputs)
            inputs = outputs
        yield f"pool{block}", partial(nn.MaxPool2d, 2)
    yield "fc6", lambda: nn.Sequential(to_vector(7), wide(512 * 7**2))
    yield "fc7", partial(wide, _LINEAR)
    yield "fc8", partial(nn.Linear, _LINEAR, config.classes)


# --- ResNet -----------------------------------------------------------------------------------------------------------


_RESNET = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_EXPANSION = 4


@dataclass(frozen=True)
class ResNetConfig:
    """The depth (50, 101, 152), picture size and classes.

    Source: He et al., Deep Residual Learning for Image Recognition (2016), Table 1; the stride sits in the 3 x 3
    convolution of a block, as in common implementations since.
    """

    depth: int = 50
    image: int = 224
    classes: int = 1000


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 convolutions around a shortcut, which is a convolution where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * _EXPANSION
        self.body = nn.Sequential(
            convolution(inputs, width, 1),
            convolution(width, width, 3, stride),
            plain_convolution(width, outputs, 1),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(plain_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (batch, channels, height, width) after the block."""
        out: Tensor = self.body(x)
        out += self.shortcut(x)
        return out.relu_()


def resnet(config: ResNetConfig) -> Iterator[tuple[str, Factory]]:
    """Yield the layers ``stem, block1_1, .., head``."""
    if config.depth not in _RESNET:
        raise BadInput(f"depth: there is no bottleneck ResNet-{config.depth}, only {', '.join(map(str, _RESNET))}")
    least_image(config.image, 32)
    yield "stem", partial(stem, 64)
    inputs = 64
    for part, count in enumerate(_RESNET[config.depth]):
        width = 64 << part
        for index in range(count):
            stride = 2 if index == 0 and part > 0 else 1
            yield f"block{part + 1}_{index + 1}", partial(Bottleneck, inputs, width, stride)
            inputs = width * _EXPANSION
    yield "head", partial(classifier, inputs, config.classes)


# --- DenseNet ---------------------------------------------------------------------------------------------------------


_DENSENET = (6, 12, 24, 16)
_BOTTLENECK = 4


@dataclass(frozen=True)
class DenseNetConfig:
    """Features added per dense layer, which go down the chain behind the old ones, picture size and classes.

    Source: Huang et al., Densely Connected Convolutional Networks (2017), Table 1 (DenseNet-BC).
    """

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


def densenet(config: DenseNetConfig) -> Iterator[tuple[str, Factory]]:
    """Yield the layers ``stem, dense1_1, .., transition1, .., head``."""
    least_image(config.image, 32)
    channels = 2 * config.growth
    yield "stem", partial(stem, channels)
    for part, count in enumerate(_DENSENET, 1):
        for index in range(1, count + 1):
            yield f"dense{part}_{index}", partial(Dense, channels, config.growth)
            channels += config.growth
        if part < len(_DENSENET):
            yield f"transition{part}", partial(_transition, channels)
            channels //= 2
    yield "head", partial(_head, channels, config.classes)


def _transition(channels: int) -> nn.Sequential:
    return nn.Sequential(*_activation(channels), plain_convolution(channels, channels // 2, 1), nn.AvgPool2d(2))


def _head(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(*_activation(channels), *classifier(channels, classes))


MODELS: dict[str, Model[Any]] = {
    "small-cnn": Model(CNNConfig(), partial(network, small_network, class_loss), pictures_of),
    "alexnet": Model(AlexNetConfig(), partial(network, alexnet, class_loss), pictures_of),
    "vgg16": Model(VGGConfig(), partial(network, vgg, class_loss), pictures_of),
    "resnet50": Model(ResNetConfig(), partial(network, resnet, class_loss), pictures_of),
    "resnet101": Model(ResNetConfig(depth=101), partial(network, resnet, class_loss), pictures_of),
    "densenet121": Model(DenseNetConfig(), partial(network, densenet, class_loss), pictures_of),
}
