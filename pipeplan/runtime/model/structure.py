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

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
OF_MODULES = frozenset(vars(nn.Module()))  # attributes that torch itself keeps
DEEP = 4  # how far an object that nobody knows is searched for tensors


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``change`` made to each of its tensors, in one order for all values of one structure."""
    leaves, made = _flat(value)
    return made(iter([change(x) if isinstance(x, Tensor) else x for _, x in leaves]))


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


def leaves_of(outputs: Sequence[Tensor], behind: Iterable[Any] = ()) -> list[Tensor]:
    """Return the tensors that gradients of ``outputs`` come to, not through the steps of autograd ``behind``."""
    others = {None, *behind}

    def before(step: Any) -> list[Any]:
        return [one for one, _ in step.next_functions if one not in others]

    steps = reached([x.grad_fn for x in outputs if x.grad_fn not in others], before)
    return [step.variable for step in steps if hasattr(step, "variable")]


def reached(starts: Iterable[Any], following: Callable[[Any], Iterable[Any]]) -> dict[Any, None]:
    """Return what ``following`` leads to from ``starts``, themselves among it, in the order in which it is found."""
    found: dict[Any, None] = {}
    pending = list(starts)
    while pending:
        one = pending.pop()
        if one not in found:
            found[one] = None
            pending.extend(following(one))
    return found


def leaves_in(value: Any) -> list[Any]:
    """Return the leaves of ``value``, its tensors among them."""
    return [leaf for _, leaf in _flat(value)[0]]


def modules_in(value: Any) -> list[nn.Module]:
    """Return the modules of ``value``."""
    return [leaf for leaf in leaves_in(value) if isinstance(leaf, nn.Module)]


def refilling(value: Any) -> Callable[[Sequence[Tensor]], Any]:
    """Return what makes the like of ``value`` of other tensors; it keeps none of those that there are."""
    leaves, made = _flat(value)
    others = [None if isinstance(x, Tensor) else (x,) for _, x in leaves]

    def refilled(tensors: Sequence[Tensor]) -> Any:
        given = iter(tensors)
        return made(iter([next(given) if other is None else other[0] for other in others]))

    return refilled


def closed_leaf(value: Any) -> Any:
    """Return a leaf of ``value`` that holds tensors where nobody can take them out, or None."""
    leaves = (leaf for leaf in leaves_in(value) if not isinstance(leaf, Tensor))
    return next((leaf for leaf in leaves if _holds_tensors(leaf, DEEP)), None)


def contains(value: Any, kind: type) -> bool:
    """Whether ``value`` is a ``kind``, or has one inside."""
    inside = None if isinstance(value, (Tensor, kind)) else _opened(value)
    return isinstance(value, kind) or (inside is not None and any(contains(part, kind) for part in inside[1]))


def places_in(value: Any) -> list[str]:
    """Return for each tensor of ``value`` where it is, as its attribute or key, nested ones joined by underscores."""
    return [name for name, leaf in _flat(value)[0] if isinstance(leaf, Tensor)]


def placed(value: Any, wanted: Sequence[str]) -> list[Tensor]:
    """Return the tensors of ``value`` in the order of their ``wanted`` places; as they come if it has others."""
    tensors, places = tensors_in(value), places_in(value)
    named = len(set(wanted)) == len(wanted) == len(tensors) and set(places) == set(wanted)
    return [tensors[places.index(place)] for place in wanted] if named else tensors


def _flat(value: Any, name: str = "") -> tuple[list[tuple[str, Any]], Callable[[Iterator[Any]], Any]]:
    """Return the leaves of ``value``, called ``name``, with where they are, and what makes the like of it of others."""
    inside = None if isinstance(value, Tensor) else _opened(value)
    if inside is None:
        return [(name, value)], next
    keys, parts, closed = inside
    flat = [_flat(part, f"{name}_{key}" if name else str(key)) for key, part in zip(keys, parts, strict=True)]
    makes = [made for _, made in flat]
    return [x for leaves, _ in flat for x in leaves], lambda leaves: closed([made(leaves) for made in makes])


_Level = tuple[Iterable[Any], Sequence[Any], Callable[[Sequence[Any]], Any]]


def _opened(value: Any) -> _Level | None:
    """Return one level of ``value``: what its parts are called, the parts, and what makes the like of others; None if
    it is a leaf."""
    kind = type(value)
    if kind in pytree.SUPPORTED_NODES or pytree.is_namedtuple_class(kind):
        node = pytree.SUPPORTED_NODES[pytree._get_node_type(value)]
        parts, context = node.flatten_fn(value)  # tree_flatten leaves a circle behind that keeps the value
        keys: Sequence[Any] = list(value) if isinstance(value, dict) else getattr(value, "_fields", ())
        keys = keys if len(keys) == len(parts) else range(len(parts))
        return keys, parts, lambda changed: node.unflatten_fn(changed, context)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        return _like(value, names, [getattr(value, name) for name in names], object.__setattr__)  # frozen ones too
    if isinstance(value, UserDict):
        return _like(value, list(value.data), list(value.data.values()), lambda x, *own: x.data.__setitem__(*own))
    if isinstance(value, dict):
        return _like(value, list(value), list(dict.values(value)), dict.__setitem__)
    if isinstance(value, list):
        return _like(value, range(len(value)), value, list.__setitem__)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        more = dict(getattr(value, "__dict__", {}))

        def closed(parts: Sequence[Any]) -> Any:
            made = tuple.__new__(kind, parts)
            if more:
                vars(made).update(more)
            return made

        return range(len(value)), value, closed
    if isinstance(value, Mapping):
        keys = list(value)
        return keys, list(value.values()), lambda parts: dict(zip(keys, parts, strict=True))
    return None


def _like(value: Any, keys: Sequence[Any], parts: Sequence[Any], put: Callable[[Any, Any, Any], object]) -> _Level:
    """Return ``value`` opened: the like of it is a copy into which others are ``put``; it keeps none of ``parts``."""
    blank = copy(value)
    for key in keys:
        put(blank, key, None)

    def closed(parts: Sequence[Any]) -> Any:
        made = copy(blank)
        for key, part in zip(keys, parts, strict=True):
            put(made, key, part)
        return made

    return keys, parts, closed


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
    tables: list[dict[str, Any]] = [x for part in module.modules() for x in (part._parameters, part._buffers)]
    before = [(table, dict(table)) for table in tables]
    converted(module, dtype)
    try:
        yield
    finally:
        for table, own in before:
            table.update(own)


def as_type(value: Any, dtype: torch.dtype | None) -> Any:
    """Return ``value`` with its floating-point tensors in another type."""
    if dtype is None:
        return value
    return mapped(lambda x: x.to(dtype) if x.is_floating_point() else x, value)
