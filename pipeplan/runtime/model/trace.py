"""How does any module become a network of layers? Torch exports it; leaf modules and free operations are the layers.

What a layer is: the consecutive operations of one call of a module without children, or one operation of a forward
that is written out. Views of a whole tensor and constants (position numbers, masks) cost nothing to make again, so
they are made again by each layer that needs them and cross no cut. An operation in place belongs to the layer that
made the tensor, with all in between. The shapes, the training mode and the batch size are those of the trace.
"""

from __future__ import annotations

import io
import logging
import operator
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from ...errors import BadInput
from .network import LayerCode, Network, buffers_kept, kind_of
from .user_code import user_code

_ADVICE = (
    "Return its layers as an nn.Sequential or a list of modules, or write the part without branches on tensor values, "
    "tensors of data-dependent shape and .item()"
)

TRACED_ON = {"cpu", "cuda"}


def trace_module(module: nn.Module, example_input: Any, device: str = "cpu") -> Network:
    """Return the network that ``module`` is on ``example_input``: a tensor, a tuple of arguments or a dict of keywords.

    The parameters of the layers are those of ``module``, so tied weights stay tied (torch's export names them once).
    BadInput tells what cannot be traced, and what to do.
    """
    graph, structure = _exported(module, example_input)
    arguments = [x for x in pytree.tree_leaves(example_input) if isinstance(x, Tensor)]
    facts = _Facts.of(graph, arguments)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    inputs = {n: i for i, n in enumerate(p for p in placeholders if p in facts.tensors)}
    groups = _merged_in_place(facts, _groups(graph, module, facts))
    _put_on(graph, torch.device(device))  # behind what is found out by running it as it was made
    network = _network(graph, module, facts, groups, inputs, arguments)
    results = list(pytree.tree_leaves(_output(graph).args[0], is_leaf=lambda x: isinstance(x, fx.Node)))

    def restored(outputs: Sequence[Tensor]) -> Any:
        tensors = iter(outputs)
        leaves = [next(tensors) if isinstance(x, fx.Node) else x for x in results]
        return pytree.tree_unflatten(leaves, structure)

    return replace(network, structure=restored)


def _exported(module: nn.Module, example_input: Any) -> tuple[fx.GraphModule, Any]:
    """Return torch's export of ``module`` in training mode as a graph of operations, and what its outputs form."""
    positional: tuple[Any, ...] = (example_input,)
    keywords: dict[str, Any] = {}
    if isinstance(example_input, tuple | list):
        positional = tuple(example_input)
    elif isinstance(example_input, dict):
        positional, keywords = (), dict(example_input)
    if not any(isinstance(x, Tensor) for x in pytree.tree_leaves(example_input)):
        raise BadInput(f"example_input: {kind_of(example_input)} holds no tensor")
    module.train()
    name = type(module).__name__
    with user_code(name):
        try:
            with _quiet():
                exported = torch.export.export(module, positional, keywords, strict=False)
                graph = exported.module(check_guards=False)
        except Exception as error:
            raise BadInput(f"{name} cannot be traced: {_reason(error)}. {_ADVICE}") from error
    assert isinstance(graph, fx.GraphModule)
    for node in graph.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor) and any(not isinstance(size, int) for size in value.shape):
                raise BadInput(f"{name} cannot be traced: the shape of {node.name} depends on data. {_ADVICE}")
    return graph, exported.call_spec.out_spec


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


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing: half-made graphs when it fails, and a warning for an LSTM's own list of weights."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.filterwarnings("ignore", message=".*were assigned during export")
            yield
    finally:
        logging.disable(disabled)


def _reason(error: Exception) -> str:
    """Return the sentence of an export's error that says what failed, and the user's line if it names one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    where = next((line for line in lines if line.startswith(("Caused by:", "File ")) and "torch/" not in line), "")
    return f"{first.rstrip('.')}{f' ({where})' if where else ''}"


@dataclass(frozen=True)
class _Facts:
    """What is known about each node: its tensors, and which node's value it is or is a view of.

    ``same`` maps a node that shows a whole value in another shape to the node of that value; ``storage`` maps each
    tensor node to the first node of its storage. ``free`` nodes are constants, parameters and whole views: each layer
    makes them for itself.
    """

    tensors: dict[fx.Node, Tensor]
    same: dict[fx.Node, fx.Node]
    storage: dict[fx.Node, fx.Node]
    free: frozenset[fx.Node]
    order: dict[fx.Node, int]

    @staticmethod
    def of(graph: fx.GraphModule, arguments: Sequence[Tensor]) -> _Facts:
        """Run ``graph`` on fake tensors and look at what shares memory with what."""
        results = _results(graph, arguments)
        tensors = {n: x for n, x in results.items() if isinstance(x, Tensor)}
        first: dict[int, fx.Node] = {}
        storage: dict[fx.Node, fx.Node] = {}
        same: dict[fx.Node, fx.Node] = {}
        free: set[fx.Node] = set()
        constant = _constants(graph)
        for node in graph.graph.nodes:
            if node in constant:
                free.add(node)
            made = results.get(node)
            if node in tensors:
                storage[node] = first.setdefault(tensors[node].untyped_storage()._cdata, node)
            elif isinstance(made, list | tuple) and node.op == "call_function":
                source = _viewed_list(node, made, tensors)
                if source is not None:
                    free.add(node)  # chunk, split, unbind: the getitem of each part is what makes it
                    storage[node] = storage[source]
            if node not in free and node.op == "call_function" and node in tensors and not written_by(node):
                for source in node.all_input_nodes:
                    if source in tensors and _shows_all(tensors[node], tensors[source]) and source not in constant:
                        same[node] = same.get(source, source)
                        free.add(node)
                        break
        order = {node: i for i, node in enumerate(graph.graph.nodes)}
        return _Facts(tensors, same, storage, frozenset(free), order)

    def value(self, node: fx.Node) -> fx.Node:
        """Return the node whose value ``node`` shows."""
        return self.same.get(node, node)


def _results(graph: fx.GraphModule, arguments: Sequence[Tensor]) -> dict[fx.Node, Any]:
    """Return what each node gives on fake tensors."""
    results: dict[fx.Node, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            results[n] = super().run_node(n)
            return results[n]

    fake = any(isinstance(x, FakeTensor) for x in (*arguments, *graph.parameters()))
    mode = nullcontext() if fake else FakeTensorMode(allow_non_fake_inputs=True)
    with buffers_kept([graph]), mode as entered, torch.no_grad():  # small whole numbers are counted on, fake or not
        flat = [x if entered is None else entered.from_tensor(x) for x in arguments]
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        known = iter(flat)
        values = [next(known) if isinstance(n.meta.get("val"), Tensor) else n.meta.get("val") for n in placeholders]
        recorder = Recorder(graph)
        recorder.run(*values, enable_io_processing=False)
    return results


def _constants(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that neither the inputs nor anything trained nor chance decides, and the attributes."""
    constant: set[fx.Node] = set()
    trained: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constant.add(node)
            if isinstance(_attribute(graph, str(node.target)), nn.Parameter):
                trained.add(node)
        elif node.op == "call_function" and not _random(node) and not written_by(node):
            sources = node.all_input_nodes
            if all(n in constant for n in sources) and (_is_view(node) or not trained.intersection(sources)):
                constant.add(node)
                if trained.intersection(sources):
                    trained.add(node)
    return constant


def _attribute(graph: fx.GraphModule, target: str) -> Any:
    found: Any = graph
    for part in target.split("."):
        found = getattr(found, part)
    return found


def _random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    returns = node.target._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that ``node`` changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            written += [n for n in pytree.tree_leaves(given) if isinstance(n, fx.Node)]
    return written


def _viewed_list(node: fx.Node, made: Iterable[Any], tensors: dict[fx.Node, Tensor]) -> fx.Node | None:
    """Return the tensor that all parts ``made`` by ``node`` are views of, if there is one."""
    keys = {x.untyped_storage()._cdata for x in made if isinstance(x, Tensor)}
    for source in node.all_input_nodes:
        if source in tensors and keys == {tensors[source].untyped_storage()._cdata}:
            return source
    return None


def _shows_all(view: Tensor, value: Tensor) -> bool:
    return view.untyped_storage()._cdata == value.untyped_storage()._cdata and view.numel() >= value.numel()


def _output(graph: fx.GraphModule) -> fx.Node:
    found: fx.Node = next(n for n in graph.graph.nodes if n.op == "output")
    return found


@dataclass
class _Group:
    """Consecutive operations that become one layer."""

    name: str
    call: str  # which call of which module without children; empty for an operation on its own
    nodes: list[fx.Node]


def _groups(graph: fx.GraphModule, module: nn.Module, facts: _Facts) -> list[_Group]:
    """Return the operations in order, those of one call of a module without children together."""
    leaves = {name for name, part in module.named_modules() if name and next(part.children(), None) is None}
    groups: list[_Group] = []
    waiting: list[fx.Node] = []  # updates of buffers, which go with the operation after them
    producer: dict[fx.Node, _Group] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node in facts.free or _is_check(node):
            continue
        if node.target is operator.getitem and node.args[0] in producer:
            group = producer[node.args[0]]
            group.nodes.append(node)
            producer[node] = group
            continue
        written = written_by(node)
        if written and all(n.op == "get_attr" for n in written):
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


def _is_check(node: fx.Node) -> bool:
    return node.op == "call_module" or "assert" in str(node.target)


def _innermost(node: fx.Node) -> tuple[str, str]:
    """Return the path of the innermost module that ``node`` comes from, and which call of it."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", ""
    call = list(stack)[-1]
    path = stack[call][0]
    return path.split("@")[0], call


def _operation(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{_operation(node.all_input_nodes[0])}{node.args[1]}"
    target = node.target
    name = target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else node.name
    return name.strip("_")


def _merged_in_place(facts: _Facts, groups: list[_Group]) -> list[_Group]:
    """Merge the groups from the maker of a tensor to each operation that changes it in place."""
    home = {node: index for index, group in enumerate(groups) for node in group.nodes}
    reach = list(range(len(groups)))  # the last group that must be in one layer with this one
    for node, index in home.items():
        for source in written_by(node):
            base = facts.storage.get(source, source)
            if base.op == "get_attr":
                continue
            if base.op == "placeholder":
                raise BadInput(f"{_operation(node)} changes the network's input {base.name} in place; work on a copy")
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


def _network(
    graph: fx.GraphModule,
    module: nn.Module,
    facts: _Facts,
    groups: list[_Group],
    inputs: dict[fx.Node, int],
    arguments: Sequence[Tensor],
) -> Network:
    """Return the layers of ``groups`` with the numbers of what they read and make."""
    numbers = dict(inputs)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    home = {node: index for index, group in enumerate(groups) for node in group.nodes}
    reads = [list(dict.fromkeys(_needed(facts, group, index, home))) for index, group in enumerate(groups)]
    last = [facts.value(n) for n in pytree.tree_leaves(_output(graph).args[0]) if isinstance(n, fx.Node)]
    if any(n in facts.free and n not in facts.same and n.op != "placeholder" for n in last):
        raise BadInput(f"{type(module).__name__} returns a constant or a parameter; return what depends on the input")
    wanted = {n for needed in reads for n in needed} | set(last)
    layers: list[LayerCode] = []
    passing = _passing(inputs, reads, last)
    for node in passing:
        number = len(inputs) + len(layers)
        name = "input" if len(inputs) == 1 else f"input {node.name}"
        layers.append(LayerCode(name, name, nn.Identity(), _unchanged, (inputs[node],), (number,)))
        numbers[node] = number
    following = len(inputs) + len(layers)
    names = _unique(group.name for group in groups)
    for name, group, needed in zip(names, groups, reads, strict=True):
        makes = [n for n in dict.fromkeys(map(facts.value, group.nodes)) if n in wanted and n in facts.tensors]
        code = _layer_graph(graph, facts, group, needed, makes)
        for path, _ in list(code.named_parameters(remove_duplicate=False)):
            if path in parameters:
                _put(code, path, parameters[path])
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
            )
        )
    ordered = sorted(inputs, key=lambda n: inputs[n])
    tensors = tuple(arguments[inputs[n]] for n in ordered)
    shapes = {number: (tuple(facts.tensors[n].shape), facts.tensors[n].dtype) for n, number in numbers.items()}
    shapes |= {i: (tuple(x.shape), x.dtype) for i, x in enumerate(tensors)}
    return Network(tuple(layers), tensors, tuple(numbers[n] for n in last), _listed, chain=False, shapes=shapes)


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
    """
    mixed = any(set(needed) & set(inputs) and set(needed) - set(inputs) for needed in reads)
    if len(inputs) > 1 or mixed or set(last) & set(inputs):
        used = {n for needed in reads for n in needed} | set(last)
        return [n for n in inputs if n in used]
    return []


def _unchanged(_: nn.Module, *values: Tensor) -> tuple[Tensor, ...]:
    return values


def _called(code: nn.Module, *values: Tensor) -> Sequence[Tensor]:
    outputs: Sequence[Tensor] = code(*values)
    return outputs


def _listed(outputs: Sequence[Tensor]) -> Any:
    return list(outputs)


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


def _put(code: nn.Module, path: str, parameter: nn.Parameter) -> None:
    *parents, name = path.split(".")
    holder = code
    for parent in parents:
        holder = getattr(holder, parent)
    holder.register_parameter(name, parameter)


def _unique(names: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return unique
