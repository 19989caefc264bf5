"""What does Python's caller get where the command line has options? Keywords by name and type, refused in their names.

:func:`door` stands before each public function that ``import pipeplan as pp`` gives. A value of another type is
BadInput that names its keyword, before anything is computed; sentences that speak of ``--no-replicas`` speak of
``no_replicas`` here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from math import isfinite
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from ..deadline import Deadline
from ..errors import BadInput
from ..names import shown
from ..problem import Chain, Platform
from .asked import LEAST_SIZE, WORDS

MOST = 10**18  # of anything
P = ParamSpec("P")
R = TypeVar("R")
OPTION = re.compile(r"(?:--|-O (?=\w))([a-z][a-z-]*[a-z])")
RENAMED = {
    "for": "for_",
    "data-parallel": "pipelines",
    "microbatch-profile": "profiles",
    "to": "target",
}  # options that Python calls otherwise
NAMES = {"Deadline": Deadline, "Platform": Platform, "Chain": Chain}  # that annotations have as text
WRITTEN = {str: "a text", int: "a whole number", float: "a number", bool: "True or False", NoneType: "None"}


def door(function: Callable[P, R]) -> Callable[P, R]:
    """Return a public function that checks its keywords, and names them where it refuses."""
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        allowed = _allowed(function)
        for name in kwargs:
            if name not in allowed and None not in allowed:
                listed = f"there are {', '.join(map(str, allowed))}"
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{name}'; {listed}")
        for name, value in {**signature.bind(*args, **kwargs).arguments, **kwargs}.items():
            if name in allowed:
                _check(name, value, allowed[name])
        try:
            return function(*args, **kwargs)
        except BadInput as error:
            sentence = OPTION.sub(_keyword, str(error))
            if sentence == str(error):
                raise
            raise type(error)(sentence) from error

    words = _words(signature, function.__globals__)
    if words:  # what help() shows: every keyword, and what it is
        own = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
        more = [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY, default=WORDS[x].default) for x in words]
        checked.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            sorted([*more, *own], key=lambda x: x.kind), return_annotation=signature.return_annotation
        )
        told = (f"{x}: {OPTION.sub(_keyword, WORDS[x].help)}" for x in words)
        checked.__doc__ = "\n\n".join([inspect.cleandoc(function.__doc__ or ""), *told])
    return checked


def _keyword(option: re.Match[str]) -> str:
    """Return what Python calls an option."""
    return RENAMED.get(option[1], option[1].replace("-", "_"))


def _words(signature: inspect.Signature, known: Mapping[str, Any]) -> list[str]:
    """Return the words of the question that a function's keywords unpack, without evaluating their types."""
    unpacked = re.search(r"Unpack\[(\w+)\]", str(signature))
    return list(known[unpacked[1]].__annotations__) if unpacked else []


@cache
def _allowed(function: Callable[..., Any]) -> dict[str | None, Any]:
    """Return the type of each argument of a function by name, those of an unpacked noun among them; None is there where
    any other name is allowed."""
    found: dict[str | None, Any] = {}
    kinds = {x.name: x.kind for x in inspect.signature(function).parameters.values()}
    given = {name: kind for name, kind in function.__annotations__.items() if name != "return"}
    for name, kind in get_type_hints(SimpleNamespace(__annotations__=given), function.__globals__, NAMES).items():
        if get_origin(kind) is Unpack:
            (noun,) = get_args(kind)
            words: dict[str | None, Any] = dict(get_type_hints(noun, localns=NAMES).items())
            found = words | found
        elif kinds[name] is inspect.Parameter.VAR_POSITIONAL:
            found[name] = Sequence[kind]  # type: ignore[valid-type]  # made of what it says
        else:
            found[None if kinds[name] is inspect.Parameter.VAR_KEYWORD else name] = kind
    return found


def _check(name: str, value: Any, kind: Any) -> None:
    """Raise BadInput unless ``value`` may be what ``name`` says."""
    word = WORDS.get(name)
    if not _fits(value, kind):
        raise BadInput(f"{name}: '{shown(str(value), 40)}' is not {_written(kind)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not isfinite(value) or abs(value) > MOST:
            raise BadInput(f"{name}: {value} is not a number to compute with")
        if word is None:
            return
        if word.unit.startswith(("SIZE", "RATE")):
            if value < LEAST_SIZE:
                unit = "B/s" if word.unit == "RATE" else "B"
                raise BadInput(
                    f"{name}: {value} is {value} {unit}; write a text with its unit, such as '{value}G{unit}'"
                )
        elif not word.least <= value <= word.most:
            raise BadInput(f"{name}: {value} is not between {word.least} and {word.most}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotation; what isn't known here is."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any or isinstance(kind, TypeVar):
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    kind = NoneType if kind is None else origin or kind
    if not isinstance(kind, type) or not isinstance(value, kind):
        return not isinstance(kind, type)
    if isinstance(value, str | bytes | Mapping) or not parts or not isinstance(value, Iterable):
        return not (isinstance(value, str | bytes) and kind is not type(value))
    if not isinstance(value, list | tuple):
        return True
    return all(_fits(each, parts[0]) for each in value) and (bool(value) or kind is not tuple)


def _written(kind: Any) -> str:
    """Return what an annotation allows, in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (Union, UnionType):
        literal = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
        others = [part for part in parts if get_origin(part) is not Literal and part is not NoneType]
        listed = [f"one of {', '.join(map(str, literal))}"] if literal else []
        return " or ".join([*listed, *map(_written, others)])
    if kind in WRITTEN:
        return WRITTEN[kind]
    if kind is Path:
        return "a path"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a dictionary"
    if origin in (list, tuple) or (isinstance(origin, type) and issubclass(origin, Iterable)):
        return f"a list of which each is {_written(parts[0])}" if parts else "a list"
    if origin is not None and issubclass(origin, Callable):  # type: ignore[arg-type]  # an abstract class of callables
        return "a function"
    return f"a {getattr(kind, '__name__', kind)}"
