"""Which chain, with which variants, is in an input of Piper's, the JSON of its published code (msr-fiddle/piper)?"""

from __future__ import annotations

from typing import Annotated

import msgspec
import networkx as nx

from ..errors import BadInput
from ..problem import Chain, Layer, Variant
from .forms import Text, read_json
from .profile_rules import MOST_DEGREE, MOST_EDGES, MOST_LAYERS, check_chain, check_variants

Number = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
KEPT, AGAIN = "vanilla", "activation recomp"


class _Way(msgspec.Struct):
    id: str
    timePerSample: Number
    parameterSize: Number
    memoryUsageA: Number


class _Node(msgspec.Struct):
    id: int
    TMPCs: dict[str, list[_Way]]
    name: Text = ""


class _Edge(msgspec.Struct):
    sourceId: int
    destId: int
    communicationCost: Number


class _Input(msgspec.Struct):
    nodes: Annotated[list[_Node], msgspec.Meta(max_length=MOST_LAYERS)]
    edges: Annotated[list[_Edge], msgspec.Meta(max_length=MOST_EDGES)]


def read_piper(text: str, name: str, place: str) -> Chain:
    """Return an input of Piper's as a chain in topological order by node number, with the degrees that all nodes have.

    A layer's forward is what running it again takes, or a third of its time where that isn't said; its microbatch is a
    sample, what it saves ``memoryUsageA``, its output the most of its edges. What groups exchange where stages end, and
    the memory of weights, which policies count, are left out. BadInput for whatever is no such input.
    """
    form = read_json(text, _Input, place)
    nodes = {node.id: node for node in form.nodes}
    graph = nx.DiGraph((x.sourceId, x.destId) for x in form.edges)
    graph.add_nodes_from(nodes)
    if len(nodes) < len(form.nodes) or len(graph) > len(nodes) or not nx.is_directed_acyclic_graph(graph):
        raise BadInput(f"{place}: $.edges: they don't make an acyclic graph of the nodes, each once")
    order = list(nx.lexicographical_topological_sort(graph))
    index = {node: i for i, node in enumerate(order)}
    sent = dict.fromkeys(order, 0.0)
    for edge in form.edges:
        sent[edge.sourceId] = max(sent[edge.sourceId], edge.communicationCost)

    def layers(degree: str) -> tuple[Layer, ...]:
        found = []
        for node in order:
            ways = {x.id: x for x in nodes[node].TMPCs[degree]}
            if KEPT not in ways:
                raise BadInput(f"{place}: node {node} has no '{KEPT}' of degree {degree}")
            kept, whole = ways[KEPT], round(ways[KEPT].timePerSample * 1e9)
            again = round(ways[AGAIN].timePerSample * 1e9) - whole if AGAIN in ways else 0
            forward = again if 0 < again <= whole else whole // 3
            called = f"{nodes[node].name or 'layer'}-{node}"
            size, saved = round(kept.parameterSize), round(kept.memoryUsageA)
            found.append(Layer(called, forward, whole - forward, size, round(sent[node]), saved))
        return tuple(found)

    common = set.intersection(*(set(x.TMPCs) for x in form.nodes)) if form.nodes else set[str]()
    degrees = sorted(int(x) for x in common if x.isascii() and x.isdigit() and 1 <= int(x[:5]) <= MOST_DEGREE)
    if degrees[:1] != [1]:
        raise BadInput(f"{place}: $.nodes: not all of them have ways to run on one GPU")
    parts = tuple(Variant(x, False, layers(str(x))) for x in degrees[1:])
    edges = tuple(sorted({(index[x.sourceId], index[x.destId]) for x in form.edges}))
    chain = Chain(name, layers("1"), 0, edges=edges, source=f"Piper input {place}", variants=parts)
    check_chain(chain, place)
    check_variants(chain, place)
    return chain
