"""How does torch see any module's forward? As a graph of operations from the tensors that go in to those that
come out.

Inputs and outputs are flat for torch and of any type for the author (:mod:`.structure`).
"""

from __future__ import annotations

import inspect
import io
import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from ....errors import BadInput
from ..network import kind_of
from ..operations import is_random
from ..structure import attributes_kept, closed_leaf, mapped, own_memory, places_in, refilling, tensors_in
from ..user_code import defined_at, in_words, line_of, place_of, user_code
from .adapted import (
    SPACE,
    arguments_of,
    as_in_eager,
    assigned_in_place,
    called,
    checkpointed_lines,
    compiled_lines,
    made_whole,
    own_gradients,
    plainly_called,
    run_uncompiled,
    uncompiled,
    with_dense_gradients,
    without_cache,
)
from .eager_calls import EagerCalls, data_dependent, is_transform

ROOT = "model"  # what the module is called in the one that is exported
OF_MODULE = f"{ROOT}."  # what the places of the module's own tensors in its trace begin with
ADVICE = (
    "Return its layers as an nn.Sequential or a list of modules, or write the part without branches on tensor values, "
    "tensors of data-dependent shape and .item()"
)


@dataclass(frozen=True)
class Exported:
    """The ``graph`` of ``root``, which has the user's module as its :data:`ROOT`, on the tensors ``arguments``.

    ``restored`` makes of the graph's outputs what the module returned. ``notes`` say what it gave up.
    """

    graph: fx.GraphModule
    root: nn.Module
    arguments: Sequence[Tensor]
    restored: Callable[[Sequence[Tensor]], Any]
    notes: tuple[str, ...]


def exported(module: nn.Module, example_input: Any, loss_alone: bool = False, training: bool = True) -> Exported:
    """Return the graph of ``module`` on ``example_input``: a tensor, a tuple of arguments or keywords.

    It is that of its ``training``, or else that of its evaluation.
    With ``loss_alone`` the loss that it returns is all that comes out. BadInput tells what cannot be traced, with the
    line of the user's, and what to do.
    """
    # one tensor that stands in it twice would be one input for torch
    example_input = mapped(own_memory, example_input)
    arguments = tensors_in(example_input)
    if not arguments:
        raise BadInput(f"example_input: {kind_of(example_input)} holds no tensor")
    name = type(module).__name__
    module.train(training)
    notes = [*without_cache(module), *with_dense_gradients([module])]
    inner = uncompiled(module)
    if isinstance(inner, torch.jit.ScriptModule):
        raise BadInput(f"{name}: torch.jit has compiled the whole model; give it as it was before")
    _refuse_arguments(inner, example_input)
    with user_code(name), run_uncompiled([module]):
        made_whole(inner, example_input)
        root, seen = _flat(inner, example_input, loss_alone)
        with attributes_kept(inner.modules()):  # forwards leave tensors of the trace in them
            known = {x for x, _ in inner.named_parameters()}
            graph, given_up = _graph(root, arguments, places_in(example_input), name)
        made = next((x for x, _ in inner.named_parameters() if x not in known), None)
        if made is not None:
            raise BadInput(
                f"{name} makes its weight {made} in its forward, where no optimizer knows it; make it in __init__"
            )
    notes += [*compiled_lines([module]), *given_up]
    _read_directly(graph)
    _assign_early(graph, [f"{ROOT}.{name}" for name in seen.assigned])
    return Exported(graph, root, arguments, seen.restored, tuple(notes))


def _refuse_arguments(module: nn.Module, example: Any) -> None:
    """Raise BadInput where ``module`` cannot be called on ``example``."""
    try:
        arguments_of(module, example)
    except TypeError as error:
        count = len(example) if isinstance(example, tuple | list) else 1
        given = ", ".join(map(str, example)) if isinstance(example, Mapping) else f"{count} argument{'s' * (count > 1)}"
        takes = ", ".join(inspect.signature(module.forward).parameters) or "nothing"
        name = f"{type(module).__name__}{defined_at(module.forward)}"
        raise BadInput(f"{name} takes {takes} and is given {given}: {error}") from error


def refuse_changed(module: nn.Module, weight: str, place: str = "", training: bool = True) -> NoReturn:
    """Raise BadInput for a ``weight`` that the forward of ``module`` changes, at a ``place``."""
    if not training:
        raise BadInput(
            f"{type(module).__name__} changes its weight {weight} in its evaluation{place}, which every microbatch "
            "would do again; write the trained model by --save, and evaluate it with its own code"
        )
    holder = module.get_submodule(weight.rpartition(".")[0])
    norm = getattr(holder, "max_norm", None) is not None
    step = "leave out max_norm, or apply it between updates" if norm else "keep it as a buffer"
    raise BadInput(
        f"{type(module).__name__} changes its weight {weight} in its forward, which several updates at once would lose"
        f"{place}; {step}"
    )


def _read_directly(graph: fx.GraphModule) -> None:
    """Let what is broadcast to the shape that it has be read as it is: a layer that does nothing would count it twice.

    Losses of torch broadcast what they compare.
    """
    for node in [x for x in graph.graph.nodes if x.target is operator.getitem]:
        made, place = node.args
        if made.target is not torch.ops.aten.broadcast_tensors.default:
            continue
        given = made.args[0][place]
        if "val" in given.meta and given.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(given)
            graph.graph.erase_node(node)
            if not made.users:
                graph.graph.erase_node(made)


def _assign_early(graph: fx.GraphModule, names: Sequence[str]) -> None:
    """Let buffers that are assigned at the end of ``graph`` be so as soon as their new values are there.

    What has to do with the old values gets a copy of them.
    """
    for name in names:
        nodes = [node for node in graph.graph.nodes if node.op == "get_attr" and node.target == name]
        users = [user for user in graph.graph.nodes if set(user.all_input_nodes) & set(nodes)]
        last = [user for user in users if user.target is torch.ops.aten.copy_.default and user.args[0] in nodes][-1]
        users.remove(last)
        value = last.all_input_nodes[1]
        moved = [value, last] if value.target is torch.ops.aten.detach.default else [last]
        after = [moved[0].all_input_nodes[-1]]
        if users:
            with graph.graph.inserting_before(users[0]):
                copied = graph.graph.call_function(torch.ops.aten.clone.default, (nodes[0],))
            copied.meta = dict(users[0].meta) | {"val": nodes[0].meta.get("val")}
            for user in users:
                for node in nodes:
                    user.replace_input_with(node, copied)
            after.append(copied)
        anchor = max(after)
        for node in reversed(moved):
            anchor.append(node)
            node.meta["nn_module_stack"] = anchor.meta.get("nn_module_stack")


def _flat(module: nn.Module, example: Any, loss_alone: bool) -> tuple[nn.Module, SimpleNamespace]:
    """Return a module around ``module`` from tensors to tensors alone, and what is seen when it runs: how its result is
    ``restored`` from tensors, and which buffers it bound anew (``assigned``)."""
    root, seen, given = nn.Module(), SimpleNamespace(), refilling(example)
    setattr(root, ROOT, module)

    def forward(*tensors: Tensor) -> list[Tensor]:
        with assigned_in_place(module) as assigned:
            output = called(module, given(tensors))
        seen.assigned = assigned
        if loss_alone:
            output = loss_in(module, output)
        _refuse_closed(module, output)
        seen.restored = refilling(output)
        return tensors_in(output)

    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # inspect's own hook
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in _argument_names(module, example)]
    )
    root.forward = forward
    return root, seen


def _refuse_closed(module: nn.Module, output: Any) -> None:
    closed = closed_leaf(output)
    if closed is None:
        return
    if "cache" in type(closed).__name__.lower():
        step = "set use_cache=False, as a cache is for generation"
    else:
        step = "return them in lists, dicts, named tuples or dataclasses, or register the type with torch.utils._pytree"
    name = f"{type(module).__name__}{defined_at(module.forward)}"
    raise BadInput(f"{name} returns {kind_of(closed)}, which holds tensors where nobody can take them out; {step}")


def loss_in(module: nn.Module, output: Any) -> Tensor:
    """Return the loss among what ``module`` returned: itself, ``.loss``, or of a tuple the first or only number;
    BadInput if none."""
    found = [output]
    if isinstance(output, Mapping) and "loss" in output:
        found = [output["loss"]]
    elif hasattr(output, "loss"):
        found = [output.loss]
    elif isinstance(output, tuple | list):
        found = list(output)
    losses = [x for x in found if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()]
    if losses and (len(losses) == 1 or losses[0] is found[0]):
        return losses[0] if losses[0].dim() == 0 else losses[0].reshape(())
    said = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else kind_of(output)
    raise BadInput(
        f"{type(module).__name__}{defined_at(module.forward)} returned {said} without a loss, and build gave none: put "
        "labels among its inputs, or return (model, example_input, loss)"
    )


def _argument_names(module: nn.Module, example: Any) -> list[str]:
    """Return a name for each tensor that goes in: its keyword, or that of the argument, and where in it."""
    if not isinstance(example, Mapping):
        values = example if isinstance(example, tuple | list) else (example,)
        example = dict(zip(_parameters(module, len(values)), values, strict=True))
    names: list[str] = []
    for place in places_in(dict(example)):
        name = re.sub(r"\W", "_", place) or "input"
        while name in names or not name.isidentifier():
            name = f"{name}_" if name.isidentifier() else f"input_{name}"
        names.append(name)
    return names


def _parameters(module: nn.Module, count: int) -> list[str]:
    """Return what the first ``count`` arguments of ``module`` are called."""
    try:
        known = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # nobody knows what it takes
        known = []
    names = [x.name for x in known if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    return [names[i] if i < len(names) else f"input{i}" for i in range(count)]


def _graph(
    root: nn.Module, arguments: Sequence[Tensor], places: Sequence[str], name: str
) -> tuple[fx.GraphModule, list[str]]:
    """Return torch's export as operations, and the lines of what it gives up: recomputation, masks, and traces of what
    cannot be traced."""
    eager = EagerCalls(getattr(root, ROOT))
    while True:
        try:
            with (
                _quiet(), plainly_called() as seen, as_in_eager(places) as masked, own_gradients(),
                eager.known(root, arguments),
            ):  # fmt: skip
                graph = torch.export.export(root, tuple(arguments), strict=False).module(check_guards=False)
        except BadInput:
            raise
        except Exception as error:
            if eager.widened(error, _reason(error)):
                continue
            raise BadInput(f"{name} cannot be traced: {_reason(error)}. {ADVICE}") from error
        assert isinstance(graph, fx.GraphModule)
        graph.graph.eliminate_dead_code(_acts)
        untold = data_dependent(graph)
        if not untold:
            return graph, [*checkpointed_lines(getattr(root, ROOT), seen), *masked, *eager.why.values()]
        reason = _untold(untold[0]) + line_of_node(untold[0])
        if not eager.widened_by(untold, reason):
            raise BadInput(f"{name} cannot be traced: {reason}. {ADVICE}")


def _untold(node: fx.Node) -> str:
    if is_transform(node):
        return "transforms of torch.func aren't made of torch's operations"
    return f"the shape of {node.name} depends on data"


def _acts(node: fx.Node) -> bool:
    """Whether ``node`` does something even where nobody reads its value."""
    operation = node.target
    if node.op != "call_function" or not isinstance(operation, torch._ops.OpOverload):
        return node.is_impure() or node.target is not operator.getitem
    return is_random(operation) or operation._schema.is_mutable or operation.namespace == SPACE or node.is_impure()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing: half-made graphs when it fails, and a warning for an LSTM's own list of weights."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.filterwarnings("ignore", message=".*(was|were) assigned during export")
            yield
    finally:
        logging.disable(disabled)


def _reason(error: Exception) -> str:
    """Return the sentence of an export's error that says what failed, and the user's line that it came from."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    place = line_of(error)
    return f"{in_words(first) or first.rstrip('.')}{f' ({place})' if place else ''}"


def line_of_node(node: fx.Node) -> str:
    """Return the innermost line outside torch that ``node`` was traced from, as errors put it; empty if unknown."""
    trace = str(node.meta.get("stack_trace", ""))
    places = [place_of(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', trace)]
    return next((f" ({place})" for place in reversed(places) if place), "")
