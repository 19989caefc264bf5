"""What does one layer cost, and what do layers share?

Times are integer nanoseconds per microbatch, sizes integer bytes. Each field says where it stands how layers' values
merge, change with the microbatch, and name other layers: three functions read that, and a new field is a line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeVar

Scale = Literal["time", "size"]
Merge = Callable[[Sequence[Any]], Any]
T = TypeVar("T")


def said(*, merge: Merge | None = None, scale: Scale | None = None, names: bool = False) -> dict[str, Any]:
    """Return what a field says in its ``metadata``: how values of layers ``merge`` into one (None: whoever merges has
    to say, or it is unknown), whether it grows with the microbatch, and whether it ``names`` layers by indices."""
    return {"merge": merge, "scale": scale, "names": names}


def total(values: Sequence[Any]) -> Any:
    """Merge into the sum, of tuples place by place; None where one is unknown."""
    if any(x is None for x in values):
        return None
    if isinstance(values[0], int):
        return sum(values)
    made, columns = type(values[0]), [total(column) for column in zip(*values, strict=True)]
    return made(columns) if made is tuple else made(*columns)


def total_known(values: Sequence[Any]) -> Any:
    """Merge into the sum of those that are known; None where none is."""
    known = [x for x in values if x is not None]
    return total(known) if known else None


def merged(part: Sequence[T], **given: Any) -> T:
    """Return ``part`` as one, with what is ``given``."""
    rules = {x.name: x.metadata.get("merge") for x in fields(part[0])}  # type: ignore[arg-type]  # a dataclass
    own = {name: rule([getattr(x, name) for x in part]) for name, rule in rules.items() if rule and name not in given}
    return type(part[0])(**own, **given)


def scaled(one: T, number: Callable[..., int], *others: T) -> T:
    """Return ``one`` with each number that scales as ``number(scale, it, *those of others)`` has it; None where one of
    the others doesn't know it. Of fields within fields the others aren't asked."""

    def new(value: Any, scale: Scale, far: Sequence[Any]) -> Any:
        if is_dataclass(value):
            return scaled(value, number)
        return None if None in far else number(scale, value, *far)

    rules = {x.name: x.metadata.get("scale") for x in fields(one)}  # type: ignore[arg-type]  # a dataclass
    known = {name: rule for name, rule in rules.items() if rule and getattr(one, name) is not None}
    made = {name: new(getattr(one, name), rule, [getattr(x, name) for x in others]) for name, rule in known.items()}
    return replace(one, **made)  # type: ignore[type-var]


def named_by(one: Any) -> tuple[int, ...]:
    """Return the layers that ``one`` names, -1 for the network's input."""
    values = [getattr(one, x.name) for x in fields(one) if x.metadata.get("names")]
    rows = [(x,) if isinstance(x, int) else x if isinstance(x, tuple) else named_by(x) for x in values if x is not None]
    return tuple(i for row in rows for i in row)


def renumbered(one: T, place: Callable[[int], int]) -> T:
    """Return ``one`` where each layer ``i`` that it names is ``place(i)``."""

    def new(value: Any) -> Any:
        if isinstance(value, int):
            return place(value)
        return tuple(sorted(map(place, value))) if isinstance(value, tuple) else renumbered(value, place)

    values = {x.name: getattr(one, x.name) for x in fields(one) if x.metadata.get("names")}  # type: ignore[arg-type]
    return replace(one, **{name: new(x) for name, x in values.items() if x is not None})  # type: ignore[type-var]


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
    same pass, or of those that take ``beside_ns`` each. ``ranks`` of the group take part in each, every ``apart``-th,
    0 for those of the tensor degree. In a ``send`` each rank sends the whole to its neighbour in a ring.
    """

    kind: Collective
    backward: bool
    bytes: int
    count: int = 1
    hidden: int = 0
    ranks: int = 0
    update: bool = False
    apart: int = 1
    beside_ns: int = 0


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
    where replicas share it, of a group whose ranks have weights in common; None: all that it has. Of what it would keep
    ``host_bytes`` wait in host memory, and where these are of what it reads alone, it runs again in the backward, when
    ``again_bytes`` are on the device.
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
    module: str | None = field(default=None, metadata=said(merge=itemgetter(0)))
    exchanges: tuple[Exchange, ...] = field(default=(), metadata=said(merge=_exchanged))
    idle_ns: tuple[int, int] | None = field(default=None, metadata=said(merge=total_known))
    matrix_state: tuple[int, ...] | None = field(default=None, metadata=said(merge=total))
    working_bytes: int = field(default=0, metadata=said(merge=max, scale="size"))
    own_parameters: int | None = None
    host_bytes: int = field(default=0, metadata=said(merge=total, scale="size"))
    again_bytes: int = field(default=0, metadata=said(merge=max, scale="size"))

    @property
    def on_its_way_bytes(self) -> int:
        """What is on the device at most of activations that wait in host memory: two layers' as large as its own, and
        what it keeps while it runs again."""
        return 2 * self.host_bytes + self.again_bytes

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
