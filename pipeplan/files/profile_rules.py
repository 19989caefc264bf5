"""Do the numbers of a profile make sense? The rules that every chain from a file or a measurement has to pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from ..cost.saved import for_weights, storages
from ..errors import BadInput
from ..problem import Chain, Layer, connected
from .forms import MOST_LETTERS

MOST_LAYERS = 20_000
MOST_EDGES = 200_000
MOST_LAYERS_WITH_EDGES = 4_000  # what all of their ranges keep stands in tables, which take half a gigabyte
MOST_EXCHANGES = 1000  # of one kind in a pass of a layer
MOST_DEGREE = 1024  # ranks that run a layer together
LARGEST_TOTAL = 10**15  # a microbatch of 11 days, a petabyte: int64 holds it times thousands of versions or speeds


def check_variants(chain: Chain, place: str) -> None:
    """Raise BadInput unless each variant has the same layers as ``chain``, at costs that make sense."""
    names, seen = [layer.name for layer in chain.layers], {chain.degrees}
    for k, variant in enumerate(chain.variants):
        here = f"{place}: $.variants[{k}]"
        part = chain.part(variant)
        if chain.width != 1 or chain.selective or chain.offloaded or part.degrees in seen or part.width > MOST_DEGREE:
            raise BadInput(
                f"{here}.tensor: {part.variant} is a second time, or beside what is a part itself, or more than "
                f"{MOST_DEGREE} GPUs"
            )
        seen.add(part.degrees)
        if [layer.name for layer in variant.layers] != names:
            raise BadInput(f"{here}.layers: they aren't called as $.layers are")
        check_chain(part, here, lambda i, here=here: f"{here}.layers[{i}]")  # type: ignore[misc]  # bound
        for i, layer in enumerate(variant.layers):
            if not 0 <= (layer.own_parameters or 0) <= layer.parameter_count:
                raise BadInput(
                    f"{here}.layers[{i}].own_parameters: are no more than its parameters, and no fewer than 0"
                )
            for j, one in enumerate(layer.exchanges):
                if not 0 <= one.hidden <= one.count <= MOST_EXCHANGES or one.bytes > LARGEST_TOTAL // MOST_EXCHANGES:
                    raise BadInput(
                        f"{here}.layers[{i}].exchanges[{j}]: no more than count can be hidden, nor 1000 made"
                    )
                if (one.ranks or variant.tensor) * one.apart > part.width or one.beside_ns > LARGEST_TOTAL:
                    raise BadInput(f"{here}.layers[{i}].exchanges[{j}]: is among more than the {part.width} of a group")


def check_chain(chain: Chain, place: str, place_of_layer: Callable[[int], str] | None = None) -> None:
    """Raise BadInput unless the values of ``chain`` make sense; every function on chains relies on it.

    Counts are not negative, times and sizes sum up to at most :data:`LARGEST_TOTAL`, something takes time, reading is
    part of the forwards that include it, edges and ties are pairs of layers in order, and layers save what they read or
    make. Errors begin with ``place``, those about a layer with ``place_of_layer`` of it where that is given:
    ``p.json: $.layers[3].forward_ns: -2 is negative``.
    """

    def of_layer(i: int) -> str:
        return f"{place}: $.layers[{i}]" if place_of_layer is None else place_of_layer(i)

    for i, layer in enumerate(chain.layers):
        if len(layer.name) > MOST_LETTERS:
            raise BadInput(f"{of_layer(i)}.name: {len(layer.name)} characters; a name has up to {MOST_LETTERS}")
    if not chain.layers:
        raise BadInput(f"{place}: there are no layers")
    if chain.microbatch < 1:
        raise BadInput(f"{place}: $.microbatch: {chain.microbatch} is not positive")
    for name in ("input_bytes", "reading_ns"):
        if getattr(chain, name) < 0:
            raise BadInput(f"{place}: $.{name}: {getattr(chain, name)} is negative")
    _check_layers(chain, of_layer)
    for i in (0, len(chain) - 1):
        if chain.read_in_passes_ns > chain.layers[i].forward_ns:
            raise BadInput(
                f"{place}: $.reading_ns: {chain.reading_ns} is more than layers[{i}].forward_ns, "
                f"{chain.layers[i].forward_ns}, which includes it"
            )
    if not any(layer.forward_ns + layer.backward_ns for layer in chain.layers):
        raise BadInput(f"{place}: all forward and backward times are 0; there is nothing to plan")
    if chain.edges is not None and len(chain) > MOST_LAYERS_WITH_EDGES:
        raise BadInput(
            f"{place}: $.edges: {len(chain)} layers with edges; up to {MOST_LAYERS_WITH_EDGES} can be planned"
        )
    _check_pairs(f"{place}: $.edges", chain.edges or (), len(chain))
    _check_pairs(f"{place}: $.tied", chain.tied, len(chain))
    reading = {j for _, j in chain.edges or ()}
    for n, i in enumerate(chain.inputs or ()):
        if chain.edges is None or not 0 <= i < len(chain) or i in reading or chain.layers[i].weight_bytes:
            raise BadInput(
                f"{place}: $.inputs[{n}]: layer {i} has weights or reads another layer, so it isn't an input"
            )
    _check_shared(f"{place}: $.shared", chain, of_layer)
    if chain.order is not None and sorted(chain.order) != list(range(len(chain))):
        raise BadInput(f"{place}: $.order: is not each number from 0 to {len(chain) - 1} once")
    read = sum(size * max(len(r), 1) for size, r in zip(chain.tensor_bytes, chain.readers, strict=True))
    if read > LARGEST_TOTAL:
        raise BadInput(f"{place}: the tensors that layers read sum up to {read} bytes, more than 1e15")
    _check_all_saved(chain, of_layer)


def _check_layers(chain: Chain, of_layer: Callable[[int], str]) -> None:
    """Raise BadInput for a time or a size that is negative, too large, or more than what includes it."""
    for field in ("forward_ns", "backward_ns", "weight_bytes", "output_bytes", "saved_bytes", "storage_bytes",
                  "backward_weight_ns", "optimizer_ns", "parameters", "host_bytes", "again_bytes"):  # fmt: skip
        total = 0
        for i, layer in enumerate(chain.layers):
            value = getattr(layer, field) or 0
            if value < 0:
                raise BadInput(f"{of_layer(i)}.{field}: {value} is negative")
            total += value
            if total > LARGEST_TOTAL:
                raise BadInput(f"{of_layer(i)}.{field}: the layers up to here sum up to {total}, more than 1e15")
    for i, layer in enumerate(chain.layers):
        for name in ("saved_bytes", "gradient_bytes") if layer.weight_needs else ():
            size = getattr(layer.weight_needs, name)
            if not 0 <= size <= LARGEST_TOTAL // len(chain):
                raise BadInput(f"{of_layer(i)}.weight_needs.{name}: {size} is negative, or the sum is above 1e15")
        if (layer.backward_weight_ns or 0) > layer.backward_ns:
            raise BadInput(
                f"{of_layer(i)}.backward_weight_ns: {layer.backward_weight_ns} is more than backward_ns, "
                f"{layer.backward_ns}, which includes it"
            )


def _check_all_saved(chain: Chain, of_layer: Callable[[int], str]) -> None:
    """Raise BadInput unless layers save what they read or make, for whole backwards and for their second parts."""
    reads: list[set[int]] = [set() for _ in chain.layers]
    for tensor, readers in enumerate(chain.readers):
        for reader in readers:
            reads[reader].add(tensor - 1)
    for i, layer in enumerate(chain.layers):
        _check_saved(layer, i, reads[i], of_layer(i))
    _check_private(chain, of_layer, "saved_bytes")
    known = [i for i, layer in enumerate(chain.layers) if layer.weight_needs is not None]
    if known and len(known) < len(chain):
        i = next(i for i in range(len(chain)) if chain.layers[i].weight_needs is None)
        raise BadInput(f"{of_layer(i)}.weight_needs: is missing; layer {known[0]} has it, and all have it or none")
    needs = for_weights(chain)
    if needs is not None:
        for i, layer in enumerate(needs.layers):
            _check_saved(replace(layer, view_of=None), i, reads[i], f"{of_layer(i)}.weight_needs")
        _check_private(needs, of_layer, "weight_needs.saved_bytes")


def _check_private(chain: Chain, of_layer: Callable[[int], str], field: str) -> None:
    for i, (layer, private) in enumerate(zip(chain.layers, storages(chain).facts.private, strict=True)):
        if private < 0:
            raise BadInput(
                f"{of_layer(i)}.{field}: {layer.saved_bytes} is less than what saves names, which takes "
                f"{(layer.saved_bytes or 0) - private}"
            )


def _check_saved(layer: Layer, index: int, reads: set[int], place: str) -> None:
    what = f"layer {index} reads {', '.join(map(str, sorted(reads))) or 'nothing'}" + " (-1 is the network's input)"
    for saved in layer.saves or ():
        if saved not in reads and saved != index:
            raise BadInput(f"{place}.saves: {saved} is not something that the layer reads or makes; {what}")
    if layer.saves is not None and layer.saved_bytes is None:
        raise BadInput(f"{place}.saves: says what is saved, but saved_bytes is missing")
    if layer.view_of is not None and layer.view_of not in reads:
        raise BadInput(f"{place}.view_of: {layer.view_of} is not something that the layer reads; {what}")
    if layer.view_of is not None and layer.storage_bytes is not None:
        raise BadInput(f"{place}.storage_bytes: a view has no storage of its own; view_of says whose it is in")


def _check_shared(what: str, chain: Chain, of_layer: Callable[[int], str]) -> None:
    """Raise BadInput unless ``shared`` is of the layers that are tied, and no layer shares more than it has."""
    if chain.shared is None:
        return
    bytes_of, parameters_of = [0] * len(chain), [0] * len(chain)
    for n, shared in enumerate(chain.shared):
        layers = shared.layers
        if len(layers) < 2 or any(not 0 <= i < len(chain) for i in layers):
            raise BadInput(f"{what}[{n}].layers: {list(layers)} are not two or more of the {len(chain)} layers")
        if any(i >= j for i, j in pairwise(layers)):
            raise BadInput(f"{what}[{n}].layers: {list(layers)} must come in order, each once")
        if shared.weight_bytes < 0 or shared.parameter_count < 0:
            raise BadInput(f"{what}[{n}]: weight_bytes and parameters cannot be negative")
        for i in layers:
            bytes_of[i] += shared.weight_bytes
            parameters_of[i] += shared.parameter_count
    for i, layer in enumerate(chain.layers):
        both = (bytes_of[i], layer.weight_bytes, "bytes"), (parameters_of[i], layer.parameter_count, "parameters")
        for found, own, unit in both:
            if found > own:
                raise BadInput(f"{of_layer(i)}: shares {found} {unit} of weights by $.shared, and has {own}")
    said, paired = (connected(pairs) for pairs in ((x.layers for x in chain.shared), chain.tied))
    if sorted(map(sorted, said)) != sorted(map(sorted, paired)):
        raise BadInput(f"{what}: connects other layers than $.tied does")


def _check_pairs(what: str, pairs: tuple[tuple[int, int], ...], count: int) -> None:
    for n, (i, j) in enumerate(pairs):
        if not (0 <= i < count and 0 <= j < count):
            raise BadInput(f"{what}[{n}]: [{i}, {j}] names a layer that is not there; there are {count}")
        if i >= j:
            raise BadInput(f"{what}[{n}]: [{i}, {j}] must name an earlier layer first")
