"""How does a stage run backward in two parts? First the gradient of its input, and when its time has come of weights.

Of what the forward has saved, the weights' part keeps what it needs alone, and beside that the gradients from which
those of weights will follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from ...errors import RunFailed
from ...schedule.weight_versions import Lent
from ..measure.held_bytes import Holding
from ..model.network import buffers_kept
from ..model.pieces import Piece, packed, parted
from ..model.split_backward import Saved, WeightPart, input_part
from .stage import Held, InFlight, StageModule, ends_of, names_of


@dataclass
class Graph:
    """A piece's graph, or one of two in a row."""

    held: Held
    makes: tuple[int, ...]
    number: tuple[int, int]  # of the piece, and among its graphs


@dataclass
class Later:
    """The weights' part of a piece's backward of one microbatch."""

    parts: list[WeightPart]
    holding: Holding


class SplitStage(StageModule):
    """A stage whose backwards come in two parts: :meth:`backward_inputs`, and later :meth:`backward_weights`.

    Nothing waits for a gradient of the first stage's input. There the first layer that trains is a graph of its own,
    whose whole backward is the second part, so that the first part has an end to go to.
    """

    def __init__(self, index: int, pieces: Sequence[Piece], *arguments: Any, **options: Any) -> None:
        self._apart: dict[int, int] = {}  # pieces that run again in two graphs, and the layers of the first
        if index == 0:
            pieces, self._apart = _first_apart(pieces)
        super().__init__(index, pieces, *arguments, **options)
        self._waiting: dict[int, list[Later]] = {}
        self._again: dict[tuple[int, int], list[Graph]] = {}  # by microbatch and piece, what ran again before
        self._for_weights: dict[tuple[int, int], tuple[int, frozenset[int]]] = {}  # by graph, of how many tensors which

    def backward_inputs(self, microbatch: int, version: int, gradient: Tensor | None, lent: Lent = ()) -> Tensor | None:
        """Return the gradient of the stage's input, as :meth:`backward` does, and leave those of weights for later."""
        flight = self._in_flight.pop(microbatch)
        known = self._opened_back(gradient)
        self.versions.install(version, lent)
        self.versions.attach_gradient(version)
        later: list[Later] = []
        for number in reversed(range(len(self._pieces))):
            later.append(self._inputs_through(number, flight, known))
        self.versions.detach_gradient(version)
        self.versions.released(version)
        self._waiting[microbatch] = later
        return None if self.index == 0 else packed([self._gradient(known, v) for v in self._input.trained])

    def backward_weights(self, microbatch: int, version: int, lent: Lent = ()) -> None:
        """Add the gradients of the weights to what is there."""
        self.versions.install(version, lent)
        self.versions.attach_gradient(version)
        for later in self._waiting.pop(microbatch):
            while later.parts:
                later.parts.pop(0).run()
            self._activations.release(later.holding)
        self.versions.detach_gradient(version)
        self.versions.released(version)

    def _inputs_through(self, number: int, flight: InFlight, known: dict[int, Tensor]) -> Later:
        """Run the first part of a piece's backward, and add to the gradients that are ``known``."""
        piece, held = self._pieces[number], flight.pieces.pop()
        graphs = [Graph(held, piece.makes, (number, 0))]
        if held.again is not None:
            graphs = self._graphs_again(number, piece, held, flight)
        elif piece.recompute:
            graphs = self._again.pop((flight.microbatch, number))
        parts: list[WeightPart] = []
        holding: Holding = {}
        for graph in reversed(graphs):
            ends: list[tuple[GradientEdge, Tensor]] = []
            for value in graph.makes:
                gradient = known.pop(value, None)
                if value in graph.held.ends and gradient is not None:
                    ends.append((graph.held.ends[value], gradient))
            graph.held.ends = {}
            if ends:
                part = self._first_part(graph, ends)
                if flight.counted:
                    for tensor in part.gradients():
                        self._activations.hold(holding, tensor)
                    self._keep(holding, part.saved, held.holding)
                parts.append(part)
            elif graph.held.saved is not None:
                graph.held.saved.clear()
            for value, gradient in graph.held.gradients.items():
                known[value] = known[value] + gradient if value in known else gradient
            if graph.held.want and not any(value in known for value in graph.held.want):
                raise RunFailed(f"no gradient comes back to the input of {names_of(piece)}")
        if flight.counted and number and not flight.pieces[-1].want:  # they are there before the saved ones go
            for value in self._pieces[number - 1].makes:
                if value in known:
                    self._activations.hold(flight.pieces[-1].holding, known[value])
        self._activations.release(held.holding)
        return Later(parts, holding)

    def _run_again(self, number: int, held: Held, flight: InFlight) -> None:
        self._again[flight.microbatch, number] = self._graphs_again(number, self._pieces[number], held, flight)

    def _first_part(self, graph: Graph, ends: Sequence[tuple[GradientEdge, Tensor]]) -> WeightPart:
        saved = graph.held.saved
        assert saved is not None, "a graph saves something, or nothing, but knows it"
        part = input_part(ends, [self._anchor], saved)
        if graph.number not in self._for_weights or self._for_weights[graph.number][0] != len(saved):
            self._for_weights[graph.number] = len(saved), part.needed()
        saved.drop_but(self._for_weights[graph.number][1])
        return part

    def _keep(self, holding: Holding, saved: Saved, counted: Holding) -> None:
        """Count what of ``counted`` is still ``saved`` into ``holding``."""
        for tensor in saved.tensors():
            if tensor.untyped_storage()._cdata in counted:
                self._activations.hold(holding, tensor)

    def _graphs_again(self, number: int, piece: Piece, held: Held, flight: InFlight) -> list[Graph]:
        """Run a recomputed piece again and return its graphs."""
        assert held.again is not None, "only what is recomputed runs again"
        entered, before = held.again
        held.again = None
        values = dict(zip(piece.reads, entered, strict=True))
        around = partial(self._draws.of, flight.microbatch)
        graphs: list[Graph] = []
        wanted = set(held.want)
        first = self._apart.get(number)
        with before.installed(), buffers_kept(piece.modules):
            for place, part in enumerate([piece] if first is None else parted(piece, first)):
                own = Held(tuple(v for v in part.reads if v in wanted), holding=held.holding)
                with self._saving(own, flight.counted):
                    made = part.run(self._entered(part, [values[v] for v in part.reads], own), flight.target, around)
                own.ends = ends_of(part, made)
                wanted |= own.ends.keys()
                values.update(zip(part.makes, (x.detach() for x in made), strict=True))
                graphs.append(Graph(own, part.makes, (number, place)))
        return graphs

    @contextmanager
    def _saving(self, held: Held, counted: bool) -> Iterator[None]:
        permanent = self._permanent() if counted else set()

        def hold(tensor: Tensor) -> None:
            if tensor.untyped_storage()._cdata not in permanent:
                self._activations.hold(held.holding, tensor)

        held.saved = Saved(hold if counted else None)
        with saved_tensors_hooks(held.saved.pack, held.saved.unpack):
            yield


def _first_apart(pieces: Sequence[Piece]) -> tuple[list[Piece], dict[int, int]]:
    """Return ``pieces`` with the first layer that trains, and those before it, apart from the rest of their piece; of a
    recomputed one, which stays whole, its number and how many layers those are."""
    for number, piece in enumerate(pieces):
        trains = [any(x.requires_grad for x in module.parameters()) for module in piece.modules]
        first = trains.index(True) + 1 if any(trains) else 0
        if first and first < len(trains):
            if piece.recompute:
                return list(pieces), {number: first}
            return [*pieces[:number], *parted(piece, first), *pieces[number + 1 :]], {}
        if first:
            break
    return list(pieces), {}
