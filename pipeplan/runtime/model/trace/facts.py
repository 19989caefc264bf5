"""What is known of each value of an exported graph? Its tensor, what it is a view of, whether gradients come to it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from ....errors import BadInput
from ..operations import is_random, is_view, statistics
from ..places import buffers_kept
from .adapted import SPACE
from .exported import ROOT, line_of_node


@dataclass(frozen=True)
class Facts:
    """What is known about each node: its tensors, and which node's value it is or is a view of.

    ``same`` maps a node that shows a whole value in another shape to the node of that value; ``storage`` maps each
    tensor node to the first node of its storage. ``free`` nodes are constants, parameters and whole views: each layer
    makes them for itself. ``written`` has the arguments that a node changes in place, and ``state`` are the buffers,
    each the first node of its storage, that some node changes. Gradients come to the ``trained``.
    """

    tensors: dict[fx.Node, Tensor]
    same: dict[fx.Node, fx.Node]
    storage: dict[fx.Node, fx.Node]
    free: frozenset[fx.Node]
    written: dict[fx.Node, list[fx.Node]]
    state: frozenset[fx.Node]
    trained: frozenset[fx.Node]

    @staticmethod
    def of(graph: fx.GraphModule, arguments: Sequence[Tensor]) -> Facts:
        """Run ``graph`` on fake tensors and look at what shares memory with what, and what changes; BadInput names a
        tensor that isn't dense."""
        results, written = _results(graph, arguments)
        tensors = {n: x for n, x in results.items() if isinstance(x, Tensor)}
        for node in (n for n, x in tensors.items() if x.layout != torch.strided):
            name = str(node.target).removeprefix(f"{ROOT}.") if node.op == "get_attr" else node.name
            raise BadInput(f"{name} is a sparse tensor{line_of_node(node)}, which no layer may have; make it dense")
        first: dict[int, fx.Node] = {}
        storage = {n: first.setdefault(x.untyped_storage()._cdata, n) for n, x in tensors.items()}
        changed = {storage[n] for nodes in written.values() for n in nodes if n in storage}
        state = frozenset(n for n in changed if n.op == "get_attr")
        same: dict[fx.Node, fx.Node] = {}
        free: set[fx.Node] = set()
        constant = _constants(graph, written, {n for n, base in storage.items() if base in changed})
        leaving = set(graph.graph.output_node().all_input_nodes)  # they keep their shapes
        for node in graph.graph.nodes:
            if node in constant:
                free.add(node)
            made = results.get(node)
            if isinstance(made, list | tuple) and node.op == "call_function":
                source = _viewed_list(node, made, tensors)
                if source is not None:
                    free.add(node)  # chunk, split, unbind: the getitem of each part is what makes it
                    storage[node] = storage[source]
            viewing = node not in free and node not in written and node not in leaving
            if viewing and node.op == "call_function" and node in tensors:
                for source in node.all_input_nodes:
                    one = source in tensors and storage[source] == storage[node]
                    if one and tensors[node].numel() >= tensors[source].numel() and source not in constant:
                        same[node] = same.get(source, source)
                        free.add(node)
                        break
        outputs = [results[n] for n in graph.graph.output_node().all_input_nodes]
        return Facts(
            tensors, same, storage, frozenset(free), written, state, _trained(graph, results, written, outputs)
        )

    def value(self, node: fx.Node) -> fx.Node:
        """Return the node whose value ``node`` shows."""
        return self.same.get(node, node)


def _results(
    graph: fx.GraphModule, arguments: Sequence[Tensor]
) -> tuple[dict[fx.Node, Any], dict[fx.Node, list[fx.Node]]]:
    """Return what each node gives on fake tensors, and which of its arguments nodes change in place."""
    results: dict[fx.Node, Any] = {}
    written: dict[fx.Node, list[fx.Node]] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            read = [(x, results[x]) for x in n.all_input_nodes if isinstance(results.get(x), Tensor)]
            versions = [x._version for _, x in read]
            results[n] = super().run_node(n)
            changed = [source for (source, x), version in zip(read, versions, strict=True) if x._version != version]
            changed += [
                x for x in statistics(n.target, n.args, n.kwargs) if isinstance(x, fx.Node) and x not in changed
            ]
            if changed:
                written[n] = changed
            return results[n]

    fake = any(isinstance(x, FakeTensor) for x in (*arguments, *graph.parameters()))
    mode = nullcontext() if fake else FakeTensorMode(allow_non_fake_inputs=True)
    with buffers_kept([graph]), mode as entered, torch.enable_grad():  # small whole numbers are counted on, fake or not
        flat = [x if entered is None else entered.from_tensor(x) for x in arguments]
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        known = iter(flat)
        values = [next(known) if isinstance(n.meta.get("val"), Tensor) else n.meta.get("val") for n in placeholders]
        recorder = Recorder(graph)
        recorder.run(*values, enable_io_processing=False)
    return results, written


def _trained(
    graph: fx.GraphModule,
    results: Mapping[fx.Node, Any],
    written: Mapping[fx.Node, Sequence[fx.Node]],
    outputs: Sequence[Any],
) -> frozenset[fx.Node]:
    """Return the nodes whose tensors gradients come to from ``outputs``, by autograd's own graph.

    What runs as it is written had no values to run on, so its outputs begin graphs of their own here; gradients go on
    to all that goes in.
    """
    pending = _steps(outputs)
    seen: set[Any] = set()
    for opaque in (None, *(n for n in reversed(graph.graph.nodes) if getattr(n.target, "namespace", "") == SPACE)):
        made = () if opaque is None else (results[opaque], *(results[n] for n in written.get(opaque, ())))
        if seen.intersection(_steps(pytree.tree_leaves(made))):
            pending = _steps(pytree.tree_leaves([results[n] for n in opaque.all_input_nodes]))
        while pending:
            step = pending.pop()
            if step not in seen:
                seen.add(step)
                pending += [before for before, _ in step.next_functions if before is not None]
    return frozenset(n for n, x in results.items() if isinstance(x, Tensor) and seen.intersection(_steps([x])))


def _steps(values: Sequence[Any]) -> list[Any]:
    """Return where gradients of tensors among ``values`` go in autograd's graph."""
    return [get_gradient_edge(x).node for x in values if isinstance(x, Tensor) and x.requires_grad]


def _constants(
    graph: fx.GraphModule, written: Mapping[fx.Node, Sequence[fx.Node]], changing: set[fx.Node]
) -> set[fx.Node]:
    """Return the nodes that neither the inputs nor anything trained nor chance nor time decides, and the attributes.

    What shares memory with what any node writes is ``changing``, and none of them.
    """
    constant: set[fx.Node] = set()
    trained: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constant.add(node)
            if isinstance(attrgetter(str(node.target))(graph), nn.Parameter):
                trained.add(node)
        elif node.op == "call_function" and not _draws(node) and node not in written and node not in changing:
            sources = node.all_input_nodes
            known = all(n in constant and n not in changing for n in sources)
            if known and (_views(node) or not trained.intersection(sources)):
                constant.add(node)
                if trained.intersection(sources):
                    trained.add(node)
    return constant


def _draws(node: fx.Node) -> bool:
    operation = node.target
    return isinstance(operation, torch._ops.OpOverload) and (operation.namespace == SPACE or is_random(operation))


def _views(node: fx.Node) -> bool:
    operation = node.target
    return is_view(operation) if isinstance(operation, torch._ops.OpOverload) else operation is operator.getitem


def _viewed_list(node: fx.Node, made: Iterable[Any], tensors: dict[fx.Node, Tensor]) -> fx.Node | None:
    """Return the tensor that all parts ``made`` by ``node`` are views of, if there is one."""
    keys = {x.untyped_storage()._cdata for x in made if isinstance(x, Tensor)}
    for source in node.all_input_nodes:
        if source in tensors and keys == {tensors[source].untyped_storage()._cdata}:
            return source
    return None
