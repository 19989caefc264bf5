"""Networks of two towers, one for pictures and one for text, whose layers are transformers' and can be parted alike.

Of ``clip`` a loss compares what two encoders make of a picture and of its text (Radford et al., Learning Transferable
Visual Models From Natural Language Supervision, 2021); of ``llava`` a Llama reads what the encoder makes of a picture
before the text (Liu et al., Improved Baselines with Visual Instruction Tuning, 2023). Each is one module, to be traced.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import BadInput
from .data import enough, pictures, text
from .model import Data, Factory, Loss, Model, chain, mixed_seed
from .text.gpt import Block, Embedding, GPTConfig
from .text.llama import LlamaConfig
from .text.llama import network as llama
from .text.rank_part import Parted
from .text.sizes import TRANSFORMERS, Llama

CLASSES = 100  # of pictures, whose numbers are characters of their texts


@dataclass(frozen=True)
class TowersConfig(Parted):
    """Sizes: ``image`` and ``patch`` are pixels a side, ``picture_`` ones are those of the encoder of pictures, others
    those of a GPT, or with ``groups`` of a Llama, for ``sequence`` tokens of text."""

    image: int
    patch: int
    picture_blocks: int
    picture_hidden: int
    picture_heads: int
    blocks: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    groups: int = 0
    feed_forward: int = 0
    rotary_base: float = 10_000.0

    @property
    def patches(self) -> int:
        """How many parts of a picture its encoder reads."""
        return (self.image // self.patch) ** 2

    @property
    def of_pictures(self) -> GPTConfig:
        """The sizes of the blocks of the encoder of pictures, in which every part sees all others."""
        sizes = self.picture_blocks, self.picture_hidden, self.picture_heads, 0, self.patches
        return GPTConfig(*sizes, causal=False, tensor=self.tensor, part=self.part)

    @property
    def of_text(self) -> GPTConfig:
        """The sizes of the encoder of text."""
        sizes = self.blocks, self.hidden, self.heads, self.vocabulary, self.sequence
        return GPTConfig(*sizes, tied=False, tensor=self.tensor, part=self.part)

    @property
    def of_language(self) -> LlamaConfig:
        """The sizes of the language model, which reads pictures, too."""
        sizes = self.blocks, self.hidden, self.heads, self.groups, self.feed_forward, self.vocabulary
        parts = {"rotary_base": self.rotary_base, "tensor": self.tensor, "part": self.part}
        return LlamaConfig(*sizes, self.patches + self.sequence, **parts)  # type: ignore[arg-type]  # by their names


class Patches(nn.Module):
    """Pictures (batch, channels, image, image) to vectors of their parts, with places (batch, patches, hidden)."""

    def __init__(self, config: TowersConfig) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, config.picture_hidden, config.patch, config.patch)
        self.positions = nn.Parameter(torch.empty(config.patches, config.picture_hidden).normal_(std=0.02))

    def forward(self, given: Tensor) -> Tensor:
        """Return the vectors of ``given`` pictures."""
        out: Tensor = self.cut(given).flatten(2).transpose(1, 2) + self.positions
        return out


class Compared(nn.Module):
    """Two encoders, and how like each picture and each text of a microbatch are (batch, batch)."""

    def __init__(self, config: TowersConfig, seed: int) -> None:
        super().__init__()
        self.images, self.text = _tower(_of_pictures(config), seed), _tower(_of_text(config), mixed_seed(seed, 1))
        self.scale = nn.Parameter(torch.tensor(2.6593))  # the logarithm of 1 / 0.07

    def forward(self, given: Tensor, tokens: Tensor) -> Tensor:
        """Return the likeness of every picture and every text."""
        seen = functional.normalize(self.images(given).mean(1), dim=-1)
        read = functional.normalize(self.text(tokens)[:, -1], dim=-1)
        return self.scale.exp() * seen @ read.t()


class Reading(nn.Module):
    """An encoder of pictures and a language model that reads them before the text."""

    def __init__(self, images: nn.Sequential, language: nn.Sequential) -> None:
        super().__init__()
        self.images, self.language = images, language

    def forward(self, given: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits of what follows each token of the text (batch, sequence, vocabulary)."""
        seen = self.images(given)
        embedding, blocks, norm, head = self.language
        x = blocks(torch.cat((seen, embedding(tokens)), 1))
        out: Tensor = head(norm(x[:, seen.shape[1] :]))
        return out


def likeness_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of pictures over texts and texts over pictures, each to tell its own."""
    return (functional.cross_entropy(output, target) + functional.cross_entropy(output.t(), target)) / 2


def network(config: TowersConfig, seed: int) -> tuple[nn.Module, Loss]:
    """Return the two towers as one module, and the loss."""
    if config.sequence_parallel or config.context > 1:
        raise BadInput("sequence_parallel, context: towers cannot be split along their sequences")
    if config.image % config.patch:
        raise BadInput(f"image: {config.image} is not a multiple of patch: {config.patch}")
    if not config.groups:
        return Compared(config, seed), likeness_loss
    language, loss = llama(config.of_language, mixed_seed(seed, 1))
    return Reading(_tower(_of_pictures(config), seed), _with_list(language)), loss


def _of_pictures(config: TowersConfig) -> list[tuple[str, Factory]]:
    def project() -> nn.Module:
        first = nn.Linear(config.picture_hidden, config.hidden)
        return nn.Sequential(first, nn.GELU(), nn.Linear(config.hidden, config.hidden)) if config.groups else first

    return [("patches", partial(Patches, config)), *_blocks(config.of_pictures), ("project", project)]


def _of_text(config: TowersConfig) -> list[tuple[str, Factory]]:
    first = partial(Embedding, config.of_text)
    return [
        ("embedding", first),
        *_blocks(config.of_text),
        ("project", partial(nn.Linear, config.hidden, config.hidden)),
    ]


def _blocks(config: GPTConfig) -> list[tuple[str, Factory]]:
    found: list[tuple[str, Factory]] = [(f"block{i}", partial(Block, config)) for i in range(config.blocks)]
    return [*found, ("norm", partial(nn.LayerNorm, config.hidden))]


def _tower(layers: list[tuple[str, Factory]], seed: int) -> nn.Sequential:
    return _with_list(chain(layers, seed))


def _with_list(tower: nn.Sequential) -> nn.Sequential:
    """Return a tower whose blocks are a list by themselves, as traces know blocks."""
    first, *blocks, norm, last = tower.named_children()
    return nn.Sequential(OrderedDict([first, ("blocks", nn.Sequential(*(x for _, x in blocks))), norm, last]))


def batches(config: TowersConfig, batch: int) -> Data:
    """Return data of ``batch`` pictures and texts, of which the last character tells encoders the picture's class."""
    read = text(batch, enough(config).sequence)
    return partial(_both, pictures(batch, config.image, CLASSES), read, config.groups > 0)


def _both(seen: Data, read: Data, continued: bool, index: int, seed: int) -> tuple[Any, Tensor]:
    (given, labels), (tokens, following) = seen(index, seed), read(index, seed)
    if continued:
        return (given, tokens), following
    return (given, torch.cat((tokens[:, :-1], labels.unsqueeze(1)), 1)), torch.arange(len(tokens), device=tokens.device)


_LARGE = 24, 1024, 16  # ViT-L/14


def _reading(image: int, patch: int, sizes: tuple[int, int, int], name: str, text_length: int) -> Model[TowersConfig]:
    of = TRANSFORMERS[name]
    assert isinstance(of, Llama)
    widths = of.layers, of.hidden, of.heads, of.vocabulary, text_length, of.groups, of.feed_forward
    return Model(TowersConfig(image, patch, *sizes, *widths, rotary_base=of.rotary_base), network, batches)


MODELS = {
    "clip-tiny": Model(TowersConfig(16, 4, 2, 32, 4, 2, 32, 4, 128, 16), network, batches),
    "clip-large": Model(TowersConfig(224, 14, *_LARGE, 12, 768, 12, 49_408, 77), network, batches),
    "llava-tiny": _reading(16, 4, (2, 32, 4), "llama-tiny", 16),
    "llava-7b": _reading(336, 14, _LARGE, "llama-7b", 1472),
    "llava-70b": _reading(336, 14, _LARGE, "llama3-70b", 7616),
}
