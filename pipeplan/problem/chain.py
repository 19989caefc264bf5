"""What is the network? Its layers in an order that they may stand in, who reads whose output, and sums over ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import lcm

import numpy as np

from ..integers import IntLike, Ints, plain
from .layers import Layer, LayerTimes, SharedWeights, renumbered
from .policy import Precision
from .sums import Sums

LOSS_NAME = "loss"  # how profiles name what comes behind the model
CHANGED = "{name} trains by its buffer {buffer}, which its forwards change, and each replica would have one of its own"
AUTOCAST = "autocast-"  # what the type of a profile under autocast begins with


VariantName = tuple[int, bool, bool]  # tensor degree, whether selective, whether offloaded
Way = tuple[int, tuple[tuple[int, int], ...], bool]  # as stages have it: the layers whose cores run again, by ranges


@dataclass(frozen=True)
class Variant:
    """A network's layers, in order, as one of ``tensor`` ranks has them that run each layer together.

    With ``sequence_parallel`` what is between products is spread along the sequence, too, and ``selective`` ones run
    the cores of their attention again (Korthikanti et al. 2022). So many ranks share the ``experts`` of each layer, and
    ``context`` of them the tokens of a sequence (:attr:`Chain.by_heads`). Activations of ``offloaded`` ones wait in
    host memory (:class:`Chain`).
    """

    tensor: int
    sequence_parallel: bool
    layers: tuple[Layer, ...]
    selective: bool = False
    experts: int = 1
    context: int = 1
    by_heads: bool = False
    offloaded: int = 0

    @property
    def width(self) -> int:
        """How many GPUs run each layer together: those that have a part of it, of its experts, or of a sequence."""
        return lcm(self.tensor * self.context, self.experts)


@dataclass(frozen=True)
class Chain:
    """A network as layers in topological order, with every cut allowed; the profile that all planning starts from.

    ``edges`` makes it a DAG: pairs ``(i, j)``, i < j, mean that layer j reads the output of layer i; without edges each
    layer reads its predecessor. Layers that no edge enters read the network's input (``input_bytes``). ``inputs`` are
    layers that only hand on one of several inputs: they and the network's input come from the data to every stage that
    reads them, and cross no cut; None where they travel from the first stage on, as in files of before. ``tied`` pairs
    layers that share parameters, and ``shared`` says which; None where that isn't known: then as much as they could
    have in common counts where it must be summed, and nothing where it is held once. ``order`` has the place of each
    layer in the model's own order, None where they stand in that. The other fields say where the
    numbers come from, ``worth`` in a sentence what plans on such numbers were found to be worth, where that is known,
    ``within`` what nine of ten estimates like its times were multiplied by when measured, None of what was measured,
    ``beside`` how many processes, with the one that was measured, computed at once, and ``in_flight`` how many
    microbatches were between forward and backward. ``reading_ns`` is what making a microbatch's data takes a process
    that reads for itself (:attr:`read_in_passes_ns`). Where ``tensor`` is above 1 the layers are the part of one of so
    many ranks that run each layer together; with ``sequence_parallel`` what is between products is parted along the
    sequence, too. Of ``selective`` layers backwards run the cores of attention again.
    ``experts`` ranks have each a part of the experts of every layer, the fullest ``imbalance`` times the mean of
    tokens. ``context`` tensor-parallel groups have each a part of every sequence, whose keys and values go round (Liu
    et al. 2023), or, ``by_heads``, each all of it for some heads in attention (Jacobs et al. 2023).
    Where activations wait in host memory ``offloaded`` is the bandwidth of each GPU's link to it, in bytes/s each way.
    ``variants`` are the same layers at the costs of such parts, and of such layers; a stage may have any of its layers
    as in ``either`` instead, where that isn't empty;
    ``head_groups`` is how many heads of keys and values attention has, None where nobody says. ``changed`` names a
    buffer that forwards change and that others train by, of which replicas would have their own, ``own_ways`` a layer
    that torch's own trace wouldn't keep: one that switches gradients or autocast, whose gradient is of its own or whose
    code runs as written; both empty without any.
    """

    name: str
    layers: tuple[Layer, ...]
    input_bytes: int
    edges: tuple[tuple[int, int], ...] | None = None
    tied: tuple[tuple[int, int], ...] = ()
    shared: tuple[SharedWeights, ...] | None = None
    microbatch: int = 1
    dtype: str = "float32"
    device: str = ""
    source: str = ""
    worth: str = ""
    within: tuple[float, float] | None = None
    beside: int = 1
    in_flight: int = 1
    reading_ns: int = 0
    order: tuple[int, ...] | None = None
    inputs: tuple[int, ...] | None = None
    tensor: int = 1
    sequence_parallel: bool = False
    selective: bool = False
    variants: tuple[Variant, ...] = ()
    head_groups: int | None = None
    changed: str = ""
    own_ways: str = ""
    experts: int = 1
    imbalance: float = 1.0
    context: int = 1
    by_heads: bool = False
    offloaded: int = 0
    either: tuple[Layer, ...] = ()

    @property
    def width(self) -> int:
        """As a variant's."""
        return lcm(self.tensor * self.context, self.experts)

    @property
    def each(self) -> int:
        """How many samples of a microbatch, which is the whole group's, those have together that share sequences."""
        return self.microbatch * self.tensor * self.context // self.width

    @property
    def several(self) -> int:
        """How many of such microbatches one of the whole group is."""
        return self.microbatch // self.each

    @property
    def degrees(self) -> tuple[int, int, bool, int, bool, int]:
        """What it is among its variants."""
        return self.tensor, self.context, self.by_heads, self.experts, self.selective, self.offloaded

    @property
    def one_of_each(self) -> str:
        """Why no stage may have replicas, in words; empty where stages may."""
        return self.changed and CHANGED.format(name=self.name, buffer=self.changed)

    @property
    def variant(self) -> str:
        """What it is called among its variants: the tensor degree, others above 1, whether it is selective; where each
        stage chooses, that, or each layer."""
        if self.variants:
            return "1 by layer" if all(x.width == 1 and not x.offloaded for x in self.variants) else "each"
        among = f" context {self.context}{' by heads' * self.by_heads}" if self.context > 1 else ""
        among += f" experts {self.experts}" if self.experts > 1 else ""
        return f"{self.tensor}{among}{' selective' * self.selective}{' offloaded' * (self.offloaded > 0)}"

    @property
    def precision(self) -> Precision:
        """What a plan on it has, where nobody says another: autocast if it was profiled so."""
        return "autocast" if self.dtype.startswith(AUTOCAST) else "fp32"

    def misfit(self, precision: Precision) -> str | None:
        """Return in words why no plan on it has this ``precision``; None where one may."""
        if (precision == "autocast") == (self.precision == "autocast"):
            return None
        other = f"{AUTOCAST}bfloat16" if precision == "autocast" else "float32 or bfloat16"
        return (
            f"--precision {precision}: {self.name} was profiled in {self.dtype}, so its activations and times are "
            f"others; profile it with --dtype {other}"
        )

    @property
    def of_cpu(self) -> bool:
        """Whether it was measured on a CPU, whose name the profiler ends with threads, and with what it measured."""
        return re.search(r", \d+ threads?(, CPU time)?$", self.device) is not None

    @property
    def reads_beside(self) -> bool:
        """Whether a host reads while its device, a GPU, computes; then no layer's time has that of reading."""
        return bool(self.device) and not self.of_cpu

    @property
    def read_in_passes_ns(self) -> int:
        """What of the reading is part of the forwards of the first layer and of the last."""
        return 0 if self.reads_beside else self.reading_ns

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def modules(self) -> int:
        """Number of layers that are the model's own: without a last one that is the loss."""
        count, last = len(self.layers), self.layers[-1]
        return count - (count > 1 and last.name == LOSS_NAME)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Readers of each tensor in order: entry 0 for the network's input, entry i + 1 for the output of layer i."""
        count = len(self.layers)
        if self.edges is None:
            return tuple((i,) if i < count else () for i in range(count + 1))
        readers: list[set[int]] = [set() for _ in range(count + 1)]
        for source, target in self.edges:
            readers[source + 1].add(target)
        readers[0] = set(range(count)) - set().union(*readers[1:])
        return tuple(tuple(sorted(r)) for r in readers)

    def from_data(self, tensor: int) -> bool:
        """Whether one of :attr:`readers` comes from the data to each stage that reads it."""
        return self.inputs is not None and (tensor == 0 or tensor - 1 in self.inputs)

    @cached_property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Sizes of the tensors of :attr:`readers`."""
        return (self.input_bytes, *(layer.output_bytes for layer in self.layers))

    @cached_property
    def cut_bytes(self) -> tuple[int, ...]:
        """Bytes that cross the cut before layer i, for i = 0..L: each distinct tensor made before and read after it.

        A skip connection is relayed stage by stage, so it counts in every cut that it crosses (ALGORITHMS section 1).
        Entry 0 is the network's input; entry L is 0. What comes from the data counts in the cuts before all layers that
        compute alone: a stage of inputs is none that a plan wants.
        """
        change = [0] * (len(self.layers) + 1)
        first = next((i for i in range(len(self.layers)) if i not in (self.inputs or ())), 0)
        for tensor, (size, readers) in enumerate(zip(self.tensor_bytes, self.readers, strict=True)):
            if readers:
                change[tensor] += size
                last = min(readers[-1], max(first, tensor)) if self.from_data(tensor) else readers[-1]
                change[last + 1] -= size
        return tuple(int(x) for x in np.cumsum(np.array(change, dtype=np.int64)))

    @cached_property
    def ties(self) -> tuple[SharedWeights, ...]:
        """What tied layers share, or at most: of those that are connected all that the smallest has."""
        if self.shared is not None:
            return self.shared
        found = []
        for layers in connected(self.tied):
            smallest = min((self.layers[i] for i in sorted(layers)), key=lambda layer: layer.weight_bytes)
            found.append(SharedWeights(tuple(sorted(layers)), smallest.weight_bytes, smallest.parameter_count))
        return tuple(found)

    @cached_property
    def sums(self) -> Sums:
        """Prefix sums over the layers."""
        return Sums.of(self.layers, self.shared or ())

    def working_bytes(self, start: IntLike, stop: IntLike) -> IntLike:
        """Return the most that a pass through one of ``layers[start:stop]`` takes beside what is kept, in bytes."""
        if not self._working[0].any():
            return 0
        last = len(self) - 1
        level = np.frexp(np.maximum(np.asarray(stop) - start, 1))[1] - 1  # of two runs that cover the range
        first, second = np.minimum(start, last), np.minimum(np.maximum(np.asarray(stop) - (1 << level), 0), last)
        return plain(np.maximum(self._working[level, first], self._working[level, second]))

    @cached_property
    def _working(self) -> Ints:
        """The most of ``working_bytes`` in 2^k layers from each on, shape (k, L)."""
        rows = [np.array([layer.working_bytes for layer in self.layers], dtype=np.int64)]
        while 2 ** len(rows) <= len(self.layers):
            ahead = np.roll(rows[-1], -(2 ** (len(rows) - 1)))
            rows.append(np.maximum(rows[-1], ahead))
        return np.stack(rows)

    def reordered(self, order: Sequence[int]) -> Chain:
        """Return the same network with its layers in another order that they may stand in: ``order[i]`` is layer i."""
        if list(order) == list(range(len(self))):
            return self
        place = {old: new for new, old in enumerate(order)} | {-1: -1}

        def moved(layers: Iterable[int]) -> tuple[int, ...]:
            return tuple(sorted(place[i] for i in layers))

        def in_order(layers: Sequence[Layer]) -> tuple[Layer, ...]:
            return tuple(renumbered(layers[i], place.__getitem__) for i in order)

        own = tuple(order if self.order is None else (self.order[i] for i in order))
        return replace(
            self,
            layers=in_order(self.layers),
            variants=tuple(replace(x, layers=in_order(x.layers)) for x in self.variants),
            edges=self.edges and tuple(sorted((place[i], place[j]) for i, j in self.edges)),
            inputs=self.inputs and moved(self.inputs),
            tied=tuple(sorted((min(x), max(x)) for x in map(moved, self.tied))),
            shared=self.shared and tuple(replace(x, layers=moved(x.layers)) for x in self.shared),
            order=None if own == tuple(range(len(self))) else own,
        )

    def in_own_order(self) -> Chain:
        """Return the same network with its layers in the model's own order."""
        order = self.order
        return self if order is None else self.reordered(sorted(range(len(self)), key=order.__getitem__))

    def part(self, variant: Variant) -> Chain:
        """Return what one rank has of the network: the same layers at a variant's costs."""
        shared = []
        for tie in self.shared or ():
            least = min((variant.layers[i] for i in tie.layers), key=lambda layer: layer.weight_bytes)
            shared.append(SharedWeights(tie.layers, least.weight_bytes, least.parameter_count))
        return replace(
            self,
            shared=None if self.shared is None else tuple(shared),
            input_bytes=-(-self.input_bytes // variant.context),
            microbatch=self.microbatch * variant.width // (variant.tensor * variant.context),
            variants=(),
            **{x.name: getattr(variant, x.name) for x in fields(variant)},
        )

    @cached_property
    def choices(self) -> tuple[Chain, ...]:
        """The network as it is without variants, and as each of these has it, one of which every stage takes."""
        if not self.variants:
            return (self,)
        found = (replace(self, variants=()), *map(self.part, self.variants))
        alike = {x.degrees: x for x in found}
        return tuple(x.alternating(alike.get(replace(x, selective=False).degrees)) for x in found)

    def alternating(self, stored: Chain | None) -> Chain:
        """Return the network whose cores run again, of which layers of a stage may be as ``stored``, too: they differ
        in what they keep, their backwards take no less, and with what passes of either work is counted."""
        if stored is None or not self.selective or self.offloaded:  # what layers move to the host takes them longer
            return self
        layers, either = list[Layer](), list[Layer]()
        for x, y in zip(self.layers, stored.layers, strict=True):
            either.append(replace(y, working_bytes=max(x.working_bytes, y.working_bytes)))
            kept = {name: getattr(x, name) for name in ("saved_bytes", "saves", "weight_needs")}
            layers.append(replace(either[-1], backward_ns=max(x.backward_ns, y.backward_ns), **kept))
        return replace(self, layers=tuple(layers), either=tuple(either))

    @property
    def otherwise(self) -> Chain:
        """The network whose layers are the other ones that they may be."""
        return replace(self, layers=self.either, either=self.layers)

    @cached_property
    def names(self) -> dict[VariantName, Chain]:
        """The :attr:`choices` by name; where there is but one, that is the first."""
        alike = {(x.tensor, x.selective, x.offloaded > 0): x for x in self.choices if x.width == x.tensor}
        return alike if self.variants else {(1, False, False): self}

    def of(self, way: Way) -> Chain:
        """Return the network as a stage of a ``way`` has it; KeyError where it has none such."""
        if way not in self._ways:
            tensor, again, offloaded = way
            found = self.names[tensor, bool(again), offloaded]
            if again and found.either:
                layers = list(found.either)
                for first, last in again:
                    layers[first:last] = found.layers[first:last]
                found = replace(found, layers=tuple(layers), either=())
            self._ways[way] = found
        return self._ways[way]

    @cached_property
    def _ways(self) -> dict[Way, Chain]:
        return {}

    def timed(self, times: LayerTimes | None) -> Chain:
        """Return the same network with the times of a device's own profile; None: with its own."""
        if times is None:
            return self
        if times not in self._timed:
            rows = zip(times.forward_ns, times.backward_ns, times.backward_weight_ns, times.optimizer_ns, strict=True)
            layers = (
                replace(layer, forward_ns=f, backward_ns=b, backward_weight_ns=w, optimizer_ns=o)
                for layer, (f, b, w, o) in zip(self.layers, rows, strict=True)
            )
            self._timed[times] = replace(self, layers=tuple(layers), either=())
        return self._timed[times]

    @cached_property
    def _timed(self) -> dict[LayerTimes, Chain]:
        return {}


def connected(sets: Iterable[Iterable[int]]) -> list[set[int]]:
    """Return the unions of ``sets`` that have elements in common, in a chain of however many sets."""
    several = [set(one) for one in sets]
    if len(several) < 2:
        return several
    from networkx.utils import UnionFind  # not for one set: it takes longer to load than most plans to find

    found = UnionFind()
    for one in several:
        found.union(*one)
    return list(found.to_sets())
