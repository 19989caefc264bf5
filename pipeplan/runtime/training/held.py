"""What does a stage keep of a microbatch between its forward and its backward?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..measure.recorder import Holding
from ..model.pieces import Piece, Saved
from .repeatable import Before


@dataclass
class Parcel:
    """What a piece has in host memory: parts of a ``block``. What is ``coming`` of them is there at the ``event``."""

    block: Tensor
    parts: list[Tensor]
    coming: list[Tensor] = field(default_factory=list)
    event: Any = None


@dataclass
class Held:
    """What a piece keeps of one microbatch.

    A stored piece keeps the ends of its graph, by value, a recomputed one what it read and the buffers that it changes
    as they were. ``gradients`` is where the gradients of the values that ``want`` one arrive, and of those at which
    graphs end ``inner``. What was ``saved`` may be ``away``, in host memory, where a recomputed piece saves what it
    read.
    """

    want: tuple[int, ...]
    ends: dict[int, GradientEdge] = field(default_factory=dict)
    inner: dict[int, GradientEdge] = field(default_factory=dict)
    again: tuple[list[Tensor], Before] | None = None
    gradients: dict[int, Tensor] = field(default_factory=dict)
    holding: Holding = field(default_factory=dict)
    saved: Saved | None = None
    away: Parcel | None = None

    def begun(self) -> dict[int, tuple[GradientEdge, Tensor]]:
        """Take and return the ends of the ``inner`` graphs, by value, with the gradients that have come there."""
        inner, self.inner = self.inner, {}
        return {value: (edge, self.gradients.pop(value)) for value, edge in inner.items() if value in self.gradients}


class Entry(torch.autograd.Function):
    """The identity at a piece's entry, which catches the gradient.

    A leaf would do the same, but keep the input in memory even where no operation saves it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, caught: dict[int, Tensor], value: int) -> Tensor:
        """Return ``x``, whose gradient will be ``caught`` as that of ``value``."""
        ctx.caught, ctx.value = caught, value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        """Catch the gradient."""
        ctx.caught[ctx.value] = gradient
        return None, None, None, None


@dataclass
class InFlight:
    """What a stage keeps of one microbatch between its forward and its backward."""

    microbatch: int
    target: Tensor | None
    pieces: list[Held]
    counted: bool


def ends_of(piece: Piece, made: Sequence[Tensor]) -> dict[int, GradientEdge]:
    """Return where the graphs of what a piece made end, for what has one."""
    return {v: get_gradient_edge(out) for v, out in zip(piece.makes, made, strict=True) if out.requires_grad}
