"""Which layers does a target keep together? Whole blocks, or what its own lists of modules have as entries."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from ..errors import PipeplanError
from ..names import shown
from ..problem import Chain

BLOCK = re.compile(
    r"((?:.*\.)?(?:(?:blocks?|layers?|decoder|h)\.\d+|(?:blocks?|layers?|decoder|h)_?\d+(?:\.\d+)?))(?:\..*)?"
)
MTP = re.compile(r"(?:.*\.)?mtp(?:_layers?)?[._]?\d*")


class CannotExpress(PipeplanError):
    """A plan that a target has no words for; the message says which part and why."""


@dataclass(frozen=True, slots=True)
class Unit:
    """``layers[start:stop]`` that a target keeps together; the model's own are ``layers[start:modules_stop]``, without
    the loss. ``block``: one of the repeated blocks."""

    name: str
    start: int
    stop: int
    modules_stop: int
    block: bool


def whole_blocks(chain: Chain) -> tuple[Unit, ...]:
    """Return the layers with those of one repeated block together, and the loss with what comes before it.

    What begins with no module, such as a sum that a model's forward writes out, is with what comes before it.
    """
    count, units = len(chain), list[Unit]()
    first = next((i for i, layer in enumerate(chain.layers[: chain.modules]) if layer.module != ""), 0)
    for i, layer in enumerate(chain.layers[first : chain.modules], first):
        found = None if ".." in layer.name else BLOCK.fullmatch(layer.name)
        own = units and found and units[-1].block and units[-1].name == found[1]
        if units and (own or layer.module == ""):
            units[-1] = replace(units[-1], stop=i + 1, modules_stop=i + 1)
        else:
            start = i if units else 0
            units.append(Unit(found[1] if found else layer.name, start, i + 1, i + 1, found is not None))
    units[-1] = replace(units[-1], stop=count)
    return tuple(units)


def nameable(chain: Chain) -> tuple[Unit, ...]:
    """Return whole blocks that torchtitan's splitter may have a name for: a module, or an entry of a list of modules.

    A port may call them otherwise; but what begins in no module, or in a list inside of a list's entry, it can't name.
    """
    units = whole_blocks(chain)
    odd = next((unit for unit in units if unit.start < unit.modules_stop and not _NAME.fullmatch(unit.name)), None)
    if odd is not None:
        raise CannotExpress(
            f"torchtitan: layer {odd.start} ({shown(odd.name)}) is neither a module nor an entry of a list of modules, "
            "which is all that its splitter has names for"
        )
    return units


_NAME = re.compile(r"(?:.*\.)?[A-Za-z_]\w*(?:\.\d+)?")


def module_of(chain: Chain, unit: Unit) -> str:
    """Return what the model calls the module that a unit begins with; empty where none does."""
    module = chain.layers[unit.start].module
    return (unit.name if unit.block else unit.name.split("..")[0]) if module is None else module


def decoder(chain: Chain) -> tuple[Unit, ...]:
    """Return an embedding, the decoder's layers, and the output with the loss, as Megatron-LM has them.

    The final norm is with the output, as it is there without multi-token prediction; layers of that are one unit.
    """
    units = whole_blocks(chain)
    blocks = [i for i, unit in enumerate(units) if unit.block]
    if not blocks:
        raise CannotExpress(f"megatron: no layer of {shown(chain.name)} is named as a decoder layer, such as layers.3")
    first, last = blocks[0], blocks[-1]
    ahead = next((i for i in range(last + 1, len(units)) if MTP.match(units[i].name)), None)
    odd = next((unit for unit in units[first:last] if not unit.block), None)
    if odd is not None:
        raise CannotExpress(f"megatron: layer {odd.start} ({shown(odd.name)}) between the decoder layers is none")
    if first == 0 or last == len(units) - 1:
        raise CannotExpress("megatron: a layout starts with the embedding and ends with the output layer")
    start, stop = units[first].start, units[last].stop
    extra: tuple[Unit, ...] = ()
    if ahead is not None:  # the final norm is then with the last decoder layer
        begin, behind = units[ahead].start, next(unit for unit in units[ahead:] if not MTP.match(unit.name))
        extra = (
            replace(units[last], stop=begin, modules_stop=begin),
            Unit("mtp", begin, behind.start, behind.start, False),
        )
        last, stop = last - 1, behind.start
    return (
        Unit("embedding", 0, start, start, False),
        *units[first : last + 1],
        *extra,
        Unit("output", stop, len(chain), units[-1].modules_stop, False),
    )


@dataclass(frozen=True, slots=True)
class Tower:
    """A module of several, ``layers[start:stop]``, whose layers no other module's stand between; stages end before one
    of its blocks, of which ``blocks`` are the first layers, or where it does."""

    name: str
    start: int
    stop: int
    blocks: tuple[int, ...]


def towers(chain: Chain) -> tuple[Tower, ...]:
    """Return the modules by what their blocks' names begin with, each with what stands between it and the next one;
    CannotExpress where there are none, or their layers are mixed."""
    named = [(unit.name.partition(".")[0], unit.start) for unit in whole_blocks(chain) if unit.block]
    runs = [(name, [start for _, start in own]) for name, own in groupby(named, lambda x: x[0])]
    if len({name for name, _ in runs}) < max(2, len(runs)):
        raise CannotExpress(
            f"megatron-bridge: the blocks of {shown(chain.name)} are those of one module, or of several in turn; with "
            "degrees of their own are modules, such as images.blocks.0 and language.blocks.0, one behind the other"
        )
    begins = [next(i for i, x in enumerate(chain.layers) if name in _modules_in(x.name)) for name, _ in runs]
    ends = [*begins[1:], len(chain)]
    return tuple(
        Tower(name, start, stop, tuple(blocks))
        for (name, blocks), start, stop in zip(runs, [0, *begins[1:]], ends, strict=True)
    )


def _modules_in(name: str) -> set[str]:
    """Return the outermost modules that a layer called so has parts of."""
    return {part.partition(".")[0] for part in name.split("..") if "." in part}


def mtp_layers(chain: Chain) -> int:
    """Return how many layers of multi-token prediction a decoder has."""
    return len({found[0] for layer in chain.layers if (found := MTP.match(layer.name))})


def layers_in_a_row(chain: Chain) -> tuple[Unit, ...]:
    """Return the layers of a list, each of which reads the one before it, as DeepSpeed runs them."""
    if chain.edges is not None:
        raise CannotExpress(
            "deepspeed: the profile was traced and isn't a list of layers, each of which takes what the one before it "
            "returns; profile the model as a list or an nn.Sequential"
        )
    count = len(chain)
    joined = next((i for i in range(1, count) if ".." in chain.layers[i].name), None)
    if joined is not None:
        raise CannotExpress(f"deepspeed: layer {joined} ({shown(chain.layers[joined].name)}) is several modules")
    last = whole_blocks(chain)[-1]
    ends = [*range(1, last.modules_stop), count]
    return tuple(
        Unit(chain.layers[start].name, start, stop, min(stop, last.modules_stop), True)
        for start, stop in pairwise([0, *ends])
    )
