"""What does one rank of a tensor-parallel group have of a layer? Its products, and marks where the group exchanges.

Such a part has the shapes of one of ``tensor`` ranks and is there to be estimated: an exchange changes shapes, and only
a clock that counts work takes note of it. Sources: Shoeybi et al., Megatron-LM (2019), section 3, for tensor
parallelism; Korthikanti et al., Reducing Activation Recomputation (2022), section 4.2.2, for sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import BadInput
from ..model import Factory, Loss, chain
from .token_losses import token_loss_named


@torch.library.custom_op("pipeplan::exchange", mutates_args=())
def exchange(x: Tensor, kind: str, ranks: int, hidden: bool = False) -> Tensor:
    """Return ``x`` (batch, sequence, ..) as an exchange among so many ``ranks`` leaves it: ``all-reduce``, or along the
    sequence ``all-gather`` or ``reduce-scatter``. A ``hidden`` one goes on beside products of the same pass."""
    raise RuntimeError(f"this is the part of one of {ranks} tensor-parallel ranks; it is there to be estimated")


@exchange.register_fake
def _shapes(x: Tensor, kind: str, ranks: int, hidden: bool = False) -> Tensor:
    sequence = {"all-gather": x.shape[1] * ranks, "reduce-scatter": x.shape[1] // ranks}.get(kind, x.shape[1])
    return x.new_empty((x.shape[0], sequence, *x.shape[2:]))


class _Exchanged(torch.autograd.Function):
    """One exchange forward and another backward, ``""`` for none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, forward: str, backward: str) -> Tensor:
        ctx.asked = ranks, backward
        return exchange(x, forward, ranks) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ranks, kind = ctx.asked
        return exchange(gradients[0], kind, ranks) if kind else gradients[0], None, None, None


class _GatheredProducts(torch.autograd.Function):
    """Products of what is gathered along the sequence, which saves the part and gathers again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.ranks = ranks
        whole = exchange(x, "all-gather", ranks)
        return tuple(functional.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        whole = exchange(x, "all-gather", ctx.ranks, True) if any(ctx.needs_input_grad[2:]) else x
        of_input = None
        if ctx.needs_input_grad[0]:
            summed = sum(gradient @ weight for gradient, weight in zip(gradients, weights, strict=True))
            assert isinstance(summed, Tensor)
            of_input = exchange(summed, "reduce-scatter", ctx.ranks)
        of_weights = (
            gradient.flatten(0, 1).t() @ whole.flatten(0, 1) if needed else None
            for gradient, needed in zip(gradients, ctx.needs_input_grad[2:], strict=True)
        )
        return of_input, None, *of_weights


class Group(NamedTuple):
    """A group of ``ranks`` that run each layer together; with ``sequence_parallel`` what is between products is spread
    along the sequence as well."""

    ranks: int = 1
    sequence_parallel: bool = False

    def share(self, count: int, what: str) -> int:
        """Return a rank's share of ``count`` columns, heads or rows; BadInput where they don't divide."""
        if count % self.ranks:
            raise BadInput(f"tensor: {self.ranks} ranks don't divide {count} {what}")
        return count // self.ranks

    def rows(self, vocabulary: int) -> int:
        """Return a rank's rows of a vocabulary, which is padded to a multiple of 128 rows a rank."""
        return vocabulary if self.ranks == 1 else -(-vocabulary // (128 * self.ranks)) * 128

    def products(self, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """Return what a rank's columns of ``layers`` make of ``x``, of which all ranks have a part or the whole."""
        if not self.sequence_parallel or self.ranks == 1:
            given = self.given(x)
            return tuple(functional.linear(given, layer.weight, layer.bias) for layer in layers)
        made = _GatheredProducts.apply(x, self.ranks, *(layer.weight for layer in layers))  # type: ignore[no-untyped-call]
        return tuple(one if layer.bias is None else one + layer.bias for one, layer in zip(made, layers, strict=True))

    def given(self, x: Tensor) -> Tensor:
        """Return what all products with columns read of ``x``, of which all ranks have a part or the whole."""
        if self.sequence_parallel:
            return self._exchanged(x, "all-gather", "reduce-scatter")
        return self._exchanged(x, "", "all-reduce")

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, of products with a rank's rows or of rows that another rank looks up."""
        if self.sequence_parallel:
            return self._exchanged(x, "reduce-scatter", "all-gather")
        return self._exchanged(x, "all-reduce", "")

    def loss(self, loss: Loss) -> Loss:
        """Return the loss on a rank's columns of the logits: the greatest, the sum and the target's are exchanged."""
        if self.ranks == 1:
            return loss

        def of_part(output: Tensor, target: Tensor) -> Tensor:
            with torch.no_grad():
                for _ in range(3):
                    exchange(output.new_empty(output.shape[:2], dtype=torch.float32), "all-reduce", self.ranks)
            return loss(output, target)

        return of_part

    def _exchanged(self, x: Tensor, forward: str, backward: str) -> Tensor:
        if self.ranks == 1:
            return x
        out: Tensor = _Exchanged.apply(x, self.ranks, forward, backward)  # type: ignore[no-untyped-call]  # torch's
        return out


class PartEmbedding(nn.Embedding):
    """A rank's rows of a table: the others' tokens are looked up as zeros."""

    def __init__(self, vocabulary: int, hidden: int, group: Group) -> None:
        super().__init__(group.rows(vocabulary), hidden)
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of ``tokens`` (batch, sequence)."""
        return self.group.summed(super().forward(tokens))


class PartHead(nn.Linear):
    """A rank's columns of the logits."""

    def __init__(self, hidden: int, vocabulary: int, group: Group) -> None:
        super().__init__(hidden, group.rows(vocabulary), bias=False)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns (batch, sequence, columns)."""
        return self.group.products(x, [self])[0]


def decoder(config: Any, seed: int, embedding: Factory, block: Factory, norm: Factory) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``embedding, block0, .., norm, head`` and the loss of a model with such a configuration."""

    def head() -> PartHead:
        linear = PartHead(config.hidden, config.vocabulary, config.group)
        nn.init.normal_(linear.weight, std=0.02)
        return linear

    blocks = [(f"block{index}", block) for index in range(config.blocks)]
    layers: Any = chain([("embedding", embedding), *blocks, ("norm", norm), ("head", head)], seed)
    if config.tied:
        layers.head.weight = getattr(layers.embedding, "tokens", layers.embedding).weight
    return layers, config.group.loss(token_loss_named(config.loss))
