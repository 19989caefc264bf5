"""What does a stage consist of, and what crosses its ends? Pieces of layers, and cuts that values cross.

Values are numbered as in :mod:`.network`. A cut is crossed by every value that is made before it and read behind it; in
a chain that is one tensor, which travels as it is. In a DAG it may be several: they travel as the bytes of one message,
and a stage that only passes a value on takes it from one message and puts it into the next. The network's inputs cross
no cut: whoever needs one reads it from the data. Where nothing travels, a message of one byte says that its time has
come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from ...errors import RunFailed
from ..device import CPU
from .autocast import autocasting
from .network import LOSS, TARGET, LayerCode, Network, TensorSpec, over

Hold = Callable[[Tensor], None]


@dataclass(frozen=True)
class Cut:
    """The ``values`` that cross between two stages, in order, and those whose gradients come back, the ``trained``."""

    values: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    trained: tuple[int, ...]

    @cached_property
    def forward(self) -> TensorSpec:
        """What is sent forward."""
        return message_spec(self.specs)

    @cached_property
    def backward(self) -> TensorSpec:
        """What is sent back."""
        return message_spec(self._trained_specs)

    @cached_property
    def _trained_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(replace(self.spec(value), order=()) for value in self.trained)

    def spec(self, value: int) -> TensorSpec:
        """Return the shape and type of one of the values."""
        return self.specs[self.values.index(value)]

    def opened(self, message: Tensor) -> dict[int, Tensor]:
        """Return the values that came in ``message``."""
        return dict(zip(self.values, unpacked(message, self.specs), strict=True))

    def opened_back(self, message: Tensor) -> dict[int, Tensor]:
        """Return the gradients that came back in ``message``."""
        return dict(zip(self.trained, unpacked(message, self._trained_specs), strict=True))


def message_spec(specs: Sequence[TensorSpec]) -> TensorSpec:
    """Return what tensors of ``specs`` travel as."""
    if _as_it_is(specs):
        return specs[0].in_memory
    return TensorSpec((max(1, sum(spec.nbytes for spec in specs)),), torch.uint8)


def _as_it_is(specs: Sequence[TensorSpec]) -> bool:
    """Whether a message is a tensor, and not the bytes of some: not every library sends complex numbers."""
    return len(specs) == 1 and not specs[0].dtype.is_complex and specs[0].nbytes > 0


def packed(tensors: Sequence[Tensor], specs: Sequence[TensorSpec] = (), device: torch.device = CPU) -> Tensor:
    """Return the message of ``tensors`` on a ``device``: a single one itself, otherwise the bytes of all.

    Each is in the order of its memory that ``specs`` say, by default that of its dimensions.
    """
    specs = specs or [TensorSpec(tuple(x.shape), x.dtype) for x in tensors]
    ordered = [x.permute(spec.order) if spec.order else x for x, spec in zip(tensors, specs, strict=True)]
    if _as_it_is(specs):
        return ordered[0]
    if not any(spec.nbytes for spec in specs):
        return torch.zeros(1, dtype=torch.uint8, device=device)
    return torch.cat([x.detach().resolve_conj().reshape(-1).contiguous().view(torch.uint8) for x in ordered])


def unpacked(message: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Return the tensors in ``message``, each in memory of its own, so that none keeps the others."""
    if _as_it_is(specs):
        return [_placed(message, specs[0])]
    sizes = [spec.nbytes for spec in specs]
    parts: Sequence[Tensor] = torch.split(message[: sum(sizes)], sizes)
    return [
        _placed(part.clone().view(spec.dtype).view(spec.in_memory.shape), spec)
        for part, spec in zip(parts, specs, strict=True)
    ]


def _placed(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Return a tensor that came in the order of its memory with its dimensions in their own."""
    return tensor.permute([spec.order.index(i) for i in range(tensor.dim())]) if spec.order else tensor


@dataclass(frozen=True)
class Piece:
    """Neighbouring layers that are stored or recomputed together.

    ``reads`` are the values that come in, without the target; ``makes`` those that go out, the loss alone if it is
    among the layers. ``over[i]`` are the values that nobody needs once layer i has run.
    """

    layers: tuple[LayerCode, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    over: tuple[tuple[int, ...], ...]
    recompute: bool

    @property
    def has_loss(self) -> bool:
        """Whether the loss is computed here."""
        return self.makes == (LOSS,)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the layers."""
        return [layer.module for layer in self.layers]

    @property
    def trains(self) -> bool:
        """Whether any weight gets a gradient here."""
        return any(parameter.requires_grad for module in self.modules for parameter in module.parameters())

    def run(
        self,
        entered: Sequence[Tensor],
        target: Any,
        around: Callable[[int], AbstractContextManager[None]] = lambda layer: nullcontext(),
    ) -> list[Tensor]:
        """Return the values that go out for those that come in.

        Each layer runs in the context that ``around`` gives for what it draws by, all of them under one autocast.
        """
        device = entered[0].device if entered else CPU
        values: dict[int, Any] = dict(zip(self.reads, entered, strict=True))
        del entered
        values[TARGET] = target
        with autocasting(self.layers[0].autocast if self.layers else None, device):
            for layer, over in zip(self.layers, self.over, strict=True):
                with around(drawn_by(layer)):
                    outputs = layer.run(layer.module, *[values[v] for v in layer.reads])
                values.update(zip(layer.makes, outputs, strict=True))
                del outputs
                for value in over:
                    del values[value]
        return [values[v] for v in self.makes]


@dataclass(frozen=True, slots=True)
class _Within:
    """A tensor in a weight, or a view of one, whatever that is by now, or in the how manieth storage elsewhere."""

    place: Tensor | int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Saved:
    """What autograd saves in one graph, which it knows by numbers, so that some of it can be dropped early.

    Of ``weights`` it knows where they are, so a backward finds what they are then; ``hold`` hears of all the rest.
    """

    def __init__(self, hold: Hold | None = None, weights: Sequence[Tensor] = ()) -> None:
        self._tensors: list[tuple[Tensor, int] | _Within | None] = []
        self._hold = hold
        self._weights = {x.untyped_storage()._cdata: x for x in weights}
        self.asked: set[int] = set()  # since it was emptied

    def __len__(self) -> int:
        return len(self._tensors)

    def pack(self, tensor: Tensor) -> int:
        """Keep a tensor and return its number."""
        weight = self._weights.get(tensor.untyped_storage()._cdata) if self._weights else None
        if weight is not None:
            offset = int(tensor.storage_offset()) - int(weight.storage_offset())
            self._tensors.append(_Within(weight, tensor.dtype, tensor.size(), tensor.stride(), offset))
            return len(self._tensors) - 1
        self._tensors.append((tensor, tensor._version))
        if self._hold is not None:
            self._hold(tensor)
        return len(self._tensors) - 1

    def unpack(self, number: int) -> Tensor:
        """Return a tensor; RunFailed if it was changed meanwhile, which autograd doesn't see where there are hooks."""
        kept = self._tensors[number]
        if kept is None:
            raise RunFailed(
                "the gradients of weights need something of a forward that they didn't need in the first microbatch; "
                "such a model runs under schedules that don't split backwards"
            )
        if isinstance(kept, _Within):
            assert isinstance(kept.place, Tensor), "what is needed has been brought back"
            now = kept.place.data
            return now.as_strided(kept.size, kept.stride, int(now.storage_offset()) + kept.offset)
        tensor, version = kept
        if tensor._version != version:
            raise RunFailed(
                f"a tensor of shape {tuple(tensor.shape)} that a backward needs was changed in place after it was saved"
            )
        self.asked.add(number)
        return tensor

    def drop_but(self, needed: frozenset[int]) -> None:
        """Keep those numbers alone."""
        self._tensors = [kept if i in needed else None for i, kept in enumerate(self._tensors)]

    def sent(self, stays: Callable[[Tensor], bool]) -> tuple[list[UntypedStorage], list[tuple[Tensor, int]]]:
        """Let go all that doesn't stay, or was changed; return its storages, and the tensors with their versions."""
        storages: dict[int, tuple[int, UntypedStorage]] = {}
        tensors = []
        for i, kept in enumerate(self._tensors):
            if isinstance(kept, tuple) and kept[0]._version == kept[1] and not stays(kept[0]):
                x, storage = kept[0], kept[0].untyped_storage()
                place, _ = storages.setdefault(storage._cdata, (len(storages), storage))
                self._tensors[i] = _Within(place, x.dtype, x.size(), x.stride(), int(x.storage_offset()))
                tensors.append(kept)
        return [x for _, x in storages.values()], tensors

    def returned(self, storages: Sequence[UntypedStorage]) -> None:
        """Have again what was sent, in ``storages`` with the same bytes."""
        for i, kept in enumerate(self._tensors):
            if isinstance(kept, _Within) and isinstance(kept.place, int):
                found = torch.empty(0, dtype=kept.dtype, device=storages[kept.place].device)
                found.set_(storages[kept.place], kept.offset, kept.size, kept.stride)
                self._tensors[i] = found, found._version

    def tensors(self) -> Iterator[Tensor]:
        """Yield what is kept."""
        return (kept[0] for kept in self._tensors if isinstance(kept, tuple))

    def clear(self) -> None:
        """Keep nothing; a graph that has saved what it made would live for ever otherwise."""
        self._tensors = []


def drawn_by(layer: LayerCode) -> int:
    """Return the value by which ``layer`` is known to what gives it random numbers: the first one that it makes, or
    reads where nobody reads what it makes; the loss where it does neither."""
    return (*layer.makes, *layer.reads, LOSS)[0]


def pieces_of(
    start: int,
    layers: Sequence[Sequence[LayerCode]],
    checkpoint: Sequence[tuple[int, int]],
    leaving: Iterable[int],
    apart: bool = False,
) -> tuple[Piece, ...]:
    """Cut a stage whose first layer is ``start`` into stored and recomputed pieces, stored layers ``apart`` one by one.

    Each of its ``layers`` is one of the plan's, and may consist of several of the network's. The values ``leaving`` are
    read behind the stage.
    """
    stop = start + len(layers)
    ranges: list[tuple[int, int, bool]] = []
    position = start
    for first, last in (*checkpoint, (stop, stop)):
        ends = range(position, first + 1) if apart else (position, first)
        ranges += [(a, b, False) for a, b in pairwise(ends) if a < b]
        ranges += [(first, last, True)] if first < last else []
        position = last
    groups = [([x for group in layers[a - start : b - start] for x in group], again) for a, b, again in ranges]
    pieces: list[Piece] = []
    needed = {*leaving, LOSS}  # behind the piece
    for codes, recompute in reversed(groups):
        made = [v for code in codes for v in code.makes]
        makes = tuple(v for v in made if v in needed)
        reads = tuple(dict.fromkeys(v for code in codes for v in code.reads if v not in made and v != TARGET))
        pieces.append(Piece(tuple(codes), reads, makes, over(codes, makes), recompute))
        needed = (needed - set(makes)) | set(reads)
    return tuple(reversed(pieces))


def grouped(network: Network, cuts: Sequence[int]) -> Network:
    """Return ``network`` with the layers between two neighbouring ``cuts`` as one, called by the first of them."""
    layers = []
    for start, stop in pairwise(cuts):
        codes = network.layers[start:stop]
        behind = {v for code in network.layers[stop:] for v in code.reads}
        (piece,) = pieces_of(start, [codes], (), behind | set(network.outputs))
        whole = replace(codes[0], module=nn.ModuleList(piece.modules), run=partial(_run, piece), reads=piece.reads)
        layers.append(codes[0] if len(codes) == 1 else replace(whole, makes=piece.makes))
    return replace(network, layers=tuple(layers))


def _run(piece: Piece, _: nn.Module, *values: Tensor) -> Sequence[Tensor]:
    return piece.run(values, None)
