"""Which chain is in a ``graph.txt``, the format of PipeDream's published profiles?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import networkx as nx

from ..errors import BadInput
from ..names import shown
from ..problem import Chain, Layer
from ..units import ms_to_ns
from .profile_rules import MOST_EDGES, MOST_LAYERS, check_chain

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
    check_chain(chain, place, lambda i: nodes[order[i]].place)
    return chain


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
                raise BadInput(f"{here}: '{shown(line)}' is not an edge such as 'node1 -- node2'")
            edges.append((here, match["source"], match["target"]))
            if len(edges) > MOST_EDGES:
                raise BadInput(f"{here}: there are more than {MOST_EDGES} edges")
            continue
        match = _NODE.fullmatch(line.strip())
        if match is None:
            raise BadInput(
                f"{here}: '{shown(line)}' is not a node such as 'node1 -- ReLU -- forward_compute_time=0.5, "
                "backward_compute_time=0.2, activation_size=1024.0, parameter_size=0.0'"
            )
        node = match["id"]
        if re.fullmatch(r"node[0-9]{1,18}", node) is None:
            raise BadInput(f"{here}: '{shown(node)}' is not a node's name such as 'node12'")
        if node in nodes:
            raise BadInput(f"{here}: {node} is there twice, first in {nodes[node].place}")
        nodes[node] = _Node(here, match["description"], _layer(match, here))
        if len(nodes) > MOST_LAYERS:
            raise BadInput(f"{here}: there are more than {MOST_LAYERS} nodes")
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    for here, source, target in edges:
        for node in (source, target):
            if node not in nodes:
                raise BadInput(f"{here}: the edge names '{shown(node)}', which is not a node of this graph")
        graph.add_edge(source, target)
    if len(nodes) > 1 and not edges:
        raise BadInput(f"{place}: {len(nodes)} nodes and not one edge; the file seems cut off")
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [u for u, _ in nx.find_cycle(graph)]
        raise BadInput(f"{place}: the edges go round in a cycle: {' -> '.join([*cycle, cycle[0]])}")
    return nodes, graph


def _layer(match: re.Match[str], here: str) -> Layer:
    kind = re.sub(r"(?s)[\s(].*", "", match["description"].strip()) or "layer"
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
            raise BadInput(f"{here}: {field}='{shown(text)}' is not a number")
        value = Fraction(part.strip())
        if value < 0:
            raise BadInput(f"{here}: {field}='{shown(text)}' is negative")
        total += value
    return total


def _number(node: str) -> int:
    return int(node.removeprefix("node"))
