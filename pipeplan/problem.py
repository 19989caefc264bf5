"""What is given: a profiled network (Chain), the machine (Platform), how weights are kept (Policy), what is allowed.

Times are integer nanoseconds per microbatch, sizes integer bytes, layer ranges half-open and zero-based.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import lcm
from typing import Any, Literal, NamedTuple

import numpy as np

from .deadline import NEVER, Deadline
from .integers import IntLike, Ints, ceil_div, plain


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
class WeightNeeds:
    """What of a layer is held from the first part of its backward, which computes the gradient of what it read, to the
    second, which computes those of its weights: ``saved_bytes`` of what it had saved, with ``saves`` as a layer's, and
    ``gradient_bytes`` of gradients that were computed meanwhile."""

    saved_bytes: int
    saves: tuple[int, ...]
    gradient_bytes: int


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
    when they are computed later, None where that isn't known.
    """

    name: str
    forward_ns: int
    backward_ns: int
    weight_bytes: int
    output_bytes: int
    saved_bytes: int | None = None
    saves: tuple[int, ...] | None = None
    view_of: int | None = None
    storage_bytes: int | None = None
    backward_weight_ns: int | None = None
    optimizer_ns: int = 0
    parameters: int | None = None
    work: LayerWork | None = None
    weight_needs: WeightNeeds | None = None

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


@dataclass(frozen=True)
class Chain:
    """A network as layers in topological order, with every cut allowed; the profile that all planning starts from.

    ``edges`` makes it a DAG: pairs ``(i, j)``, i < j, mean that layer j reads the output of layer i; without edges each
    layer reads its predecessor. Layers that no edge enters read the network's input (``input_bytes``). ``tied`` pairs
    layers that share parameters, and ``shared`` says which; None where that isn't known: then as much as they could
    have in common counts where it must be summed, and nothing where it is held once. ``order`` has the place of each
    layer in the model's own order, None where they stand in that. The other fields say where the
    numbers come from, ``worth`` in a sentence what plans on such numbers were found to be worth, where that is known,
    ``beside`` how many processes, with the one that was measured, computed at once. ``reading_ns`` is what making a
    microbatch's data takes a process that reads for itself: part of the forward times of the first layer and the last.
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
    beside: int = 1
    reading_ns: int = 0
    order: tuple[int, ...] | None = None

    @property
    def of_cpu(self) -> bool:
        """Whether it was measured on a CPU, whose name the profiler ends with threads, and with what it measured."""
        return re.search(r", \d+ threads?(, CPU time)?$", self.device) is not None

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def modules(self) -> int:
        """Number of layers that are the model's own: without a last one that is the loss."""
        count, last = len(self.layers), self.layers[-1]
        return count - (count > 1 and last.name == LOSS and not last.weight_bytes)

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

    @cached_property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Sizes of the tensors of :attr:`readers`."""
        return (self.input_bytes, *(layer.output_bytes for layer in self.layers))

    @cached_property
    def cut_bytes(self) -> tuple[int, ...]:
        """Bytes that cross the cut before layer i, for i = 0..L: each distinct tensor made before and read after it.

        A skip connection is relayed stage by stage, so it counts in every cut that it crosses (ALGORITHMS section 1).
        Entry 0 is the network's input; entry L is 0.
        """
        change = [0] * (len(self.layers) + 1)
        for tensor, (size, readers) in enumerate(zip(self.tensor_bytes, self.readers, strict=True)):
            if readers:
                change[tensor] += size
                change[readers[-1] + 1] -= size
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
        return Sums.of(self)

    def is_range(self, start: IntLike, stop: IntLike) -> Any:
        """Whether a stage may have what stands from position ``start`` to ``stop``: any layers at all."""
        return np.asarray(stop) > start

    def reordered(self, order: Sequence[int]) -> Chain:
        """Return the same network with its layers in another order that they may stand in: ``order[i]`` is layer i."""
        if list(order) == list(range(len(self))):
            return self
        place = {old: new for new, old in enumerate(order)} | {-1: -1}

        def moved(layers: Iterable[int]) -> tuple[int, ...]:
            return tuple(sorted(place[i] for i in layers))

        layers = []
        for layer in (self.layers[i] for i in order):
            saves = None if layer.saves is None else moved(layer.saves)
            view = None if layer.view_of is None else place[layer.view_of]
            needs = layer.weight_needs and replace(layer.weight_needs, saves=moved(layer.weight_needs.saves))
            layers.append(replace(layer, saves=saves, view_of=view, weight_needs=needs))
        own = tuple(order if self.order is None else (self.order[i] for i in order))
        return replace(
            self,
            layers=tuple(layers),
            edges=self.edges and tuple(sorted((place[i], place[j]) for i, j in self.edges)),
            tied=tuple(sorted((min(x), max(x)) for x in map(moved, self.tied))),
            shared=self.shared and tuple(replace(x, layers=moved(x.layers)) for x in self.shared),
            order=None if own == tuple(range(len(self))) else own,
        )

    def in_own_order(self) -> Chain:
        """Return the same network with its layers in the model's own order."""
        order = self.order
        return self if order is None else self.reordered(sorted(range(len(self)), key=order.__getitem__))

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
            self._timed[times] = replace(self, layers=tuple(layers))
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


@dataclass(frozen=True)
class SharedSums:
    """One of a chain's :class:`SharedWeights`, and ``holders``, of shape (L + 1,): how many of ``layers[:i]`` have it.

    ``optimizer_ns`` is what a step of it takes: the least share that it has, by its parameters, of a layer's step.
    """

    holders: Ints
    weight_bytes: int
    parameters: int
    optimizer_ns: int

    @staticmethod
    def of(shared: SharedWeights, layers: Sequence[Layer]) -> SharedSums:
        """Return the sums of ``shared`` over ``layers``."""
        count = shared.parameter_count
        steps = [layers[i].optimizer_ns * count // max(1, layers[i].parameter_count) for i in shared.layers]
        holders = np.zeros(len(layers) + 1, dtype=np.int64)
        holders[np.array(shared.layers) + 1] = 1
        return SharedSums(np.cumsum(holders), shared.weight_bytes, count, min(steps))

    def again(self, start: IntLike, stop: IntLike) -> IntLike:
        """Return in how many of ``layers[start:stop]`` it is counted, after the first."""
        return plain(np.maximum(self.holders[stop] - self.holders[start] - 1, 0))

    def inside(self, start: int, stop: int) -> bool:
        """Whether any of ``layers[start:stop]`` has it."""
        return bool(self.holders[stop] > self.holders[start])


@dataclass(frozen=True)
class Sums:
    """Prefix sums of a chain's layer costs, each of shape (L + 1,): entry i is the sum over ``layers[:i]``.

    They count what layers share in each of them; ``shared`` says what is known of that.
    """

    forward_ns: Ints
    backward_ns: Ints
    backward_weight_ns: Ints
    optimizer_ns: Ints
    weight_bytes: Ints
    parameters: Ints
    shared: tuple[SharedSums, ...]

    @staticmethod
    def of(chain: Chain) -> Sums:
        """Return the prefix sums of ``chain``."""

        def prefix(values: Sequence[int]) -> Ints:
            return np.concatenate([[0], np.cumsum(np.asarray(values, dtype=np.int64))]).astype(np.int64)

        layers = chain.layers
        return Sums(
            forward_ns=prefix([x.forward_ns for x in layers]),
            backward_ns=prefix([x.backward_ns for x in layers]),
            backward_weight_ns=prefix([x.weight_part_ns for x in layers]),
            optimizer_ns=prefix([x.optimizer_ns for x in layers]),
            weight_bytes=prefix([x.weight_bytes for x in layers]),
            parameters=prefix([x.parameter_count for x in layers]),
            shared=tuple(SharedSums.of(x, layers) for x in chain.shared or ()),
        )

    @cached_property
    def passes_ns(self) -> list[int]:
        """Forward and backward together, as Python's integers: quicker to read one by one."""
        found: list[int] = (self.forward_ns + self.backward_ns).tolist()
        return found


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """What a device's own profile says of every layer, in ns per microbatch; the fields of Layer of the same names."""

    name: str
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    backward_weight_ns: tuple[int, ...]
    optimizer_ns: tuple[int, ...]

    @staticmethod
    def of(chain: Chain, name: str) -> LayerTimes:
        """Return the times of ``chain``."""
        rows = [(x.forward_ns, x.backward_ns, x.weight_part_ns, x.optimizer_ns) for x in chain.layers]
        return LayerTimes(name, *zip(*rows, strict=True))

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The four kinds of times."""
        return self.forward_ns, self.backward_ns, self.backward_weight_ns, self.optimizer_ns

    @property
    def waited_ns(self) -> tuple[int, ...]:
        """The part of each backward that earlier layers wait for."""
        return tuple(b - w for b, w in zip(self.backward_ns, self.backward_weight_ns, strict=True))


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: usable memory in bytes, and speed relative to the device that its profile was measured on.

    ``times`` are those of a profile of its own; None: the chain's. On a platform all devices have them, or none.
    """

    memory_bytes: int
    speed: Fraction = Fraction(1)
    times: LayerTimes | None = None


@lru_cache(maxsize=256)
def _extreme(devices: tuple[Device, ...], slow: bool) -> Device:
    """Return the least memory, and for every layer the time of the slowest of ``devices``; or the most and the fastest.

    Where profiles differ times are rounded towards what is sought, so that no sum of them is on its wrong side. Of the
    fastest's backwards both the whole and the part that others wait for are the least of any, each by itself.
    """
    pick = min if slow else max
    memory, speed = pick(x.memory_bytes for x in devices), pick(x.speed for x in devices)
    first = devices[0].times
    if first is None or all(x.times == first for x in devices):
        return Device(memory, speed, first)
    scaled = [
        [[-(-t * s.denominator // s.numerator) if slow else t * s.denominator // s.numerator for t in c] for c in x]
        for x, s in (((*x.times.columns, x.times.waited_ns), x.speed) for x in devices if x.times is not None)
    ]
    extreme = max if slow else min
    columns = [tuple(extreme(at) for at in zip(*kind, strict=True)) for kind in zip(*scaled, strict=True)]
    forward, backward, weight, optimizer, waited = columns
    if not slow:
        weight = tuple(whole - part for whole, part in zip(backward, waited, strict=True))
    return Device(
        memory, Fraction(1), LayerTimes("slowest" if slow else "fastest", forward, backward, weight, optimizer)
    )


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the network: it joins ``count`` units of the level below (devices, at the lowest level).

    ``links`` is how many links each of these units has into this level, for all that its devices send beyond the unit;
    None where any two devices have a link of their own.
    """

    count: int
    bandwidth: int  # bytes per second and direction, of each link
    latency_ns: int = 0
    links: int | None = None


@dataclass(frozen=True)
class Platform:
    """Devices in a fixed order, joined by levels, the lowest (inside a server) first (PipeDream section 3.1).

    At most one level has ``links``. A message takes the devices at both its ends ``overhead_ns`` of work, to send it or
    to receive it, beside what the link takes, which keeps them from computing where transfers are ``blocking``.
    ``reserved_bytes`` of each device are for others: its ``memory_bytes`` are without them.
    """

    devices: tuple[Device, ...]
    levels: tuple[Level, ...]
    full_duplex: bool = False
    blocking: bool = False
    reserved_bytes: int = 0
    overhead_ns: int = 0

    def __len__(self) -> int:
        return len(self.devices)

    @staticmethod
    def flat(count: int, memory_bytes: int, bandwidth: int = 12 * 10**9, latency_ns: int = 0) -> Platform:
        """Return ``count`` equal devices on one level; the default 12 GB/s is PCIe 3 x16 (MadPipe section 5.1)."""
        return Platform((Device(memory_bytes),) * count, (Level(count, bandwidth, latency_ns),))

    def reserving(self, size: int) -> Platform:
        """Return the platform with ``size`` bytes less of every device's memory, for others."""
        devices = tuple(replace(x, memory_bytes=x.memory_bytes - size) for x in self.devices)
        return replace(self, devices=devices, reserved_bytes=self.reserved_bytes + size)

    @cached_property
    def unit_sizes(self) -> tuple[int, ...]:
        """Devices in one unit of each level: the running product of the levels' counts."""
        sizes, size = [], 1
        for level in self.levels:
            size *= level.count
            sizes.append(size)
        return tuple(sizes)

    @cached_property
    def shared_level(self) -> int | None:
        """The level whose units share their links, or None."""
        return next((k for k, level in enumerate(self.levels) if level.links is not None), None)

    def shares_links(self, level: int) -> bool:
        """Whether a transfer over ``level`` takes one of the links that its sender's unit has for all it sends."""
        return self.shared_level is not None and level >= self.shared_level

    def both_ways(self, level: int) -> bool:
        """Whether the two directions of a transfer over ``level`` don't exclude each other."""
        return self.full_duplex or self.shares_links(level)

    def link_of(self, device: int) -> int:
        """Return the number of the shared link by which ``device`` sends: the devices of a unit are spread evenly over
        its links, neighbours together."""
        assert self.shared_level is not None, "every two devices have a link of their own"
        links = self.levels[self.shared_level].links or 1
        size = self.unit_sizes[self.shared_level - 1] if self.shared_level else 1
        return device // size * links + device % size * links // size

    def level_of(self, devices: Sequence[int]) -> int:
        """Return the index of the lowest level whose one unit holds all of ``devices``."""
        first, last = min(devices), max(devices)
        return next(k for k, size in enumerate(self.unit_sizes) if first // size == last // size)

    def level_between(self, one: Sequence[int], other: Sequence[int]) -> int:
        """Return the lowest level that joins every two devices of the groups that exchange a microbatch's tensors.

        Microbatch m is on ``one[m % len(one)]`` and ``other[m % len(other)]``: pipelines side by side, each inside a
        server, never leave it. For groups that lie one behind the other it is the level that joins them all.
        """
        if len(self.levels) == 1 or max(one) < min(other) or max(other) < min(one):
            return self.level_of((*one, *other))
        return max(self.level_of((one[m % len(one)], other[m % len(other)])) for m in range(lcm(len(one), len(other))))

    @cached_property
    def paths(self) -> tuple[tuple[int, int], ...]:
        """Bandwidth (bytes/s) and latency (ns) of a transfer that spans levels 0..k: its slowest level decides."""
        return tuple(
            (min(x.bandwidth for x in self.levels[: k + 1]), max(x.latency_ns for x in self.levels[: k + 1]))
            for k in range(len(self.levels))
        )

    def transfer_ns(self, size: int, level: int) -> int:
        """Time to move ``size`` bytes one way over a path that spans ``level``; 0 for no bytes."""
        bandwidth, latency = self.paths[level]
        return latency + ceil_div(size * 10**9, bandwidth) if size else 0

    def held_ns(self, size: int, level: int) -> int:
        """For how long such a transfer keeps the device at either of its ends from computing."""
        if not size:
            return 0
        return self.overhead_ns + (self.transfer_ns(size, level) if self.blocking else 0)

    @cached_property
    def spans(self) -> Ints:
        """The lowest level that joins the devices a..b-1, shape (P, P + 1); 0 where b <= a."""
        count = len(self.devices)
        table = np.zeros((count, count + 1), dtype=np.int64)
        first, last = np.arange(count)[:, None], np.arange(-1, count)[None, :]
        for k in range(1, len(self.levels)):
            below = self.unit_sizes[k - 1]
            table[(first // below != last // below) & (last > first)] = k
        return table

    @property
    def best_device(self) -> Device:
        """The most memory and the most speed (at every layer) that any device has: what no device exceeds."""
        return _extreme(tuple(dict.fromkeys(self.devices)), False)

    def slowest(self, devices: Sequence[int]) -> Device:
        """Return the least memory and the least speed (at every layer) of ``devices``: what a replicated stage gets."""
        if len(devices) == 1:
            return self.devices[devices[0]]
        return _extreme(tuple(dict.fromkeys(self.devices[d] for d in devices)), True)


ENDLESS = 10**15  # microbatches between two updates, which then take a nanosecond of each at most
CLIPPED_TOGETHER = (  # of the policy's weights, where they are others than those
    "the norm of all gradients is known once every stage has its own, but with weights {weights} each stage updates as "
    "soon as it has its own; weights flush and 2bw update from the same microbatches"
)
Weights = Literal["flush", "2bw", "stash", "latest"]
TOGETHER: tuple[Weights, ...] = ("flush", "2bw")  # all stages make every update from the same microbatches
Optimizer = Literal["sgd", "momentum", "adam"]
Precision = Literal["fp32", "mixed"]
Checkpointing = Literal["none", "stages", "segments"]
Zero = Literal[0, 1]
Engine = Literal["torch"]
LOSS = "loss"  # how profiles name what comes behind the model


@dataclass(frozen=True, slots=True)
class Policy:
    """How weights, gradients and optimizer state are kept, and how often they are updated (ALGORITHMS section 3).

    ``accumulate`` is the number of microbatches per update. None means: open, the planner decides it. Until then 2bw
    takes costs at their limit, the updates so rare that they cost next to nothing and that microbatches in flight are
    never too many for two versions: what is infeasible then, or takes longer, is and does so at every interval. Other
    policies take one update per microbatch.
    ``bucket_parameters`` is the number of parameters whose optimizer state is on the device at a time with ``offload``.
    With ``coarsening``, for drained batches, gradients are summed in chunks of so many buckets, and the optimizer steps
    one chunk while the next is summed (Myelin section V-C); None: its steps are spread over the backwards before.
    ``bytes_per_parameter`` is what another engine holds of one version of the weights, their gradient and the
    optimizer's state; None: what ``optimizer`` and ``precision`` say. ``shared_bytes_per_parameter`` of them are what
    replicas share with ``zero``.
    With ``zero`` 1 the replicas of a stage share its optimizer state, and the fp32 weights of mixed precision: each
    keeps and steps an equal part (Rajbhandari et al., ZeRO, P_os); 0: each keeps and steps all of it. A search that
    looks at one of several ``pipelines`` side by side takes each replica for as many. No file has that.
    ``engine``: whose runtime holds what goes between drained stages, None for pipeplan's own. That of torch has buffers
    to receive every microbatch of a mini-batch.
    With ``clip`` gradients are clipped by the total norm over all stages: no update begins before every stage has its
    gradient and they have summed one number.
    """

    weights: Weights = "2bw"
    accumulate: int | None = None
    optimizer: Optimizer = "sgd"
    precision: Precision = "fp32"
    offload: bool = False
    vertical_sync: bool = False
    bucket_parameters: int = 16 * 10**6
    coarsening: int | None = None
    bytes_per_parameter: int | None = None
    shared_bytes_per_parameter: int | None = None
    zero: Zero = 0
    engine: Engine | None = None
    pipelines: int = 1
    clip: bool = False

    def sharers(self, replicas: int) -> int:
        """Return over how many of a stage's ``replicas`` its optimizer state is spread."""
        return replicas * self.pipelines if self.zero else 1

    @property
    def drains(self) -> bool:
        """Whether the pipeline empties before every update."""
        return self.weights == "flush"

    @property
    def updates_together(self) -> bool:
        """Whether all stages make every update from the same microbatches, so that copies of weights stay equal.

        Under the other policies each stage updates when its own backwards are over, at other times than the rest.
        """
        return self.weights in TOGETHER

    def goes_with(self, weights: Weights) -> bool:
        """Whether ``weights`` could be kept so instead: where gradients are clipped all stages update together."""
        return not self.clip or weights in TOGETHER

    @property
    def steps_apart(self) -> bool:
        """Whether optimizer steps come behind a drained batch, with sums or after them, and not among its backwards."""
        return self.coarsening is not None or (self.clip and self.drains)

    @property
    def waits_for_norm(self) -> bool:
        """Whether an update's gradients wait aside for the norm of all, while passes make the next ones."""
        return self.clip and not self.drains

    def update_interval(self, replicas: int = 1) -> int:
        """Microbatches between two weight updates of a stage with ``replicas`` replicas."""
        return max(replicas, self.accumulate or (ENDLESS if self.open else 1))

    @property
    def open(self) -> bool:
        """Whether costs are those of any interval between updates: lower bounds for each."""
        return self.accumulate is None and self.weights == "2bw"


@dataclass(frozen=True)
class Problem:
    """An instance: the chain, the platform, the policy, and what a plan may use.

    ``checkpointing`` allows a stage to recompute nothing (``none``), all of itself (``stages``) or any segments.
    Layers that share weights may be in several stages where the policy allows it (``tied`` is ``apart``), or stay in
    one (``together``); ``free`` is a relaxation for searches, where sums over stages take no time.
    Searches for plans raise OutOfTime at the ``deadline``, which changes no answer that comes before it.
    """

    chain: Chain
    platform: Platform
    policy: Policy = Policy()
    replicas: bool = True
    checkpointing: Checkpointing = "stages"
    deadline: Deadline = NEVER
    tied: Literal["apart", "together", "free"] = "apart"

    @property
    def most_replicas(self) -> int:
        """The most replicas that a stage may have."""
        return len(self.platform) if self.replicas else 1

    def with_policy(self, policy: Policy) -> Problem:
        """Return the same instance under another policy."""
        return replace(self, policy=policy)
