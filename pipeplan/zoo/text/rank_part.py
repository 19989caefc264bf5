"""What does one rank of a tensor-parallel group have of a layer? Its products, and marks where the group exchanges.

Such a part has the shapes of one of ``tensor`` ranks. Of no rank in particular it is there to be estimated: an exchange
changes shapes, and only a clock that counts work takes note of it. In a run a rank has its own part of the weights of
the whole layer, and exchanges are what the run says (:func:`exchange_by`). Sources: Shoeybi et al., Megatron-LM (2019),
section 3, for tensor parallelism; Korthikanti et al., Reducing Activation Recomputation (2022), section 4.2.2, for
sequence parallelism; Liu et al., Ring Attention (2023) and Jacobs et al., DeepSpeed Ulysses (2023), for context
parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import BadInput
from ..model import Factory, Loss, chain
from .exchanges import GatheredProducts, exchange, exchanged
from .ring import ring_attention
from .token_losses import token_loss_named
from .vocabulary import looked_up, of_part, part_loss


class Shard(NamedTuple):
    """Which part of a tensor the rank at ``place`` of so many ``ranks`` has: ``own`` of each of the ``blocks`` that lie
    in a row along ``axis``, which has ``length`` in all. What the last ranks have more than there is are zeros."""

    axis: int
    length: int
    own: int
    blocks: int
    ranks: int
    place: int

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of ``whole``, in memory of its own."""
        split = torch.unflatten(whole.detach(), self.axis, (self.blocks, -1))
        first = min(self.place * self.own, split.shape[self.axis + 1])
        part = split.narrow(self.axis + 1, first, min(self.own, split.shape[self.axis + 1] - first))
        missing = list(part.shape)
        missing[self.axis + 1] = self.own - missing[self.axis + 1]
        return torch.cat([part, part.new_zeros(missing)], self.axis + 1).flatten(self.axis, self.axis + 1)

    def own_of(self, given: Tensor) -> Tensor:
        """Return the part of what has the length of a whole, and what has another as it is."""
        return self.of(given) if given.dim() > self.axis and given.shape[self.axis] == self.length else given

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return what all ranks have the ``parts`` of."""
        split = torch.cat([torch.unflatten(x, self.axis, (self.blocks, -1)) for x in parts], self.axis + 1)
        return split.narrow(self.axis + 1, 0, self.length // self.blocks).flatten(self.axis, self.axis + 1)


class Group(NamedTuple):
    """A group of ``ranks`` that run each layer together; with ``sequence_parallel`` what is between products is spread
    along the sequence as well. A part is that of the rank at ``place`` in a run, or of none in particular, to be
    estimated. ``experts`` ranks have each a part of the experts of a layer, and ``context`` of them each a part of
    every sequence, whose keys and values go round, or ``by_heads`` all of it for a part of the heads."""

    ranks: int = 1
    sequence_parallel: bool = False
    place: int | None = None
    experts: int = 1
    context: int = 1
    by_heads: bool = False

    @property
    def width(self) -> int:
        """How many ranks have parts of a layer, of its experts, or of a sequence."""
        return lcm(self.ranks * self.context, self.experts)

    def part(self, sequence: int) -> int:
        """Return a rank's part of a sequence: two, of all ranks' in a row, which make causal attention even."""
        if self.context > 1 and sequence % (2 * self.context):
            raise BadInput(f"context: {self.context} ranks don't share {sequence} tokens evenly in two parts per rank")
        return sequence // self.context

    def sent(self, key: Tensor, value: Tensor, times: int) -> None:
        """Send keys and values round, so many times as much."""
        both = key.new_empty(key.numel() + value.numel())
        exchange(both, "send", self.context, True, times, len(both), self.ranks)

    def attended(
        self, attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **how: Any
    ) -> Tensor:
        """Return what ``attention`` makes of queries, keys and values (batch, heads, sequence, width) of a part of the
        sequence."""
        if not self.by_heads:
            return ring_attention(query, key, value, self, how["is_causal"])
        if key.shape[1] % self.context:
            raise BadInput(f"context: {self.context} ranks don't share {key.shape[1]} heads of keys evenly")
        made = attention(*(self._turned(x, self.context) for x in (query, key, value)), **how)
        return self._turned(made, 1 / self.context)

    def _turned(self, x: Tensor, longer: float) -> Tensor:
        """Return a part of the sequence for all heads as all of it for a part of them, so many times as long."""
        batch, heads, sequence, width = x.shape
        rows = x.reshape(-1, width)
        out = exchanged(rows, self.context, "all-to-all", "all-to-all", 1, len(rows), self.ranks)
        return out.view(batch, round(heads / longer), round(sequence * longer), width)

    def mark(self, model: nn.Module) -> None:
        """Note at each weight of ``model`` how many of the group's ranks have the same; those of three dimensions are
        of experts."""
        for parameter in model.parameters() if self.width > self.ranks else ():
            parameter.copies = self.width // (self.experts if parameter.dim() == 3 else self.ranks)  # type: ignore[attr-defined]  # ours

    def traded(self, rows: Tensor, times: int = 1, length: int | None = None) -> Tensor:
        """Return what comes of ``rows`` (tokens, hidden) that each go to the ranks of so many experts, or back from
        them: as many as went, or ``length``."""
        if self.experts == 1:
            return rows
        return exchanged(rows, self.experts, "all-to-all", "all-to-all", times, len(rows) if length is None else length)

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
        made = GatheredProducts.apply(x, self.ranks, *(layer.weight for layer in layers))  # type: ignore[no-untyped-call]
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

    def added(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Return what all ranks' rows of ``layer`` make of what each has of ``x``."""
        if self.place is None:
            return self.summed(layer(x))
        made = self.summed(functional.linear(x, layer.weight))
        return made if layer.bias is None else made + layer.bias

    def looked_up(self, tokens: Tensor, table: nn.Embedding, find: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum over all ranks of what each finds of ``tokens`` in its rows of the ``table``; of a kind of its
        own by the way that ``find`` has."""
        if self.place is None:
            return self.summed(find(tokens))
        first, rows = self.place * len(table.weight), len(table.weight)
        if type(table).__mro__[1] is not nn.Embedding:
            own, others = of_part(tokens, first, rows)
            return self.summed(find(own).masked_fill(others.unsqueeze(-1), 0))
        unused = -1 if table.padding_idx is None else table.padding_idx - first
        return self.summed(looked_up(tokens, table.weight, first, unused if 0 <= unused < rows else -1))

    def loss(self, loss: Loss, vocabulary: int) -> Loss:
        """Return the loss on a rank's columns of the logits: the greatest, the sum and the target's are exchanged."""
        if self.ranks == 1:
            return loss
        if self.place is not None:
            return lambda output, target: self.token_loss(output.flatten(0, 1), target.flatten(), vocabulary)

        def of_part(output: Tensor, target: Tensor) -> Tensor:
            with torch.no_grad():
                for _ in range(3):
                    exchange(output.new_empty(output.shape[:2], dtype=torch.float32), "all-reduce", self.ranks)
            return loss(output, target)

        return of_part

    def token_loss(self, logits: Tensor, target: Tensor, vocabulary: int) -> Tensor:
        """Return the mean cross-entropy of all ranks' columns of logits (tokens, columns); of a ``vocabulary``."""
        assert self.place is not None, "only in a run are there values"
        return part_loss(logits, target, self.ranks, self.place * logits.shape[1], vocabulary)

    def parted(self, layer: Any, axis: int, own: int, blocks: int = 1) -> Any:
        """Leave of a product or a table what the rank has: ``own`` columns, or rows with ``axis`` 1, or rows of a
        table; as much of each of ``blocks`` that lie in a row."""
        if self.ranks == 1:
            return layer
        size = "num_embeddings" if isinstance(layer, nn.Embedding) else ("out_features", "in_features")[axis]
        setattr(layer, size, own)
        self.part_weight(layer, "weight", axis, own, blocks)
        if axis == 0 and getattr(layer, "bias", None) is not None:
            self.part_weight(layer, "bias", 0, own, blocks)
        return layer

    def part_weight(self, module: Any, name: str, axis: int, own: int, blocks: int = 1) -> None:
        """Leave ``own`` of a parameter along ``axis``; in a run the rank's, and ``shards`` of the module say which."""
        whole = getattr(module, name)
        if self.place is None:
            part = whole.new_empty([own if i == axis else size for i, size in enumerate(whole.shape)])
        else:
            shard = Shard(axis, whole.shape[axis], own // blocks, blocks, self.ranks, self.place)
            module.shards = {**getattr(module, "shards", {}), name: shard}
            part = shard.of(whole)
        setattr(module, name, nn.Parameter(part, whole.requires_grad))

    def _exchanged(self, x: Tensor, forward: str, backward: str) -> Tensor:
        return x if self.ranks == 1 else exchanged(x, self.ranks, forward, backward)


@dataclass(frozen=True, kw_only=True)
class Parted:
    """What one rank has of a network's layers. With ``tensor`` above 1 they are one rank's part, with
    ``sequence_parallel`` along the sequence, too; that of rank ``part`` in a run, where that isn't negative. With
    ``context`` above 1 they have such a part of the sequence (``by_heads``: in attention of the heads)."""

    tensor: int = 1
    sequence_parallel: bool = False
    part: int = -1
    context: int = 1
    by_heads: bool = False

    @property
    def group(self) -> Group:
        """The ranks that run each layer together."""
        place = None if self.tensor == 1 or self.part < 0 else self.part
        experts = getattr(self, "expert_ranks", 1)
        return Group(self.tensor, self.sequence_parallel, place, experts, self.context, self.by_heads)


class PartEmbedding(nn.Embedding):
    """A rank's rows of a table: the others' tokens are looked up as zeros."""

    def __init__(self, vocabulary: int, hidden: int, group: Group) -> None:
        super().__init__(vocabulary, hidden)
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of ``tokens`` (batch, sequence)."""
        return self.group.looked_up(tokens, self, super().forward)


class PartHead(nn.Linear):
    """A rank's columns of the logits."""

    def __init__(self, hidden: int, vocabulary: int, group: Group) -> None:
        super().__init__(hidden, vocabulary, bias=False)
        self.group = group
        nn.init.normal_(self.weight, std=0.02)
        group.parted(self, 0, group.rows(vocabulary))

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns (batch, sequence, columns)."""
        return self.group.products(x, [self])[0]


def decoder(
    config: Any, seed: int, embedding: Factory, block: Callable[[int], nn.Module], norm: Factory
) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``embedding, block0, .., norm, head`` and the loss of a model with such a configuration, of
    which ``block`` makes one by its number."""

    head = partial(PartHead, config.hidden, config.vocabulary, config.group)
    blocks = [(f"block{index}", partial(block, index)) for index in range(config.blocks)]
    layers: Any = chain([("embedding", embedding), *blocks, ("norm", norm), ("head", head)], seed)
    if config.tied:
        layers.head.weight = getattr(layers.embedding, "tokens", layers.embedding).weight
    config.group.mark(layers)
    return layers, config.group.loss(token_loss_named(config.loss), config.vocabulary)
