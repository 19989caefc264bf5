"""Tasks to train on in comparisons, each with a part that isn't trained on.

``digits``: a small network like VGG, with batch norm, on the handwritten digits that scikit-learn ships. ``text``:
gpt-tiny on Python's language reference. A sample depends on its number and the seed alone, so microbatches of any size
see the same ones. ``training_tasks:digits`` names one where
a model is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn

from pipeplan import zoo
from pipeplan.errors import BadInput
from pipeplan.zoo.data import corpus
from pipeplan.zoo.images.convolutional import convolution
from pipeplan.zoo.model import Data, Factory, Loss, Model, chain, class_loss, mixed_seed
from pipeplan.zoo.text.gpt import GPTConfig

PIXELS = 8
CLASSES = 10
TRAINING_SHARE = 0.8
UNSEEN_WINDOWS = 64


@dataclass(frozen=True)
class DigitsConfig:
    """``width`` channels in the first block, doubled in each of the next two; pictures are enlarged ``scale`` times."""

    width: int = 16
    scale: int = 4
    hidden: int = 128


@cache
def handwritten() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training pictures (n, 1, 8, 8) with mean 0 and deviation 1, their digits (n,), and the same for testing.

    1,797 digits by 43 writers (Alpaydin and Kaynak 1998); the split follows the order of the file.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise BadInput("training_tasks: the digits come with scikit-learn: pip install scikit-learn") from None
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    pictures = (pictures - pictures.mean()) / pictures.std()
    targets = torch.tensor(digits.target, dtype=torch.int64)
    split = int(TRAINING_SHARE * len(targets))
    return pictures[:split], targets[:split], pictures[split:], targets[split:]


def network(config: DigitsConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``conv1_1, .., pool3, fc4, fc5`` and the loss."""

    def factories() -> Iterator[tuple[str, Factory]]:
        inputs, outputs, side = 1, config.width, PIXELS * config.scale
        for block, count in enumerate((1, 2, 2), 1):
            for index in range(1, count + 1):
                yield f"conv{block}_{index}", partial(convolution, inputs, outputs)
                inputs = outputs
            yield f"pool{block}", partial(nn.MaxPool2d, 2)
            outputs, side = 2 * outputs, side // 2
        vector = inputs * side * side
        yield "fc4", lambda: nn.Sequential(nn.Flatten(), nn.Linear(vector, config.hidden), nn.ReLU())
        yield "fc5", partial(nn.Linear, config.hidden, CLASSES)

    return chain(factories(), seed), class_loss


def batches(config: DigitsConfig, batch: int) -> Data:
    """Return training microbatches: consecutive samples of an order that the seed draws."""
    return partial(_drawn, config.scale, batch)


def _drawn(scale: int, batch: int, index: int, seed: int) -> tuple[Tensor, Tensor]:
    pictures, targets, _, _ = handwritten()
    chosen = _order(len(targets), seed)[index * batch : (index + 1) * batch]
    return enlarged(pictures[chosen], scale), targets[chosen]


@cache
def _order(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def enlarged(pictures: Tensor, scale: int) -> Tensor:
    """Return pictures (n, 1, 8, 8) with ``scale`` times the height and width."""
    return nn.functional.interpolate(pictures, scale_factor=scale, mode="bilinear")


def training_digits() -> int:
    """Return the number of pictures to train on."""
    return len(handwritten()[1])


def unseen_digits() -> tuple[Tensor, Tensor]:
    """Return all pictures that are not trained on, as large as the model takes them, and their digits."""
    _, _, pictures, targets = handwritten()
    return enlarged(pictures, digits.config.scale), targets


def windows(config: GPTConfig, batch: int) -> Data:
    """Return training microbatches of windows from the first part of the text; the target is the next character."""
    return partial(_windows, config.sequence, batch)


def _windows(sequence: int, batch: int, index: int, seed: int) -> tuple[Tensor, Tensor]:
    last = int(TRAINING_SHARE * len(corpus())) - sequence - 1
    starts = [mixed_seed(seed, sample) % last for sample in range(index * batch, (index + 1) * batch)]
    return _cut(starts, sequence)


def _cut(starts: Iterable[int], sequence: int) -> tuple[Tensor, Tensor]:
    window = torch.stack([corpus()[start : start + sequence + 1] for start in starts])
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def unseen_text() -> tuple[Tensor, Tensor]:
    """Return windows spread evenly over the last part of the text, and their next characters."""
    sequence = text.config.sequence
    first = int(TRAINING_SHARE * len(corpus()))
    step = (len(corpus()) - sequence - 1 - first) // UNSEEN_WINDOWS
    return _cut(range(first, first + step * UNSEEN_WINDOWS, step), sequence)


digits = Model(DigitsConfig(), network, batches)
text = replace(zoo.load("gpt-tiny"), batches=windows)
