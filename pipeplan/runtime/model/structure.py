"""Where are the tensors in a value of any type, or in modules? They are taken out, and others put in their places.

Values keep their types: what torch knows as a tree (lists, tuples, named tuples, dicts, and types that are registered,
such as transformers' outputs), dataclasses, mappings and further kinds of lists and dicts are walked through; anything
else is one leaf.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Change = Callable[[Any], Any]
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
OF_MODULES = frozenset(vars(nn.Module()))  # attributes that torch itself keeps
DEEP = 4  # how far an object that nobody knows is searched for tensors


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``change`` made to each of its tensors, in one order for all values of one structure."""
    return _walked(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


def own_memory(x: Tensor) -> Tensor:
    """Return a copy of ``x`` that shares no memory with anything, laid out as it is where that can be."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def compact(x: Tensor) -> Tensor:
    """Return ``x``, or a copy where it is a part of a larger tensor, which it would keep."""
    part = x.layout == torch.strided and not x.is_nested and x.untyped_storage().nbytes() > x.nbytes
    return x.detach().clone() if part else x


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of ``value``."""
    return [leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor)]


def leaves_of(outputs: Sequence[Tensor], behind: Iterable[Any] = ()) -> Iterator[Tensor]:
    """Yield the tensors that gradients of ``outputs`` come to, not through the steps of autograd ``behind``."""
    pending, seen = [x.grad_fn for x in outputs], set[Any](behind)
    while pending:
        step = pending.pop()
        if step is not None and step not in seen:
            seen.add(step)
            if hasattr(step, "variable"):
                yield step.variable
            pending += [before for before, _ in step.next_functions]


def leaves_in(value: Any) -> list[Any]:
    """Return the leaves of ``value``, its tensors among them."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    _walked(note, value)
    return found


def refilling(value: Any) -> Callable[[Sequence[Tensor]], Any]:
    """Return what makes the like of ``value`` of other tensors; it keeps none of those that there are."""
    made = _making(value)
    return lambda tensors: made(iter(tensors))


def _making(value: Any) -> Callable[[Iterator[Tensor]], Any]:
    if isinstance(value, Tensor):
        return next
    inside = _Opened.of(value)
    if inside is None:
        return lambda _: value
    closed, parts = inside.closed, [_making(part) for part in inside.parts]
    return lambda tensors: closed([part(tensors) for part in parts])


def closed_leaf(value: Any) -> Any:
    """Return a leaf of ``value`` that holds tensors where nobody can take them out, or None."""
    leaves = (leaf for leaf in leaves_in(value) if not isinstance(leaf, Tensor))
    return next((leaf for leaf in leaves if _holds_tensors(leaf, DEEP)), None)


def contains(value: Any, kind: type) -> bool:
    """Whether ``value`` is a ``kind``, or has one inside."""
    inside = None if isinstance(value, (Tensor, kind)) else _Opened.of(value)
    return isinstance(value, kind) or (inside is not None and any(contains(part, kind) for part in inside.parts))


def places_in(value: Any) -> list[str]:
    """Return for each tensor of ``value`` where it is, as its attribute or key, nested ones joined by underscores."""
    return [name for name, leaf in _named("", value) if isinstance(leaf, Tensor)]


def _walked(change: Change, value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    inside = _Opened.of(value)
    if inside is None:
        return change(value)
    return inside.closed([_walked(change, part) for part in inside.parts])


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    inside = None if isinstance(value, Tensor) else _Opened.of(value)
    if inside is None:
        yield name, value
        return
    for key, part in zip(inside.keys, inside.parts, strict=True):
        yield from _named(f"{name}_{key}" if name else key, part)


class _Opened:
    """One level of a value: its ``parts``, what they are called, and how the like is made of others."""

    def __init__(self, keys: Sequence[Any], parts: Sequence[Any], closed: Callable[[Sequence[Any]], Any]) -> None:
        self.keys = list(map(str, keys))
        self.parts = list(parts)
        self.closed = closed

    @staticmethod
    def of(value: Any) -> _Opened | None:
        """Return ``value`` opened, or None if it is a leaf."""
        kind = type(value)
        if kind in pytree.SUPPORTED_NODES or pytree.is_namedtuple_class(kind):
            return _registered(value)
        if is_dataclass(value) and not isinstance(value, type):
            return _dataclass(value)
        if isinstance(value, UserDict):
            data = value.data
            return _like(value, list(data), list(data.values()), lambda x: x.data.clear(), _put_data)
        if isinstance(value, dict):
            return _like(value, list(value), list(dict.values(value)), dict.clear, dict.__setitem__)
        if isinstance(value, list):
            return _like(value, range(len(value)), value, list.clear, lambda x, _, part: list.append(x, part))
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return _tuple(value)
        if isinstance(value, Mapping):
            keys = list(value)
            return _Opened(keys, list(value.values()), lambda parts: dict(zip(keys, parts, strict=True)))
        return None


def _registered(value: Any) -> _Opened:
    node = pytree.SUPPORTED_NODES[pytree._get_node_type(value)]
    parts, context = node.flatten_fn(value)  # tree_flatten leaves a circle behind that keeps the value
    if isinstance(value, dict):
        keys: Sequence[Any] = list(value)
    else:
        keys = getattr(value, "_fields", range(len(parts)))
    if len(keys) != len(parts):
        keys = range(len(parts))
    return _Opened(keys, parts, lambda changed: node.unflatten_fn(changed, context))


def _like(
    value: Any, keys: Sequence[Any], parts: Sequence[Any], empty: Callable[[Any], Any], put: Callable[..., Any]
) -> _Opened:
    """Return ``value`` opened: the like of it is a copy that ``empty`` made empty and others are ``put`` into."""
    blank = copy(value)
    empty(blank)

    def closed(parts: Sequence[Any]) -> Any:
        made = copy(blank)
        for key, part in zip(keys, parts, strict=True):
            put(made, key, part)
        return made

    return _Opened(keys, parts, closed)


def _dataclass(value: Any) -> _Opened:
    names = [field.name for field in fields(value) if hasattr(value, field.name)]
    put = object.__setattr__  # frozen ones too

    def empty(made: Any) -> None:
        for name in names:
            put(made, name, None)

    return _like(value, names, [getattr(value, name) for name in names], empty, put)


def _put_data(made: Any, key: Any, part: Any) -> None:
    made.data[key] = part


def _tuple(value: tuple[Any, ...]) -> _Opened:
    kind, more = type(value), dict(getattr(value, "__dict__", {}))

    def closed(parts: Sequence[Any]) -> Any:
        made = tuple.__new__(kind, parts)
        if more:
            vars(made).update(more)
        return made

    return _Opened(range(len(value)), value, closed)


def _holds_tensors(leaf: Any, deep: int) -> bool:
    if isinstance(leaf, Tensor):
        return True
    if isinstance(leaf, (*PLAIN, type)) or deep == 0 or callable(leaf):
        return False
    inside = list(getattr(leaf, "__dict__", {}).values())
    return any(_holds_tensors(part, deep - 1) for value in inside for part in leaves_in(value))


# --- modules ----------------------------------------------------------------------------------------------------------


def tensors_of(modules: Iterable[nn.Module], alone: Iterable[nn.Module] = ()) -> list[Tensor]:
    """Return the weights and buffers of ``modules``, and the tensors among their attributes; those of modules ``alone``
    without the modules inside."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    substitute(modules, note, alone)
    return found


def substitute(
    modules: Iterable[nn.Module], change: Callable[[Tensor], Tensor], alone: Iterable[nn.Module] = ()
) -> None:
    """Put ``change(x)`` where ``modules`` have the tensor ``x``: as a weight, as a buffer, or among attributes; and
    where modules ``alone`` have it without the modules inside."""
    for part in dict.fromkeys([*alone, *(part for module in modules for part in module.modules())]):
        for table in (part._parameters, part._buffers):
            for name, x in list(table.items()):
                if x is not None:
                    table[name] = change(x)  # type: ignore[assignment]  # of the same kind
        for name, value in list(vars(part).items()):
            found = tensors_in(value) if name not in OF_MODULES else ()
            if any(change(x) is not x for x in found):
                vars(part)[name] = mapped(change, value)


@contextmanager
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let ``modules`` have the attributes and hooks of before behind the context, and generators among them their
    states."""
    before = [(part, {k: x for k, x in vars(part).items() if k not in OF_MODULES}) for part in modules]
    tables = (x for part, _ in before for name, x in vars(part).items() if name in OF_MODULES and "_hooks" in name)
    hooks = [(table, dict(table)) for table in tables]
    drawn = [(x, x.get_state()) for _, own in before for x in own.values() if isinstance(x, torch.Generator)]
    try:
        yield
    finally:
        for part, own in before:
            for name in vars(part).keys() - own.keys() - OF_MODULES:
                delattr(part, name)
            vars(part).update(own)
        for table, own in hooks:
            table.clear()
            table.update(own)
        for generator, state in drawn:
            generator.set_state(state)


def hooked_as(weight: nn.Parameter, other: nn.Parameter) -> nn.Parameter:
    """Return ``other``, which takes the place of ``weight``, with the hooks and the copies that were set on that."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "copies"):
        hooks = getattr(weight, name, None)
        if hooks:
            setattr(other, name, hooks)
    return other


def converted(module: nn.Module, dtype: torch.dtype, kept: Sequence[Tensor] = ()) -> None:
    """Convert the floating-point parameters and buffers of ``module`` but those ``kept``; what was tied stays tied."""
    left = set(map(id, kept))
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                if id(parameter) not in made:
                    weight = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                    made[id(parameter)] = hooked_as(parameter, weight)
                setattr(part, name, made[id(parameter)])
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and buffer.is_floating_point() and id(buffer) not in left:
                setattr(part, name, buffer.to(dtype))


@contextmanager
def in_type(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Within the context, let ``module`` have floating-point weights and buffers of type ``dtype`` in their place."""
    if dtype is None:
        yield
        return
    slots = [
        (part, name, x)
        for part in module.modules()
        for entries in (part._parameters, part._buffers)
        for name, x in entries.items()
        if x is not None
    ]
    converted(module, dtype)
    try:
        yield
    finally:
        for part, name, x in slots:
            setattr(part, name, x)


def as_type(value: Any, dtype: torch.dtype | None) -> Any:
    """Return ``value`` with its floating-point tensors in another type."""
    if dtype is None:
        return value
    return mapped(lambda x: x.to(dtype) if x.is_floating_point() else x, value)
