"""Is a model what the plan's profile is of? Its layers as the profile has them, or the first difference.

A chain has the profile's layers. Of a graph neighbours may have been merged for the plan, the loss among them; then
several layers of the network are one of the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import BadInput
from ....problem import LOSS_NAME, Chain
from ..loaded import LoadedModel, grouped
from ..network import LOSS, LayerCode


def fitted(model: LoadedModel, chain: Chain) -> LoadedModel:
    """Return ``model``, as it was loaded, with the layers of ``chain`` in their order; BadInput when it has others."""
    if not model.chain:
        own = chain.in_own_order()
        groups = _merged(model, own) if model.training else _evaluated(model, own)
        return grouped(model, [groups[i] for i in chain.order or range(len(chain))])
    count = len(model.layers) - 1
    if chain.edges is not None:
        raise BadInput(
            f"model: is a chain of {count} layers; the plan's profile {chain.name} is a graph with skip "
            "connections, of a model that isn't a list of layers"
        )
    if len(chain) != count + 1 or bool(chain.layers[-1].weight_bytes) != bool(model.layers[-1].weight_bytes):
        raise BadInput(
            f"model: has {count} layers; the plan's profile {chain.name} has {len(chain)}, and should have "
            f"{count + 1}, of which the last is the {LOSS_NAME}"
        )
    return model


def _merged(model: LoadedModel, chain: Chain) -> list[Sequence[LayerCode]]:
    """Return the codes of a graph in groups, one for each layer of ``chain``, by their names."""
    codes = [code for layer in model.layers for code in layer.codes]
    groups: list[Sequence[LayerCode]] = []
    position = 0
    for index, layer in enumerate(chain.layers):
        following = chain.layers[index + 1].name if index + 1 < len(chain) else None
        ends = range(position + 1, len(codes) + 1)
        stop = next((end for end in ends if _is(codes, position, end, layer.name, following)), 0)
        if not stop:
            there = f"has {codes[position].name!r}" if position < len(codes) else "has no more layers"
            raise BadInput(f"model: {there} where the plan's profile {chain.name} has layer {index}, {layer.name!r}")
        groups.append(codes[position:stop])
        position = stop
    if position < len(codes):
        raise BadInput(
            f"model: has {codes[position].name!r} behind the {len(chain)} layers that the plan's profile "
            f"{chain.name} has"
        )
    return groups


def _evaluated(model: LoadedModel, chain: Chain) -> list[Sequence[LayerCode]]:
    """Return the codes of a graph in evaluation in groups, one for each layer of ``chain``, which is of its training.

    What has the name of a layer, or of a part of it, is that, if what it reads is made by then; a later call of a part
    is where the first one is, if it isn't found itself. What training doesn't have goes with the code before it, or
    with the last that it reads. Layers that only training has get no code.
    """
    groups: list[list[LayerCode]] = [[] for _ in chain.layers]
    made: dict[int, int] = {}  # by value, the layer
    at = 0
    for code in (code for layer in model.layers for code in layer.codes):
        first = max((made.get(v, 0) for v in code.reads), default=0)
        names = code.name, code.name.rpartition("#")[0]
        behind = ((i, own) for own in names for i in range(first, len(chain)))
        at = next((i for i, own in behind if own and _has(chain.layers[i].name, own)), max(first, at))
        made.update(dict.fromkeys(code.makes, at))
        groups[at].append(code)
    return list(groups)


def _has(name: str, own: str) -> bool:
    """Whether a layer of a profile called ``name`` has, at one of its ends or inside, what ``own`` begins with."""
    return name == own or any(_inside(part, own.split("..")[0]) for part in name.split(".."))


def _is(codes: Sequence[LayerCode], start: int, stop: int, name: str, following: str | None) -> bool:
    """Whether ``name`` is that of ``codes[start:stop]`` as one layer, and ``following`` of what comes behind them.

    Merged layers are called by the first and the last of them, which may have been merged themselves, or by the module
    that they are the whole of.
    """
    first, last = codes[start].name, codes[stop - 1].name
    begin, dots, end = name.rpartition("..")
    merged = bool(dots) and _begins(begin, first) and (_begins(end, last) or name.endswith(f"..{last}"))
    if not (merged or (name == first and stop - start == 1) or (_inside(name, first) and _inside(name, last))):
        return False
    if following is None or stop == len(codes):
        return following is None and stop == len(codes)
    return _begins(following, codes[stop].name) and not _inside(name, codes[stop].name)


def _begins(name: str, first: str) -> bool:
    """Whether a layer of a profile called ``name`` may begin with the layer ``first``."""
    return name == first or name.startswith(f"{first}..") or any(_inside(x, first) for x in name.split(".."))


def _inside(block: str, name: str) -> bool:
    """Whether the layer ``name`` belongs to the module called ``block``."""
    return all(part == block or part.startswith(f"{block}.") for part in name.split(".."))


def check_model(model: LoadedModel, chain: Chain) -> None:
    """Raise BadInput, naming the first difference, unless ``model``, fitted to ``chain``, has its sizes.

    Compared are the layers' parameters, the sizes of values and who reads them. Of a trace of its evaluation it is the
    parameters alone, of which layers may have fewer.
    """
    if not model.training:
        for index, (layer, profiled) in enumerate(zip(model.layers, chain.layers, strict=True)):
            if layer.weight_bytes > profiled.weight_bytes:
                raise BadInput(
                    f"model: in evaluation layer {index} ({profiled.name}) has {layer.weight_bytes} bytes of "
                    f"parameters; the plan's profile, which is of training, says {profiled.weight_bytes}: its "
                    "operations come in another order then; evaluate it without a pipeline"
                )
        return
    entering = sum(model.specs[value].nbytes for value in range(model.inputs))
    if entering != chain.input_bytes:
        raise BadInput(
            f"model: its example input has {entering} bytes; the plan's profile says {chain.input_bytes} for "
            f"microbatches of {chain.microbatch}"
        )
    for index, (layer, profiled) in enumerate(zip(model.layers, chain.layers, strict=True)):
        where = f"model: layer {index} ({profiled.name})"
        if profiled.weight_bytes not in (layer.weight_bytes, layer.counted_bytes):
            raise BadInput(
                f"{where} has {layer.weight_bytes} bytes of parameters; the plan's profile says {profiled.weight_bytes}"
            )
        made = [model.specs[value] for value in layer.codes[0].makes if value != LOSS]
        size = sum(spec.nbytes for spec in made)
        if len(layer.codes) == 1 and made and size != profiled.output_bytes:
            raise BadInput(
                f"{where} puts out {size} bytes, {' and '.join(map(str, made))}; the plan's profile says "
                f"{profiled.output_bytes}"
            )
    _check_edges(model, chain)


def _check_edges(model: LoadedModel, chain: Chain) -> None:
    if chain.edges is None:  # a chain, or merged at the cuts that one tensor crosses
        return
    maker = {v: i for i, layer in enumerate(model.layers) for code in layer.codes for v in code.makes}
    for index, layer in enumerate(model.layers):
        reads = {maker[v] for code in layer.codes for v in code.reads if v in maker} - {index}
        planned = {i for i, j in chain.edges if j == index}
        if reads != planned:
            raise BadInput(
                f"model: layer {index} ({chain.layers[index].name}) reads {_listed(reads)}; the plan's profile says "
                f"{_listed(planned)}"
            )


def _listed(layers: set[int]) -> str:
    return f"layers {', '.join(map(str, sorted(layers)))}" if layers else "no layer"
