"""How is the backward of one graph cut in two? Gradients of what entered first, those of weights later.

The *spine* of a graph are the nodes that lie on a way to what entered. Where something that depends on weights alone
meets the spine, the gradient that comes there is kept: from it the gradients of those weights follow, whenever.
Weights that meet it at two nodes, one of which feeds the other, are left in the first part: from the first of these
nodes a gradient would come to them along the spine as well. So are weights of one dimension, as norms have: their
gradients are a by-product of that of what entered, which would be computed and kept for them again. The idea is that
of torch's own pipelining (Qi et al. 2024, Zero Bubble Pipeline Parallelism, section 4.1), which holds all that was
saved until the second part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from .pieces import Saved
from .structure import reached


class Caught:
    """The gradients that come to a node, caught in the first part and given to it in the second."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.gradients: tuple[Tensor | None, ...] | None = None
        self._hook = node.register_prehook(self._at)

    def _at(self, gradients: Any) -> Any:
        if self.gradients is None:
            self.gradients = tuple(x if x is None else alone(x) for x in gradients)
            return None
        return self.gradients  # hooks of the user's have changed them already

    def let_go(self) -> None:
        """Forget the gradients, and let the node go, which would live as long as its hook."""
        self._hook.remove()
        self.gradients = None

    def edges(self) -> Iterator[tuple[GradientEdge, Tensor]]:
        """Yield where the second part begins, and with what."""
        for number, gradient in enumerate(self.gradients or ()):
            if gradient is not None:
                yield GradientEdge(self.node, number), gradient


@dataclass
class Group:
    """Weights and all nodes at which they meet the spine, and the graph's ends that are not on it."""

    leaves: list[Tensor]
    caught: list[Caught] = field(default_factory=list)
    ends: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)

    def edges(self) -> list[tuple[GradientEdge, Tensor]]:
        """Return where the gradients of the weights come from."""
        return [*self.ends, *(edge for one in self.caught for edge in one.edges())]

    def run(self) -> None:
        """Add the gradients of the weights to theirs."""
        pairs = self.edges()
        if pairs:
            edges, gradients = zip(*pairs, strict=True)
            _run(edges, gradients, self.leaves)
        for one in self.caught:
            one.let_go()

    def rehearse(self) -> None:
        """Compute the gradients of the weights and forget them."""
        pairs = self.edges()
        if pairs:
            edges, gradients = zip(*pairs, strict=True)
            torch.autograd.grad(edges, self.leaves, gradients, retain_graph=True, allow_unused=True)


@dataclass
class WeightPart:
    """What is left to do of a backward; ``run`` does it."""

    groups: list[Group]
    saved: Saved

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradients that are kept for it."""
        return (gradient for group in self.groups for _, gradient in group.edges())

    def run(self) -> None:
        """Add the gradients of all weights to theirs, and let go of everything."""
        while self.groups:
            self.groups.pop(0).run()
        self.saved.clear()

    def let_go(self) -> None:
        """Let go of everything; it will not be run."""
        for group in self.groups:
            for one in group.caught:
                one.let_go()
        self.groups = []
        self.saved.clear()

    def needed(self) -> frozenset[int]:
        """Return the numbers of what was saved that it needs, found by trying."""
        self.saved.asked.clear()
        for group in self.groups:
            group.rehearse()
        return frozenset(self.saved.asked)


def input_part(ends: Sequence[tuple[GradientEdge, Tensor]], entries: Sequence[Tensor], saved: Saved) -> WeightPart:
    """Run the first part of a backward from ``ends``, with the gradients that came there, and return the second.

    The first goes to the leaves ``entries``. A graph in which nothing leads to them has no first part, and ends from
    which nothing does are left for the second.
    """
    targets = [torch.autograd.graph.get_gradient_edge(entry).node for entry in entries]
    children, spine = _walked([edge.node for edge, _ in ends], targets)
    if not spine:
        return WeightPart(later_part(ends), saved)
    apart = [(edge, gradient) for edge, gradient in ends if edge.node in children and edge.node not in spine]
    meeting = _meeting(children, spine, {edge.node for edge, _ in apart})
    now: list[Tensor] = []
    later: list[Group] = []
    for leaves, nodes in _grouped(meeting):
        if all(leaf.dim() < 2 for leaf in leaves) or (len(nodes) > 1 and _in_a_row(nodes, children, spine)):
            now += leaves
        else:
            own = [(edge, alone(gradient)) for edge, gradient in apart if edge.node in nodes]
            later.append(Group(leaves, [Caught(node) for node in nodes if node in spine], own))
    edges, gradients = zip(*ends, strict=True)
    _run(edges, gradients, [*entries, *now], keep=True)
    return WeightPart(later, saved)


def alone(gradient: Tensor) -> Tensor:
    """Return a gradient, or a copy of one that is part of a larger tensor, which keeping it would keep."""
    return gradient.clone() if gradient.untyped_storage().nbytes() > gradient.nbytes else gradient


def later_part(ends: Sequence[tuple[GradientEdge, Tensor]]) -> list[Group]:
    """Return what of the second part a graph is from whose ``ends`` nothing leads to what entered."""
    leaves: list[Any] = [node for node in _walked([edge.node for edge, _ in ends], [])[0] if _is_leaf(node)]
    own = [(edge, alone(gradient)) for edge, gradient in ends]
    return [Group([leaf.variable for leaf in leaves], ends=own)] if leaves else []


def _run(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], leaves: Sequence[Tensor], keep: bool = False
) -> None:
    """Do what torch.autograd.backward does, but for its look at the gradients' shapes, which takes as long as the call
    itself; there is one for each weight."""
    _engine_run_backward(
        edges, tuple(gradients), keep, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
    )


Children = Mapping[Node, Sequence[Node]]


def _walked(roots: Sequence[Node], targets: Sequence[Node]) -> tuple[dict[Node, list[Node]], set[Node]]:
    """Return all nodes below ``roots`` but ``targets`` with those right below each, and the spine: those on a way to
    ``targets``."""
    children: dict[Node, list[Node]] = {}
    parents: dict[Node, list[Node]] = {}
    stack = list(reversed(roots))
    while stack:
        node = stack.pop()
        if node in children:
            continue
        children[node] = below = [child for child, _ in node.next_functions if child is not None]
        for child in below:
            parents.setdefault(child, []).append(node)
        stack.extend(reversed(below))
    spine = set(reached((node for x in targets for node in parents.get(x, ())), lambda node: parents.get(node, ())))
    for target in targets:
        children.pop(target, None)
    return children, spine


def _is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")


def _meeting(children: Children, spine: set[Node], apart: set[Node]) -> dict[Node, list[Any]]:
    """Return the nodes of the spine above weights, with the leaves of these; and the ends ``apart`` from it."""
    known: dict[Node, list[Any]] = {}

    def leaves(top: Node) -> list[Any]:
        if top not in known:
            known[top] = [node for node in reached([top], lambda node: children.get(node, ())) if _is_leaf(node)]
        return known[top]

    meeting: dict[Node, list[Any]] = {}
    for node in children:
        if node in spine:
            own = [
                leaf for child in children[node] if child in children and child not in spine for leaf in leaves(child)
            ]
            if own:
                meeting[node] = list(dict.fromkeys(own))
        elif node in apart and (own := leaves(node)):
            meeting[node] = own
    return meeting


def _grouped(meeting: Mapping[Node, Sequence[Any]]) -> list[tuple[list[Tensor], list[Node]]]:
    """Return the weights and nodes of each group: what hangs together because nodes share weights."""
    home: dict[Any, tuple[list[Any], list[Node]]] = {}  # the group of each leaf
    for node, leaves in meeting.items():
        met = list({id(home[x]): home[x] for x in leaves if x in home}.values())
        new = [x for x in leaves if x not in home]
        group = [*(x for own, _ in met for x in own), *new], [*(x for _, nodes in met for x in nodes), node]
        home.update(dict.fromkeys(group[0], group))
    groups = {id(group): group for group in home.values()}.values()
    return [([leaf.variable for leaf in leaves], nodes) for leaves, nodes in groups]


def _in_a_row(nodes: Sequence[Node], children: Children, spine: set[Node]) -> bool:
    """Whether one of ``nodes`` leads to another along the spine."""

    def below(node: Node) -> list[Node]:
        return [child for child in children[node] if child in spine]

    return not set(nodes).isdisjoint(reached((child for node in nodes for child in below(node)), below))
