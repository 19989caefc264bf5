"""Profiles from elsewhere as chains: PipeDream's ``graph.txt``, and the checks that every profile has to pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import networkx as nx

from .errors import BadInput
from .granularity import articulation_cuts, merge_articulation, merge_share, merge_zero_time
from .problem import Chain, Layer
from .units import ms_to_ns

__all__ = [
    "LARGEST_TOTAL",
    "articulation_cuts",
    "check_chain",
    "merge_articulation",
    "merge_share",
    "merge_zero_time",
    "read_graph_text",
]

LARGEST_TOTAL = 10**15  # a microbatch of 11 days, a petabyte: int64 holds it times thousands of versions or speeds

_NODE = re.compile(
    r"(?P<id>\S+) -- (?P<description>.*) -- forward_compute_time=(?P<forward_compute_time>[^,]*), "
    r"backward_compute_time=(?P<backward_compute_time>[^,]*), activation_size=(?P<activation_size>[^,]*), "
    r"parameter_size=(?P<parameter_size>[^,]*?)(?: -- stage_id=\S*)?"
)
_EDGE = re.compile(r"(?P<source>\S+) -- (?P<target>\S+)")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,2})?")


@dataclass(frozen=True, slots=True)
class _Node:
    """One node line: where it stands, what it is called, and its costs."""

    place: str
    description: str
    layer: Layer


def read_graph_text(text: str, name: str, place: str, microbatch: int = 1) -> Chain:
    """Return the profile in PipeDream's ``graph.txt`` format as a chain in topological order, by node number.

    ``text`` holds the file, ``place`` names it in errors. Times are ms, sizes bytes, lists ``[a; b]`` are summed; nodes
    named ``Input*`` that nothing feeds are dropped, their activation sizes summed up are ``input_bytes``. The format
    has no microbatch size: ``microbatch`` says it. Layers are called by their kind and node number (``Conv2d-4``).
    Raises BadInput, with the line, for whatever is not such a graph.
    """
    nodes, graph = _parse_graph(text, place)
    inputs = [n for n in graph if nodes[n].description.startswith("Input") and not graph.in_degree(n)]
    input_bytes = sum(nodes[n].layer.output_bytes for n in inputs)
    graph.remove_nodes_from(inputs)
    if not graph:
        raise BadInput(
            f"{place}: there is no layer in it, only inputs" if inputs else f"{place}: there is no node in it"
        )
    order = list(nx.lexicographical_topological_sort(graph, key=_number))
    index = {node: i for i, node in enumerate(order)}
    edges = tuple(sorted((index[u], index[v]) for u, v in graph.edges))
    linear = edges == tuple(pairwise(range(len(order))))
    chain = Chain(
        name=name,
        layers=tuple(nodes[n].layer for n in order),
        input_bytes=input_bytes,
        edges=None if linear else edges,
        microbatch=microbatch,
        source=f"PipeDream graph {place}",
    )
    check_chain(chain, lambda i: nodes[order[i]].place)
    return chain


def check_chain(chain: Chain, place_of_layer: Callable[[int], str]) -> None:
    """Raise BadInput unless the values of ``chain`` make sense; every function on chains relies on it.

    Counts are not negative, times and sizes sum up to at most :data:`LARGEST_TOTAL`, something takes time, edges and
    ties are pairs of layers in order, and layers save what they read or make. ``place_of_layer`` names a layer:
    ``layers[3].forward_ns: -2 is negative``.
    """
    if not chain.layers:
        raise BadInput(f"{chain.name}: there are no layers")
    if chain.microbatch < 1:
        raise BadInput(f"microbatch: {chain.microbatch} is not positive")
    if chain.input_bytes < 0:
        raise BadInput(f"input_bytes: {chain.input_bytes} is negative")
    for field in ("forward_ns", "backward_ns", "weight_bytes", "output_bytes", "saved_bytes", "storage_bytes",
                  "backward_weight_ns", "optimizer_ns", "parameters"):  # fmt: skip
        total = 0
        for i, layer in enumerate(chain.layers):
            value = getattr(layer, field) or 0
            if value < 0:
                raise BadInput(f"{place_of_layer(i)}.{field}: {value} is negative")
            total += value
            if total > LARGEST_TOTAL:
                raise BadInput(f"{place_of_layer(i)}.{field}: the layers up to here sum up to {total}, more than 1e15")
    for i, layer in enumerate(chain.layers):
        if (layer.backward_weight_ns or 0) > layer.backward_ns:
            raise BadInput(
                f"{place_of_layer(i)}.backward_weight_ns: {layer.backward_weight_ns} is more than backward_ns, "
                f"{layer.backward_ns}, which includes it"
            )
    if not any(layer.forward_ns + layer.backward_ns for layer in chain.layers):
        raise BadInput(f"{chain.name}: all forward and backward times are 0; there is nothing to plan")
    _check_pairs("edges", chain.edges or (), len(chain))
    _check_pairs("tied", chain.tied, len(chain))
    read = sum(size * max(len(r), 1) for size, r in zip(chain.tensor_bytes, chain.readers, strict=True))
    if read > LARGEST_TOTAL:
        raise BadInput(f"{chain.name}: the tensors that layers read sum up to {read} bytes, more than 1e15")
    reads: list[set[int]] = [set() for _ in chain.layers]
    for tensor, readers in enumerate(chain.readers):
        for reader in readers:
            reads[reader].add(tensor - 1)
    for i, layer in enumerate(chain.layers):
        _check_saved(layer, i, reads[i], place_of_layer(i))
    for i, (layer, private) in enumerate(zip(chain.layers, chain.storages.facts.private, strict=True)):
        if private < 0:
            raise BadInput(
                f"{place_of_layer(i)}.saved_bytes: {layer.saved_bytes} is less than what saves names, which takes "
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


def _check_pairs(what: str, pairs: tuple[tuple[int, int], ...], count: int) -> None:
    for n, (i, j) in enumerate(pairs):
        if not (0 <= i < count and 0 <= j < count):
            raise BadInput(f"{what}[{n}]: [{i}, {j}] names a layer that is not there; there are {count}")
        if i >= j:
            raise BadInput(f"{what}[{n}]: [{i}, {j}] must name an earlier layer first")


def _parse_graph(text: str, place: str) -> tuple[dict[str, _Node], nx.DiGraph]:
    """Return the nodes by their ids and the acyclic graph of the edges, or raise BadInput."""
    nodes: dict[str, _Node] = {}
    edges: list[tuple[str, str, str]] = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        here = f"{place} line {number}"
        if not line.strip():
            continue
        if line[0] in "\t ":
            match = _EDGE.fullmatch(line.strip())
            if match is None:
                raise BadInput(f"{here}: {_shown(line)} is not an edge such as 'node1 -- node2'")
            edges.append((here, match["source"], match["target"]))
            continue
        match = _NODE.fullmatch(line.strip())
        if match is None:
            raise BadInput(
                f"{here}: {_shown(line)} is not a node such as 'node1 -- ReLU -- forward_compute_time=0.5, "
                "backward_compute_time=0.2, activation_size=1024.0, parameter_size=0.0'"
            )
        node = match["id"]
        if re.fullmatch(r"node[0-9]{1,18}", node) is None:
            raise BadInput(f"{here}: {_shown(node)} is not a node's name such as 'node12'")
        if node in nodes:
            raise BadInput(f"{here}: {node} is there twice, first in {nodes[node].place}")
        nodes[node] = _Node(here, match["description"], _layer(match, here))
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    for here, source, target in edges:
        for node in (source, target):
            if node not in nodes:
                raise BadInput(f"{here}: the edge names {_shown(node)}, which is not a node of this graph")
        graph.add_edge(source, target)
    if len(nodes) > 1 and not edges:
        raise BadInput(f"{place}: {len(nodes)} nodes and not one edge; the file seems cut off")
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [u for u, _ in nx.find_cycle(graph)]
        raise BadInput(f"{place}: the edges go round in a cycle: {' -> '.join([*cycle, cycle[0]])}")
    return nodes, graph


def _layer(match: re.Match[str], here: str) -> Layer:
    kind = re.split(r"[\s(]", match["description"].strip(), maxsplit=1)[0] or "layer"
    return Layer(
        name=f"{kind}-{_number(match['id'])}",
        forward_ns=ms_to_ns(_value(match, "forward_compute_time", here)),
        backward_ns=ms_to_ns(_value(match, "backward_compute_time", here)),
        weight_bytes=round(_value(match, "parameter_size", here)),
        output_bytes=round(_value(match, "activation_size", here)),
    )


def _value(match: re.Match[str], field: str, here: str) -> Fraction:
    """Return the number in ``field``, or the sum of the list ``[a; b]``."""
    text = match[field].strip()
    parts = text[1:-1].split(";") if text.startswith("[") and text.endswith("]") else [text]
    total = Fraction(0)
    for part in parts:
        if _NUMBER.fullmatch(part.strip()) is None:
            raise BadInput(f"{here}: {field}={_shown(text)} is not a number")
        value = Fraction(part.strip())
        if value < 0:
            raise BadInput(f"{here}: {field}={_shown(text)} is negative")
        total += value
    return total


def _number(node: str) -> int:
    return int(node.removeprefix("node"))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
