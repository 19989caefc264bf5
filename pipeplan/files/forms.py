"""What does a noun look like in a JSON file? Like its own fields, and here and there a file is stricter.

Forms are msgspec types: reading refuses unknown keys, missing ones and other types, and names the place
(``$.layers[3].forward_ns``); writing keeps the order of the keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from inspect import cleandoc
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

from ..errors import BadInput

T = TypeVar("T")
Positive = Annotated[int, msgspec.Meta(ge=1, le=10**15)]
MOST_LETTERS = 10_000
Text = Annotated[str, msgspec.Meta(max_length=MOST_LETTERS)]  # a name, or where something comes from
Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
Instant = Annotated[int, msgspec.Meta(le=10**18)]  # what is below 0 the validator says in its own words


def form(
    noun: type,
    keys: Collection[str] = (),
    *,
    optional: Collection[str] | None = None,
    brief: bool = False,
    rename: Mapping[str, str] | None = None,
    **types: Any,
) -> type[Any]:
    """Return the form of a dataclass in a file: its fields as keys, in that order or in the order of ``keys``.

    ``types`` are those of keys that a file has beside the fields, or is stricter about. The keys ``optional`` may be
    left out (None: all whose fields have defaults); with ``brief`` what equals its default is not written.
    """
    own = {field.name: field for field in fields(noun)}
    types = {key: Text if hint is str else hint for key, hint in get_type_hints(noun).items()} | types
    left_out = [name for name, field in own.items() if field.default is not MISSING] if optional is None else optional
    return msgspec.defstruct(
        f"{noun.__name__}File",
        [(key, types[key], own[key].default) if key in left_out else (key, types[key]) for key in keys or own],
        namespace={"__doc__": cleandoc(noun.__doc__ or "")},
        forbid_unknown_fields=True,
        omit_defaults=brief,
        rename=dict(rename or {}),
    )


_KINDS = {
    "pipeplan-profile": "this is a profile; pipeplan plan makes a plan of it",
    "pipeplan-plan": "this is a plan, with its profile; pipeplan check, show, simulate, report, export and run take it",
    "pipeplan-measured": "this is the trace of a run; pipeplan diff PLAN TRACE sets it beside its plan",
}


def converted(value: Any, to: type[T]) -> T:
    """Return the form ``to`` of a noun, or the noun ``to`` of a form; keys and fields are taken by name."""
    return msgspec.convert(value, to, from_attributes=True)


def read_json(text: str, form: type[T], place: str) -> T:
    """Return ``text`` read into ``form``; BadInput, starting with ``place``, says what in it is wrong and where."""
    try:
        found = msgspec.json.decode(text.encode(), type=form)
        refuse_repeated_keys(text, place)
        return found
    except msgspec.MsgspecError as error:  # malformed JSON and validation errors alike
        said = _of_another_kind(str(error), form) or str(error)
        raise BadInput(f"{place}: {said if said.startswith('JSON') else said[0].lower() + said[1:]}") from error
    except RecursionError as error:
        raise BadInput(f"{place}: JSON is nested too deeply") from error


def _of_another_kind(said: str, form: type) -> str | None:
    """Return what a file is, in words, where it is another of this program's than ``form`` reads; else None."""
    found = re.fullmatch(r"Invalid enum value '(pipeplan-\w+)/\d+' - at `\$\.format`", said)
    if found is None or found[1] in str(form.__annotations__["format"]):
        return None
    return _KINDS.get(found[1])


def refuse_repeated_keys(text: str, place: str) -> None:
    """Raise BadInput if an object in ``text``, which is JSON, says something twice: readers take one or the other."""

    def unique(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            raise BadInput(f"{place}: {_repeated(text)} is there twice")

    json.loads(text, object_pairs_hook=unique, parse_int=str)


def _repeated(text: str) -> str:
    """Return the place of a key that its object has already, the one that is nested least."""
    waiting = [("$", json.loads(text, object_pairs_hook=tuple, parse_int=str))]
    for place, value in waiting:
        if isinstance(value, list):
            waiting += [(f"{place}[{i}]", x) for i, x in enumerate(value)]
        elif isinstance(value, tuple):
            seen: set[str] = set()
            for key, x in value:
                if key in seen:
                    return f"{place}.{key[:80]}"
                seen.add(key)
                waiting.append((f"{place}.{key}", x))
    raise AssertionError("only asked for what has one")


def json_text(form: msgspec.Struct) -> str:
    """Return the JSON of a form, indented by one column; what doesn't print in its strings is escaped."""
    lines = msgspec.json.format(msgspec.json.encode(form), indent=1).decode().split("\n")
    return "\n".join(line if line.isprintable() else _escaped(line) for line in lines) + "\n"


def _escaped(line: str) -> str:
    return "".join(sign if sign.isprintable() else json.dumps(sign)[1:-1] for sign in line)
