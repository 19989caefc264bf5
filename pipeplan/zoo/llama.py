"""Llama style decoders: RMS norm, rotary positions, SwiGLU, grouped-query attention; each block one layer.

Sources: Touvron et al., LLaMA (2023); Grattafiori et al., The Llama 3 Herd of Models (2024), for the grouped sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import BadInput
from .data import CHARACTERS, text
from .model import Data, Factory, Loss, Model, chain
from .sizes import TRANSFORMERS, Llama
from .token_losses import token_loss_named


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; ``groups`` is the number of key-value heads, which divides ``heads``; ``loss`` one of
    :data:`.token_losses.TOKEN_LOSSES`."""

    blocks: int
    hidden: int
    heads: int
    groups: int
    feed_forward: int
    vocabulary: int
    sequence: int
    rotary_base: float = 10_000.0
    epsilon: float = 1e-5
    tied: bool = False
    loss: str = "same"


class Block(nn.Module):
    """Attention with rotary positions and a gated feed-forward part, each after a norm and with a residual sum."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, rest = divmod(config.hidden, config.heads)
        if rest or width % 2 or config.heads % config.groups:
            raise BadInput(
                f"heads: {config.heads} heads in {config.groups} groups don't share {config.hidden} hidden units evenly"
            )
        self.width = width
        self.norm1 = nn.RMSNorm(config.hidden, eps=config.epsilon)
        self.query = _linear(config.hidden, config.hidden)
        self.key = _linear(config.hidden, config.groups * width)
        self.value = _linear(config.hidden, config.groups * width)
        self.project = _linear(config.hidden, config.hidden)
        self.norm2 = nn.RMSNorm(config.hidden, eps=config.epsilon)
        self.gate = _linear(config.hidden, config.feed_forward)
        self.up = _linear(config.hidden, config.feed_forward)
        self.down = _linear(config.feed_forward, config.hidden)
        # every block has the table of its own: a chain hands on one tensor, the hidden states
        frequencies = config.rotary_base ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(config.sequence), frequencies)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (batch, sequence, hidden) after the block."""
        normed = self.norm1(x)
        query, key, value = (self._heads(part(normed)) for part in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(
            self._rotated(query), self._rotated(key), value, is_causal=True, enable_gqa=True
        )
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        out: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.width).transpose(1, 2)

    def _rotated(self, x: Tensor) -> Tensor:
        """Turn each pair (i, i + width / 2) of ``x`` (batch, heads, sequence, width) by its place's angle."""
        sequence = x.shape[2]
        cosine, sine = self.cosine[:sequence], self.sine[:sequence]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


def _embedding(config: LlamaConfig) -> nn.Embedding:
    table = nn.Embedding(config.vocabulary, config.hidden)
    nn.init.normal_(table.weight, std=0.02)
    return table


def network(config: LlamaConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``embedding, block0, .., norm, head`` and the loss."""

    def factories() -> Iterator[tuple[str, Factory]]:
        yield "embedding", partial(_embedding, config)
        for index in range(config.blocks):
            yield f"block{index}", partial(Block, config)
        yield "norm", partial(nn.RMSNorm, config.hidden, eps=config.epsilon)
        yield "head", partial(_linear, config.hidden, config.vocabulary)

    layers = chain(factories(), seed)
    if config.tied:
        layers.head.weight = layers.embedding.weight  # type: ignore[union-attr]
    return layers, token_loss_named(config.loss)


def batches(config: LlamaConfig, batch: int) -> Data:
    """Return the language reference by characters."""
    if config.vocabulary < CHARACTERS:
        raise BadInput(f"vocabulary: {config.vocabulary} is less than the text's {CHARACTERS} characters")
    return text(batch, config.sequence)


def _sized(name: str, rotary_base: float = 10_000.0) -> Model[LlamaConfig]:
    """Return the model whose sizes :data:`~pipeplan.zoo.sizes.TRANSFORMERS` has under ``name``."""
    sizes = TRANSFORMERS[name]
    assert isinstance(sizes, Llama)
    config = LlamaConfig(
        sizes.layers,
        sizes.hidden,
        sizes.heads,
        sizes.groups,
        sizes.feed_forward,
        sizes.vocabulary,
        sizes.sequence,
        rotary_base,
        tied=sizes.tied,
    )
    return Model(config, network, batches)


tiny = _sized("llama-tiny")
llama_7b = _sized("llama-7b")
llama3_8b = _sized("llama3-8b", 500_000.0)
