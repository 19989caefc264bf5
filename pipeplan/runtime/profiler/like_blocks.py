"""Which blocks of a model are alike, so that few are estimated for all? Units of lists of modules, told as often as
they stand there.

Of a run of like units (one item, or a few that repeat: attention of two kinds by turns) the first two and the last two
stay. Their profile shows whether the units between are alike, too: the second must equal the third, and what a unit
reads must come from before the run, from the unit before or from itself. Else nothing is told from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ...problem import Chain, Layer
from ...problem.layers import named_by, renumbered
from ..model.contract import Built, is_whole
from ..model.network import module_names, named_layers
from ..model.trace.trace import unique

KEPT = 4  # units
MOST_PERIOD = 6  # items of a unit
PLAIN = (str, float, bool, type(None), tuple, list, dict, set)


class Unlike(Exception):
    """Blocks that looked alike aren't."""


@dataclass(frozen=True)
class Run:
    """Units ``first``.. of so many items (``period``) in the list at ``path``, whose items are called ``names``; of a
    list of layers ``path`` is None, and ``modules`` are what profiles say of their modules' names."""

    path: str | None
    names: tuple[str, ...]
    first: int
    period: int
    units: int
    modules: tuple[str | None, ...] = ()

    @property
    def kept(self) -> list[int]:
        """The items that stay."""
        start = self.first + 2 * self.period
        return [i for i in range(len(self.names)) if not start <= i < start + (self.units - KEPT) * self.period]

    @property
    def kept_names(self) -> list[str]:
        """What the items that stay are called meanwhile: numbers stay in a row."""
        numbered = all(name == str(i) for i, name in enumerate(self.names))
        return [str(n) if numbered else self.names[i] for n, i in enumerate(self.kept)]


@contextmanager
def shortened(built: Built) -> Iterator[tuple[Built, list[Run]]]:
    """Within the context, have of each list of ``built`` what stays of its longest run, and the runs."""
    if not is_whole(built.layers):
        named = named_layers(built.layers)
        run = _longest(None, [name for name, _ in named], [module for _, module in named])
        if run is None:
            yield built, []
            return
        own = zip(module_names(built.layers), named, strict=True)
        run = replace(run, modules=tuple(None if path == name else path for path, (name, _) in own))
        yield replace(built, layers=[named[i] for i in run.kept]), [run]
        return
    lists = list(_lists(built.layers, ""))
    before = [found._modules for found, _ in lists]
    try:
        for found, run in lists:
            kept = [found._modules[run.names[i]] for i in run.kept]
            found._modules = dict(zip(run.kept_names, kept, strict=True))
        yield built, [run for _, run in lists]
    finally:
        for (found, _), modules in zip(lists, before, strict=True):
            found._modules = modules


def _lists(module: nn.Module, path: str) -> Iterator[tuple[nn.Module, Run]]:
    """Yield the outermost lists in ``module`` that have a run, with it."""
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        names = list(child._modules)
        listed = isinstance(child, nn.ModuleList | nn.Sequential) and None not in child._modules.values()
        run = _longest(place, names, [child.get_submodule(x) for x in names]) if listed else None
        if run is not None:
            yield child, run
        else:
            yield from _lists(child, place)


def _longest(path: str | None, names: Sequence[str], items: Sequence[nn.Module]) -> Run | None:
    """Return the run that saves most items, if one saves any."""
    best, most = None, 0
    facts = [_facts(item) for item in items] if len(items) > KEPT else []
    for period in range(1, min(MOST_PERIOD, len(facts) // (KEPT + 1)) + 1):
        first = 0
        for stop in range(period, len(facts) + 1):
            steps = _steps(facts, stop, period)
            if steps is not None and (stop - period < first + period or steps == _steps(facts, stop - period, period)):
                continue
            units = (stop - first) // period
            if (units - KEPT) * period > most:
                best, most = Run(path, tuple(names), first, period, units), (units - KEPT) * period
            first = stop - period + 1
    return best if best is None or _own_weights(items, best) else None


def _steps(facts: Sequence[tuple[Any, tuple[int, ...]]], item: int, period: int) -> tuple[int, ...] | None:
    """Return by how much the whole numbers of ``item`` are above those of the one a unit before, None if unlike."""
    if item >= len(facts) or facts[item][0] != facts[item - period][0]:
        return None
    steps = tuple(b - a for a, b in zip(facts[item - period][1], facts[item][1], strict=True))
    return steps if set(steps) <= {0, period} else None  # an item may know which it is


def _facts(module: nn.Module) -> tuple[Any, tuple[int, ...]]:
    """Return what decides what ``module`` does, and apart from it its whole numbers."""
    said: list[Any] = []
    numbers: list[int] = []
    seen: dict[int, int] = {}
    for place, part in module.named_modules(remove_duplicate=False):
        said.append((place, type(part), part.training))
        for name, value in vars(part).items():
            if name in ("_parameters", "_buffers"):
                value = {k: x if x is None else _tensor(x, seen) for k, x in value.items()}
            if name == "_modules":
                continue
            if type(value) is int:
                numbers.append(value)
                value = "number"
            elif isinstance(value, Tensor):
                value = _tensor(value, seen)
            plain = isinstance(value, PLAIN) and " at 0x" not in repr(value)
            said.append((name, repr(value) if plain else id(value)))
    return said, tuple(numbers)


def _tensor(x: Tensor, seen: dict[int, int]) -> Any:
    return type(x), tuple(x.shape), str(x.dtype), x.requires_grad, seen.setdefault(id(x), len(seen))


def _own_weights(items: Sequence[nn.Module], run: Run) -> bool:
    """Whether no unit of ``run`` shares a parameter with another item."""
    owners: dict[int, set[int]] = {}
    for index, item in enumerate(items):
        for p in item.parameters():
            owners.setdefault(id(p), set()).add((index - run.first) // run.period)
    return all(len(found) == 1 or not found & set(range(run.units)) for found in owners.values())


def told(chain: Chain, run: Run) -> tuple[Chain, list[int]]:
    """Return the profile of the whole model of that of its :func:`shortened` one, and the layer that each is told from.

    Unlike where the second unit isn't the third, or a unit reads, or shares weights, further away.
    """
    items = _items(chain, run)
    starts = _starts(items, run)
    begin, third, length = starts[0], starts[2], starts[2] - starts[1]
    if starts[3] - third != length or starts[4] > len(chain):
        raise Unlike
    readings: list[list[int]] = [[] for _ in chain.layers]
    for i, j in chain.edges or ():
        readings[j].append(i)
    unit = [sum(i >= start for start in starts) for i in range(len(chain))]  # 1 to 4; 0 before, 5 behind

    def by(distance: int) -> Callable[[int], int]:
        return lambda i: i if i < begin else i + distance

    def same(layer: Layer) -> Layer:
        return replace(layer, name="", module=None)

    for j in range(third, len(chain)):
        if any(0 < unit[i] < unit[j] - 1 for i in (*named_by(chain.layers[j]), *readings[j]) if i >= 0):
            raise Unlike
    for i in range(starts[1], third):
        one, other, move = chain.layers[i], chain.layers[i + length], by(length)
        if same(renumbered(one, move)) != same(other) or sorted(map(move, readings[i])) != sorted(readings[i + length]):
            raise Unlike
    if any(0 < unit[i] <= KEPT for x in (*chain.tied, *(x.layers for x in chain.shared or ())) for i in x):
        raise Unlike

    more = run.units - KEPT
    source = [(i, 0) for i in range(starts[3])]
    source += [(i, k) for k in range(1, more + 1) for i in range(third, starts[3])]
    source += [(i, more) for i in range(starts[3], len(chain))]
    moves = [by(later * length) for _, later in source]
    named = zip(source, moves, _names(chain, run, source, items), strict=True)
    edges = {(move(r), j) for j, ((i, _), move) in enumerate(zip(source, moves, strict=True)) for r in readings[i]}
    behind = moves[-1]
    return replace(
        chain,
        layers=tuple(replace(renumbered(chain.layers[i], move), name=a, module=b) for (i, _), move, (a, b) in named),
        edges=None if chain.edges is None else tuple(sorted(edges)),
        inputs=chain.inputs and tuple(j for j, (i, _) in enumerate(source) if i in (chain.inputs or ())),
        tied=tuple((behind(i), behind(j)) for i, j in chain.tied),
        shared=chain.shared and tuple(replace(x, layers=tuple(map(behind, x.layers))) for x in chain.shared),
    ), [i for i, _ in source]


def _items(chain: Chain, run: Run) -> list[int | None]:
    """Return of which item, of those that stayed, each layer is."""
    if run.path is None:
        return [i if i < len(run.kept) else None for i in range(len(chain))]
    place = {name: n for n, name in enumerate(run.kept_names)}
    found: list[int | None] = []
    for layer in chain.layers:
        ends = {place[x[1]] for part in layer.name.split("..") if (x := _of_item(run, part))}
        if len(ends) > 1:
            raise Unlike
        found.append(next(iter(ends), None))
    return found


def _of_item(run: Run, name: str) -> re.Match[str] | None:
    return re.match(rf"{re.escape(run.path or '')}\.([^.#]+)", name)


def _starts(items: Sequence[int | None], run: Run) -> list[int]:
    """Return where the units that stayed begin, and where the last one ends if it is as long as the one before."""
    there = [x for x in items if x is not None]
    firsts = [run.first + k * run.period for k in range(KEPT)]
    if there != sorted(there) or not set(firsts) <= set(there):
        raise Unlike
    starts = [items.index(x) for x in firsts]
    return [*starts, 2 * starts[3] - starts[2]]


def _names(
    chain: Chain, run: Run, source: Sequence[tuple[int, int]], items: Sequence[int | None]
) -> list[tuple[str, str | None]]:
    """Return what the layers, and the modules that begin with them, are called in the whole model; ``source`` has
    layers and how many units later they are."""
    if run.path is None:
        behind = ((layer.name, layer.module) for layer in chain.layers[len(run.kept) :])
        return [*zip(run.names, run.modules, strict=True), *behind]
    names, modules = [], []
    for i, later in source:
        layer, item = chain.layers[i], items[i]
        own = "" if item is None else f"{run.path}.{run.names[item + later * run.period]}"

        def whole(name: str, own: str = own) -> str:
            parts = ((part, _of_item(run, part) if own else None) for part in name.split(".."))
            return "..".join(own + part[found.end() :] if found else part for part, found in parts)

        names.append(whole(re.sub(r"#\d+$", "", layer.name)))
        modules.append(layer.module and whole(layer.module))
    return list(zip(unique(names), modules, strict=True))
