"""The convolution that the picture networks share, and a small network of it with batch norm.

``small`` trains in seconds, and has what bigger ones have: buffers, pooling, and layers of uneven cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from ...errors import BadInput
from ..data import pictures_of
from ..model import Factory, Loss, Model, chain, class_loss

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


def network(config: CNNConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``stem, block1, .., pool, head`` and the loss."""
    least_image(config.image, 1 << (config.blocks - 1))

    def factories() -> Iterator[tuple[str, Factory]]:
        width = config.width
        yield "stem", partial(convolution, 3, width)
        for index in range(1, config.blocks):
            yield f"block{index}", partial(convolution, width, 2 * width, stride=2)
            width *= 2
        yield "pool", lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        yield "head", partial(nn.Linear, width, config.classes)

    return chain(factories(), seed), class_loss


MODELS = {"small-cnn": Model(CNNConfig(), network, pictures_of)}
