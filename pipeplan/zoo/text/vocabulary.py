"""What does a rank make of tokens whose vocabulary it has a part of? Their vectors, and their loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .exchanges import exchange

IGNORED = -100  # the target of a token that has no loss, as torch has it


class _LookedUp(torch.autograd.Function):
    """The rows of tokens in a part of a table that begins at row ``first``, zeros for the tokens of others."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first: int, unused: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.first, ctx.rows, ctx.unused = first, len(weight), unused
        own, others = of_part(tokens, first, len(weight))
        return functional.embedding(own, weight).masked_fill_(others.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        own, others = of_part(tokens, ctx.first, ctx.rows)
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
        own, others = of_part(target, first, softmax.shape[1])
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
        own, others = of_part(target, ctx.first, softmax.shape[1])
        counted = target != IGNORED
        softmax.scatter_add_(-1, own.unsqueeze(-1), others.to(softmax.dtype).unsqueeze(-1) - 1)
        softmax *= (counted * (gradients[0] / counted.sum())).unsqueeze(-1)
        return softmax.to(ctx.dtype), None, None, None, None


_PartLoss.__name__ = "cross_entropy_loss"  # as traces have torch's, by which a plan's layers are known


def of_part(numbers: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the places of ``numbers`` in a part of so many ``rows``, and which of them are others' (at place 0)."""
    own = numbers - first
    others = (own < 0) | (own >= rows)
    return own.masked_fill(others, 0), others


def looked_up(tokens: Tensor, weight: Tensor, first: int, unused: int) -> Tensor:
    """Return the rows of ``tokens`` in a part of a table from row ``first`` on; row ``unused`` of it gets no gradient
    (-1: all do)."""
    found: Tensor = _LookedUp.apply(tokens, weight, first, unused)  # type: ignore[no-untyped-call]  # torch's
    return found


def part_loss(logits: Tensor, target: Tensor, ranks: int, first: int, vocabulary: int) -> Tensor:
    """Return the mean cross-entropy of all ranks' columns of logits, of which these (tokens, columns) begin at
    ``first`` of a ``vocabulary``."""
    count = max(0, min(logits.shape[1], vocabulary - first))
    loss: Tensor = _PartLoss.apply(logits, target, ranks, first, count)  # type: ignore[no-untyped-call]  # torch's
    return loss
