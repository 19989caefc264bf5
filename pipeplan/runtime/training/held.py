"""What does a stage keep of a microbatch between its forward and its backward, and how may it wait in host memory?

What a piece of a stage has saved goes home while the next piece runs, in a stream of its own, and comes back while the
piece behind it runs backward. So what two pieces keep is on the device at a time, as the memory model counts. What is
on its way stays where it is until the device's own stream has waited for it: then its memory is that stream's again,
and the host need not ask when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...errors import RunFailed
from ...integers import ceil_div
from ..measure.recorder import HeldBytes, Holding
from ..model.pieces import Piece, Saved
from .repeatable import Before
from .update.offload import Ways, event_on, host_block

ALIGNED: Final = 16  # bytes, of each storage in a block: of the largest numbers


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


class Waiting:
    """What waits in host memory of all stages of a rank, ``held_bytes`` now, and the ways there and back.

    ``activations`` counts what of it is on the ``device``, and at most at home.
    """

    def __init__(self, device: torch.device, activations: HeldBytes) -> None:
        self._device, self._activations = device, activations
        self._ways = Ways()
        self._free: dict[int, list[Tensor]] = {}  # blocks by size
        self._leaving: tuple[Any, list[tuple[Tensor, int]], Holding] | None = None
        self.held_bytes = 0

    def send(self, held: Held, stays: Callable[[Tensor], bool]) -> None:
        """Let what a piece has saved go home, but for what ``stays``, behind what the device has been given so far."""
        self.settle()
        assert held.saved is not None, "what is to be sent has been saved"
        storages, tensors = held.saved.sent(lambda x: x.device != self._device or stays(x))
        *starts, end = accumulate((ceil_div(x.nbytes(), ALIGNED) * ALIGNED for x in storages), initial=0)
        free = self._free.get(end)
        block = free.pop() if free else host_block(end, self._device)
        parts = [block[start : start + x.nbytes()] for start, x in zip(starts, storages, strict=True)]
        held.away = Parcel(block, parts)
        made = event_on(self._device)
        with self._ways.on("home", self._device, [made]):
            for part, storage in zip(parts, storages, strict=True):
                there = torch.empty(0, dtype=torch.uint8, device=self._device)
                part.copy_(there.set_(storage), non_blocking=True)
            at_home = event_on(self._device)
        keys = [x._cdata for x in storages if x._cdata in held.holding]
        self._leaving = at_home, tensors, {key: held.holding.pop(key) for key in keys}
        self.held_bytes += sum(map(len, parts))
        self._activations.most_at_home = max(self._activations.most_at_home, self.held_bytes)

    def settle(self) -> None:
        """Let the device wait for what is on its way home, and forget that; RunFailed where it has changed."""
        if self._leaving is None:
            return
        (event, tensors, holding), self._leaving = self._leaving, None
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        for tensor, version in tensors:
            if tensor._version != version:
                raise RunFailed(
                    f"a tensor of shape {tuple(tensor.shape)} was changed in place while it went to host memory; let "
                    "the plan keep its activations"
                )
        self._activations.release(holding)

    def fetch(self, held: Held, counted: bool) -> None:
        """Let what a piece has at home come back, beside what the device is given from now on."""
        if held.away is None or held.away.coming:
            return
        self.settle()
        parcel = held.away
        parcel.coming = [torch.empty(len(x), dtype=torch.uint8, device=self._device) for x in parcel.parts]
        with self._ways.on("there", self._device, [event_on(self._device)]):
            for there, home in zip(parcel.coming, parcel.parts, strict=True):
                there.copy_(home, non_blocking=True)
            parcel.event = event_on(self._device)
        for tensor in parcel.coming if counted else ():
            self._activations.hold(held.holding, tensor)

    def arrive(self, held: Held) -> None:
        """Let the device wait for what comes back, and put it where it was."""
        parcel, held.away = held.away, None
        if parcel is None:
            return
        assert held.saved is not None, "what comes back was sent"
        if parcel.event is not None:
            torch.cuda.current_stream(self._device).wait_event(parcel.event)
        held.saved.returned([x.untyped_storage() for x in parcel.coming])
        self._free.setdefault(len(parcel.block), []).append(parcel.block)  # copies to it come behind that
        self.held_bytes -= sum(map(len, parcel.parts))
