"""What is a row of scripts/checks/models.py? A model, what it is given, and what compares what it puts out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

BATCH = 2


@dataclass(frozen=True)
class Row:
    """``make`` builds the model, ``sample`` a microbatch for it; without ``loss`` the model returns it.

    A model that ``draws`` is compared with a run of one process, whose layers draw the same numbers.
    """

    make: Callable[[], nn.Module]
    sample: Callable[[Generator], Any]
    loss: Any = None
    draws: bool = False


def numbers(generator: Generator, *shape: int, below: int) -> Tensor:
    """Return whole numbers."""
    return torch.randint(below, shape, generator=generator)


def normal(generator: Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers around 0."""
    return torch.randn(*shape, generator=generator, dtype=dtype)


def vectors(width: int = 8, out: int = 8, rows: int = 4) -> Callable[[Generator], Any]:
    """Return what gives vectors, and vectors to compare with."""
    return lambda g: (normal(g, rows, width), normal(g, rows, out))


def images(size: int = 16, channels: int = 3, classes: int = 5) -> Callable[[Generator], Any]:
    """Return what gives images and their classes."""
    return lambda g: (normal(g, BATCH, channels, size, size), numbers(g, BATCH, below=classes))


def words(length: int = 8, below: int = 29) -> Callable[[Generator], Any]:
    """Return what gives tokens, and a token to predict for each."""
    return lambda g: (numbers(g, BATCH, length, below=below), numbers(g, BATCH, length, below=below))


def on_tokens(logits: Any, target: Tensor) -> Tensor:
    """Return the mean cross entropy of a token for each place."""
    found = logits["logits"] if isinstance(logits, dict) else logits
    return functional.cross_entropy(found.flatten(0, 1), target.flatten())
