"""Which options does a file give a program? Those of a command line, of arrays, variables and TOML, as written."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...errors import BadInput
from ...names import shown
from ..text import read_text

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?\}|([A-Za-z_]\w*))")
OPTION = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
MOST = 10**9
LONGEST = 10**5  # bytes of a file; as many letters once its variables stand for what they do


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the file ``path``: each name, with ``-`` for ``_``, and its words; the last of equal names counts.

    ``words`` are all that are no options themselves.
    """

    path: str
    given: dict[str, tuple[str, ...]]
    words: tuple[str, ...]

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def text(self, name: str) -> str | None:
        """Return the first word of an option, None where it isn't given; BadInput where it has none."""
        if name not in self.given:
            return None
        if not self.given[name]:
            raise BadInput(f"{self.path}: --{name} has no value")
        word = self.given[name][0]
        if VARIABLE.search(word):
            raise BadInput(f"{self.path}: --{name} is {shown(word)}, which the file doesn't set; write its value")
        return word

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return the number of an option; BadInput where it is none, or is missing and has no ``default``."""
        word = self.text(name)
        if word is None:
            if default is None:
                raise BadInput(f"{self.path}: --{name} is missing")
            return default
        if not re.fullmatch(r"-?[0-9]{1,10}", word) or not least <= int(word) <= MOST:
            raise BadInput(f"{self.path}: --{name}: '{shown(word)}' isn't a count of at least {least}")
        return int(word)


def read_options(path: str) -> Options:
    """Return the options in a shell script, in what is to be pasted into one, or in TOML; BadInput names the file.

    Comments, line ends behind a backslash, ``NAME=value`` and arrays are understood, and ``$NAME`` of what the file set
    before. Anything else is taken as words. Of TOML ``[table]`` and ``key = value`` are the option ``--table.key``.
    """
    text = read_text(path, LONGEST)
    with suppress(tomllib.TOMLDecodeError, RecursionError):
        tables = tomllib.loads(text)
        if any(isinstance(x, dict) for x in tables.values()):  # NAME="value" alone is a shell's
            return Options(path, dict(_of_toml(tables)), ())
    try:
        tokens = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise BadInput(f"{path}: isn't shell text: {str(error).lower()}") from error
    given: dict[str, list[str]] = {}
    words: list[str] = []
    name: str | None = None
    for word in _plain(path, tokens):
        found = OPTION.fullmatch(word)
        if found is None:
            words.append(word)
            if name is not None:
                given[name].append(word)
            continue
        name = found[1].replace("_", "-")
        given[name] = [] if found[2] is None else [found[2]]
    return Options(path, {key: tuple(value) for key, value in given.items()}, tuple(words))


def _of_toml(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the options of a table and of those in it, with their words; true and false are words, too."""
    for key, value in table.items():
        name = f"{prefix}{key}".replace("_", "-")
        if isinstance(value, dict):
            yield from _of_toml(value, f"{name}.")
        else:
            words = value if isinstance(value, list) else [value]
            yield name, tuple(",".join(map(str, x)) if isinstance(x, list) else str(x) for x in words)


def _plain(path: str, tokens: list[str]) -> list[str]:
    """Return tokens without assignments and brackets of arrays, and with what variables stand for."""
    found: list[str] = []
    known: dict[str, str] = {}
    left = LONGEST

    def stands_for(name: re.Match[str]) -> str:
        nonlocal left
        value = known.get(name[1] or name[2], name[0])
        left -= len(value)
        if left < 0:
            raise BadInput(f"{path}: its variables stand for more than {LONGEST:,} letters")
        return value

    for token in tokens:
        set_here = ASSIGNMENT.fullmatch(token)
        if set_here is None:
            found.append(VARIABLE.sub(stands_for, token.strip("()") or ""))
            continue
        value = VARIABLE.sub(stands_for, set_here[2].lstrip("("))
        known[set_here[1]] = value
        if value.startswith("--"):  # options in a variable, or the first of an array
            found += value.split()
    return [word for word in found if word]
