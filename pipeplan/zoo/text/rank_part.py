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
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import BadInput
from ..model import Factory, Loss, chain
from .exchanges import Exchanged, GatheredProducts, Traded, exchange
from .token_losses import token_loss_named

IGNORED = -100  # the target of a token that has no loss, as torch has it


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


class _LookedUp(torch.autograd.Function):
    """The rows of tokens in a part of a table that begins at row ``first``, zeros for the tokens of others."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first: int, unused: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.first, ctx.rows, ctx.unused = first, len(weight), unused
        own, others = _of_part(tokens, first, len(weight))
        return functional.embedding(own, weight).masked_fill_(others.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        own, others = _of_part(tokens, ctx.first, ctx.rows)
        gradient = gradients[0].masked_fill(others.unsqueeze(-1), 0)
        made = torch.ops.aten.embedding_dense_backward(gradient, own, ctx.rows, ctx.unused, False)
        return None, made, None, None


class _PartLoss(torch.autograd.Function):
    """The mean cross-entropy of a rank's columns of logits, of which ``first`` is the first and ``count`` are tokens'.

    The softmax is kept. Source: Megatron-LM, tensor_parallel/cross_entropy.py.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ranks: int, first: int, count: int) -> Tensor:
        ctx.save_for_backward(softmax := logits.float().clone(), target)
        ctx.first, ctx.dtype = first, logits.dtype
        softmax[:, count:] = float("-inf")
        softmax -= exchange(softmax.amax(-1), "greatest", ranks).unsqueeze(-1)
        own, others = _of_part(target, first, softmax.shape[1])
        chosen = softmax.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(others, 0)
        chosen = exchange(chosen, "all-reduce", ranks)
        whole = exchange(softmax.exp_().sum(-1), "all-reduce", ranks)
        softmax /= whole.unsqueeze(-1)
        counted = target != IGNORED
        loss: Tensor = ((whole.log() - chosen) * counted).sum() / counted.sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        softmax, target = ctx.saved_tensors
        own, others = _of_part(target, ctx.first, softmax.shape[1])
        counted = target != IGNORED
        softmax.scatter_add_(-1, own.unsqueeze(-1), others.to(softmax.dtype).unsqueeze(-1) - 1)
        softmax *= (counted * (gradients[0] / counted.sum())).unsqueeze(-1)
        return softmax.to(ctx.dtype), None, None, None, None


_PartLoss.__name__ = "cross_entropy_loss"  # as traces have torch's, by which a plan's layers are known


def _of_part(numbers: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the places of ``numbers`` in a part of so many ``rows``, and which of them are others' (at place 0)."""
    own = numbers - first
    others = (own < 0) | (own >= rows)
    return own.masked_fill(others, 0), others


class _Ring(torch.autograd.Function):
    """Attention of a rank's part of the sequence to all of it: keys and values go round, backward with the gradients.

    Of causal attention each rank has the first and the last of its parts alike, so that all have as much: its own in a
    triangle, and of every other's half. Saved is its own part. Source: TransformerEngine's context_parallel.py.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Group, causal: bool) -> Any:
        out, ctx.group, ctx.causal = None, group, causal
        for step in range(group.context):
            if step < group.context - 1:
                group.sent(key, value, 1)
            own = causal and not step
            part, statistics = _FLASH(query, *_seen(key, value, causal and not own), 0.0, own)
            out = part if out is None else torch.addcmul(out, part, statistics.unsqueeze(-1).to(part.dtype))
        ctx.save_for_backward(query, key, value, out, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, out, statistics = ctx.saved_tensors
        made = [torch.zeros_like(x) for x in (query, key, value)]
        for step in range(ctx.group.context):
            if step < ctx.group.context - 1:
                ctx.group.sent(key, value, 2)
            own = ctx.causal and not step
            seen = _seen(key, value, ctx.causal and not own)
            for x, more in zip(made, _FLASH_BACKWARD(*gradients, query, *seen, out, statistics, 0.0, own), strict=True):
                x[:, :, : more.shape[2]].add_(more)
        return *made, None, None


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _seen(key: Tensor, value: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """Return what queries see of another rank's keys and values."""
    rows = key.shape[2] // 2 if half else key.shape[2]
    return key[:, :, :rows], value[:, :, :rows]


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
            out: Tensor = _Ring.apply(query, key, value, self, how["is_causal"])  # type: ignore[no-untyped-call]  # torch's
            return out
        if key.shape[1] % self.context:
            raise BadInput(f"context: {self.context} ranks don't share {key.shape[1]} heads of keys evenly")
        made = attention(*(self._turned(x, self.context) for x in (query, key, value)), **how)
        return self._turned(made, 1 / self.context)

    def _turned(self, x: Tensor, longer: float) -> Tensor:
        """Return a part of the sequence for all heads as all of it for a part of them, so many times as long."""
        batch, heads, sequence, width = x.shape
        rows = x.reshape(-1, width)
        out = Traded.apply(rows, self.context, 1, len(rows), self.ranks)  # type: ignore[no-untyped-call]  # torch's
        turned: Tensor = out.view(batch, round(heads / longer), round(sequence * longer), width)
        return turned

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
        asked = self.experts, times, len(rows) if length is None else length
        out: Tensor = Traded.apply(rows, *asked)  # type: ignore[no-untyped-call]  # torch's
        return out

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
            own, others = _of_part(tokens, first, rows)
            return self.summed(find(own).masked_fill(others.unsqueeze(-1), 0))
        unused = -1 if table.padding_idx is None else table.padding_idx - first
        found = _LookedUp.apply(tokens, table.weight, first, unused if 0 <= unused < rows else -1)  # type: ignore[no-untyped-call]
        return self.summed(found)

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
        first, columns = self.place * logits.shape[1], logits.shape[1]
        count = max(0, min(columns, vocabulary - first))
        loss: Tensor = _PartLoss.apply(logits, target, self.ranks, first, count)  # type: ignore[no-untyped-call]  # torch's
        return loss

    def take(self, part: nn.Module, whole: nn.Module) -> None:
        """Give ``part`` its own of the weights of ``whole``, and say in ``shards`` of its modules which that is.

        Of a module whose ``blocks`` lie in a row it is as much of each.
        """
        wholes = dict(whole.named_modules(remove_duplicate=False))
        made: dict[nn.Parameter, nn.Parameter] = {}
        for path, module in part.named_modules(remove_duplicate=False):
            shards: dict[str, Shard] = {}
            for name, own in list(module._parameters.items()):
                given = wholes[path]._parameters[name]
                if own is None or given is None:
                    continue
                padded = 0 if isinstance(module, PartEmbedding | PartHead) else None  # perhaps to as many as there are
                axis = next((i for i, size in enumerate(own.shape) if size != given.shape[i]), padded)
                if axis is not None:
                    blocks: Any = getattr(module, "blocks", 1)
                    size = own.shape[axis] // blocks
                    shards[name] = self.shard(given, axis, size, blocks)
                if given not in made and axis is not None:
                    made[given] = nn.Parameter(shards[name].of(given), given.requires_grad)
                module._parameters[name] = made.setdefault(given, given)
            if shards:
                module.__dict__["shards"] = shards

    def shard(self, whole: Tensor, axis: int, own: int, blocks: int = 1) -> Shard:
        """Return which part of ``whole`` the rank has that has ``own`` of each block along ``axis``."""
        assert self.place is not None, "only in a run are there values"
        return Shard(axis, whole.shape[axis], own, blocks, self.ranks, self.place)

    def _exchanged(self, x: Tensor, forward: str, backward: str) -> Tensor:
        if self.ranks == 1:
            return x
        out: Tensor = Exchanged.apply(x, self.ranks, forward, backward)  # type: ignore[no-untyped-call]  # torch's
        return out


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
        super().__init__(group.rows(vocabulary), hidden)
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of ``tokens`` (batch, sequence)."""
        return self.group.looked_up(tokens, self, super().forward)


class PartHead(nn.Linear):
    """A rank's columns of the logits."""

    def __init__(self, hidden: int, vocabulary: int, group: Group) -> None:
        super().__init__(hidden, group.rows(vocabulary), bias=False)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns (batch, sequence, columns)."""
        return self.group.products(x, [self])[0]


def decoder(
    config: Any,
    seed: int,
    parts: tuple[Factory, Callable[[int], nn.Module], Factory],
    network: Callable[[Any, int], Any],
) -> tuple[nn.Sequential, Loss]:
    """Return the layers ``embedding, block0, .., norm, head`` and the loss of a model with such a configuration.

    ``parts`` make an embedding, a block by its number and a norm; of a rank in a run they get its part of a whole
    ``network``.
    """
    embedding, block, norm = parts

    def head() -> PartHead:
        linear = PartHead(config.hidden, config.vocabulary, config.group)
        nn.init.normal_(linear.weight, std=0.02)
        return linear

    blocks = [(f"block{index}", partial(block, index)) for index in range(config.blocks)]
    layers: Any = chain([("embedding", embedding), *blocks, ("norm", norm), ("head", head)], seed)
    if config.tied:
        layers.head.weight = getattr(layers.embedding, "tokens", layers.embedding).weight
    if config.group.place is not None:
        config.group.take(layers, network(replace(config, tensor=1), seed)[0])
    config.group.mark(layers)
    return layers, config.group.loss(token_loss_named(config.loss), config.vocabulary)
