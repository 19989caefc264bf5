"""What does attention of a rank's part of the sequence see of the others' parts? Keys and values, which go round."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Ring(torch.autograd.Function):
    """Attention of a rank's part of the sequence to all of it: keys and values go round, backward with the gradients.

    Of causal attention each rank has the first and the last of its parts alike, so that all have as much: its own in a
    triangle, and of every other's half. Saved is its own part. Source: TransformerEngine's context_parallel.py.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, causal: bool) -> Any:
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


def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: Any, causal: bool) -> Tensor:
    """Return what queries of a part (batch, heads, sequence, width) attend to, of all parts of the ``group``."""
    out: Tensor = _Ring.apply(query, key, value, group, causal)  # type: ignore[no-untyped-call]  # torch's
    return out
