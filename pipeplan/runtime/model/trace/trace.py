"""How does any module become a network of layers? Torch exports it; leaf modules and free operations are the layers.

What a layer is: the consecutive operations of one call of a module without children, or one operation of a forward
that is written out. Views of a whole tensor and constants (position numbers, masks) cost nothing to make again, so
they are made again by each layer that needs them and cross no cut. An operation in place belongs to the layer that
made the tensor, with all in between. The shapes, the training mode and the batch size are those of the trace.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from ....errors import BadInput
from ...device import CPU
from ..autocast import Autocast, autocasting
from ..deferred import is_random, statistics
from ..network import LayerCode, Network, TensorSpec, buffers_kept, unchanged
from .adapted import SPACE, function_of
from .exported import ROOT, Exported, exported, line_of_node, refuse_changed

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
        facts = _Facts.of(graph, found.arguments)
    _refuse_changed_weights(getattr(found.root, ROOT), graph, facts, training)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    inputs = {n: i for i, n in enumerate(p for p in placeholders if p in facts.tensors)}
    groups = _merged_in_place(facts, _groups(graph, found.root, facts))
    _put_on(graph, torch.device(device))  # behind what is found out by running it as it was made
    network = _network(found, facts, groups, inputs).under(autocast)
    return replace(network, structure=found.restored, notes=found.notes)


def _refuse_changed_weights(module: nn.Module, graph: fx.GraphModule, facts: _Facts, training: bool) -> None:
    for node, changed in facts.written.items():
        for base in (facts.storage.get(n, n) for n in changed):
            if base.op == "get_attr" and isinstance(attrgetter(str(base.target))(graph), nn.Parameter):
                refuse_changed(module, _path(str(base.target)), line_of_node(node), training)


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
        if isinstance(part, fx.GraphModule):
            part.recompile()


@dataclass(frozen=True)
class _Facts:
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
    order: dict[fx.Node, int]
    written: dict[fx.Node, list[fx.Node]]
    state: frozenset[fx.Node]
    trained: frozenset[fx.Node]

    @staticmethod
    def of(graph: fx.GraphModule, arguments: Sequence[Tensor]) -> _Facts:
        """Run ``graph`` on fake tensors and look at what shares memory with what, and what changes."""
        results, written = _results(graph, arguments)
        tensors = {n: x for n, x in results.items() if isinstance(x, Tensor)}
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
                    if source in tensors and _shows_all(tensors[node], tensors[source]) and source not in constant:
                        same[node] = same.get(source, source)
                        free.add(node)
                        break
        order = {node: i for i, node in enumerate(graph.graph.nodes)}
        outputs = [results[n] for n in graph.graph.output_node().all_input_nodes]
        return _Facts(
            tensors, same, storage, frozenset(free), order, written, state, _trained(graph, results, written, outputs)
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
            if known and (_is_view(node) or not trained.intersection(sources)):
                constant.add(node)
                if trained.intersection(sources):
                    trained.add(node)
    return constant


def _draws(node: fx.Node) -> bool:
    operation = node.target
    return isinstance(operation, torch._ops.OpOverload) and (operation.namespace == SPACE or is_random(operation))


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    returns = node.target._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _viewed_list(node: fx.Node, made: Iterable[Any], tensors: dict[fx.Node, Tensor]) -> fx.Node | None:
    """Return the tensor that all parts ``made`` by ``node`` are views of, if there is one."""
    keys = {x.untyped_storage()._cdata for x in made if isinstance(x, Tensor)}
    for source in node.all_input_nodes:
        if source in tensors and keys == {tensors[source].untyped_storage()._cdata}:
            return source
    return None


def _shows_all(view: Tensor, value: Tensor) -> bool:
    return view.untyped_storage()._cdata == value.untyped_storage()._cdata and view.numel() >= value.numel()


@dataclass
class _Group:
    """Consecutive operations that become one layer."""

    name: str
    call: str  # which call of which module without children; empty for an operation on its own
    nodes: list[fx.Node]


def _groups(graph: fx.GraphModule, root: nn.Module, facts: _Facts) -> list[_Group]:
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


def _merged_in_place(facts: _Facts, groups: list[_Group]) -> list[_Group]:
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
            merged[-1].name = _joined(merged[-1].name, group.name)
        else:
            merged.append(group)
        end = max(end, reach[index])
    return merged


def _joined(one: str, other: str) -> str:
    return f"{one.split('..')[0]}..{other}"


def _network(found: Exported, facts: _Facts, groups: list[_Group], inputs: dict[fx.Node, int]) -> Network:
    """Return the layers of ``groups`` with the numbers of what they read and make."""
    graph, arguments, numbers = found.graph, found.arguments, dict(inputs)
    parameters = dict(found.root.named_parameters(remove_duplicate=False))
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
        for path, _ in list(code.named_parameters(remove_duplicate=False)):
            if path in parameters:
                code.get_submodule(path.rpartition(".")[0]).register_parameter(
                    path.rpartition(".")[2], parameters[path]
                )
        numbers.update({n: following + i for i, n in enumerate(makes)})
        following += len(makes)
        layers.append(
            LayerCode(
                name,
                f"layer {name}",
                code,
                _called,
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


def _needed(facts: _Facts, group: _Group, index: int, home: dict[fx.Node, int]) -> Iterator[fx.Node]:
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


def _called(code: nn.Module, *values: Tensor) -> Sequence[Tensor]:
    outputs: Sequence[Tensor] = code(*values)
    return outputs


def _layer_graph(
    graph: fx.GraphModule, facts: _Facts, group: _Group, reads: list[fx.Node], makes: list[fx.Node]
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

    for node in sorted(group.nodes, key=lambda n: facts.order[n]):
        copy(node)
    part.output(tuple(copies[n] for n in makes))
    return fx.GraphModule(graph, part)


def unique(names: Iterable[str]) -> list[str]:
    """Return ``names``, those that come again with their count."""
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return unique
