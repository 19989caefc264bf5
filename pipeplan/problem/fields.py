"""How do the fields of a layer merge, change with the microbatch, and name other layers? Each says so where it stands.

Three functions read that: a new field is a line of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

Scale = Literal["time", "size"]
Merge = Callable[[Sequence[Any]], Any]
T = TypeVar("T")


def said(*, merge: Merge | None = None, scale: Scale | None = None, names: bool = False) -> dict[str, Any]:
    """Return what a field says in its ``metadata``: how values of layers ``merge`` into one (None: whoever merges has
    to say, or it is unknown), whether it grows with the microbatch, and whether it ``names`` layers by indices."""
    return {"merge": merge, "scale": scale, "names": names}


def first(values: Sequence[T]) -> T:
    """Merge into the first."""
    return values[0]


def total(values: Sequence[Any]) -> Any:
    """Merge into the sum, of tuples place by place; None where one is unknown."""
    if any(x is None for x in values):
        return None
    if isinstance(values[0], int):
        return sum(values)
    made, columns = type(values[0]), [total(column) for column in zip(*values, strict=True)]
    return made(columns) if made is tuple else made(*columns)


def largest(values: Sequence[int]) -> int:
    """Merge into the largest."""
    return max(values)


def total_known(values: Sequence[Any]) -> Any:
    """Merge into the sum of those that are known; None where none is."""
    known = [x for x in values if x is not None]
    return total(known) if known else None


def merged(part: Sequence[T], **given: Any) -> T:
    """Return ``part`` as one, with what is ``given``."""
    rules = {x.name: x.metadata.get("merge") for x in fields(part[0])}  # type: ignore[arg-type]  # a dataclass
    own = {name: rule([getattr(x, name) for x in part]) for name, rule in rules.items() if rule and name not in given}
    return type(part[0])(**own, **given)


def scaled(one: T, number: Callable[..., int], *others: T) -> T:
    """Return ``one`` with each number that scales as ``number(scale, it, *those of others)`` has it; None where one of
    the others doesn't know it. Of fields within fields the others aren't asked."""

    def new(value: Any, scale: Scale, far: Sequence[Any]) -> Any:
        if is_dataclass(value):
            return scaled(value, number)
        return None if None in far else number(scale, value, *far)

    rules = {x.name: x.metadata.get("scale") for x in fields(one)}  # type: ignore[arg-type]  # a dataclass
    known = {name: rule for name, rule in rules.items() if rule and getattr(one, name) is not None}
    made = {name: new(getattr(one, name), rule, [getattr(x, name) for x in others]) for name, rule in known.items()}
    return replace(one, **made)  # type: ignore[type-var]


def named_by(one: Any) -> tuple[int, ...]:
    """Return the layers that ``one`` names, -1 for the network's input."""
    values = [getattr(one, x.name) for x in fields(one) if x.metadata.get("names")]
    rows = [(x,) if isinstance(x, int) else x if isinstance(x, tuple) else named_by(x) for x in values if x is not None]
    return tuple(i for row in rows for i in row)


def renumbered(one: T, place: Callable[[int], int]) -> T:
    """Return ``one`` where each layer ``i`` that it names is ``place(i)``."""

    def new(value: Any) -> Any:
        if isinstance(value, int):
            return place(value)
        return tuple(sorted(map(place, value))) if isinstance(value, tuple) else renumbered(value, place)

    values = {x.name: getattr(one, x.name) for x in fields(one) if x.metadata.get("names")}  # type: ignore[arg-type]
    return replace(one, **{name: new(x) for name, x in values.items() if x is not None})  # type: ignore[type-var]
