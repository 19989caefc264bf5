"""How does any module become a network of layers? Torch exports it; leaf modules and free operations are the layers.

What a layer is: the consecutive operations of one call of a module without children, or one operation of a forward
that is written out. Views of a whole tensor and constants (position numbers, masks) cost nothing to make again, so
they are made again by each layer that needs them and cross no cut. An operation in place belongs to the layer that
made the tensor, with all in between. The shapes, the training mode and the batch size are those of the trace.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from ....errors import BadInput
from ...device import CPU
from ..autocast import Autocast, autocasting
from ..network import LayerCode, Network, TensorSpec, unchanged
from .adapted import SPACE, function_of
from .exported import OF_MODULE, ROOT, Exported, exported, line_of_node, refuse_changed
from .facts import Facts

TRACED_ON = {"cpu", "cuda"}


def trace_module(
    module: nn.Module,
    example_input: Any,
    device: str = "cpu",
    loss_alone: bool = False,
    training: bool = True,
    autocast: Autocast | None = None,
) -> Network:
    """Return the network that ``module`` is on ``example_input``: a tensor, a tuple of arguments or keywords.

    It is that of its ``training``, or else that of its evaluation, where dropout is no layer, and of its run under
    ``autocast``.
    With ``loss_alone`` it puts out the loss that the module returns, and nothing else. The parameters of the layers are
    those of ``module``, so tied weights stay tied (torch's export names them once). BadInput tells what cannot be
    traced, and what to do.
    """
    with nullcontext() if autocast is None else autocast.on(CPU, trace=True):
        found = exported(module, example_input, loss_alone, training)
    graph = found.graph
    with autocasting(autocast, CPU):
        facts = Facts.of(graph, found.arguments)
    for node, changed in facts.written.items():
        for base in (facts.storage.get(n, n) for n in changed):
            if base.op == "get_attr" and isinstance(attrgetter(str(base.target))(graph), nn.Parameter):
                refuse_changed(getattr(found.root, ROOT), _path(str(base.target)), line_of_node(node), training)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    inputs = {n: i for i, n in enumerate(p for p in placeholders if p in facts.tensors)}
    groups = _merged_in_place(facts, _groups(graph, found.root, facts))
    _put_on(graph, torch.device(device))  # behind what is found out by running it as it was made
    network = _network(found, facts, groups, inputs).under(autocast)
    with_state_of(getattr(found.root, ROOT), network)
    return replace(network, structure=found.restored, notes=found.notes)


def with_state_of(module: nn.Module, network: Network) -> frozenset[str]:
    """Let ``network`` have the weights and buffers that ``module`` has now; return where its constants are."""
    others = set[str]()
    state = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    for code in (layer.module for layer in network.layers):
        own = [*code.named_parameters(remove_duplicate=False), *code.named_buffers(remove_duplicate=False)]
        for place, _ in own:
            found = state.get(place.removeprefix(OF_MODULE)) if place.startswith(OF_MODULE) else None
            if found is None:
                others.add(place)
            else:
                holder, _, name = place.rpartition(".")
                setattr(code.get_submodule(holder), name, found)
    return frozenset(others)


def _put_on(graph: fx.GraphModule, device: torch.device) -> None:
    """Let ``graph``, and the graphs in it, make tensors on ``device``: the export names the one it was made on.

    Regions of their own type, such as autocast's, name it as text.
    """
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            region = isinstance(node.target, torch._ops.HigherOrderOperator)

            def here(value: Any, region: bool = region) -> Any:
                if isinstance(value, torch.device):
                    return device
                return device.type if region and isinstance(value, str) and value in TRACED_ON else value

            node.args = fx.node.map_aggregate(node.args, here)
            node.kwargs = fx.node.map_aggregate(node.kwargs, here)
        if isinstance(part, fx.GraphModule) and part is not graph:
            part.recompile()


@dataclass
class _Group:
    """Consecutive operations that become one layer."""

    name: str
    call: str  # which call of which module without children; empty for an operation on its own
    nodes: list[fx.Node]


def _groups(graph: fx.GraphModule, root: nn.Module, facts: Facts) -> list[_Group]:
    """Return the operations in order, those of one call of a module without children together."""
    named = [(_path(name), part) for name, part in root.named_modules()]
    leaves = {name for name, part in named if name and next(part.children(), None) is None}
    groups: list[_Group] = []
    waiting: list[fx.Node] = []  # updates of buffers, which go with the operation after them
    producer: dict[fx.Node, _Group] = {}
    for node in graph.graph.nodes:
        of_none = node.op in ("placeholder", "get_attr", "output", "call_module") or "assert" in str(node.target)
        if of_none or node in facts.free:
            continue
        if node.target is operator.getitem and node.args[0] in producer:
            group = producer[node.args[0]]
            group.nodes.append(node)
            producer[node] = group
            continue
        if node in facts.written and all(n.op == "get_attr" for n in node.all_input_nodes):
            waiting.append(node)
            continue
        path, call = _innermost(node)
        call = call if path in leaves else ""
        if not (groups and call and groups[-1].call == call):
            own = path if call else ".".join(x for x in (path, _operation(node)) if x)
            groups.append(_Group(own, call, []))
        groups[-1].nodes += [*waiting, node]
        waiting = []
        producer[node] = groups[-1]
    if groups:
        groups[-1].nodes += waiting
    return groups


def _innermost(node: fx.Node) -> tuple[str, str]:
    """Return the path of the innermost module that ``node`` comes from, and which call of it."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", ""
    call = list(stack)[-1]
    path = stack[call][0]
    return _path(path.split("@")[0]), call


def _begins(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Return the outermost module whose only call begins with each of the ``nodes``, given in order; others begin
    none."""
    first: dict[str, tuple[fx.Node, str]] = {}
    for node in nodes:
        for call, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            first.setdefault(call, (node, _path(path.split("@")[0])))
    calls = Counter(path for _, path in first.values())
    found: dict[fx.Node, str] = {}
    for node, path in first.values():
        if path and calls[path] == 1:
            found.setdefault(node, path)
    return found


def _path(name: str) -> str:
    """Return a module's name in the user's module, which is one in that which was exported."""
    return name.removeprefix(ROOT).removeprefix(".") if name == ROOT or name.startswith(f"{ROOT}.") else ""


def _operation(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{_operation(node.all_input_nodes[0])}{node.args[1]}"
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.name.strip("_")
    name = target.overloadpacket.__name__
    return function_of(name) if target.namespace == SPACE else name.strip("_")


def _merged_in_place(facts: Facts, groups: list[_Group]) -> list[_Group]:
    """Merge the groups from the maker of a tensor to each operation that changes it in place.

    Of a buffer that changes, from the first to the last operation that has to do with it.
    """
    home = {node: index for index, group in enumerate(groups) for node in group.nodes}
    reach = list(range(len(groups)))  # the last group that must be in one layer with this one
    begins: dict[fx.Node, int] = {}
    for node, index in home.items():
        for base in {facts.storage[n] for n in node.all_input_nodes if n in facts.storage} & facts.state:
            begin = begins.setdefault(base, index)
            reach[begin] = max(reach[begin], index)
        for source in facts.written.get(node, ()):
            base = facts.storage.get(source, source)
            if base.op == "get_attr":
                continue
            if base.op == "placeholder":
                raise BadInput(
                    f"{_operation(node)} changes the network's input {base.name} in place{line_of_node(node)}; work on "
                    "a copy"
                )
            base = facts.value(base)
            if base in home:
                reach[home[base]] = max(reach[home[base]], index)
    merged: list[_Group] = []
    end = -1
    for index, group in enumerate(groups):
        if index <= end:
            merged[-1].nodes += group.nodes
            merged[-1].name = f"{merged[-1].name.split('..')[0]}..{group.name}"
        else:
            merged.append(group)
        end = max(end, reach[index])
    return merged


def _network(found: Exported, facts: Facts, groups: list[_Group], inputs: dict[fx.Node, int]) -> Network:
    """Return the layers of ``groups`` with the numbers of what they read and make."""
    graph, arguments, numbers = found.graph, found.arguments, dict(inputs)
    home = {node: index for index, group in enumerate(groups) for node in group.nodes}
    reads = [list(dict.fromkeys(_needed(facts, group, index, home))) for index, group in enumerate(groups)]
    last = [facts.value(n) for n in pytree.tree_leaves(graph.graph.output_node().args[0]) if isinstance(n, fx.Node)]
    if any(n in facts.free and n not in facts.same and n.op != "placeholder" for n in last):
        name = type(getattr(found.root, ROOT)).__name__
        raise BadInput(f"{name} returns a constant or a parameter; return what depends on the input")
    wanted = {n for needed in reads for n in needed} | set(last)
    layers: list[LayerCode] = []
    passing = _passing(inputs, reads, last)
    for node in passing:
        number = len(inputs) + len(layers)
        name = "input" if len(inputs) == 1 else f"input {node.name}"
        layers.append(LayerCode(name, name, nn.Identity(), unchanged, (inputs[node],), (number,), ""))
        numbers[node] = number
    following = len(inputs) + len(layers)
    names = unique(group.name for group in groups)
    begins = _begins(node for group in groups for node in group.nodes)
    for name, group, needed in zip(names, groups, reads, strict=True):
        makes = [n for n in dict.fromkeys(map(facts.value, group.nodes)) if n in wanted and n in facts.tensors]
        code = _layer_graph(graph, facts, group, needed, makes)
        numbers.update({n: following + i for i, n in enumerate(makes)})
        following += len(makes)
        layers.append(
            LayerCode(
                name,
                f"layer {name}",
                code,
                nn.Module.__call__,
                tuple(numbers[n] for n in needed),
                tuple(numbers[n] for n in makes),
                None if begins.get(group.nodes[0]) == name else begins.get(group.nodes[0], ""),
            )
        )
    ordered = sorted(inputs, key=lambda n: inputs[n])
    tensors = tuple(arguments[inputs[n]] for n in ordered)
    shapes = {number: TensorSpec.of(facts.tensors[n]) for n, number in numbers.items()}
    shapes |= {i: TensorSpec(tuple(x.shape), x.dtype) for i, x in enumerate(tensors)}
    trained = frozenset(number for n, number in numbers.items() if n in facts.trained)
    outputs = tuple(numbers[n] for n in last)
    return Network(tuple(layers), tensors, outputs, list, chain=False, shapes=shapes, trained=trained)


def _needed(facts: Facts, group: _Group, index: int, home: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """Yield the values made elsewhere that ``group`` reads, through what it makes for itself."""
    pending = [n for node in group.nodes for n in node.all_input_nodes]
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if node in facts.free:
            pending += node.all_input_nodes
        elif node.op == "placeholder" or home[node] != index:
            yield node


def _passing(inputs: dict[fx.Node, int], reads: list[list[fx.Node]], last: list[fx.Node]) -> list[fx.Node]:
    """Return the inputs that need a layer to pass them on.

    A profile knows one network input, that layers without other inputs read; anything else is an edge from a layer.
    What is read late comes first, so that what is read at once can be one layer with its reader.
    """
    mixed = any(set(needed) & set(inputs) and set(needed) - set(inputs) for needed in reads)
    if len(inputs) > 1 or mixed or set(last) & set(inputs):
        first = {n: index for index, needed in reversed(list(enumerate(reads))) for n in needed}
        used = [n for n in inputs if n in first or n in last]
        return sorted(used, key=lambda n: -first.get(n, len(reads)))
    return []


def _layer_graph(
    graph: fx.GraphModule, facts: Facts, group: _Group, reads: list[fx.Node], makes: list[fx.Node]
) -> fx.GraphModule:
    """Return the operations of ``group``, and what they need made again, as a module of its own."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: part.placeholder(node.name) for node in reads}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            for source in node.all_input_nodes:
                copy(source)
            copies[node] = part.node_copy(node, copy)
        return copies[node]

    for node in sorted(group.nodes):
        copy(node)
    part.output(tuple(copies[n] for n in makes))
    return _LazyGraphModule(graph, part)  # a rank runs its own layers alone


def unique(names: Iterable[str]) -> list[str]:
    """Return ``names``, those that come again with their count."""
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return unique
