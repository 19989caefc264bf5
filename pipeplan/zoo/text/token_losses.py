"""How does the cross-entropy of a language model run: as torch's own kernels, step by step, or as one kernel?"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import BadInput
from ..model import Loss, token_loss


class ExactLoss(torch.autograd.Function):
    """The mean cross-entropy in fp32: the softmax is made in the forward, step by step, and kept for the backward.

    Source: Megatron-LM, tensor_parallel/cross_entropy.py, on one GPU.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits (tokens, vocabulary)."""
        exact = logits.float()
        exact = exact - exact.amax(-1, keepdim=True)
        chosen = exact.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        softmax = exact.exp()
        whole = softmax.sum(-1)
        softmax.div_(whole.unsqueeze(-1))
        ctx.save_for_backward(softmax, target)
        ctx.dtype = logits.dtype
        return (whole.log() - chosen).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits, the softmax less one at the target, by one kernel for all of them."""
        softmax, target = ctx.saved_tensors
        softmax.scatter_add_(-1, target.unsqueeze(-1), -torch.ones_like(target.unsqueeze(-1), dtype=softmax.dtype))
        found = torch.empty_like(softmax, dtype=ctx.dtype)
        return torch.mul(softmax, gradients[0] / len(target), out=found), None


class FusedLoss(torch.autograd.Function):
    """The mean cross-entropy of which one kernel makes loss and gradient, reading logits once and keeping no softmax.

    The gradient, in the logits' type, is made in the forward and kept; the backward scales it. Source: Hsu et al.,
    Liger Kernel (2024), section 3.2, but in memory of its own.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits (tokens, vocabulary)."""
        loss: Tensor
        loss, gradient = _loss_and_gradient(logits, target)
        ctx.save_for_backward(gradient)
        ctx.count = len(target)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits."""
        (gradient,) = ctx.saved_tensors
        found: Tensor = gradient * (gradients[0] / ctx.count)
        return found, None


ROWS = 256  # tokens whose softmax exists at a time where the kernel is played with several


@torch.library.custom_op("pipeplan::token_loss", mutates_args=())
def _loss_and_gradient(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss in fp32, and the gradient of the losses' sum: one operation for whoever counts them."""
    total = torch.zeros((), device=logits.device)
    gradient = torch.empty_like(logits)
    for first in range(0, len(logits), ROWS):
        rows, chosen, out = (x[first : first + ROWS] for x in (logits, target, gradient))
        log = rows.float().log_softmax(-1)
        total -= log.gather(-1, chosen.unsqueeze(-1)).sum()
        out.copy_(log.exp_().scatter_add_(-1, chosen.unsqueeze(-1), -torch.ones_like(log[:, :1])))
    return total / len(target), gradient


@_loss_and_gradient.register_fake
def _shapes(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty((), dtype=torch.float32), torch.empty_like(logits)


def _of_tokens(kind: Any, output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a ``kind`` of logits (batch, sequence, vocabulary) and token numbers."""
    loss: Tensor = kind.apply(output.flatten(0, 1), target.flatten())
    return loss


exact_token_loss, fused_token_loss = partial(_of_tokens, ExactLoss), partial(_of_tokens, FusedLoss)
fused_token_loss.takes_half = True  # type: ignore[attr-defined]  # read by runtime/model/network.py

TOKEN_LOSSES: dict[str, Loss] = {"same": token_loss, "fp32": exact_token_loss, "fused": fused_token_loss}
"""By how it runs, on logits of 16 bits: as torch's own on logits in fp32, likewise but step by step as Megatron-LM has
it, or as one kernel on the logits as they are."""


def token_loss_named(name: str) -> Loss:
    """Return the loss that runs so; BadInput for a name of none."""
    if name not in TOKEN_LOSSES:
        raise BadInput(f"loss: {name!r} isn't one of {', '.join(TOKEN_LOSSES)}")
    return TOKEN_LOSSES[name]
