"""How does a stage run backward in two parts? First the gradient of its input, and when its time has come of weights.

Of what the forward has saved, the weights' part keeps what it needs alone, and beside that the gradients from which
those of weights will follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...schedule.weight_versions import Lent
from ..measure.recorder import Holding
from ..model.network import LayerCode
from ..model.pieces import Piece
from ..model.split_backward import WeightPart, input_part, later_part
from .held import Entry, Held, InFlight
from .stage import StageModule

Later = tuple[WeightPart, Holding]  # the weights' part of a piece's backward of one microbatch, and what it keeps


class SplitStage(StageModule):
    """A stage whose backwards come in two parts: :meth:`backward_inputs`, and later :meth:`backward_weights`.

    A layer that trains and into which no gradient goes on, as an embedding of tokens or of positions, is a graph of its
    own, whose whole backward is the second part: the profile has seen it by itself, too.
    """

    splits = True

    def __init__(self, index: int, pieces: Sequence[Piece], *arguments: Any, **options: Any) -> None:
        pieces = [replace(piece, layers=tuple(map(self._ending, piece.layers))) for piece in pieces]
        super().__init__(index, pieces, *arguments, **options)
        self._waiting: dict[int, list[Later]] = {}
        self._running: Held | None = None
        self._for_weights: dict[int, tuple[int, frozenset[int]]] = {}  # by piece, of how many tensors which

    def backward_inputs(self, microbatch: int, version: int, gradient: Tensor | None, lent: Lent = ()) -> Tensor | None:
        """Return the gradient of the stage's input, as :meth:`backward` does, and leave those of weights for later."""
        return self._back(microbatch, version, gradient, 1, lent, self._inputs_through)

    def backward_weights(self, microbatch: int, version: int, lent: Lent = ()) -> None:
        """Add the gradients of the weights to what is there."""
        self.versions.install(version, lent, back=True)
        self.gradients.attach(version)
        for part, holding in self._waiting.pop(microbatch):
            part.run()
            self._activations.release(holding)
        self.gradients.detach(version)
        self.versions.released(version)

    def _ending(self, layer: LayerCode) -> LayerCode:
        """Return a layer that trains so that its graph ends with it where it begins with it, too."""
        if not any(x.requires_grad for x in layer.module.parameters()):
            return layer

        @wraps(layer.run)
        def run(module: nn.Module, *values: Any) -> Sequence[Tensor]:
            made = layer.run(module, *values)
            held = self._running
            if held is None or any(isinstance(x, Tensor) and x.requires_grad for x in values):
                return made
            return [self._begun(held, v, x) if x.requires_grad else x for v, x in zip(layer.makes, made, strict=True)]

        return replace(layer, run=run)

    def _begun(self, held: Held, value: int, made: Tensor) -> Tensor:
        held.inner[value] = get_gradient_edge(made)
        found: Tensor = Entry.apply(self._anchor, made.detach(), held.gradients, value)  # type: ignore[no-untyped-call]
        return found

    def _inputs_through(self, flights: Sequence[InFlight], gradients: Sequence[dict[int, Tensor]]) -> None:
        for flight, known in zip(flights, gradients, strict=True):
            numbers = reversed(range(len(self._pieces)))
            self._waiting[flight.microbatch] = [x for n in numbers for x in self._first_part(n, flight, known)]

    def _first_part(self, number: int, flight: InFlight, known: dict[int, Tensor]) -> Iterator[Later]:
        """Run the first part of a piece's backward, add to the gradients that are ``known``, and yield what is left."""
        piece, held = self._pieces[number], self._last_of(flight)
        self._run_again(piece, held, flight)
        gradients = {value: known.pop(value) for value in piece.makes if value in known}
        ends = [(edge, gradients[value]) for value, edge in held.ends.items() if value in gradients]
        del gradients
        held.ends = {}
        if ends:
            part, holding = self._input_part(number, held, ends), Holding()
            if flight.counted:
                for tensor in part.gradients():
                    self._activations.hold(holding, tensor)
                for tensor in part.saved.tensors():
                    if tensor.untyped_storage()._cdata in held.holding:
                        self._activations.hold(holding, tensor)
            yield part, holding
        elif held.saved is not None:
            held.saved.clear()
        self._pass_on(piece, held, known)

    def _input_part(self, number: int, held: Held, ends: list[tuple[GradientEdge, Tensor]]) -> WeightPart:
        assert held.saved is not None, "a graph saves something, or nothing, but knows it"
        part = input_part(ends, [self._anchor], held.saved)
        ends.clear()
        part.groups += later_part(list(held.begun().values()))
        if number not in self._for_weights or self._for_weights[number][0] != len(held.saved):
            self._for_weights[number] = len(held.saved), part.needed()
        held.saved.drop_but(self._for_weights[number][1])
        return part

    @contextmanager
    def _saving(self, held: Held, counted: bool, newest: bool = False) -> Iterator[None]:
        self._running = held
        try:
            with super()._saving(held, counted, newest):
                yield
        finally:
            self._running = None
