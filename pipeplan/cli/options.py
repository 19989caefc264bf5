"""How are options said? In rows of text, or as words of a question; values have types, and names that are completed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..api.asked import LARGEST_SEED, Said, Word, rows_of, word_of, words
from ..choices import BEST, PLANNED
from ..deadline import Deadline
from ..errors import BadInput
from ..names import shown
from ..units import MOST_COUNT, gpu_counts, parse_counts, parse_time
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


def _gpus() -> Iterable[str]:
    from ..files.machines.accelerators import accelerators

    return accelerators()


def _models() -> Iterable[str]:
    from ..zoo import MODELS, ZOO

    return (f"{ZOO}{name}" for name in MODELS)


def profiles() -> Iterable[str]:
    """Return what can be named where a profile is."""
    from ..files.profiles import PREFIX, examples

    return (*_models(), *(f"{PREFIX}{name}" for name in examples()))


def _schedules() -> Iterable[str]:
    from ..schedule.runnable import schedules

    return schedules()


def _algorithms() -> Iterable[str]:
    from ..api.comparing import NAMES

    return NAMES


def _knobs_known(tuning: Iterable[str] = ()) -> Iterable[str]:
    """Return what -O may say: names that tune a search, and the options of algorithms with their values."""
    from ..partition import ALGORITHMS

    of_algorithms = {
        (name, str(value).lower()) for x in ALGORITHMS.values() for name, of in x.options.items() for value in of
    }
    return (*(f"{name}=" for name in tuning), *(f"{name}={value}" for name, value in sorted(of_algorithms)))


FILE = Named(tuple, files=True)
GPU = Named(_gpus, files=True)
MODEL = Named(_models)
SCHEDULE = Named(_schedules)
RUN_SCHEDULE = Named(lambda: (*PLANNED, "pipedream", BEST), files=True)
WRITTEN = Named(lambda: (*_schedules(), "all", BEST), files=True)


class Count(click.IntRange):
    """A whole number from ``least`` up to ``most``."""

    def __init__(self, least: int = 1, most: int = MOST) -> None:
        super().__init__(least, most)


class Gpus(click.ParamType[tuple[int, ...]]):
    """GPUs such as ``8``, or ``2x8``, ``most`` at most: see :func:`..units.gpu_counts`."""

    name = "N|NxN"

    def __init__(self, most: int = MOST_COUNT) -> None:
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the counts; BadInput for what is none."""
        return value if isinstance(value, tuple) else gpu_counts(str(value), _name(param), self.most)


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


class Counts(click.ParamType[list[int]]):
    """Counts with commas between them, or ranges of them."""

    name = "N,.."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Return the counts; BadInput for what is none."""
        return value if isinstance(value, list) else parse_counts(str(value), _name(param))


class Output(click.ParamType[str]):
    """A file to be written, ``-`` for standard output; whether it can be shows before anything is worked out."""

    name = "FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path; BadInput when nothing can be written there."""
        from ..files.text import check_writable

        check_writable(str(value))
        return str(value)


class Share(click.ParamType[float]):
    """A share such as ``5%``, as a fraction of one."""

    name = "PERCENT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return ``0.05`` for ``5%``."""
        text = str(value)
        if not text.endswith("%"):
            self.fail(f"{text!r} is not a percentage, such as 5%", param, ctx)
        try:
            number = float(text[:-1])
        except ValueError:
            self.fail(f"{text!r} is not a percentage, such as 5%", param, ctx)
        if not 0 <= number <= 100:
            self.fail(f"{text!r} is not between 0% and 100%", param, ctx)
        return number / 100


class Time(click.ParamType[int]):
    """A time such as ``60s``, in nanoseconds; ``above`` 0 or from 0."""

    name = "TIME"

    def __init__(self, *, above: bool = False) -> None:
        self.above = above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return nanoseconds; BadInput for what is no time."""
        if isinstance(value, int):
            return value
        ns = parse_time(str(value), _name(param))
        if self.above and not ns:
            raise BadInput(f"{_name(param)}: {value!r} isn't a time to wait")
        return ns


def _name(option: click.Parameter | None) -> str:
    return "value" if option is None else option.opts[0]


BY_UNIT: dict[str, click.ParamType[Any]] = {  # types of values
    "X": Number(),
    "PERCENT": Share(),
    "COLUMNS": Count(40, 10**4),
    "SEED": Count(0, LARGEST_SEED),
    "OUT": Output(),
    "FILE": FILE,
    "DIR": click.Path(path_type=Path),
    "N|NxN": Gpus(),
    "N|any": CountOr("N|any", "any", "any"),
    "0|1|2|3|any": CountOr("0|1|2|3|any", "any", "any", 3, 0),
    "auto|N": CountOr("auto|N", "auto", None, 10**6),
    "N,..": Counts(),
}
UNSAID = ("N", "X", "PERCENT", "COLUMNS", "SEED", "OUT")  # whose metavars are click's


def options(rows: str, **special: Mapping[str, Any] | click.ParamType[Any]) -> Callable[[Command], Command]:
    """Return what adds an option for each row: see :func:`.word_of`. ``special`` are a type, or click's own words, by
    keywords.

    The unit gives a value's type, by :data:`BY_UNIT`; ``N`` is a count, a choice has ``|``, and a flag has none.
    """
    made = [_of_row(*word_of(row), special) for row in rows_of(rows)]
    return lambda command: reduce(lambda found, add: add(found), reversed(made), command)


def _of_row(
    keyword: str, word: Word, special: Mapping[str, Mapping[str, Any] | click.ParamType[Any]]
) -> Callable[[Command], Command]:
    choices = tuple(word.unit.split("|")) if "|" in word.unit and word.unit.islower() else ()
    kind: Any = Literal[choices] if choices else int if word.unit == "N" else str if word.unit else bool
    own = special.get(keyword, {})
    return option_of(Said(keyword, word, (kind,)), **({"type": own} if isinstance(own, click.ParamType) else own))


def _with_traceback(context: click.Context, _: click.Parameter, asked: bool) -> None:
    context.meta[TRACEBACK] = asked


DEBUG = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_with_traceback, help="Print the traceback of a failure, too."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts instead of tables.")
PLAN = click.argument("plan", metavar="PLAN", type=FILE)


def _deadline(_: click.Context, option: click.Parameter, text: str | None) -> Deadline:
    from ..api.given.problems import deadline_of

    return deadline_of(text)


def time_limit(what: str) -> Callable[[Command], Command]:
    """Return the option --time-limit, the ``deadline`` of a command, with what it stops; it counts from the start."""
    return click.option(
        "--time-limit", "deadline", metavar="TIME", callback=_deadline, default=None, is_eager=True, help=what
    )


GIVE_UP = time_limit("Give up after this time, such as 30s.")

PROFILE = click.argument("profile", metavar="PROFILE", type=Named(profiles, files=True))
COMPLETED: dict[str, click.ParamType[Any]] = {"gpu": GPU, "algorithms": Named(_algorithms, lists=True)}


def type_of(said: Said) -> click.ParamType[Any]:
    """Return the type of a word's values on the command line; a text where Python takes what the text says."""
    if said.word.unit in BY_UNIT:
        return BY_UNIT[said.word.unit]
    if (int in said.types and str not in said.types) or (said.choices and isinstance(said.choices[0], int)):
        return Count(said.word.least, said.word.most)
    if said.choices:
        return click.Choice([str(value) for value in said.choices])
    return COMPLETED.get(said.keyword, click.STRING)


def option_of(said: Said, **other: Any) -> Callable[[Command], Command]:
    """Return the option of a word; ``other`` are click's own words for it, in place of what follows from it."""
    word = said.word
    spelled = word.option if word.option.startswith("-") else f"--{word.option}"
    if bool in said.types:
        both = "/" not in word.option and (word.default is False or type(None) in said.types)
        spelled += f"/--no-{spelled[2:]}" if both else ""
        about: dict[str, Any] = {"is_flag": True, "default": said.default, "show_default": word.default is not None}
    else:
        listed = said.choices and word.unit not in BY_UNIT
        about = {"type": type_of(said), "metavar": None if listed or word.unit in UNSAID else word.unit or None}
        if word.default == ():
            about["multiple"] = True
        elif word.default is not None:  # which click tells from no default
            about |= {"default": word.default, "show_default": True}
        else:
            about["show_default"] = False
    return click.option(*spelled.split(", "), said.keyword, **{**about, "help": word.help, **other})


def asking(question: type, without: Sequence[str] = (), **other: dict[str, Any]) -> Callable[[Command], Command]:
    """Return what adds the options of a question's words but those ``without``, and -O where it has knobs.

    ``other`` are click's own words for some of them.
    """
    said = {name: word for name, word in words(question).items() if name not in (*without, "time_limit", "options")}

    def add(command: Command) -> Command:
        if any(x.word.knob for x in said.values()):
            command = _knobs(said)(command)
        for name, word in reversed(said.items()):
            if not word.word.knob:
                command = option_of(word, **other.get(name, {}))(command)
        return command

    return add


def _knobs(said: Mapping[str, Said]) -> Callable[[Command], Command]:
    """Return the option -O for what tunes a search: the knobs among ``said``, and the options of an algorithm."""
    knobs = {x.word.option: x for x in said.values() if x.word.knob}
    told = "; ".join(
        f"{name}={'|'.join(map(str, x.choices or [x.word.unit]))}: "
        f"{x.word.help[:1].lower()}{x.word.help[1:].rstrip('.')}"
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
        callback=partial(_parsed_knobs, knobs),
        help=f"What tunes the search, repeatable. {told}{more}.",
    )


def _parsed_knobs(
    knobs: Mapping[str, Said], context: click.Context, option: click.Parameter, texts: Sequence[str]
) -> dict[str, Any]:
    """Return the words that -O says, and under ``options`` those of an algorithm."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.UsageError(f"-O: '{shown(text, 40)}' is not of the form NAME=VALUE")
        if name in knobs:
            found[knobs[name].keyword] = _converted(knobs[name], value, context)
        else:
            found.setdefault("options", {})[name] = {"true": True, "false": False}.get(value, value)
    return found


def _converted(said: Said, value: str, context: click.Context) -> Any:
    try:
        return type_of(said).convert(value, None, context)
    except click.BadParameter as error:
        raise BadInput(f"-O {said.word.option}: {error.message}") from error


def refuse_without(needed: str, *names: str) -> None:
    """Raise UsageError when one of the options ``names`` is said that mean something only beside ``--needed``, which
    isn't."""
    context = click.get_current_context()
    said = [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if said and context.params[needed] is None:
        raise click.UsageError(f"--{said[0]} goes with --{needed}".replace("_", "-"))


def refuse_two_documents(as_json: bool, **targets: str | None) -> None:
    """Raise UsageError when the files of the options ``targets`` and the JSON would both go to standard output."""
    said = [f"--{name} -" for name, target in targets.items() if target == "-"] + ["--json"] * as_json
    if len(said) > 1:
        raise click.UsageError(f"{' and '.join(said)} would both go to standard output; name a file for one of them")
