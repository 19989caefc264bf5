"""How do functions with a gradient of their own get through a trace? Each call is one operation, which runs as written.

A trace would look into the forward of a ``torch.autograd.Function`` and forget its backward: a gradient that is passed
straight through would be lost, and more would be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.fx.node import has_side_effect

from ..structure import refilling, tensors_in

SPACE = "pipeplan"  # where torch finds the operations

_NUMBERS = count()
_LIBRARY: list[torch.library.Library] = []  # made when first needed; operations last as long as it


def function_of(operation: str) -> str:
    """Return the name of the function that an operation of ours calls."""
    return operation.rpartition("_")[0]


@contextmanager
def own_gradients() -> Iterator[None]:
    """Within the context a call of a function with a gradient of its own, but torch's, is one operation of a trace."""
    original = Function.__dict__["apply"]

    def apply(kind: Any, *arguments: Any, **keywords: Any) -> Any:
        plainly: Callable[..., Any] = original.__get__(None, kind)
        if kind.__module__.partition(".")[0] == "torch" or not tensors_in(arguments):
            return plainly(*arguments, **keywords)
        given = refilling(arguments)
        return as_operation(kind.__name__, lambda x: plainly(*given(x), **keywords), tensors_in(arguments))

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]  # for the time of the trace
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]  # as it was


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
