"""What does one layer cost, and what do layers share?

Times are integer nanoseconds per microbatch, sizes integer bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from .fields import first, largest, said, total, total_known

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]


class PassWork(NamedTuple):
    """What one pass of a layer asks of an estimated device for one microbatch, each operation under what bounds it.

    Arithmetic in ns at the full peak, memory traffic in ns at the full bandwidth, the ``kernels`` that are too small
    for either to matter, and the ``operations`` that the host issues. See :mod:`pipeplan.cost.roofline`.
    """

    compute_ns: int
    memory_ns: int
    kernels: int
    operations: int


class LayerWork(NamedTuple):
    """What an estimate of a layer's times was made of, by pass."""

    forward: PassWork
    backward: PassWork
    optimizer: PassWork


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives that the ranks of a group make in one pass of a layer that they run together, or of its ``update``.

    ``count`` of ``bytes`` each, which is the size of the whole tensor in all-reduces, of what is gathered or scattered,
    and of what one rank sends in an all-to-all, to itself among others. ``hidden`` of them go on beside products of the
    same pass. ``ranks`` of the group take part in each, 0 for those of the tensor degree.
    """

    kind: Collective
    backward: bool
    bytes: int
    count: int = 1
    hidden: int = 0
    ranks: int = 0
    update: bool = False


def _exchanged(values: Sequence[tuple[Exchange, ...]]) -> tuple[Exchange, ...]:
    """Return what layers exchange, like ones counted together."""
    found: dict[Exchange, Exchange] = {}
    for one in (x for row in values for x in row):
        key = replace(one, count=0, hidden=0)
        have = found.get(key, key)
        found[key] = replace(have, count=have.count + one.count, hidden=have.hidden + one.hidden)
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class WeightNeeds:
    """What of a layer is held from the first part of its backward, which computes the gradient of what it read, to the
    second, which computes those of its weights: ``saved_bytes`` of what it had saved, with ``saves`` as a layer's, and
    ``gradient_bytes`` of gradients that were computed meanwhile."""

    saved_bytes: int = field(metadata=said(scale="size"))
    saves: tuple[int, ...] = field(metadata=said(names=True))
    gradient_bytes: int = field(metadata=said(scale="size"))


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's measured costs for one microbatch: times in ns, sizes in bytes.

    ``output_bytes`` is the size of the one tensor that it produces; ``saved_bytes`` is what its forward keeps for its
    backward when the layer is a stage by itself, None for "what it reads" (MadPipe section 3). ``saves`` names the
    layers whose outputs are among that, -1 for the network's input and its own index for its own output, so that ranges
    of layers count each once; None where that isn't known: its bytes are then shared with no other layer. ``view_of``
    is the layer (or -1) in whose output's storage the output lies, None where it has its own, of ``storage_bytes``
    (None: ``output_bytes``). ``backward_weight_ns`` is the part of ``backward_ns`` that computes
    weight gradients (zero-bubble schedules move it); ``parameters`` counts scalars, None for ``weight_bytes / 4``.
    ``work`` is what its times were made of, if they are estimated; ``weight_needs`` what its weights' gradients need
    when they are computed later, None where that isn't known. ``module`` is what the model calls the module whose call
    begins with the layer, None where that is ``name``, and empty where none begins there. ``exchanges`` are what the
    ranks of a group send each other in it, where the layer is one rank's part and its times are without them;
    ``idle_ns`` is how long an estimated device waits for its host in the forward and in the backward meanwhile.
    ``matrix_state`` is how many numbers each optimizer of :data:`..choices.BY_MATRIX` keeps, None where that is
    unknown. ``working_bytes`` is the most that one of its passes takes beside what the forward keeps: gradients of what
    it made and read, and what its operations need meanwhile. ``own_parameters`` are those whose state its rank keeps
    where replicas share it, of a group whose ranks have weights in common; None: all that it has.
    """

    name: str
    forward_ns: int = field(metadata=said(merge=total, scale="time"))
    backward_ns: int = field(metadata=said(merge=total, scale="time"))
    weight_bytes: int
    output_bytes: int = field(metadata=said(scale="size"))
    saved_bytes: int | None = field(default=None, metadata=said(scale="size"))
    saves: tuple[int, ...] | None = field(default=None, metadata=said(names=True))
    view_of: int | None = field(default=None, metadata=said(names=True))
    storage_bytes: int | None = field(default=None, metadata=said(scale="size"))
    backward_weight_ns: int | None = field(default=None, metadata=said(merge=total, scale="time"))
    optimizer_ns: int = 0
    parameters: int | None = None
    work: LayerWork | None = field(default=None, metadata=said(merge=total))
    weight_needs: WeightNeeds | None = field(default=None, metadata=said(scale="size", names=True))
    module: str | None = field(default=None, metadata=said(merge=first))
    exchanges: tuple[Exchange, ...] = field(default=(), metadata=said(merge=_exchanged))
    idle_ns: tuple[int, int] | None = field(default=None, metadata=said(merge=total_known))
    matrix_state: tuple[int, ...] | None = field(default=None, metadata=said(merge=total))
    working_bytes: int = field(default=0, metadata=said(merge=largest, scale="size"))
    own_parameters: int | None = None

    @property
    def own(self) -> tuple[int, int]:
        """Bytes and number of its parameters whose state its rank keeps where replicas share it."""
        if self.own_parameters is None:
            return self.weight_bytes, self.parameter_count
        return -(-self.weight_bytes * self.own_parameters // max(1, self.parameter_count)), self.own_parameters

    @property
    def parameter_count(self) -> int:
        """Number of scalar parameters."""
        return self.weight_bytes // 4 if self.parameters is None else self.parameters

    @property
    def weight_part_ns(self) -> int:
        """The part of ``backward_ns`` that computes weight gradients: as measured, else half of it for a layer with
        weights (two products of equal size, as in a linear layer) and nothing for one without."""
        if self.backward_weight_ns is not None:
            return self.backward_weight_ns
        return self.backward_ns // 2 if self.weight_bytes else 0


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Weights that all of ``layers``, two or more in order, use: each has ``weight_bytes`` of them among its own.

    ``parameters`` counts scalars, None for ``weight_bytes / 4``.
    """

    layers: tuple[int, ...]
    weight_bytes: int
    parameters: int | None = None

    @property
    def parameter_count(self) -> int:
        """Number of scalar parameters."""
        return self.weight_bytes // 4 if self.parameters is None else self.parameters


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """What a device's own profile says of every layer, in ns per microbatch; the fields of Layer of the same names."""

    name: str
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    backward_weight_ns: tuple[int, ...]
    optimizer_ns: tuple[int, ...]

    @staticmethod
    def of(layers: Sequence[Layer], name: str) -> LayerTimes:
        """Return the times of ``layers``."""
        rows = [(x.forward_ns, x.backward_ns, x.weight_part_ns, x.optimizer_ns) for x in layers]
        return LayerTimes(name, *zip(*rows, strict=True))

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The four kinds of times."""
        return self.forward_ns, self.backward_ns, self.backward_weight_ns, self.optimizer_ns

    @property
    def waited_ns(self) -> tuple[int, ...]:
        """The part of each backward that earlier layers wait for."""
        return tuple(b - w for b, w in zip(self.backward_ns, self.backward_weight_ns, strict=True))
