"""How are options said? In rows of text, or as words of a question; values have types, and names that are completed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..api.asked import LARGEST_SEED, Word, rows_of, word_of, words
from ..choices import BEST, PLANNED
from ..deadline import Deadline
from ..errors import BadInput
from ..names import shown
from ..registry import Late
from ..units import gpu_counts, parse_counts, parse_time
from . import TRACEBACK

Command = TypeVar("Command", bound=Callable[..., Any])
MOST = 10**9  # of anything that is counted, where nothing else says how many there may be


class Named(click.ParamType[str]):
    """A text that is one of ``names``, or with ``files`` a file; none is refused here. ``lists``: several by commas."""

    name = "text"

    def __init__(self, names: Callable[[], Iterable[str]], *, files: bool = False, lists: bool = False) -> None:
        self.names, self.files, self.lists = names, files, lists

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return what ``incomplete`` may become: names where any begin so, else a file."""
        before, comma, last = incomplete.rpartition(",") if self.lists else ("", "", incomplete)
        if last or not self.files:
            found = [CompletionItem(f"{before}{comma}{name}") for name in self.names() if name.startswith(last)]
            if found or not self.files:
                return found
        return [CompletionItem(incomplete, type="file")]


def _models() -> Iterable[str]:
    from ..zoo import MODELS, ZOO

    return (f"{ZOO}{name}" for name in MODELS)


def profiles() -> Iterable[str]:
    """Return what can be named where a profile is."""
    from ..files.profiles import PREFIX, examples

    return (*_models(), *(f"{PREFIX}{name}" for name in examples()))


_schedules: Callable[[], Iterable[str]] = Late("schedule.kinds:schedules")


def _knobs_known(tuning: Iterable[str] = ()) -> Iterable[str]:
    """Return what -O may say: names that tune a search, and the options of algorithms with their values."""
    from ..partition import ALGORITHMS

    of_algorithms = {
        (name, str(value).lower()) for x in ALGORITHMS.values() for name, of in x.options.items() for value in of
    }
    return (*(f"{name}=" for name in tuning), *(f"{name}={value}" for name, value in sorted(of_algorithms)))


FILE = Named(tuple, files=True)
GPU = Named(Late("files.machines.accelerators:accelerators"), files=True)
MODEL = Named(_models)
SCHEDULE = Named(_schedules)
RUN_SCHEDULE = Named(lambda: (*PLANNED, "pipedream", BEST), files=True)
WRITTEN = Named(lambda: (*_schedules(), "all", BEST), files=True)


class Count(click.IntRange):
    """A whole number from ``least`` up to ``most``."""

    def __init__(self, least: int = 1, most: int = MOST) -> None:
        super().__init__(least, most)


class Number(click.FloatRange):
    """A finite number from ``least`` up to ``most``, or ``above`` the least."""

    def __init__(self, least: float = 0, most: float | None = None, *, above: bool = False) -> None:
        super().__init__(least, most, min_open=above)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; BadInput for nan, which every comparison lets through, and for what has no end."""
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            raise BadInput(f"{_name(param)}: {value} is not a number to compute with")
        return number


class CountOr(Count):
    """A number, or a ``word`` that stands for ``value``."""

    def __init__(self, name: str, word: str, value: str | int | None, most: int = MOST, least: int = 1) -> None:
        super().__init__(least, most)
        self.name, self.word, self.value = name, word, value

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or what the word stands for."""
        return self.value if value == self.word else super().convert(value, param, ctx)


class Parsed(click.ParamType[Any]):
    """A text of which ``parse(text, option)`` makes a value, or that it refuses."""

    def __init__(self, name: str, parse: Callable[[str, str], Any]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value; what is one already as it is."""
        return self.parse(value, _name(param)) if isinstance(value, str) else value


def _writable(text: str, option: str) -> str:
    """Return a file to be written, ``-`` for standard output: whether it can be shows before anything is worked out."""
    from ..files.text import check_writable

    check_writable(text)
    return text


def _share(text: str, option: str) -> float:
    """Return ``0.05`` for ``5%``."""
    with suppress(ValueError):
        number = float(text[:-1])
        if text.endswith("%") and not 0 <= number <= 100:
            raise click.BadParameter(f"{text!r} is not between 0% and 100%")
        if text.endswith("%"):
            return number / 100
    raise click.BadParameter(f"{text!r} is not a percentage, such as 5%")


def _time_above_0(text: str, option: str) -> int:
    ns = parse_time(text, option)
    if not ns:
        raise BadInput(f"{option}: {text!r} isn't a time to wait")
    return ns


def _name(option: click.Parameter | None) -> str:
    return "value" if option is None else option.opts[0]


OUTPUT, SHARE, TIME = Parsed("FILE", _writable), Parsed("PERCENT", _share), Parsed("TIME", parse_time)
TIME_ABOVE_0 = Parsed("TIME", _time_above_0)
BY_UNIT: dict[str, click.ParamType[Any]] = {  # types of values
    "X": Number(),
    "PERCENT": SHARE,
    "COLUMNS": Count(40, 10**4),
    "SEED": Count(0, LARGEST_SEED),
    "OUT": OUTPUT,
    "FILE": FILE,
    "DIR": click.Path(path_type=Path),
    "N|NxN": Parsed("N|NxN", gpu_counts),
    "N|any": CountOr("N|any", "any", "any"),
    "0|1|2|3|any": CountOr("0|1|2|3|any", "any", "any", 3, 0),
    "auto|N": CountOr("auto|N", "auto", None, 10**6),
    "N,..": Parsed("N,..", parse_counts),
}
UNSAID = ("N", "X", "PERCENT", "COLUMNS", "SEED", "OUT")  # whose metavars are click's


def options(rows: str, **special: Mapping[str, Any] | click.ParamType[Any]) -> Callable[[Command], Command]:
    """Return what adds an option for each row: see :func:`.word_of`. ``special`` are a type, or click's own words, by
    keywords.

    The unit gives a value's type, by :data:`BY_UNIT`; ``N`` is a count, a choice has ``|``, and a flag has none.
    """
    made = []
    for word in map(word_of, rows_of(rows)):
        choices = tuple(word.unit.split("|")) if "|" in word.unit and word.unit.islower() else ()
        kind: Any = Literal[choices] if choices else int if word.unit == "N" else str if word.unit else bool
        own = special.get(word.keyword, {})
        other = {"type": own} if isinstance(own, click.ParamType) else own
        made.append(option_of(replace(word, types=(kind,)), **other))
    return lambda command: reduce(lambda found, add: add(found), reversed(made), command)


DEBUG = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=lambda context, _, asked: context.meta.update({TRACEBACK: asked}),
    help="Print the traceback of a failure, too.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts instead of tables.")
PLAN = click.argument("plan", metavar="PLAN", type=FILE)


deadline_of: Callable[[str | None], Deadline] = Late("api.given.problems:deadline_of")


def time_limit(what: str, name: str = "time_limit") -> Callable[[Command], Command]:
    """Return the option --time-limit, a deadline, with ``what`` it stops; it counts from the start."""
    begun: dict[str, Any] = {"is_eager": True, "callback": lambda _, option, text: deadline_of(text)}
    return click.option("--time-limit", name, metavar="TIME", help=what, **begun)


GIVE_UP = time_limit("Give up after this time, such as 30s.", "deadline")
PROFILE = click.argument("profile", metavar="PROFILE", type=Named(profiles, files=True))
COMPLETED: dict[str, click.ParamType[Any]] = {"gpu": GPU, "algorithms": Named(Late("api.comparing:names"), lists=True)}


def type_of(word: Word) -> click.ParamType[Any]:
    """Return the type of a word's values on the command line; a text where Python takes what the text says."""
    if word.unit in BY_UNIT:
        return BY_UNIT[word.unit]
    if (int in word.types and str not in word.types) or (word.choices and isinstance(word.choices[0], int)):
        return Count(word.least, word.most)
    if word.choices:
        return click.Choice([str(value) for value in word.choices])
    return COMPLETED.get(word.keyword, click.STRING)


def option_of(word: Word, **other: Any) -> Callable[[Command], Command]:
    """Return the option of a word; ``other`` are click's own words for it, in place of what follows from it."""
    spelled = word.option if word.option.startswith("-") else f"--{word.option}"
    if bool in word.types:
        both = "/" not in word.option and (word.default is False or type(None) in word.types)
        spelled += f"/--no-{spelled[2:]}" if both else ""
        about: dict[str, Any] = {"is_flag": True, "default": word.unsaid, "show_default": word.default is not None}
    else:
        listed = word.choices and word.unit not in BY_UNIT
        about = {"type": type_of(word), "metavar": None if listed or word.unit in UNSAID else word.unit or None}
        if word.default == ():
            about["multiple"] = True
        elif word.default is not None:  # which click tells from no default
            about |= {"default": word.default, "show_default": True}
        else:
            about["show_default"] = False
    return click.option(*spelled.split(", "), word.keyword, **{**about, "help": word.help, **other})


def asking(question: type, without: Sequence[str] = (), **other: dict[str, Any]) -> Callable[[Command], Command]:
    """Return what adds the options of a question's words but those ``without``, and -O where it has knobs.

    ``other`` are click's own words for some of them.
    """
    said = {name: word for name, word in words(question).items() if name not in (*without, "time_limit", "options")}

    def add(command: Command) -> Command:
        if any(x.knob for x in said.values()):
            command = _knobs(said)(command)
        for name, word in reversed(said.items()):
            if not word.knob:
                command = option_of(word, **other.get(name, {}))(command)
        return command

    return add


def _knobs(said: Mapping[str, Word]) -> Callable[[Command], Command]:
    """Return the option -O for what tunes a search: the knobs among ``said``, and the options of an algorithm."""
    knobs = {x.option: x for x in said.values() if x.knob}
    told = "; ".join(
        f"{name}={'|'.join(map(str, x.choices or [x.unit]))}: {x.help[:1].lower()}{x.help[1:].rstrip('.')}"
        for name, x in knobs.items()
    )
    more = "; or an option of --algorithm, which pipeplan list algorithms has" if "algorithm" in said else ""
    return click.option(
        "-O",
        "--option",
        "knobs",
        multiple=True,
        metavar="NAME=VALUE",
        type=Named(partial(_knobs_known, tuple(knobs))),
        expose_value=False,
        callback=partial(_parsed_knobs, knobs),
        help=f"What tunes the search, repeatable. {told}{more}.",
    )


def _parsed_knobs(
    knobs: Mapping[str, Word], context: click.Context, option: click.Parameter, texts: Sequence[str]
) -> None:
    """Add to what a command is given the words that -O says, and under ``options`` those of an algorithm."""
    found = context.params
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.UsageError(f"-O: '{shown(text, 40)}' is not of the form NAME=VALUE")
        if name in knobs:
            try:
                found[knobs[name].keyword] = type_of(knobs[name]).convert(value, None, context)
            except click.BadParameter as error:
                raise BadInput(f"-O {name}: {error.message}") from error
        else:
            found.setdefault("options", {})[name] = {"true": True, "false": False}.get(value, value)


def refuse_without(needed: str, *names: str) -> None:
    """Raise UsageError when one of the options ``names`` is said that mean something only beside ``--needed``, which
    isn't."""
    context = click.get_current_context()
    said = [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if said and context.params[needed] is None:
        raise click.UsageError(f"--{said[0]} goes with --{needed}".replace("_", "-"))
