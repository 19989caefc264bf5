"""How long does a layer take on a device that isn't here? The longer of what its kernels and its host take.

A kernel takes what bounds it: arithmetic at a share of the peak, traffic at a share of the memory's bandwidth, or the
least time of any kernel. The host issues operations one after the other while kernels run, so a pass takes as long as
the slower of the two; forward and backward each have their time per operation, as Python issues the one and C++ the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import sqrt
from typing import NamedTuple

from ..integers import ceil_div
from ..problem import Chain, Layer, LayerWork, PassWork, Platform, WeightNeeds
from .saved import entering_bytes
from .time_model import collective_ns


def with_exchanges(chain: Chain, where: Platform) -> Chain:
    """Return a rank's chain with the time that its group's exchanges take on a platform of such ranks, in place of the
    exchanges. A pass takes its kernels and what is exchanged, or as long as its host, if that is longer; sums of what
    ranks of the group have in common are part of the optimizer's step."""
    layers = []
    for layer in chain.layers:
        forward, backward = (
            max(0, _exchanged_ns(layer, back, chain, where) - (layer.idle_ns or (0, 0))[back]) for back in (False, True)
        )
        layers.append(
            replace(
                layer,
                forward_ns=layer.forward_ns + forward,
                backward_ns=layer.backward_ns + backward,
                backward_weight_ns=layer.weight_part_ns,
                optimizer_ns=layer.optimizer_ns + _exchanged_ns(layer, False, chain, where, update=True),
                exchanges=(),
                idle_ns=None,
                work=None,
            )
        )
    return replace(chain, layers=tuple(layers))


def _exchanged_ns(layer: Layer, backward: bool, chain: Chain, where: Platform, update: bool = False) -> int:
    """Return what the exchanges of one pass, or of an update, take, hidden ones only as far as they are longer than the
    pass, or than what each goes on beside. Those of the tensor degree are inside of a server, others wherever their
    group is."""
    seen = hidden = 0
    for one in layer.exchanges:
        if (one.backward, one.update) == (backward, update):
            ranks = one.ranks or chain.tensor
            bandwidth, _ = where.paths[where.level_of(range(chain.width if update else ranks * one.apart))]
            each = collective_ns(one.kind, one.bytes, ranks, bandwidth)
            seen += (one.count - one.hidden) * each
            if one.beside_ns:
                seen += one.hidden * max(0, each - one.beside_ns)
            else:
                hidden += one.hidden * each
    return seen + max(0, hidden - (layer.backward_ns if backward else layer.forward_ns))


def with_offloaded(chain: Chain) -> Chain:
    """Return a chain whose layers keep nothing, and those of its variants, where these are offloaded: what they save
    goes to host memory while the next layer runs, and comes back in the backward; or what they read alone does, and
    they run again, if that takes less.

    A pass takes as long as its bytes do by the link, if that is longer; two layers' bytes are on the device at a time.
    """
    if not any(x.offloaded for x in chain.choices):
        return chain
    variants = (replace(x, layers=with_offloaded(chain.part(x)).layers) for x in chain.variants)
    chain, layers = replace(chain, variants=tuple(variants)), list[Layer]()
    for i, layer in enumerate(chain.layers if chain.offloaded else ()):
        read, (f, b) = int(entering_bytes(chain, i, i + 1)), (layer.forward_ns, layer.backward_ns)
        saved = read if layer.saved_bytes is None else layer.saved_bytes
        ways = []
        for size, backward, again in ((saved, b, 0), (read, b + f, saved)):
            there = ceil_div(size * 10**9, chain.offloaded)
            ways.append((max(f, there), max(backward, there), size, again))
        forward, backward, size, again = min(ways, key=lambda way: way[0] + way[1])
        part = replace(layer, forward_ns=forward, backward_ns=backward, backward_weight_ns=layer.weight_part_ns)
        needs = layer.weight_needs or WeightNeeds(saved, layer.saves or (), 0)  # between the parts of a backward
        part = replace(part, host_bytes=size, again_bytes=again, weight_needs=needs, saved_bytes=0, saves=(), work=None)
        layers.append(replace(part, working_bytes=layer.working_bytes + part.on_its_way_bytes))
    return replace(chain, layers=tuple(layers) or chain.layers)


NO_WORK = PassWork(0, 0, 0, 0)
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.8), (64, 64, 0.65))
"""Rows and columns of a product that one multiprocessor makes at a time, and what share of the best such kernels reach:
those of cuBLAS and CUTLASS for tensor cores."""
_DEPTH = 192  # of a product, that a tile's beginning and end take as long as
_WINOGRAD_DEPTH = 40  # likewise channels of a convolution by Winograd's transforms: of 3 x 3 in float32, on V100s
_SPLIT_DEPTH = 512  # into parts at least as deep kernels share out the depth of a product
_PARTS = 8  # at most so many, but for weights' gradients
_LEAST_SHARE = 0.2


def product_share(batch: int, rows: int, columns: int, depth: float, units: int, edge: int = _DEPTH) -> float:
    """Return the share of the best rate that a product of matrices reaches on ``units`` multiprocessors.

    These make tiles of the result in waves, the last of which leaves some of them idle; to fill and to empty its
    registers takes a tile as long as ``edge`` more of depth. The kernel is the one that does best; where tiles
    are few, kernels share out the depth too.
    """
    best = 0.0
    for high, wide, rate in _TILES:
        waves = -(-batch * -(-rows // high) * -(-columns // wide) // units)
        best = max(best, rate * batch * rows * columns / (waves * units * high * wide))
    return max(_LEAST_SHARE, best * depth / (depth + edge))


class Product(NamedTuple):
    """A product of matrices that a kernel makes: so many at once, of rows by columns, each the sum of ``depth`` terms.

    ``weights`` says that a weight's gradient comes out, whose depth can be shared out.
    """

    batch: int
    rows: int
    columns: int
    depth: float
    weights: bool = False

    def share(self, units: int) -> float:
        """Return the share of the best rate that it reaches (:func:`product_share`)."""
        tiles = self.batch * -(-self.rows // 128) * -(-self.columns // 128)
        deepest = max(1, int(self.depth // _SPLIT_DEPTH))
        most = _PARTS if tiles < 2 * units else 1  # more waves leave little idle
        parts = {min(x, deepest) for x in (*range(1, most + 1), units // tiles if self.weights else 1) if x}
        return max(product_share(self.batch, self.rows * x, self.columns, self.depth / x, units) for x in parts)

    def aligned(self, number: str) -> bool:
        """Whether the rows of its operands and result are whole 16 bytes, as tensor cores read them."""
        whole = {"float16": 8, "bfloat16": 8, "tf32": 4, "float8": 16}.get(number, 1)
        return self.columns % whole == 0 and self.depth % whole == 0

    def winograd_share(self, units: int) -> float:
        """Return that share of a convolution by Winograd's transforms, whose products are as deep as its channels."""
        if self.weights:
            return self.share(units)
        return product_share(self.batch, self.rows, self.columns, self.depth / 9, units, _WINOGRAD_DEPTH)


class Blocks(NamedTuple):
    """What a kernel makes of so many parts that each keep a multiprocessor busy, such as a batch norm of its channels.

    ``share`` says what is reached of the rate for very many.
    """

    parts: int

    def share(self, units: int) -> float:
        """Return how much of ``units`` multiprocessors is busy on average, wave by wave."""
        return self.parts / (-(-self.parts // units) * units)


class Attended(NamedTuple):
    """Attention by one kernel: how many keys a query sees on average, and the width of a head."""

    keys: float
    width: int
    edge: int

    def share(self, units: int) -> float:
        """Return what is reached of the rate for endless sequences of heads 128 wide."""
        return self.keys / (self.keys + self.edge) * sqrt(min(1.0, self.width / 128))


Shape = Product | Blocks | Attended  # of what a kernel makes, which has a share of its rate


@dataclass(frozen=True, slots=True)
class Constants:
    """What turns work into time: shares of peak and of bandwidth, ns of a kernel at least, and ns of the host for an
    operation."""

    compute_share: float = 0.8
    bandwidth_share: float = 0.9
    kernel_ns: float = 5000.0
    forward_host_ns: float = 0.0
    backward_host_ns: float = 0.0

    def kernels_ns(self, work: PassWork) -> float:
        """Return how long the device works."""
        return (
            work.compute_ns / self.compute_share + work.memory_ns / self.bandwidth_share + work.kernels * self.kernel_ns
        )

    def host_ns(self, work: PassWork, backward: bool = False) -> float:
        """Return how long the host takes to issue the operations of a pass."""
        return work.operations * (self.backward_host_ns if backward else self.forward_host_ns)

    def pass_ns(self, work: PassWork, backward: bool = False) -> float:
        """Return how long a pass takes."""
        return max(self.kernels_ns(work), self.host_ns(work, backward))

    def bound_by_host(self, work: LayerWork) -> bool:
        """Whether the device waits for its host in the forward or the backward of a layer."""
        passes = ((work.forward, False), (work.backward, True))
        return any(self.host_ns(x, backward) > self.kernels_ns(x) for x, backward in passes)

    def passes_ns(self, works: Sequence[PassWork], backward: bool, ahead: bool) -> list[float]:
        """Return how long passes take that come one after the other.

        With ``ahead`` the host is as far ahead as kernels before have let it come: for layers that are single
        operations. Otherwise each begins with an idle device, as one of another stage does.
        """
        if not ahead:
            return [self.pass_ns(work, backward) for work in works]
        times, lead = [], 0.0
        for work in works:
            kernels, host = self.kernels_ns(work), self.host_ns(work, backward)
            times.append(max(kernels, host - lead))
            lead = max(0.0, lead + kernels - host)
        return times


def timed(chain: Chain, constants: Constants) -> Chain:
    """Return an estimated chain with the times that its work takes by ``constants``.

    Weight gradients keep their share of the backward. In a DAG the host runs ahead from layer to layer.
    """
    works = [layer.work for layer in chain.layers if layer.work is not None]
    assert len(works) == len(chain), "only estimated layers can be timed again"
    ahead = chain.edges is not None
    forward = constants.passes_ns([x.forward for x in works], False, ahead)
    backward = constants.passes_ns([x.backward for x in reversed(works)], True, ahead)[::-1]
    layers = []
    for layer, work, f, b in zip(chain.layers, works, forward, backward, strict=True):
        part = layer.backward_weight_ns
        if part is not None and layer.backward_ns:
            part = round(Fraction(part * round(b), layer.backward_ns))
        step = round(constants.pass_ns(work.optimizer))
        idle = None
        if layer.exchanges:
            idle = round(f - constants.kernels_ns(work.forward)), round(b - constants.kernels_ns(work.backward))
        layers.append(
            replace(
                layer,
                forward_ns=round(f),
                backward_ns=round(b),
                backward_weight_ns=part,
                optimizer_ns=step,
                idle_ns=idle,
            )
        )
    return replace(chain, layers=tuple(layers))


def spread_of_hosts(chain: Chain, constants: Constants, hosts: tuple[tuple[float, float], ...]) -> tuple[float, ...]:
    """Return by which factors an estimated chain's passes take longer where an operation takes the host other ns,
    forward and backward."""

    def passes_ns(of: Constants) -> int:
        return sum(x.forward_ns + x.backward_ns for x in timed(chain, of).layers)

    own = max(1, passes_ns(constants))
    return tuple(passes_ns(replace(constants, forward_host_ns=f, backward_host_ns=b)) / own for f, b in hosts)
