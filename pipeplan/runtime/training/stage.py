"""How does a stage run microbatches? Forward and backward, several in flight, some of its layers recomputed.

A stage is cut into pieces: runs of stored layers and recomputed segments. Each piece has a graph of its own, so a
backward goes piece by piece and frees each as soon as it is done, which is how the memory model counts (ALGORITHMS
section 3). A recomputed piece keeps what it reads, and runs again in the backward, or in a pass of its own before that,
with the same random numbers. What a stage only passes on is nothing that it keeps; its gradient is added to that of the
stage's own uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from math import isfinite
from operator import call
from types import MappingProxyType

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from ...errors import RunFailed
from ...schedule.weight_versions import Lent
from ..device import CPU, on_host
from ..measure.recorder import HeldBytes
from ..model.network import LOSS, TensorSpec
from ..model.pieces import Cut, Piece, Saved, packed
from ..model.places import buffers_kept
from .held import Entry, Held, InFlight, Waiting, ends_of
from .repeatable import ChangingBuffers, Draws, installed
from .weights.gradients import Gradients

FromData = Mapping[int, tuple[int, TensorSpec]]
NO_DATA: FromData = MappingProxyType({})

Through = Callable[[Sequence[InFlight], Sequence[dict[int, Tensor]]], None]  # a backward, which adds to gradients


class StageModule:
    """The ``pieces`` of a stage, the one with the loss last, between two ``cuts``; there is none behind the loss.

    Passes use weights, and add to their ``gradients``. What comes in and goes out are the messages of the cuts;
    ``data`` are the values that are read from the data beside, and which of the inputs each is, of which shape. The
    loss's gradient is divided by ``divisor``, the microbatches of an update, so that updates see means, and
    multiplied by a loss scale if there is one. With ``reads_newest`` the version of a backward may be another than
    its forward's: stored layers are differentiated at the stored activations, recomputed ones run again with the
    backward's version. ``activations`` counts what is kept. The layers are on ``device`` and have their random
    numbers from ``draws``; ``later(action)`` does what must wait until the device has computed what it was given so
    far. With ``waiting`` what pieces keep is in host memory until their backwards come.
    """

    splits = False  # whether backwards come in two parts

    def __init__(
        self,
        index: int,
        pieces: Sequence[Piece],
        cuts: tuple[Cut, Cut | None],
        gradients: Gradients,
        activations: HeldBytes,
        divisor: int,
        reads_newest: bool = False,
        device: torch.device = CPU,
        later: Callable[[Callable[[], None]], None] = call,
        draws: Draws | None = None,
        data: FromData = NO_DATA,
        trained: Set[int] | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        self.index = index
        self.versions, self.gradients = gradients.versions, gradients
        self.losses: dict[int, float] = {}
        self._activations = activations
        self._device, self._later = device, later
        self._draws = draws or Draws()
        self._divisor = divisor
        self._seed = torch.tensor(1 / divisor, dtype=torch.float64, device=device)
        self._anchor = torch.zeros((), requires_grad=True, device=device)  # makes autograd follow what enters
        self._input, self._output = cuts
        self._data = data
        self._pieces = pieces
        made = (v for piece in pieces for v in piece.makes)
        self._trained = {*made, *self._input.trained} if trained is None else trained
        self._buffers = [ChangingBuffers(piece.modules) for piece in pieces]
        leaving = self._output.values if self._output is not None else ()
        # by piece, the values that are needed behind it
        self._needed = [
            {LOSS, *leaving, *(v for piece in pieces[i + 1 :] for v in piece.reads)} for i in range(len(pieces))
        ]
        self._reads_newest = reads_newest
        self._home = waiting
        self._fixed: set[int] = set()  # storages of what modules have
        self._in_flight: dict[int, InFlight] = {}

    @property
    def takes_targets(self) -> bool:
        """Whether the stage computes the loss."""
        return self._pieces[-1].has_loss

    @property
    def reads(self) -> bool:
        """Whether the stage reads any of the data."""
        return bool(self._data) or self.takes_targets

    def forward(
        self,
        microbatch: int,
        version: int,
        x: Tensor | None,
        target: Tensor | None,
        counted: bool,
        lent: Lent = (),
        inputs: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return what the stage puts out for the message ``x`` and the network's ``inputs``; it keeps what the
        backward needs.

        Of the loss it puts out the value, which also goes into :attr:`losses`.
        """
        values = self._opened(microbatch, x, inputs)
        self.versions.install(version, lent)
        flight = InFlight(microbatch, target, [], counted)
        stays = self._staying(target)
        # the stage before waits for gradients, whether or not it trains anything
        wanted = set(self._input.trained) if self.index > 0 else set()
        for number, piece in enumerate(self._pieces):
            entered = [values[v] for v in piece.reads]
            held = Held(tuple(v for v in piece.reads if v in wanted))
            flight.pieces.append(held)
            if piece.recompute:
                if counted:
                    for tensor in entered:
                        self._activations.hold(held.holding, tensor)
                with torch.no_grad(), self._buffers[number].apart(recomputed=True) as before:
                    made = self._draws.run(piece, microbatch, entered, target)
                held.again = entered, before
                if self._home is not None:
                    held.again, held.saved = ([], before), Saved()
                    for tensor in entered:
                        held.saved.pack(tensor)
                del before
                passes_on = bool(held.want) or piece.trains
                wanted |= set(piece.makes) if passes_on else set()
            else:
                with self._buffers[number].apart(recomputed=False), self._saving(held, counted, self._reads_newest):
                    made = self._draws.run(piece, microbatch, self._entered(piece, entered, held), target)
                held.ends = ends_of(piece, made)
                wanted |= held.ends.keys()
                made = [out.detach() for out in made]  # from here on nothing but autograd keeps its graph
            wanted &= self._trained
            values.update(zip(piece.makes, made, strict=True))
            del entered, made
            self._forget(values, number)
            if self._home is not None:
                self._home.send(held, stays)
        self._in_flight[microbatch] = flight
        self.versions.released(version)
        if self.takes_targets:
            self._keep_loss(microbatch, values[LOSS], trains=True)
            self._seed = self._seed.to(values[LOSS].dtype)
        return self._closed(microbatch, values)

    def scale_loss(self, scale: float) -> None:
        """Multiply the gradients of the backwards to come by ``scale``."""
        self._seed.fill_(scale / self._divisor)  # to a new tensor a GPU's host would wait to copy it

    def evaluate(
        self,
        microbatch: int,
        version: int,
        x: Tensor | None,
        target: Tensor | None,
        lent: Lent = (),
        inputs: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return what :meth:`forward` does without keeping anything; the modules are in evaluation mode."""
        values = self._opened(microbatch, x, inputs)
        self.versions.install(version, lent)
        with torch.no_grad():
            for number, piece in enumerate(self._pieces):
                made = self._draws.run(piece, microbatch, [values[v] for v in piece.reads], target)
                values.update(zip(piece.makes, made, strict=True))
                del made
                self._forget(values, number)
        if self.takes_targets:
            self._keep_loss(microbatch, values[LOSS], trains=False)
        return self._closed(microbatch, values)

    def recompute(self, microbatch: int, version: int, lent: Lent = ()) -> None:
        """Run again all pieces that are recomputed, so that the backward of the microbatch finds their graphs."""
        flight = self._in_flight[microbatch]
        self.versions.install(version, lent, back=True)
        for piece, held in zip(self._pieces, flight.pieces, strict=True):
            self._run_again(piece, held, flight)
        self.versions.released(version)

    def backward(
        self, microbatch: int, version: int, gradient: Tensor | None, covers: int = 1, lent: Lent = ()
    ) -> Tensor | None:
        """Return the gradient of the stage's input (None for the first stage) from that of its output.

        ``gradient`` is None where the stage computes the loss. Parameters' gradients are added to what is there. A
        backward that ``covers`` several microbatches, up to ``microbatch``, takes and returns their gradients stacked.
        It is one pass of autograd through all of them, unless the stage recomputes: then, for memory, one by one.
        """
        return self._back(microbatch, version, gradient, covers, lent, self._through)

    def _back(
        self, microbatch: int, version: int, gradient: Tensor | None, covers: int, lent: Lent, through: Through
    ) -> Tensor | None:
        flights = [self._in_flight.pop(m) for m in range(microbatch - covers + 1, microbatch + 1)]
        messages = [gradient] * covers if gradient is None or covers == 1 else list(gradient.unbind())
        known = [self._opened_back(message) for message in messages]
        by_one = self._home is not None or any(piece.recompute for piece in self._pieces)
        together = 1 if by_one else covers
        self.versions.install(version, lent, back=True)
        self.gradients.attach(version)
        for first in range(0, covers, together):
            through(flights[first : first + together], known[first : first + together])
        self.gradients.detach(version)
        self.versions.released(version)
        if self.index == 0:
            return None
        found = [self._closed_back(gradients) for gradients in known]
        return found[0] if covers == 1 else torch.stack(found)

    def _through(self, flights: Sequence[InFlight], gradients: Sequence[dict[int, Tensor]]) -> None:
        """Run all pieces backward, each for all ``flights`` at once, and add to the ``gradients`` of values."""
        for piece in reversed(self._pieces):
            everybodys = [self._last_of(flight) for flight in flights]
            ends: list[GradientEdge] = []
            starts: list[Tensor | None] = []
            for flight, held, known in zip(flights, everybodys, gradients, strict=True):
                self._run_again(piece, held, flight)
                for value in piece.makes:
                    gradient = known.pop(value, None)
                    if value in held.ends and gradient is not None:
                        ends.append(held.ends[value])
                        starts.append(gradient)
                held.ends = {}
            if ends:
                torch.autograd.backward(ends, starts)
            del ends, starts
            for begun in (held.begun() for held in everybodys):
                for code in piece.layers:  # whose outputs have one graph
                    own = [begun[value] for value in code.makes if value in begun]
                    if own:
                        torch.autograd.backward([edge for edge, _ in own], [gradient for _, gradient in own])
            for held, known in zip(everybodys, gradients, strict=True):
                if held.saved is not None:
                    held.saved.clear()
                self._pass_on(piece, held, known)

    def _last_of(self, flight: InFlight) -> Held:
        """Take what the last piece kept, and let what the one before did come back from where it waits."""
        held = flight.pieces.pop()
        if self._home is not None:
            self._home.fetch(held, flight.counted)
            self._home.arrive(held)
            for before in flight.pieces[-1:]:
                self._home.fetch(before, flight.counted)
        return held

    def _pass_on(self, piece: Piece, held: Held, known: dict[int, Tensor]) -> None:
        """Add what has come to a piece's input to the gradients that are ``known``, and forget what it kept."""
        for value, gradient in held.gradients.items():
            known[value] = known[value] + gradient if value in known else gradient
        if held.want and not any(value in known for value in held.want):
            raise RunFailed(f"no gradient comes back to the input of {', '.join(x.name for x in piece.layers)}")
        self._activations.release(held.holding)

    def _run_again(self, piece: Piece, held: Held, flight: InFlight) -> None:
        """Run a piece that is recomputed, and hasn't been, on what it read, as at the first time."""
        if held.again is None:
            return
        (entered, before), held.again = held.again, None
        if held.saved is not None:
            entered = [held.saved.unpack(i) for i in range(len(held.saved))]
        with installed(before), buffers_kept(piece.modules), self._saving(held, flight.counted):
            made = self._draws.run(piece, flight.microbatch, self._entered(piece, entered, held), flight.target)
        held.ends = ends_of(piece, made)

    def _opened(self, microbatch: int, message: Tensor | None, inputs: Sequence[Tensor]) -> dict[int, Tensor]:
        values = {v: inputs[place] for v, (place, _) in self._data.items()}
        for v, (_, spec) in self._data.items():
            self._check(microbatch, "gets", values[v], spec)
        if message is not None:
            self._check(microbatch, "gets", message, self._input.forward)
            values |= self._input.opened(message)
        return values

    def _closed(self, microbatch: int, values: Mapping[int, Tensor]) -> Tensor:
        """Return the message of what goes out, or the loss."""
        if self._output is None:
            return values[LOSS]
        for value, spec in zip(self._output.values, self._output.specs, strict=True):
            self._check(microbatch, "puts out", values[value], spec)
        return packed([values[value] for value in self._output.values], self._output.specs, self._device)

    def _opened_back(self, message: Tensor | None) -> dict[int, Tensor]:
        if message is None:
            return {LOSS: self._seed}
        assert self._output is not None, "only where there is a stage behind does a gradient come"
        return self._output.opened_back(message)

    def _closed_back(self, known: Mapping[int, Tensor]) -> Tensor:
        """Return the message of the gradients that go back; zeros of what nothing depends on."""
        specs, device = [(v, self._input.spec(v)) for v in self._input.trained], self._device
        found = [known[v] if v in known else torch.zeros(x.shape, dtype=x.dtype, device=device) for v, x in specs]
        return packed(found, device=device)

    def _forget(self, values: dict[int, Tensor], number: int) -> None:
        """Keep of ``values`` those alone that are needed after piece ``number``."""
        for value in values.keys() - self._needed[number]:
            del values[value]

    def _keep_loss(self, microbatch: int, x: Tensor, trains: bool) -> None:
        """Read the value when it is there; on a GPU, waiting for it here would hold up what comes after."""
        value = on_host(x)

        def read() -> None:
            found = self.losses[microbatch] = float(value)
            if trains and not isfinite(found):
                raise RunFailed(f"the loss is {found} for microbatch {microbatch}; a lower learning rate may help")

        self._later(read)

    def _entered(self, piece: Piece, tensors: Sequence[Tensor], held: Held) -> list[Tensor]:
        return [
            Entry.apply(self._anchor, x, held.gradients, value) if value in held.want else x  # type: ignore[no-untyped-call]
            for value, x in zip(piece.reads, tensors, strict=True)
        ]

    @contextmanager
    def _saving(self, held: Held, counted: bool, newest: bool = False) -> Iterator[None]:
        """Within the context, count what autograd saves, but for weights and buffers; of weights let it know where they
        are, if a backward is to find the ``newest``. That takes time, so it isn't done without need."""
        if not (counted or newest or self.splits or self._home):
            yield
            return
        permanent = self._permanent(newest) if counted else ()

        def hold(tensor: Tensor) -> None:
            if tensor.untyped_storage()._cdata not in permanent:
                self._activations.hold(held.holding, tensor)

        held.saved = Saved(hold if counted else None, self.versions.readable if newest else ())
        with saved_tensors_hooks(held.saved.pack, held.saved.unpack):
            yield

    def _permanent(self, newest: bool) -> Set[int]:
        """Return the storages of weights, but for those of which the ``newest`` are found, and of buffers."""
        if not (newest and self._fixed):
            modules = (module for piece in self._pieces for module in piece.modules)
            tensors = (x for module in modules for x in (*module.parameters(), *module.buffers()))
            self._fixed = {x.untyped_storage()._cdata for x in tensors if not (newest and x.requires_grad)}
        return self._fixed if newest else self._fixed | self.versions.storages()

    def _staying(self, target: Tensor | None) -> Callable[[Tensor], bool]:
        """Return what says whether a saved tensor is there anyway: in weights, buffers or the ``target``."""
        there = {x.untyped_storage()._cdata for x in (target,) if isinstance(x, Tensor)}
        there |= set() if self._home is None else self._permanent(self._reads_newest)
        return lambda x: x.untyped_storage()._cdata in there or x.is_conj() or x.is_neg()

    def _check(self, microbatch: int, verb: str, x: Tensor, spec: TensorSpec) -> None:
        """What is sent must be what the other end expects: gloo would reinterpret or abort."""
        if x.shape != spec.shape or x.dtype != spec.dtype:
            found = TensorSpec(tuple(x.shape), x.dtype)
            raise RunFailed(
                f"stage {self.index} {verb} {found} for microbatch {microbatch}; the model's example: {spec}"
            )
