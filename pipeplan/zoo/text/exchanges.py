"""What do the ranks that run a layer together exchange inside of it? An operation that runs and estimates both see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_by: list[Callable[[Tensor, str], Tensor]] = []  # what exchanges in this process


def exchange_by(does: Callable[[Tensor, str], Tensor]) -> None:
    """Let exchanges of this process be what ``does`` returns for a tensor and a kind, in new memory."""
    _by[:] = [does]


@torch.library.custom_op("pipeplan::exchange", mutates_args=())
def exchange(
    x: Tensor, kind: str, ranks: int, hidden: bool = False, times: int = 1, rows: int = 0, apart: int = 1
) -> Tensor:
    """Return ``x`` (batch, sequence, ..) as an exchange among so many ``ranks`` leaves it, each so far ``apart``:
    ``all-reduce``, or along the sequence ``all-gather`` or ``reduce-scatter``; ``greatest`` is an all-reduce, too, and
    ``all-to-all`` and ``send`` are of rows, each so many ``times``, and leave so many. A ``hidden`` one goes on beside
    products of the same pass, or a ``send`` beside the attention that follows it."""
    if _by:
        return _by[0](x, kind)
    raise RuntimeError(f"this is the part of one of {ranks} tensor-parallel ranks; it is there to be estimated")


@exchange.register_fake
def _shapes(
    x: Tensor, kind: str, ranks: int, hidden: bool = False, times: int = 1, rows: int = 0, apart: int = 1
) -> Tensor:
    if kind in ("all-to-all", "send"):
        return x.new_empty((rows, *x.shape[1:]))
    if kind not in ("all-gather", "reduce-scatter"):
        return x.new_empty(x.shape)
    return x.new_empty((x.shape[0], x.shape[1] * ranks if kind == "all-gather" else x.shape[1] // ranks, *x.shape[2:]))


class _Exchanged(torch.autograd.Function):
    """One exchange forward and another backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranks: int, forward: str, backward: str, times: int, rows: int, apart: int
    ) -> Tensor:
        ctx.asked, ctx.kind = (ranks, False, times, rows and len(x), apart), backward
        return exchange(x, forward, ranks, False, times, rows, apart) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = exchange(gradients[0], ctx.kind, *ctx.asked) if ctx.kind else gradients[0]
        return found, *[None] * 6


def exchanged(
    x: Tensor, ranks: int, forward: str, backward: str, times: int = 1, rows: int = 0, apart: int = 1
) -> Tensor:
    """Return what an exchange of ``x`` leaves, whose gradient another exchanges, ``""`` for none: see :func:`exchange`;
    of those of rows the gradient has as many as came."""
    out: Tensor = _Exchanged.apply(x, ranks, forward, backward, times, rows, apart)  # type: ignore[no-untyped-call]
    return out


class GatheredProducts(torch.autograd.Function):
    """Products of what is gathered along the sequence, which saves the part and gathers again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, *weights: Tensor) -> tuple[Tensor, ...]:
        """Exchange."""
        ctx.save_for_backward(x, *weights)
        ctx.ranks = ranks
        whole = exchange(x, "all-gather", ranks)
        return tuple(functional.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Exchange the gradients."""
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
