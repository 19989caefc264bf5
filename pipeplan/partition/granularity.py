"""Which shorter chain stands for a chain whose cuts are not all wanted? Merged layers cost what their layers cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from ..cost.memory_model import own_of, weights_of
from ..cost.saved import for_weights, for_weights_bytes, inner_bytes, saved_bytes, storages
from ..cost.time_model import whole_step_ns
from ..errors import BadInput
from ..problem import Chain, Layer, WeightNeeds
from ..problem.layers import merged, renumbered

AUTO = "auto"  # blocks where there are lists of like ones, else nothing


def merging(text: str = AUTO, blocks: str | None = None) -> Callable[[Chain], Chain]:
    """Return the function on chains that ``--granularity``, or ``--blocks``, names."""
    if text == "node" and blocks is None:
        return lambda chain: chain
    if text == AUTO and blocks is None:

        def where_alike(chain: Chain) -> Chain:
            merged = merge_blocks(chain.in_own_order()) if like_blocks(chain) else chain
            return merged if len(merged) < len(chain) else chain

        return where_alike
    if text == "block" or (blocks is not None and text in (AUTO, "node")):
        lists = [name for name in (blocks or "").split(",") if name]
        return lambda chain: merge_blocks(chain.in_own_order(), lists)
    if blocks is not None:
        raise BadInput(f"--blocks means --granularity block, not {text[:40]}")
    if text == "articulation":
        return lambda chain: merge_articulation(chain.in_own_order())
    match = re.fullmatch(r"([0-9]{1,60}(?:\.[0-9]{1,60})?)%", text)
    if match is None or not 0 < Fraction(match[1]) < 100:
        raise BadInput(f"--granularity: {text[:40]!r} is not auto, node, block, articulation or a share such as 1%")
    share = Fraction(match[1]) / 100
    return lambda chain: merge_share(chain.in_own_order(), share)


SavedRule = Literal["distinct", "input"]
LIKE = 3  # blocks of one kind make a list of them


def articulation_cuts(chain: Chain) -> tuple[int, ...]:
    """Return the cuts of ``chain``, 0 and L included, that at most one tensor crosses.

    Tensors of zero bytes, in a storage without any, do not count. No cut comes before all layers that compute.
    """
    count, facts = len(chain), storages(chain).facts
    first = next((i for i in range(count) if i not in (chain.inputs or ())), 0)
    crossing = np.zeros(count + 2, dtype=np.int64)
    for tensor, (root, readers) in enumerate(zip(facts.roots(0).values(), chain.readers, strict=True)):
        if readers and (facts.sizes[tensor] or facts.storages[root]):
            crossing[tensor] += 1
            crossing[readers[-1] + 1] -= 1
    free = np.cumsum(crossing) <= 1
    return (0, *(i for i in range(first + 1, count) if free[i]), count)


def _crossing(chain: Chain, cut: int) -> list[int]:
    """Return the tensor that crosses one of the :func:`articulation_cuts`."""
    facts, roots = storages(chain).facts, storages(chain).facts.roots(0)
    for tensor, readers in enumerate(chain.readers[: cut + 1]):
        if readers and readers[-1] >= cut and (facts.sizes[tensor] or facts.storages[roots[tensor]]):
            return [tensor]
    return [cut]


def merge_articulation(chain: Chain, saved: SavedRule = "distinct") -> Chain:
    """Return ``chain`` as a plain chain, its layers merged between neighbouring :func:`articulation_cuts`.

    Layer sums, cut bytes at the remaining cuts and the bytes saved by any run of merged layers are those of ``chain``.
    ``saved="input"`` counts the input of each merged layer as all that it saves: MadPipe's accounting (section 3).
    A chain without edges comes back with nothing merged. Source: ALGORITHMS section 1, granularity ``articulation``.
    """
    if chain.edges is None and saved == "distinct":
        return chain
    cuts = articulation_cuts(chain) if chain.edges is not None else tuple(range(len(chain) + 1))
    layers = []
    for group, (start, stop) in enumerate(pairwise(cuts)):
        fields: dict[str, Any] = {}
        outgoing = chain.cut_bytes[stop] if stop < len(chain) else chain.layers[-1].output_bytes
        if saved == "distinct":
            entering = dict.fromkeys(_crossing(chain, start), group - 1)
            fields = _saved(chain, start, stop, _crossing(chain, stop), entering, group)
            exactly = inner_bytes(chain, start, stop) == 0 and fields["saved_bytes"] == chain.cut_bytes[start]
            if exactly and fields["saves"] == (group - 1,):
                fields |= {"saved_bytes": None, "saves": None}
        layers.append(_merged_layer(chain, start, stop, outgoing, fields))
    return _replaced(chain, cuts, layers, edges=None)


def merge_zero_time(chain: Chain) -> Chain:
    """Return ``chain`` with each layer whose forward and backward take no time merged into a neighbour.

    Of the cuts between two layers that take time the one of least bytes stays. In a DAG a group is merged only where
    one merged layer can stand for it exactly, that is, keeps every cut and every saved byte; other groups stay apart.
    Patterns cannot order operations that take no time (ALGORITHMS section 2).
    """
    busy = [i for i, layer in enumerate(chain.layers) if layer.forward_ns + layer.backward_ns > 0]
    kept = [min(range(i + 1, j + 1), key=lambda cut: chain.cut_bytes[cut]) for i, j in pairwise(busy)]
    cuts = [0]
    for start, stop in pairwise([0, *kept, len(chain)]):
        cuts += [stop] if _mergeable(chain, start, stop) else range(start + 1, stop + 1)
    return _cut(chain, cuts)


def merge_share(chain: Chain, share: Fraction) -> Chain:
    """Return ``chain`` with neighbours merged until a layer takes ``share`` of the total time, as far as it is exact.

    From the first layer on, a merged layer ends as soon as its forward and backward take the share. In a DAG it ends
    only where one layer can stand for it exactly (every cut and every saved byte kept), and layers for which that is
    nowhere before twice the share stay apart: a skip connection keeps its ends. Greedy, in one pass.
    """
    total = int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])
    count = len(chain)
    cuts = [0]
    while cuts[-1] < count:
        start = cuts[-1]
        best, time = start + 1, 0
        for stop in range(start + 1, count + 1):
            layer = chain.layers[stop - 1]
            time += layer.forward_ns + layer.backward_ns
            if stop > start + 1 and time > 2 * share * total:
                break
            if _mergeable(chain, start, stop):
                best = stop
                if time >= share * total:
                    break
        cuts.append(best)
    return _cut(chain, cuts)


def merge_blocks(chain: Chain, lists: Sequence[str] = ()) -> Chain:
    """Return ``chain`` with a layer for each item of its lists of modules, by the item's own name if whole.

    ``lists`` name them, such as ``model.layers`` or ``stages.*.blocks``, whatever their items are called; without any
    they are the outermost numbered parts of the layers' names. Between the lists, layers without weights join the one
    before them, or else the one behind. In a DAG what one layer cannot stand for exactly stays in as few as can.
    BadInput where none is called so.
    """
    names = [_item(layer.name, lists) for layer in chain.layers]
    for pattern in lists:
        if not any(name and fnmatchcase(name.rpartition(".")[0], pattern) for name in names):
            there = ", ".join(dict.fromkeys(x.name.split("..")[0] for x in chain.layers[:4]))
            raise BadInput(f"blocks: no layers are items of {pattern!r}; the first ones are {there}")
    cuts: list[int] = [0]
    called: dict[int, str] = {}
    sizes = Counter(names)
    for start, stop in pairwise(_bounds(chain, names)):
        while cuts[-1] < stop:
            first = cuts[-1]
            last = next(end for end in range(stop, first, -1) if end == first + 1 or _mergeable(chain, first, end))
            cuts.append(last)
        item = names[start]
        whole = cuts[-2] == start and stop - start == sizes[item]
        if item is not None and whole and _item(chain.layers[stop - 1].name.split("..")[-1], lists) == item:
            called[start] = item
    return _cut(chain, cuts, called)


def like_blocks(chain: Chain) -> bool:
    """Whether most layers are those of blocks alike: three or more items of lists, each as many layers of such weights.

    It looks at no times, so that a network has the same blocks whatever was measured.
    """
    items: dict[str, list[int]] = {}
    for layer in chain.layers:
        item = _item(layer.name, ())
        if item is not None:
            items.setdefault(item, []).append(layer.weight_bytes)
    kinds = Counter(tuple(weights) for weights in items.values())
    alike = sum(len(weights) for weights in items.values() if kinds[tuple(weights)] >= LIKE)
    return 2 * alike >= len(chain)


def _item(name: str, lists: Sequence[str]) -> str | None:
    """Return the name of the item of a list of modules that a layer called ``name`` belongs to, or None."""
    parts = name.split("..")[0].split(".")
    for end, part in enumerate(parts, 1):
        named = any(fnmatchcase(".".join(parts[: end - 1]), x) for x in lists)
        if named or (part.isdigit() and not lists):
            return ".".join(parts[:end])
    return None


def _bounds(chain: Chain, names: Sequence[str | None]) -> list[int]:
    """Return where the groups of :func:`merge_blocks` begin, and where the last one ends."""
    starts: list[int] = []
    weighted = False  # whether the group that is open, between lists, has weights
    for i, layer in enumerate(chain.layers):
        before = names[i - 1] if i else None
        if names[i] is not None:
            new = names[i] != before
        elif not i or before is not None or i == len(chain) - 1:
            new = True
        else:
            new = bool(layer.weight_bytes) and weighted
        if new:
            starts.append(i)
            weighted = False
        weighted = weighted or bool(layer.weight_bytes)
    return [*starts, len(chain)]


def _cut(chain: Chain, cuts: Sequence[int], called: Mapping[int, str] | None = None) -> Chain:
    """Return ``chain`` with the layers between ``cuts`` merged; each group must be :func:`_mergeable`.

    ``called`` names the groups that begin at a layer; others are called by their first and last layer.
    """
    layers, group, called = list[Layer](), _groups(cuts), called or {}

    def maker(tensor: int) -> int:
        return group[tensor - 1] if tensor else -1

    for start, stop in pairwise(cuts):
        if stop - start == 1:
            layer = chain.layers[start]
            layers.append(_called(renumbered(layer, lambda i: maker(i + 1)), called.get(start, layer.name)))
            continue
        leaving = _leaving(chain, start, stop)
        outgoing = sum(chain.tensor_bytes[t] for t in leaving)
        entering = {t: maker(t) for t in range(start + 1)}
        fields = _saved(chain, start, stop, leaving, entering, group[start])
        layer = _merged_layer(chain, start, stop, outgoing, fields)
        layers.append(_called(layer, called.get(start, layer.name)))
    edges = chain.edges and tuple(sorted({(group[i], group[j]) for i, j in chain.edges if group[i] != group[j]}))
    return _replaced(chain, cuts, layers, edges)


def _called(layer: Layer, name: str) -> Layer:
    """Return ``layer`` under another name; the module that begins with it stays."""
    module = layer.name if layer.module is None else layer.module
    return replace(layer, name=name, module=None if module in (name, name.split("..")[0]) else module)


def _groups(cuts: Sequence[int]) -> list[int]:
    """Return for each layer the group between ``cuts`` that holds it."""
    return [group for group, (start, stop) in enumerate(pairwise(cuts)) for _ in range(start, stop)]


def _leaving(chain: Chain, start: int, stop: int) -> list[int]:
    """Return the tensors that ``layers[start:stop]`` make and others read, or the last one where there are none."""
    return [t for t in range(start + 1, stop + 1) if any(r >= stop for r in chain.readers[t])] or [stop]


def _mergeable(chain: Chain, start: int, stop: int) -> bool:
    """Whether one layer can stand for ``layers[start:stop]`` exactly: what leaves is read, and saved, as one tensor."""
    if chain.edges is None or stop - start == 1:
        return True
    reads_input = chain.input_bytes and any(start <= r < stop for r in chain.readers[0])
    if reads_input and any(i < start <= j < stop for i, j in chain.edges):
        return False  # a layer that an edge enters no longer reads the network's input
    leaving, facts = _leaving(chain, start, stop), storages(chain).facts
    if any(map(chain.from_data, leaving)):
        return False
    if len({tuple(r for r in chain.readers[t] if r >= stop) for t in leaving}) > 1:
        return False
    if len(leaving) == 1:
        return True
    weights = for_weights(chain)
    both = [facts.kept, *([storages(weights).facts.kept] if weights is not None else [])]
    kept = [
        tuple(
            (any(t in of[i] for i in range(start, stop)), tuple(t in of[i] for i in range(stop, len(chain))))
            for of in both
        )
        for t in leaving
    ]
    apart = all(facts.parents[t] < 0 and t not in facts.parents for t in leaving)
    whole = all(facts.sizes[t] == facts.storages[t] for t in leaving)
    return apart and whole and len(set(kept)) == 1


def _saved(
    chain: Chain, start: int, stop: int, leaving: Sequence[int], entering: dict[int, int], group: int
) -> dict[str, Any]:
    """Return the fields of layer ``group`` that saves what ``layers[start:stop]`` save, and say where its output lies.

    ``leaving`` are the tensors that its output consists of; ``entering`` tells which layer makes one that comes in.
    """
    facts = storages(chain).facts
    roots = facts.roots(start)
    kept = {roots[t] for i in range(start, stop) for t in facts.kept[i]}
    saves = {entering[t] for t in kept if t in entering}
    root = roots[leaving[0]]
    own = root not in entering  # its storage is this layer's, or one without bytes
    if own and root in kept:
        saves.add(group)
    storage = facts.storages[root] if root > start else facts.sizes[root]
    needs: WeightNeeds | None = None
    weights = for_weights(chain)
    if weights is not None:
        held, gradients = for_weights_bytes(chain, start, stop) or (0, 0)
        mine = {roots[t] for i in range(start, stop) for t in storages(weights).facts.kept[i]}
        named = {entering[t] for t in mine if t in entering} | ({group} if own and root in mine else set())
        needs = WeightNeeds(held - gradients, tuple(sorted(named)), gradients)
    unknown = any(x.saved_bytes is not None and x.saves is None for x in chain.layers[start:stop])
    whole = sum(chain.tensor_bytes[t] for t in leaving)
    return {
        "saved_bytes": int(saved_bytes(chain, start, stop)),
        "saves": None if unknown and not saves else tuple(sorted(saves)),
        "view_of": entering.get(root),
        "storage_bytes": storage if own and len(leaving) == 1 and storage != whole else None,
        "weight_needs": needs,
    }


def _merged_layer(chain: Chain, start: int, stop: int, output_bytes: int, saved: dict[str, Any]) -> Layer:
    """Return ``layers[start:stop]`` as one layer that has the fields ``saved``."""
    part = chain.layers[start:stop]
    weight_bytes, parameters = weights_of(chain, start, stop)
    own = None if all(x.own_parameters is None for x in part) else own_of(chain, start, stop)[1]
    begins = next((x for x in part if x.module != "" or x.forward_ns + x.backward_ns), part[0])  # behind inputs alone
    return merged(
        part,
        module=begins.module if begins is part[0] or begins.module is not None else begins.name,
        name=part[0].name if len(part) == 1 else f"{part[0].name}..{part[-1].name}",
        weight_bytes=weight_bytes,
        parameters=part[0].parameters if len(part) == 1 else parameters,
        output_bytes=output_bytes,
        optimizer_ns=whole_step_ns(chain, start, stop),
        own_parameters=own,
        **saved,
    )


def _replaced(
    chain: Chain, cuts: Sequence[int], layers: Sequence[Layer], edges: tuple[tuple[int, int], ...] | None
) -> Chain:
    """Return ``chain`` with ``layers`` in the place of the groups between ``cuts``; what is tied follows its groups."""
    group = _groups(cuts)
    holders = [(tuple(sorted({group[i] for i in x.layers})), x) for x in chain.shared or ()]
    shared = tuple(replace(x, layers=found) for found, x in holders if len(found) > 1)
    tied = {(min(group[i], group[j]), max(group[i], group[j])) for i, j in chain.tied if group[i] != group[j]}
    inputs = tuple(group[i] for i in chain.inputs or () if group.count(group[i]) == 1)
    return replace(
        chain,
        layers=tuple(layers),
        edges=edges,
        inputs=None if edges is None or chain.inputs is None else inputs,
        tied=tuple(sorted(tied)),
        shared=None if chain.shared is None else shared,
    )
