"""Llama style decoders: RMS norm, rotary positions, SwiGLU, grouped-query attention; each block one layer.

Sources: Touvron et al., LLaMA (2023); Grattafiori et al., The Llama 3 Herd of Models (2024), for the grouped sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import BadInput
from ..data import text_of
from ..model import Loss, Model
from .rank_part import Parted, PartEmbedding, decoder
from .sizes import TRANSFORMERS, Llama

GROUPS = "groups of heads"


@dataclass(frozen=True)
class LlamaConfig(Parted):
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


class _Gated(torch.autograd.Function):
    """The product of ``silu(gate)``, ``up`` and, if there are, each row's ``share``; these alone are kept.

    So does Megatron-LM, core/fusions/fused_bias_swiglu.py.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, share: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(gate, up, share)
        made = functional.silu(gate) * up
        return made if share is None else made * share

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, share = ctx.saved_tensors
        gradient, of_share = gradients[0], None
        if share is not None:
            of_share = (functional.silu(gate) * up).mul_(gradient).sum(-1, keepdim=True)
            gradient = gradient * share
        return torch.ops.aten.silu_backward(gradient * up, gate), functional.silu(gate).mul_(gradient), of_share


def gated(gate: Tensor, up: Tensor, share: Tensor | None = None) -> Tensor:
    """Return ``silu(gate) * up`` (.., columns), of which each row is taken ``share`` (.., 1) times."""
    made: Tensor = _Gated.apply(gate, up, share)  # type: ignore[no-untyped-call]  # torch's
    return made


class Block(nn.Module):
    """Attention with rotary positions and a gated feed-forward part, each after a norm and with a residual sum."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.group = config.group
        self.norm1 = nn.RMSNorm(config.hidden, eps=config.epsilon)
        self.add_attention(config)
        self.norm2 = nn.RMSNorm(config.hidden, eps=config.epsilon)
        self.add_feed_forward(config.hidden, config.feed_forward)

    def add_attention(self, config: Any, width: int = 0) -> None:
        """Add the weights of attention, of heads of a ``width``, 0: as hidden units are shared evenly by heads."""
        even, rest = divmod(config.hidden, config.heads)
        if (rest and not width) or (width or even) % 2 or config.heads % config.groups:
            raise BadInput(
                f"heads: {config.heads} heads in {config.groups} groups don't share {config.hidden} hidden units evenly"
            )
        self.width = width = width or even
        heads = self.group.share(config.heads, "heads")
        groups = max(1, config.groups // config.tensor)  # of more ranks than groups each has one of its own
        self.group.share(config.groups if self.group.place is not None else max(config.groups, config.tensor), GROUPS)
        part, whole = self.group.parted, config.groups * width
        self.query = part(linear(config.hidden, config.heads * width), 0, heads * width)
        self.key = part(linear(config.hidden, whole), 0, groups * width)
        self.value = part(linear(config.hidden, whole), 0, groups * width)
        self.project = part(linear(config.heads * width, config.hidden), 1, heads * width)
        self.add_angles(config, width)

    def add_feed_forward(self, hidden: int, width: int) -> None:
        """Add the weights of a gated feed-forward part of so many columns in all."""
        inner = self.group.share(width, "columns")
        self.gate = self.group.parted(linear(hidden, width), 0, inner)
        self.up = self.group.parted(linear(hidden, width), 0, inner)
        self.down = self.group.parted(linear(width, hidden), 1, inner)

    def add_angles(self, config: Any, width: int) -> None:
        """Add the angles by which positions turn ``width`` numbers."""
        # every block has the table of its own: a chain hands on one tensor, the hidden states
        frequencies = config.rotary_base ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(config.sequence), frequencies)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (batch, sequence, hidden) after the block."""
        x = x + self.attended(self.norm1(x))
        return x + self.fed(self.norm2(x))

    def attended(self, x: Tensor) -> Tensor:
        """Return what attention makes of ``x``."""
        made = self.group.products(x, [self.query, self.key, self.value])
        query, key, value = map(self.heads, made)
        return self.projected(self.rotated(self.normed(query, 0)), self.rotated(self.normed(key, 1)), value)

    def normed(self, heads: Tensor, which: int) -> Tensor:
        """Return queries (0) or keys (1) as attention takes them, before they are turned."""
        return heads

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the sum over all heads (batch, sequence, heads, width) of what these attend to, laid out likewise."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.group.added(attended.transpose(1, 2).flatten(2), self.project)

    def fed(self, x: Tensor) -> Tensor:
        """Return what the gated feed-forward part makes of ``x``."""
        gate, up = self.group.products(x, [self.gate, self.up])
        return self.group.added(gated(gate, up), self.down)

    def heads(self, x: Tensor) -> Tensor:
        """Return ``x`` (batch, sequence, heads x width) head by head."""
        return x.view(*x.shape[:2], -1, self.width)

    def rotated(self, x: Tensor) -> Tensor:
        """Turn each pair (i, i + width / 2) of ``x`` (batch, sequence, heads, width) by its place's angle."""
        cosine, sine = (table[: x.shape[1], None] for table in (self.cosine, self.sine))
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a product without biases."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


def _embedding(config: LlamaConfig) -> nn.Embedding:
    table = PartEmbedding(config.vocabulary, config.hidden, config.group)
    nn.init.normal_(table.weight, std=0.02)
    config.group.parted(table, 0, config.group.rows(config.vocabulary))
    return table


def network(
    config: LlamaConfig, seed: int, block: Callable[[int], nn.Module] | None = None
) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``embedding, block0, .., norm, head`` and the loss; ``block`` makes others than Llama's."""
    norm = partial(nn.RMSNorm, config.hidden, eps=config.epsilon)
    return decoder(config, seed, partial(_embedding, config), block or (lambda _: Block(config)), norm)


def _model(name: str) -> Model[LlamaConfig]:
    """Return the model whose sizes :data:`~pipeplan.zoo.text.sizes.TRANSFORMERS` has under ``name``."""
    sizes = TRANSFORMERS[name]
    assert isinstance(sizes, Llama)
    widths = sizes.hidden, sizes.heads, sizes.groups, sizes.feed_forward
    config = LlamaConfig(sizes.layers, *widths, sizes.vocabulary, sizes.sequence, sizes.rotary_base, tied=sizes.tied)
    return Model(config, network, text_of)


MODELS = {name: _model(name) for name, sizes in TRANSFORMERS.items() if isinstance(sizes, Llama)}
