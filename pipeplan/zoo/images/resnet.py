"""ResNet with bottleneck blocks: stem, one layer per residual block, head.

Source: He et al., Deep Residual Learning for Image Recognition (2016), Table 1; the stride sits in the 3 x 3
convolution of a block, as in common implementations since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from ...errors import BadInput
from ..data import pictures_of
from ..model import Factory, Loss, Model, chain, class_loss
from .cnn import classifier, convolution, least_image, plain_convolution, stem

_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_EXPANSION = 4


@dataclass(frozen=True)
class ResNetConfig:
    """The depth (50, 101, 152), picture size and classes."""

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


def network(config: ResNetConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``stem, block1_1, .., head`` and the loss."""
    if config.depth not in _BLOCKS:
        raise BadInput(f"depth: there is no bottleneck ResNet-{config.depth}, only {', '.join(map(str, _BLOCKS))}")
    least_image(config.image, 32)

    def factories() -> Iterator[tuple[str, Factory]]:
        yield "stem", partial(stem, 64)
        inputs = 64
        for part, count in enumerate(_BLOCKS[config.depth]):
            width = 64 << part
            for index in range(count):
                stride = 2 if index == 0 and part > 0 else 1
                yield f"block{part + 1}_{index + 1}", partial(Bottleneck, inputs, width, stride)
                inputs = width * _EXPANSION
        yield "head", partial(classifier, inputs, config.classes)

    return chain(factories(), seed), class_loss


MODELS = {
    "resnet50": Model(ResNetConfig(), network, pictures_of),
    "resnet101": Model(ResNetConfig(depth=101), network, pictures_of),
}
