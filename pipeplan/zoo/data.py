"""Microbatches for the zoo: real English text by characters, and synthetic pictures whose classes can be learnt.

Every microbatch is a function of (index, seed) alone: nothing is downloaded, nothing has state, so all ranks and a
resumed run see the same samples. The text is the language reference that every Python carries as ``pydoc_data``;
another Python version has a slightly different edition.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from ..errors import BadInput
from .model import Data, mixed_seed

CHARACTERS = 128  # ASCII; the few other characters become "?"
_PATTERN = 4  # a class is a random pattern of this many tiles squared


def text(batch: int, sequence: int) -> Data:
    """Return data of ``batch`` windows of ``sequence`` characters; the target is the next character at each place."""
    if sequence >= len(corpus()):
        raise BadInput(f"sequence: {sequence} is longer than the text, which has {len(corpus())} characters")
    return partial(_windows, batch, sequence)


def pictures(batch: int, size: int, classes: int, channels: int = 3) -> Data:
    """Return data of ``batch`` pictures (channels, size, size): the pattern of a random class under as much noise."""
    return partial(_pictures, batch, size, classes, channels)


def text_of(config: Any, batch: int) -> Data:
    """Return :func:`text` for a model with a ``vocabulary`` and a ``sequence``; BadInput where characters don't fit."""
    sequence = enough(config).sequence
    return text(batch, config.group.part(sequence) if hasattr(config, "group") else sequence)


def upper_case_of(config: Any, batch: int) -> Data:
    """Return data of ``batch`` translations for such a model: characters and the same in upper case, one late, to
    continue.

    The input holds both, (batch, 2 * sequence); the target is the upper case, (batch, sequence).
    """
    sequence = enough(config).sequence
    return partial(_translations, batch, sequence, text(batch, sequence))


def enough(config: Any) -> Any:
    """Return ``config``; BadInput where its ``vocabulary`` has fewer numbers than the text has characters."""
    if config.vocabulary < CHARACTERS:
        raise BadInput(f"vocabulary: {config.vocabulary} is less than the text's {CHARACTERS} characters")
    return config


def pictures_of(config: Any, batch: int) -> Data:
    """Return :func:`pictures` for a model of ``image`` pixels squared and so many ``classes``."""
    return pictures(batch, config.image, config.classes)


def _windows(batch: int, sequence: int, index: int, seed: int) -> tuple[Tensor, Tensor]:
    if _has_no_values():
        return _empty(batch, sequence), _empty(batch, sequence)
    with torch.device("cpu"):
        characters = corpus()
        generator = torch.Generator().manual_seed(mixed_seed(seed, index))
        starts = torch.randint(len(characters) - sequence, (batch, 1), generator=generator)
        window = characters[starts + torch.arange(sequence + 1)]
    return _placed(window[:, :-1]), _placed(window[:, 1:])


def _translations(batch: int, sequence: int, windows: Data, index: int, seed: int) -> tuple[Tensor, Tensor]:
    if _has_no_values():
        return _empty(batch, 2 * sequence), _empty(batch, sequence)
    with torch.device("cpu"):
        source, _ = windows(index, seed)
        lower = (source >= ord("a")) & (source <= ord("z"))
        target = torch.where(lower, source - (ord("a") - ord("A")), source)
        begun = torch.cat((torch.zeros(batch, 1, dtype=torch.int64), target[:, : sequence - 1]), dim=1)
    return _placed(torch.cat((source, begun), dim=1)), _placed(target)


def _pictures(batch: int, size: int, classes: int, channels: int, index: int, seed: int) -> tuple[Tensor, Tensor]:
    if _has_no_values():
        return torch.empty(batch, channels, size, size), _empty(batch)
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(mixed_seed(seed, index))
        labels = torch.randint(classes, (batch,), generator=generator)
        noise = torch.randn(batch, channels, size, size, generator=generator)
        tiles = torch.stack([_pattern(int(label), channels) for label in labels])
        patterns = torch.nn.functional.interpolate(tiles, size=(size, size), mode="nearest")
    return _placed(patterns + noise), _placed(labels)


def _pattern(label: int, channels: int) -> Tensor:
    """Return the tiles of a class: the same whatever the seed, so that the classes mean the same in every run."""
    generator = torch.Generator().manual_seed(mixed_seed(label))
    return torch.randn(channels, _PATTERN, _PATTERN, generator=generator)


def _has_no_values() -> bool:
    """Whether only shapes are asked for: a microbatch of any size then takes no memory."""
    return detect_fake_mode() is not None or torch.get_default_device().type == "meta"


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def _placed(tensor: Tensor) -> Tensor:
    """Move a microbatch made on the CPU to the default device of the moment."""
    return tensor.to(torch.get_default_device()).contiguous()


@cache
def corpus() -> Tensor:
    """Return the whole text as character numbers (int64, below :data:`CHARACTERS`), about 460,000 of them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise BadInput("this Python lacks its language reference (module pydoc_data), the zoo's text") from None
    joined = "\n".join(topics[key] for key in sorted(topics))
    return torch.frombuffer(bytearray(joined.encode("ascii", "replace")), dtype=torch.uint8).to("cpu", torch.int64)
