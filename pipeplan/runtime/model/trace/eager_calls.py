"""Which calls of a forward run as they are written, as no trace can look into them? Each is one operation.

A trace has no values, so it fails where a forward looks at them, and in what isn't made of torch's operations. Then the
innermost module in whose forward it fails is called as an operation of its own, and so are all of its kind; where that
is most of the model, it is the statements of its forward (:mod:`.regions`). What comes out has the shapes that it has
in a plain run on the example; another shape in a run is an error.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from traceback import walk_tb
from types import CodeType
from typing import Any

import torch
from torch import Tensor, autograd, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ....errors import BadInput
from ..places import buffers_kept
from ..structure import closed_leaf, contains, leaves_in, leaves_of, refilling, substitute, tensors_in, tensors_of
from .adapted import as_operation, assigned_in_place, replaced
from .noted import Noted
from .regions import CALL, HOOK, PART, Region, code_of, forward_of

MOST = 0.8  # share of the weights from which a module is most of its model
GRADIENTS = "gradients are computed inside of it"
HOOKED = "a hook is set on a tensor in it"
TRIES = 50  # traces of one model


class _Leaves(Exception):
    """What a call takes or gives cannot be told without values; more has to be one operation with it."""


class EagerCalls:
    """The calls of ``model`` that are operations of their own; more where a trace fails. ``why`` has a line for each"""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inside = dict.fromkeys(model.modules())
        self._kinds: set[Any] = set()
        self._regions: dict[Any, list[Region]] = {}
        self._noted: list[Noted] = []
        self._at = 0
        self._state = ""  # "noting" what plain calls give, "within" one of them, or "" for a trace
        self._stack: list[nn.Module] = []
        self._failed: list[nn.Module] = []
        self._longer = False  # a region has become so
        self._tries = 0
        self.why: dict[Any, str] = {}
        for part in self._inside:
            if part is not model and (part._backward_hooks or part._backward_pre_hooks):
                self._add(part, "it has a hook for its backward")

    @contextmanager
    def known(self, root: nn.Module, arguments: Sequence[Tensor]) -> Iterator[None]:
        """Within the context they are so; before it, ``root`` has run on the ``arguments`` to see what they give."""
        while self.why and not self._seen(root, arguments):
            pass
        self._at, self._failed = 0, []
        with self._changed():
            yield

    def widened(self, error: BaseException, said: str) -> bool:
        """Whether there are more of them, for a trace that failed with ``error``, ``said`` in words."""
        if self._longer:
            self._longer = False
            return True
        found = re.search(r"model attribute: (\S+)\.lifted_tensor", str(error))  # what it says when it has ended
        failed = [*self._failed, *([_at(self._model, found[1])] if found else [])]
        for module in reversed([x for x in failed if x in self._inside]):
            lines = [line for frame, line in walk_tb(error.__traceback__) if _is_of(frame.f_code, module)]
            if lines and self._is_most(module) and self._marked(module, lines, said):
                return True
            if module is self._model:  # of what is said when all is over nobody knows the line
                return found is not None and self._marked(module, (0, sys.maxsize), said)
            if self._add(module, said):
                return True
        return False

    def widened_by(self, nodes: Sequence[fx.Node], said: str) -> bool:
        """Whether there are more, for the first of ``nodes``, whose values have sizes that depend on data."""
        if any(x.op == "output" for node in nodes if _is_untold(node) for x in node.users):
            return False
        calls = list(nodes[0].meta.get("nn_module_stack") or {})
        paths = nodes[0].meta["nn_module_stack"] if calls else {}
        for call in reversed(calls):
            within = [x for x in nodes if call in x.meta.get("nn_module_stack", {})]
            readers = [x for node in within if _is_untold(node) for x in node.users if x.op != "output"]
            module = _at(self._model, paths[call][0])
            if module is not None and self._is_most(module):
                function = forward_of(module)
                lines = [line for x in (*within, *readers) if function for line in _lines(x, function)]
                return bool(lines) and self._marked(module, lines, said)
            inside = all(
                call in x.meta.get("nn_module_stack", {}) for node in within if _is_untold(node) for x in node.users
            )
            if inside and module is not None and self._add(module, said):
                return True
        return False

    def _add(self, module: nn.Module, said: str) -> bool:
        own = type(module).__module__.startswith("torch.nn.")
        kind: Any = module if own else type(module)
        self._tries += 1
        if kind in self._kinds or self._tries > TRIES:
            return False
        self._kinds.add(kind)
        name = type(module).__name__
        self.why[kind] = f"{name} cannot be traced: {said}. Each of its calls is one layer, which runs as it is written"
        return True

    def _marked(self, module: nn.Module, lines: Sequence[int], said: str) -> bool:
        function = forward_of(module)
        try:
            region = Region(function, min(lines), max(lines)) if function else None
            if region is None:
                return False
            return self._take(region.from_made() if said.startswith((GRADIENTS, HOOKED)) else region, module, said)
        except (OSError, ValueError, SyntaxError):  # its source isn't there, or it cannot be parted
            return False

    def _take(self, region: Region, module: nn.Module, said: str) -> bool:
        """Whether ``region``, with those that it meets, is a new one."""
        self._tries += 1
        others: list[Region] = []
        for other in self._regions.get(region.function, []):
            if region.overlaps(other):
                region = region.joined(other)
                self.why.pop(other, None)
            else:
                others.append(other)
        code_of(region.function, [*others, region])
        if self._tries > TRIES or region in self._regions.get(region.function, []):
            return False
        self._regions[region.function] = [*others, region]
        where = "lines {} to {} of {}.{}".format(*region.ends(), type(module).__name__, region.function.__name__)
        self.why[region] = f"{where} cannot be traced: {said}. They are one layer, which runs as it is written"
        return True

    def _is_most(self, module: nn.Module) -> bool:
        own, whole = (sum(x.numel() for x in y.parameters()) for y in (module, self._model))
        return own >= MOST * whole

    # --- calling ------------------------------------------------------------------------------------------------------

    def _seen(self, root: nn.Module, arguments: Sequence[Tensor]) -> bool:
        """Run ``root`` and note what the calls give; False if others are to be called so."""
        if any(isinstance(x, FakeTensor) for x in (*arguments, *tensors_of([root]))):
            raise BadInput(f"{next(iter(self.why.values()))}; for that it needs values, which an estimate has not")
        self._noted, self._state, self._failed = [], "noting", []
        state = random.getstate()
        try:
            with self._changed(), torch.random.fork_rng(devices=[]), buffers_kept([root]):
                root(*[x.clone() for x in arguments])
        except _Leaves as error:
            if not self.widened(error, str(error)):
                raise BadInput(f"{type(self._model).__name__} cannot be traced: {error}") from error
            return False
        finally:
            self._state = ""
            random.setstate(state)
        return True

    @contextmanager
    def _changed(self) -> Iterator[None]:
        plain: Any = nn.Module._call_impl

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._state != "within" and (type(module) in self._kinds or module in self._kinds):
                return self._one(
                    type(module).__name__, [module], [], lambda *a, **k: plain(module, *a, **k), args, kwargs
                )
            self._stack.append(module)
            try:
                return plain(module, *args, **kwargs)
            except Exception:
                self._failed = self._failed or list(self._stack)
                raise
            finally:
                self._stack.pop()

        def no_more(said: str, *_: Any, **__: Any) -> Any:
            raise _Leaves(said)

        with ExitStack() as stack:
            if not self._state:
                stack.enter_context(replaced(autograd, "_engine_run_backward", partial(no_more, GRADIENTS)))
                stack.enter_context(replaced(Tensor, HOOK, partial(no_more, HOOKED)))
            stack.enter_context(replaced(nn.Module, "_call_impl", call))
            for function, regions in self._regions.items():
                stack.callback(setattr, function, "__code__", function.__code__)
                stack.callback(function.__globals__.pop, CALL, None)
                function.__code__ = code_of(function, regions)
                function.__globals__[CALL] = self._statements
            yield

    def _statements(self, part: Callable[[dict[str, Any]], Any], given: dict[str, Any]) -> Any:
        if self._state == "within":
            return part(given)
        code = part.__code__
        known = (x for regions in self._regions.values() for x in regions)
        region = next(x for x in known if _holds(x, code.co_filename, code.co_firstlineno))
        module = self._stack[-1]
        held, own = region.held(module)
        held = [*held, *(x for x in leaves_in(given) if isinstance(x, nn.Module) and x is not module)]
        name = "{}_{}_{}".format(region.function.__name__, *region.ends())
        untold: set[str] = set()
        try:
            made = self._one(name, held, [module] if own else [], part, (given,), {})
            untold = {name for name, value in made.items() if _untold(value)} if type(made) is dict else set()
            if self._state == "noting" and untold:
                raise _Leaves(f"{min(untold)} has no shape that is known without values")
        except _Leaves as error:
            inside = {name for name, value in given.items() if _untold(value, numbers=False)}
            longer = region.since(inside) if inside else region.until(untold)
            self._longer = self._take(longer, module, str(error))
            raise
        return made

    def _one(
        self,
        name: str,
        modules: Sequence[nn.Module],
        alone: Sequence[nn.Module],
        plainly: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Call ``plainly`` as one operation, of the tensors given and those of ``modules``, and note what comes."""
        given = tensors_in((args, kwargs))
        if _untold((args, kwargs), numbers=False):
            for kind in (*modules, *map(type, modules)):
                self._kinds.discard(kind)
                self.why.pop(kind, None)
            raise _Leaves(f"{name} gets what has no shape that is known without values")
        if self._state == "noting":
            versions = {id(x): x._version for x in (*given, *tensors_of([self._model]))}
            before = [x.grad_fn for x in given]
            self._state = "within"
            try:
                with ExitStack() as stack:
                    for module in modules:
                        stack.enter_context(assigned_in_place(module))
                    output = plainly(*args, **kwargs)
            finally:
                self._state = "noting"
            if name[0].isupper() and _untold(output):
                raise _Leaves(f"{name} gives what has no shape that is known without values")
            alone = [
                *alone,
                *self._owners(leaves_of(tensors_in(output), before), modules),
            ]  # hooks may read weights of others
            own = tensors_of(modules, alone)
            first = {id(x): i for i, x in reversed(list(enumerate(own)))}  # an LSTM has its weights in a list, too
            chosen = sorted(first.values())
            passed = [*given, *(own[i] for i in chosen)]
            others = [i for i, x in enumerate(passed) if x._version != versions.get(id(x), x._version)]
            changed = {i: passed[i].requires_grad for i in others}
            self._noted.append(Noted(name, output, passed, changed, chosen, alone))
            return output
        noted = self._noted[self._at]
        self._at += 1
        if noted.name != name:
            raise _Leaves(f"{name} is called in another order than without a trace")
        alone = noted.alone
        own = tensors_of(modules, alone)
        filled = refilling((args, kwargs))
        modes = [(part, part.training) for module in modules for part in module.modules()]

        def called(tensors: Sequence[Tensor]) -> Any:
            if any(isinstance(x, FakeTensor) for x in tensors):
                return noted.alike(tensors)
            args, kwargs = filled(tensors[: len(given)])
            with _given(modules, alone, noted.chosen, tensors[len(given) :]), ExitStack() as stack:
                for module in modules:
                    stack.enter_context(assigned_in_place(module))
                for part, training in modes:
                    part.training = training
                return noted.checked(plainly(*args, **kwargs))

        return as_operation(name, called, [*given, *(own[i] for i in noted.chosen)])

    def _owners(self, leaves: Iterable[Tensor], modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
        """Yield the other modules that have some of ``leaves`` as their weights."""
        inside = {part for module in modules for part in module.modules()}
        others = [part for part in self._inside if part not in inside]
        owner = {id(x): part for part in others for x in part._parameters.values() if x is not None}
        yield from dict.fromkeys(owner[id(x)] for x in leaves if id(x) in owner)


@contextmanager
def _given(
    modules: Sequence[nn.Module], alone: Sequence[nn.Module], chosen: Sequence[int], tensors: Sequence[Tensor]
) -> Iterator[None]:
    """Within the context let ``modules`` have ``tensors`` in the places of those ``chosen`` of their own."""
    there = tensors_of(modules, alone)
    own = [there[i] for i in chosen]
    put = {id(x): new for x, new in zip(own, tensors, strict=True)}
    back = {id(new): x for x, new in zip(own, tensors, strict=True)}
    substitute(modules, lambda x: put.get(id(x), x), alone)
    try:
        yield
    finally:
        substitute(modules, lambda x: back.get(id(x), x), alone)


def _untold(value: Any, numbers: bool = True) -> bool:
    """Whether a trace cannot know the shape of what is in ``value``, its ``numbers`` included, as it needs values."""
    if contains(value, PackedSequence) or closed_leaf(value) is not None:
        return True
    return any(
        (numbers and type(x) in (int, float))
        or (isinstance(x, Tensor) and (x.layout != torch.strided or x.is_nested or _is_symbolic(x) or _is_mapped(x)))
        for x in leaves_in(value)
    )


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(not isinstance(size, int) for size in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def data_dependent(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of ``graph`` whose sizes, or values that aren't tensors, are known with data alone, and those
    of ``torch.func``, which isn't made of operations."""
    nodes = graph.graph.nodes
    return [x for x in nodes if _is_untold(x) or is_transform(x)]


def is_transform(node: fx.Node) -> bool:
    """Whether ``node`` begins or ends one of the transforms of ``torch.func``."""
    return str(getattr(node.target, "__module__", "")).startswith("torch._functorch")


def _is_untold(node: fx.Node) -> bool:
    return any(_is_symbolic(value) or _is_mapped(value) for value in pytree.tree_leaves(node.meta.get("val")))


def _is_mapped(value: Any) -> bool:
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def _is_of(code: CodeType, module: nn.Module) -> bool:
    """Whether ``code`` is that of the forward of ``module``, or of a part of it."""
    own: Any = getattr(forward_of(module), "__code__", None)
    same = own is not None and code.co_filename == own.co_filename
    return same and (code.co_name == PART or code.co_firstlineno == own.co_firstlineno)


def _at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module of ``model`` at the path that a trace gives, ``model`` itself at the first place."""
    inside = path.split("@")[0].partition(".")[2]
    try:
        return model.get_submodule(inside) if path else None
    except AttributeError:
        return None


def _lines(node: fx.Node, function: Any) -> list[int]:
    """Return the lines of ``function`` that ``node`` comes from."""
    code = function.__code__
    told = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', str(node.meta.get("stack_trace", "")))
    return [int(line) for file, line, name in told if file == code.co_filename and name == code.co_name]


def _holds(region: Region, file: str, line: int) -> bool:
    first, last = region.ends()
    return region.function.__code__.co_filename == file and first <= line <= last
