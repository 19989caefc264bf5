"""One stage on one rank: forwards and backwards of microbatches, with recomputed segments and several in flight.

A stage is cut into pieces: runs of stored layers and recomputed segments. Each piece has a graph of its own, so a
backward goes piece by piece and frees each as soon as it is done, which is how the memory model counts (ALGORITHMS
section 3). A recomputed piece keeps its input and the random state, and runs again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..errors import RunFailed
from .account import Account, Holding
from .device import CPU, on_host, random_state, with_random_state
from .model import TensorSpec
from .network import loss_value
from .profiler import Loss
from .renewal import renewing
from .versions import Versions


@dataclass(frozen=True)
class Piece:
    """Neighbouring layers that are stored or recomputed together; the loss, if it is among them, comes last."""

    modules: tuple[nn.Module, ...]
    loss: Loss | None
    recompute: bool

    def run(self, x: Tensor, target: Tensor | None) -> Tensor:
        """Return the output for input ``x``."""
        for module in self.modules:
            x = module(x)
        if self.loss is not None:
            assert target is not None, "the stage with the loss gets targets"
            x = loss_value(self.loss, x, target)
        return x


@dataclass
class Held:
    """What a piece keeps of one microbatch.

    A stored piece keeps the end of its graph, a recomputed one its input and the random state. ``gradient`` is where
    the gradient of the input arrives, if anybody asks for it.
    """

    wants_gradient: bool
    end: GradientEdge | None = None
    again: tuple[Tensor, Tensor] | None = None
    gradient: list[Tensor] = field(default_factory=list)
    holding: Holding = field(default_factory=dict)


class _Entry(torch.autograd.Function):
    """The identity at a piece's entry, which catches the gradient.

    A leaf would do the same, but keep the input in memory even where no operation saves it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, caught: list[Tensor]) -> Tensor:
        ctx.caught = caught
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.caught.append(gradient)
        return None, None, None


@dataclass
class InFlight:
    """What a stage keeps of one microbatch between its forward and its backward."""

    version: int
    target: Tensor | None
    pieces: list[Held]
    accounted: bool


def _at_once(action: Callable[[], None]) -> None:
    action()


class StageModule:
    """Layers ``start..stop`` of the model, with ``checkpoint`` segments of it recomputed.

    ``layers`` are the stage's own, without the loss; ``loss`` is None on all stages but the one that holds it. The
    gradient of the loss is divided by ``divisor``, the microbatches of an update, so that updates see means, and
    multiplied by a loss scale if there is one. With
    ``renews`` the version of a backward may be another than its forward's: stored layers are differentiated at the
    stored activations, recomputed ones run again with the backward's version. The layers are on ``device``;
    ``later(action)`` does what must wait until the device has computed what it was given so far.
    """

    def __init__(
        self,
        index: int,
        start: int,
        stop: int,
        layers: Sequence[nn.Module],
        loss: Loss | None,
        checkpoint: Sequence[tuple[int, int]],
        versions: Versions,
        account: Account,
        divisor: int,
        boundaries: tuple[TensorSpec, TensorSpec | None],
        renews: bool = False,
        device: torch.device = CPU,
        later: Callable[[Callable[[], None]], None] = _at_once,
    ) -> None:
        self.index = index
        self.versions = versions
        self.losses: dict[int, float] = {}
        self._account = account
        self._device, self._later = device, later
        self._divisor = divisor
        self._seed = torch.tensor(1 / divisor, dtype=torch.float64, device=device)
        self._anchor = torch.zeros((), requires_grad=True, device=device)  # makes autograd follow what enters
        self._input, self._output = boundaries
        self._pieces = _pieces(start, stop, layers, loss, checkpoint)
        self._modules = layers
        self._renews = renews
        self._fixed: set[int] | None = None  # storages of buffers and frozen weights
        self._in_flight: dict[int, InFlight] = {}

    @property
    def takes_targets(self) -> bool:
        """Whether the stage computes the loss."""
        return self._pieces[-1].loss is not None

    def forward(self, microbatch: int, version: int, x: Tensor, target: Tensor | None, accounted: bool) -> Tensor:
        """Return what the stage puts out for ``x``; it keeps what the backward needs.

        Of the loss it puts out the value, which also goes into :attr:`losses`.
        """
        self._check(microbatch, "gets", x, self._input)
        self.versions.install(version)
        flight = InFlight(version, target, [], accounted)
        wants_gradient = self.index > 0  # the stage before waits for one, whether or not it trains anything
        for piece in self._pieces:
            held = Held(wants_gradient)
            flight.pieces.append(held)
            if piece.recompute:
                held.again = x, random_state(self._device)
                if accounted:
                    self._account.hold(held.holding, x)
                with torch.no_grad():
                    x = piece.run(x, target)
                wants_gradient = wants_gradient or _trains(piece)
            else:
                with self._renewing(held.holding, accounted) if self._renews else self._saving(held.holding, accounted):
                    out = piece.run(self._entered(x, held), target)
                held.end = get_gradient_edge(out) if out.requires_grad else None
                wants_gradient = out.requires_grad
                x = out.detach()
                del out  # from here on nothing but autograd keeps its graph
        self._in_flight[microbatch] = flight
        self.versions.released(version)
        if self.takes_targets:
            self._keep_loss(microbatch, x, trains=True)
            self._seed = self._seed.to(x.dtype)
        elif self._output is not None:
            self._check(microbatch, "puts out", x, self._output)
        return x

    def scale_loss(self, scale: float) -> None:
        """Multiply the gradients of the backwards to come by ``scale``."""
        self._seed = torch.tensor(scale / self._divisor, dtype=torch.float64, device=self._device)

    def evaluate(self, microbatch: int, version: int, x: Tensor, target: Tensor | None) -> Tensor:
        """Return what the stage puts out for ``x`` without keeping anything; the modules are in evaluation mode."""
        self._check(microbatch, "gets", x, self._input)
        self.versions.install(version)
        with torch.no_grad():
            for piece in self._pieces:
                x = piece.run(x, target)
        if self.takes_targets:
            self._keep_loss(microbatch, x, trains=False)
        elif self._output is not None:
            self._check(microbatch, "puts out", x, self._output)
        return x

    def backward(self, microbatch: int, version: int, gradient: Tensor | None, covers: int = 1) -> Tensor | None:
        """Return the gradient of the stage's input (None for the first stage) from that of its output.

        ``gradient`` is None where the stage computes the loss. Parameters' gradients are added to what is there. A
        backward that ``covers`` several microbatches, up to ``microbatch``, takes and returns their gradients stacked.
        It is one pass of autograd through all of them, unless the stage recomputes: then, for memory, one by one.
        """
        flights = [self._in_flight.pop(m) for m in range(microbatch - covers + 1, microbatch + 1)]
        gradients = [gradient] * covers if gradient is None or covers == 1 else list(gradient.unbind())
        together = covers if not any(piece.recompute for piece in self._pieces) else 1
        self.versions.install(version)
        self.versions.attach_gradient(version)
        found: list[Tensor | None] = []
        for first in range(0, covers, together):
            found += self._through(flights[first : first + together], gradients[first : first + together])
        self.versions.detach_gradient(version)
        self.versions.released(version)
        entered = [x for x in found if x is not None]
        if not entered:
            return None
        return entered[0] if covers == 1 else torch.stack(entered)

    def _through(self, flights: Sequence[InFlight], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run all pieces backward, each for all ``flights`` at once; return the gradients of what entered."""
        for piece in reversed(self._pieces):
            everybodys = [flight.pieces.pop() for flight in flights]
            ends: list[GradientEdge] = []
            starts: list[Tensor | None] = []
            for flight, held, gradient in zip(flights, everybodys, gradients, strict=True):
                end = held.end if held.again is None else self._recomputed(piece, held, *held.again, flight)
                if end is not None:
                    ends.append(end)
                    starts.append(self._seed if piece.loss is not None else gradient)
            if ends:
                torch.autograd.backward(ends, starts)
            del ends
            if any(held.wants_gradient and not held.gradient for held in everybodys):
                raise RunFailed(f"no gradient comes back to the input of {_names(piece)}")
            gradients = [held.gradient[0] if held.wants_gradient else None for held in everybodys]
            for held in everybodys:
                self._account.release(held.holding)
        return gradients

    def _recomputed(self, piece: Piece, held: Held, x: Tensor, random: Tensor, flight: InFlight) -> GradientEdge | None:
        """Run a piece again on its input ``x``, with the randomness of the first time, and return its graph's end."""
        with (
            with_random_state(random, self._device),
            buffers_kept(piece.modules),
            self._saving(held.holding, flight.accounted),
        ):
            out = piece.run(self._entered(x, held), flight.target)
        return get_gradient_edge(out) if out.requires_grad else None

    def _keep_loss(self, microbatch: int, x: Tensor, trains: bool) -> None:
        """Read the value when it is there; on a GPU, waiting for it here would hold up what comes after."""
        value = on_host(x)

        def read() -> None:
            found = self.losses[microbatch] = float(value)
            if trains and not isfinite(found):
                raise RunFailed(f"the loss is {found} for microbatch {microbatch}; a lower learning rate may help")

        self._later(read)

    def _entered(self, x: Tensor, held: Held) -> Tensor:
        if not held.wants_gradient:
            return x
        entered: Tensor = _Entry.apply(self._anchor, x, held.gradient)  # type: ignore[no-untyped-call]
        return entered

    @contextmanager
    def _saving(self, holding: Holding, accounted: bool) -> Iterator[None]:
        if not accounted:
            yield
            return
        with self._account.saving(holding, self._permanent()):
            yield

    @contextmanager
    def _renewing(self, holding: Holding, accounted: bool) -> Iterator[None]:
        if accounted and self._fixed is None:
            self._fixed = {x.untyped_storage()._cdata for x in self._tensors() if not x.requires_grad}
        permanent = self._fixed or set()

        def hold(tensor: Tensor) -> None:
            if accounted and tensor.untyped_storage()._cdata not in permanent:
                self._account.hold(holding, tensor)

        with renewing(self.versions, hold):
            yield

    def _permanent(self) -> set[int]:
        """Return the storages of weights and buffers, which the account leaves out."""
        return self.versions.storages() | {tensor.untyped_storage()._cdata for tensor in self._tensors()}

    def _tensors(self) -> Iterator[Tensor]:
        for module in self._modules:
            yield from module.parameters()
            yield from module.buffers()

    def _check(self, microbatch: int, verb: str, x: Tensor, spec: TensorSpec) -> None:
        """What is sent must be what the other end expects: gloo would reinterpret or abort."""
        if tuple(x.shape) != spec.shape or x.dtype != spec.dtype:
            found = TensorSpec(tuple(x.shape), x.dtype)
            raise RunFailed(
                f"stage {self.index} {verb} {found} for microbatch {microbatch}; the model's example: {spec}"
            )


def _pieces(
    start: int,
    stop: int,
    layers: Sequence[nn.Module],
    loss: Loss | None,
    checkpoint: Sequence[tuple[int, int]],
) -> list[Piece]:
    """Cut layers ``start..stop``, of which ``loss`` is the last if it is there, into stored and recomputed pieces."""
    pieces = []
    position = start

    def add(first: int, last: int, recompute: bool) -> None:
        with_loss = loss is not None and last == stop
        modules = tuple(layers[first - start : (last - 1 if with_loss else last) - start])
        pieces.append(Piece(modules, loss if with_loss else None, recompute))

    for first, last in checkpoint:
        if position < first:
            add(position, first, False)
        add(first, last, True)
        position = last
    if position < stop:
        add(position, stop, False)
    return pieces


def _trains(piece: Piece) -> bool:
    return any(parameter.requires_grad for module in piece.modules for parameter in module.parameters())


def _names(piece: Piece) -> str:
    names = [type(module).__name__ for module in piece.modules]
    return ", ".join(names) if names else "the loss"


@contextmanager
def buffers_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let a second run of ``modules`` work on copies of their buffers: batch statistics must count once."""
    originals = [
        (owner, name, buffer)
        for module in dict.fromkeys(modules)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    for owner, name, buffer in originals:
        owner._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for owner, name, buffer in originals:
            owner._buffers[name] = buffer
