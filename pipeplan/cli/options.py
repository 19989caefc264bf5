"""Where do profile and platform come from, and what may a plan use? Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ..api.asked import LARGEST_SEED, Said, words
from ..deadline import Deadline
from ..errors import BadInput
from ..names import shown
from ..units import MOST_COUNT, gpu_counts, parse_counts, parse_time
from . import TRACEBACK, completed

Command = TypeVar("Command", bound=Callable[..., Any])
MOST = 10**9  # of anything that is counted, where nothing else says how many there may be


class Count(click.IntRange):
    """A whole number from ``least`` up to ``most``."""

    def __init__(self, least: int = 1, most: int = MOST) -> None:
        super().__init__(least, most)


class Gpus(click.ParamType[tuple[int, ...]]):
    """GPUs such as ``8``, or ``2x8``, ``most`` at most: see :func:`..units.gpu_counts`."""

    name = "N|NxN"

    def __init__(self, most: int = MOST_COUNT) -> None:
        self.most = most

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return how it is written, which click would put in capitals."""
        return self.name

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


class Batch(Count):
    """Samples of an update, or ``any``."""

    name = "N|any"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or ``any`` as it is."""
        return value if value == "any" else super().convert(value, param, ctx)


class Pipelines(Count):
    """A number of equal pipelines, None for ``auto``."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or None."""
        return None if value == "auto" else super().convert(value, param, ctx)


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


FILE = completed.Named(tuple, files=True)
SEED = Count(0, LARGEST_SEED)


def _with_traceback(context: click.Context, _: click.Parameter, asked: bool) -> None:
    context.meta[TRACEBACK] = asked


DEBUG = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_with_traceback, help="Print the traceback of a failure, too."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts instead of tables.")
PLAN = click.argument("plan", metavar="PLAN", type=FILE)


def _deadline(_: click.Context, option: click.Parameter, text: str | None) -> Deadline:
    from ..api.problems import deadline_of

    return deadline_of(text)


def time_limit(what: str) -> Callable[[Command], Command]:
    """Return the option --time-limit, the ``deadline`` of a command, with what it stops; it counts from the start."""
    return click.option(
        "--time-limit", "deadline", metavar="TIME", callback=_deadline, default=None, is_eager=True, help=what
    )


GIVE_UP = time_limit("Give up after this time, such as 30s.")

PROFILE = click.argument("profile", metavar="PROFILE", type=completed.PROFILE)
COMPLETED: dict[str, click.ParamType[Any]] = {"gpu": completed.GPU, "algorithms": completed.ALGORITHMS_LIST}
TYPES: dict[str, Callable[[Said], click.ParamType[Any]]] = {  # of values, by their units
    "N|NxN": lambda _: Gpus(),
    "N|any": lambda _: Batch(),
    "auto|N": lambda said: Pipelines(int(said.word.least), int(said.word.most)),
    "N,..": lambda _: Counts(),
    "PERCENT": lambda _: Share(),
    "FILE": lambda _: FILE,
}


def type_of(said: Said) -> click.ParamType[Any]:
    """Return the type of a word's values on the command line; a text where Python takes what the text says."""
    if said.word.unit in TYPES:
        return TYPES[said.word.unit](said)
    if int in said.types and str not in said.types:
        return Count(int(said.word.least), int(said.word.most))
    if said.choices and isinstance(said.choices[0], int):
        return Count(int(said.word.least), int(said.word.most))
    if said.choices:
        return click.Choice([str(value) for value in said.choices])
    return COMPLETED.get(said.keyword, click.STRING)


def option_of(said: Said, **other: Any) -> Callable[[Command], Command]:
    """Return the option of a word; ``other`` are click's own words for it, in place of what follows from it."""
    name, word = said.word.named(said.keyword), said.word
    if bool in said.types:
        both = word.default is False or type(None) in said.types
        spelled = f"--{name}/--no-{name}" if both else f"--{name}"
        about: dict[str, Any] = {"is_flag": True, "default": said.default, "show_default": word.default is False}
    else:
        spelled = f"--{name}"
        kind = type_of(said)
        about = {"type": kind, "show_default": word.default is not None}
        if word.default is not None:  # which click tells from no default
            about["default"] = word.default
        if not said.choices:
            about["metavar"] = word.unit or None
        if word.default == ():
            about = {"multiple": True, "metavar": word.unit, "type": kind}
    return click.option(spelled, said.keyword, **{**about, "help": word.help, **other})


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
    knobs = {x.word.named(name): x for name, x in said.items() if x.word.knob}
    told = "; ".join(
        f"{name}={_values(x)}: {x.word.help[:1].lower()}{x.word.help[1:].rstrip('.')}" for name, x in knobs.items()
    )
    more = "; or an option of --algorithm, which pipeplan list algorithms has" if "algorithm" in said else ""
    return click.option(
        "-O",
        "--option",
        "knobs",
        multiple=True,
        metavar="NAME=VALUE",
        type=completed.Named(partial(completed.knobs, tuple(knobs))),
        callback=partial(_parsed_knobs, knobs),
        help=f"What tunes the search, repeatable. {told}{more}.",
    )


def _values(said: Said) -> str:
    return "|".join(map(str, said.choices)) if said.choices else said.word.unit


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
        raise BadInput(f"-O {said.word.named(said.keyword)}: {error.message}") from error


class Share(click.ParamType[float]):
    """A share such as ``5%``, as a fraction of one."""

    name = "PERCENT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return ``0.05`` for ``5%``."""
        if isinstance(value, float):
            return value
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


def refuse_without(needed: str, *names: str) -> None:
    """Raise UsageError when one of the options ``names`` is said that mean something only beside ``--needed``, which
    isn't."""
    context = click.get_current_context()
    said = [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if said and context.params[needed] is None:
        raise click.UsageError(f"--{said[0]} goes with --{needed}")


def refuse_two_documents(as_json: bool, **targets: str | None) -> None:
    """Raise UsageError when the files of the options ``targets`` and the JSON would both go to standard output."""
    said = [f"--{name} -" for name, target in targets.items() if target == "-"] + ["--json"] * as_json
    if len(said) > 1:
        raise click.UsageError(f"{' and '.join(said)} would both go to standard output; name a file for one of them")
