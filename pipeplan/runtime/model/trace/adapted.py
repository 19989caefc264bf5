"""Which of its author's ways does a model give up to be trained by stages? Each with a line that says so.

Caches of generation, recomputation of its own (``torch.utils.checkpoint``, which a plan decides about), and compilation
as a whole. What it computes stays the same. Calls of a ``torch.autograd.Function`` are one operation each, which runs
as written: a trace would look into its forward and forget its backward, so that a gradient passed straight through
would be lost, and more would be saved.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count, starmap
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.fx.node import has_side_effect
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint

from ..structure import refilling, tensors_in
from ..user_code import place_of

GENERATOR = "_checkpoint_without_reentrant_generator"  # what torch.utils.checkpoint recomputes with
PACKED = "find_packed_sequence_indices"  # with which transformers asks whether positions begin anew
COMPILED = "torch._dynamo.eval_frame"  # where torch keeps the class of what it has compiled


def without_cache(module: nn.Module) -> list[str]:
    """Let ``module`` return no cache of keys and values, which is for generation; return the line that says so."""
    found: list[Any] = [x for x in module.modules() if getattr(getattr(x, "config", None), "use_cache", None) is True]
    for part in found:
        part.config.use_cache = False
    why = "is set to False: keys and values are kept for generation, not for training"
    return [f"use_cache of {type(found[0]).__name__} {why}"] if found else []


def with_dense_gradients(modules: Iterable[nn.Module]) -> list[str]:
    """Let the tables of ``modules`` have dense gradients, which are summed and sent; return the line that says so.

    An optimizer that knows no sparse gradients, and plain SGD, makes of both the same.
    """
    parts = (part for module in modules for part in module.modules())
    found = [part for part in parts if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    for table in found:
        table.sparse = False
    why = "(sparse=True): its gradients are dense here, with the same sums"
    return [f"{type(found[0]).__name__}{why}"] if found else []


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``module`` has compiled, or itself."""
    return getattr(module, "_orig_mod", module) if _is_compiled(module) else module


def compiled_lines(modules: Sequence[nn.Module]) -> list[str]:
    """Return the line that says what of ``modules`` is compiled, if anything is."""
    names = [
        name or type(uncompiled(module)).__name__
        for module in modules
        for name, part in module.named_modules()
        if _is_compiled(part)
    ]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"{names[0]}{more}: compiled by torch.compile, and profiled and run uncompiled"]


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__module__ == COMPILED or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def run_uncompiled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run what is compiled in ``modules`` as it was written."""
    if any(_is_compiled(part) for module in modules for part in module.modules()):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def checkpointed_lines(module: nn.Module, places: Sequence[str]) -> list[str]:
    """Return the line that says that ``module`` called ``torch.utils.checkpoint`` in these ``places``, if it did."""
    first = next(filter(None, places), "")
    where = f", first in {first}" if first else ""
    times = f"{len(places)} calls of torch.utils.checkpoint" if len(places) > 1 else "torch.utils.checkpoint"
    said = (
        f"{type(module).__name__} recomputes by itself ({times}{where}): traced without, so that the plan decides "
        "what is recomputed (--checkpointing)"
    )
    return [said] if places else []


@contextmanager
def plainly_called() -> Iterator[list[str]]:
    """Run what is given to ``torch.utils.checkpoint`` as it is, recomputing nothing; yield the places of its calls, of
    each the innermost outside torch and this package."""
    seen: list[str] = []

    def note() -> None:
        lines = ((frame.f_code.co_filename, line) for frame, line in walk_stack(None))
        seen.append(next(filter(None, starmap(place_of, lines)), ""))

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve: bool, *arguments: Any) -> Any:
            note()
            return function(*arguments)

    def plain(*_: Any, **__: Any) -> Iterator[None]:
        note()
        yield

    with replaced(checkpoint, "CheckpointFunction", Reentrant), replaced(checkpoint, GENERATOR, plain):
        yield seen


@contextmanager
def no_reentry() -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` recompute under saved-tensor hooks: its other way refuses torch.autograd.grad."""

    class Once:
        @staticmethod
        def apply(function: Any, preserve: bool, *arguments: Any) -> Any:
            return checkpoint.checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=preserve)

    with replaced(checkpoint, "CheckpointFunction", Once):
        yield


@contextmanager
def assigned_in_place(module: nn.Module) -> Iterator[list[str]]:
    """Let buffers that ``module`` binds anew keep their places: they get the values when the context ends.

    Their names are told then; torch's export forgets what is bound anew inside of a module.
    """
    owners = list(module.named_modules())
    before = [(prefix, owner, name, x) for prefix, owner in owners for name, x in owner._buffers.items()]
    names: list[str] = []
    yield names
    for prefix, owner, name, old in before:
        new = owner._buffers.get(name)
        if new is not old and old is not None and new is not None and new.shape == old.shape:
            old.copy_(new.detach())
            owner._buffers[name] = old
            names.append(f"{prefix}.{name}".lstrip("."))


@contextmanager
def as_in_eager(places: Sequence[str]) -> Iterator[list[str]]:
    """Let transformers choose its attention as it does outside a trace: without a mask none is made. Models that ask
    whether they are exported, to write a kernel out, are told that they are not.

    Its own question whether it is traced decides there; a mask made for a trace is another kernel, and more bytes.
    ``places`` are the inputs: what depends on the values of a mask, or of positions that may be several sequences in
    one, stays as a trace has it; a line says so then.
    """
    library = sys.modules.get("transformers.masking_utils")
    given = [place for place in places if "mask" in place or "position" in place]
    lines: list[str] = []

    def asked(before: Any, tensor: Any = None) -> bool:
        if tensor is None:
            return False
        if given and not lines:
            lines.append(
                f"{given[0]}: where nothing is padded transformers attends without a mask in plain training, which a "
                "trace cannot know: it has one, which takes more bytes; leave that input out where none is needed"
            )
        return bool(before(tensor))

    with ExitStack() as stack:
        models = [x for key, x in list(sys.modules.items()) if key.startswith("transformers.models.")]
        for asking in (x for x in models if "is_torchdynamo_exporting" in vars(x)):
            for name in ("is_torchdynamo_exporting", "is_torchdynamo_compiling"):
                if name in vars(asking):
                    stack.enter_context(replaced(asking, name, lambda *_: False))
        for name in ("is_torchdynamo_exporting", "is_torchdynamo_compiling", "is_tracing"):
            if library is not None and hasattr(library, name):
                stack.enter_context(replaced(library, name, partial(asked, getattr(library, name))))
        if hasattr(library, PACKED) and not given:  # the model's own positions are those of one sequence
            stack.enter_context(replaced(library, PACKED, lambda *_, **__: None))
        yield lines


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the context, replace what all find under a ``name`` in a module or a class, the ``owner``."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# --- gradients of its own ---------------------------------------------------------------------------------------------

SPACE = "pipeplan"  # where torch finds the operations
_NUMBERS = count()
_LIBRARY: list[torch.library.Library] = []  # made when first needed; operations last as long as it


def function_of(operation: str) -> str:
    """Return the name of the function that an operation of ours calls."""
    return operation.rpartition("_")[0]


@contextmanager
def own_gradients() -> Iterator[None]:
    """Within the context a call of a function with a gradient of its own, but torch's, is one operation of a trace.

    Authors keep ``Own.apply`` under other names, so it is what that calls which is replaced.
    """

    def apply(kind: Any, *arguments: Any, **keywords: Any) -> Any:
        plainly: Callable[..., Any] = getattr(kind, "plainly", super(_SingleLevelFunction, kind).apply)
        if kind.__module__.partition(".")[0] == "torch" or not tensors_in(arguments):
            return plainly(*arguments, **keywords)
        given = refilling(arguments)
        return as_operation(kind.__name__, lambda x: plainly(*given(x), **keywords), tensors_in(arguments))

    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]  # it only inherits one
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def as_operation(name: str, called: Callable[[Sequence[Tensor]], Any], given: Sequence[Tensor]) -> Any:
    """Call ``called`` on the tensors ``given`` by an operation of its own, which stays to be called again."""
    made: list[Callable[[Sequence[Tensor]], Any]] = []

    def run(tensors: list[Tensor]) -> list[Tensor]:
        output = called(tensors)
        if not made:
            made.append(refilling(output))
        return tensors_in(output)

    if not _LIBRARY:
        _LIBRARY.append(torch.library.Library(SPACE, "FRAGMENT"))  # type: ignore[no-untyped-call]  # torch's own
    operation = f"{name}_{next(_NUMBERS)}"
    _LIBRARY[0].define(f"{operation}(Tensor[] x) -> Tensor[]")  # type: ignore[no-untyped-call]  # as above
    _LIBRARY[0].impl(operation, run, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]  # as above
    called_as = getattr(getattr(torch.ops, SPACE), operation)
    has_side_effect(called_as.default)  # nobody knows what it does, so no trace may leave it out
    outputs = called_as(list(given))
    return made[0](outputs)


def made_whole(module: nn.Module, example: Any) -> None:
    """Let lazy parts of ``module`` get their weights, by an evaluation of the ``example``."""
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        training = module.training
        module.eval()
        with torch.no_grad():
            called(module, example)
        module.train(training)


def called(module: nn.Module, value: Any) -> Any:
    """Call ``module`` with keywords or with arguments, where it takes them, or with the one that ``value`` is."""
    given, named = arguments_of(module, value)
    return module(*given, **named)


def arguments_of(module: nn.Module, value: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments and keywords with which ``module`` is called on ``value``; TypeError if with none."""
    ways: list[tuple[Sequence[Any], Mapping[str, Any]]] = [((value,), {})]
    if isinstance(value, Mapping | tuple | list):
        ways.insert(0, ((), value) if isinstance(value, Mapping) else (value, {}))
    try:
        signature = inspect.signature(module.forward)
    except ValueError:  # nobody knows what it takes
        return ways[0]
    refused: list[TypeError] = []
    for given, named in ways:
        try:
            signature.bind(*given, **named)
        except TypeError as error:
            refused.append(error)
        else:
            return given, named
    raise refused[0]
