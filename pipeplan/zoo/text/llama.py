"""Llama style decoders: RMS norm, rotary positions, SwiGLU, grouped-query attention; each block one layer.

Sources: Touvron et al., LLaMA (2023); Grattafiori et al., The Llama 3 Herd of Models (2024), for the grouped sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import BadInput
from ..data import text_of
from ..model import Loss, Model
from .rank_part import Group, PartEmbedding, decoder
from .sizes import TRANSFORMERS, Llama

GROUPS = "groups of heads"


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; ``groups`` is the number of key-value heads, which divides ``heads``; ``loss`` one of
    :data:`.token_losses.TOKEN_LOSSES`. With ``tensor`` above 1 the layers are one rank's part (:mod:`.rank_part`), with
    ``sequence_parallel`` along the sequence, too; that of rank ``part`` in a run, where that isn't negative."""

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
    tensor: int = 1
    sequence_parallel: bool = False
    part: int = -1

    @property
    def group(self) -> Group:
        """The ranks that run each layer together."""
        return Group(self.tensor, self.sequence_parallel, None if self.tensor == 1 or self.part < 0 else self.part)


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
        self.width, self.group = width, config.group
        heads = self.group.share(config.heads, "heads")
        groups = max(1, config.groups // config.tensor)  # of more ranks than groups each has one of its own
        self.group.share(config.groups if self.group.index is not None else max(config.groups, config.tensor), GROUPS)
        inner = self.group.share(config.feed_forward, "columns")
        self.norm1 = nn.RMSNorm(config.hidden, eps=config.epsilon)
        self.query = _linear(config.hidden, heads * width)
        self.key = _linear(config.hidden, groups * width)
        self.value = _linear(config.hidden, groups * width)
        self.project = _linear(heads * width, config.hidden)
        self.norm2 = nn.RMSNorm(config.hidden, eps=config.epsilon)
        self.gate = _linear(config.hidden, inner)
        self.up = _linear(config.hidden, inner)
        self.down = _linear(inner, config.hidden)
        # every block has the table of its own: a chain hands on one tensor, the hidden states
        frequencies = config.rotary_base ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(config.sequence), frequencies)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (batch, sequence, hidden) after the block."""
        made = self.group.products(self.norm1(x), [self.query, self.key, self.value])
        query, key, value = map(self._heads, made)
        attended = functional.scaled_dot_product_attention(
            self._rotated(query), self._rotated(key), value, is_causal=True, enable_gqa=True
        )
        x = x + self.group.added(attended.transpose(1, 2).flatten(2), self.project)
        gate, up = self.group.products(self.norm2(x), [self.gate, self.up])
        out: Tensor = x + self.group.added(functional.silu(gate) * up, self.down)
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
    table = PartEmbedding(config.vocabulary, config.hidden, config.group)
    nn.init.normal_(table.weight, std=0.02)
    return table


def network(config: LlamaConfig, seed: int) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``embedding, block0, .., norm, head`` and the loss."""
    parts = partial(_embedding, config), partial(Block, config), partial(nn.RMSNorm, config.hidden, eps=config.epsilon)
    return decoder(config, seed, parts, network)


def _model(name: str) -> Model[LlamaConfig]:
    """Return the model whose sizes :data:`~pipeplan.zoo.text.sizes.TRANSFORMERS` has under ``name``."""
    sizes = TRANSFORMERS[name]
    assert isinstance(sizes, Llama)
    widths = sizes.hidden, sizes.heads, sizes.groups, sizes.feed_forward
    config = LlamaConfig(sizes.layers, *widths, sizes.vocabulary, sizes.sequence, sizes.rotary_base, tied=sizes.tied)
    return Model(config, network, text_of)


MODELS = {name: _model(name) for name, sizes in TRANSFORMERS.items() if isinstance(sizes, Llama)}
