"""Where do profile and platform come from, and what may a plan use? Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Any, TypeVar, get_args

import click
from click.core import ParameterSource

from ..choices import DEFAULT_BANDWIDTH, DEFAULT_NETWORK, OPTIMIZERS, Weights
from ..deadline import Deadline
from ..errors import BadInput
from ..names import shown
from ..units import MOST_COUNT, gpu_counts, parse_time
from . import TRACEBACK, completed

Command = TypeVar("Command", bound=Callable[..., Any])
MOST = 10**9  # of anything that is counted, where nothing else says how many there may be
MOST_RUNS = 10**4  # with drawn durations
LARGEST_SEED = 2**32 - 1  # what every generator of random numbers takes


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
            raise BadInput(f"{_name(param)}: {value!r} is no time to wait")
        return ns


def _name(option: click.Parameter | None) -> str:
    return "value" if option is None else option.opts[0]


FILE = completed.Named(tuple, files=True)
SEED = Count(0, LARGEST_SEED)


def _with_traceback(context: click.Context, _: click.Parameter, asked: bool) -> None:
    context.meta[TRACEBACK] = asked


DEBUG = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_with_traceback,
    help="Print the traceback of a failure, too.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts instead of tables.")
PLAN = click.argument("plan", metavar="PLAN", type=FILE)
KNOBS = click.option(
    "-O",
    "--option",
    "knobs",
    multiple=True,
    metavar="KEY=VALUE",
    type=completed.KNOB,
    help="Of --algorithm, repeatable; pipeplan list algorithms has them, such as -O mode=released.",
)
EFFORT = click.option(
    "--effort",
    type=click.Choice(["quick", "normal", "high"]),
    help="auto: how many candidates to try beyond the exact contiguous plan, high after all of normal; grids: how many "
    "local moves.  "
    "[default: normal]",
)
SOLVER = click.option(
    "--solver",
    type=click.Choice(["cbc", "highs"]),
    default="cbc",
    show_default=True,
    help="Of the integer program that schedules non-contiguous stages; highs needs highspy.",
)

JOBS = click.option(
    "--jobs",
    type=Count(most=256),
    default=1,
    show_default=True,
    help="Search in so many processes where one search needn't wait for another; results are the same.",
)


def _deadline(_: click.Context, option: click.Parameter, text: str | None) -> Deadline:
    from ..api.asked import deadline_of

    return deadline_of(text)


def time_limit(what: str) -> Callable[[Command], Command]:
    """Return the option --time-limit, the ``deadline`` of a command, with what it stops; it counts from the start."""
    return click.option(
        "--time-limit", "deadline", metavar="TIME", callback=_deadline, default=None, is_eager=True, help=what
    )


GIVE_UP = time_limit("Give up after this long, such as 30s.")

PROBLEM: dict[str, Callable[[Any], Any]] = {  # the options that describe a planning problem, as --help lists them
    "profile": click.argument("profile", metavar="PROFILE", type=completed.PROFILE),
    "gpus": click.option("--gpus", type=Gpus(), help="Number of equal GPUs, or 2x8: two servers of eight."),
    "gpu": click.option(
        "--gpu",
        metavar="NAME",
        type=completed.GPU,
        help="What they are, such as h100: memory and links where --mem and --bandwidth don't say them; pipeplan list "
        "has the names.  [default: without --mem what the profile is of]",
    ),
    "mem": click.option("--mem", metavar="SIZE", help="Usable memory of each GPU, such as 16GB, 16G or 16GiB."),
    "reserve": click.option(
        "--reserve",
        metavar="SIZE|auto",
        help="Memory of each GPU that is not for plans: CUDA's, NCCL's, fragments. auto: 2GB, or nothing for a "
        "profile of a CPU.  [default: nothing]",
    ),
    "bandwidth": click.option(
        "--bandwidth",
        metavar="RATE",
        help="Between any two GPUs of a server, per direction, such as 12GB/s or 10Gbps.  [default: that of --gpu; "
        f"{DEFAULT_BANDWIDTH}]",
    ),
    "network": click.option(
        "--network",
        metavar="RATE",
        help=f"With --gpus 2x8: between two GPUs of two servers, per direction.  [default: {DEFAULT_NETWORK}]",
    ),
    "latency": click.option("--latency", metavar="TIME", help="Of each transfer, such as 5us.  [default: 0]"),
    "overhead": click.option(
        "--overhead",
        metavar="TIME",
        help="What each message takes the GPUs at both its ends, which send and receive it, beside that.  [default: 0]",
    ),
    "platform": click.option("--platform", metavar="FILE", help="Platform JSON instead of the options above."),
    "blocking_transfers": click.option(
        "--blocking-transfers", is_flag=True, help="Transfers keep the GPUs at both their ends from computing."
    ),
    "granularity": click.option(
        "--granularity",
        default="auto",
        show_default=True,
        metavar="auto|node|block|articulation|N%",
        help="auto: block where most layers belong to blocks that are alike, else node. "
        "The others: cut after any layer, between items of lists of modules, where one tensor is live, or between "
        "neighbours merged up to that share.",
    ),
    "blocks": click.option(
        "--blocks",
        metavar="NAMES",
        help="The lists whose items are blocks, such as model.layers or stages.*.blocks; means --granularity block.  "
        "[default: the outermost ones]",
    ),
    "weights": click.option(
        "--weights",
        type=click.Choice(get_args(Weights)),
        help="How weight versions are kept.  [default: stash or 2bw, the one whose gradients are less late if it takes "
        "at most 2% longer; flush in grids, with --for and with a --schedule that drains]",
    ),
    "accumulate": click.option(
        "--accumulate",
        type=Count(),
        help="Microbatches per update.  [default: 4 per GPU]",
    ),
    "batch": click.option(
        "--batch",
        type=Batch(),
        help="Samples per update, instead: a multiple of the profile's microbatch. any: 2bw the fewest microbatches "
        "within 0.1% of the best period of any number; flush 4 per GPU; latest the best up to GPUs - 1; stash 1.",
    ),
    "optimizer": click.option(
        "--optimizer",
        type=click.Choice(list(OPTIMIZERS)),
        default="sgd",
        show_default=True,
        help=f"Its state takes {', '.join(row.share for row in OPTIMIZERS.values())} times the fp32 weights.",
    ),
    "precision": click.option(
        "--precision", type=click.Choice(["fp32", "mixed", "autocast"]), help="[default: fp32, or autocast as profiled]"
    ),
    "offload": click.option(
        "--offload/--no-offload",
        default=None,
        help="Keep optimizer state in host memory.  [default: no; in grids of pipelines, where that is faster]",
    ),
    "bytes_per_parameter": click.option(
        "--bytes-per-parameter",
        metavar="N|N+SHARED",
        help="Weights, gradient and optimizer state as another engine holds them, such as 18, or 6+12 to share the 12 "
        "with --zero 1.  [default: by --optimizer and --precision]",
    ),
    "zero": click.option(
        "--zero",
        type=click.IntRange(0, 1),
        default=0,
        show_default=True,
        help="1: the replicas of a stage share its optimizer state and steps (ZeRO-1).",
    ),
    "clipped": click.option(
        "--clipped",
        is_flag=True,
        help="For run --clip-norm: updates wait for the norm of all gradients, with weights flush and 2bw.",
    ),
    "no_replicas": click.option("--no-replicas", is_flag=True, help="One GPU per stage."),
    "checkpointing": click.option(
        "--checkpointing",
        type=click.Choice(["none", "stages", "segments"]),
        help="What may be recomputed: nothing, whole stages, or any segments of layers.  "
        "[default: segments for auto, else stages]",
    ),
    "no_checkpointing": click.option("--no-checkpointing", is_flag=True, help="The same as --checkpointing none."),
}


def problem_options(command: Command, without: Sequence[str] = (), **other: Callable[[Any], Any]) -> Command:
    """Add the options of :data:`PROBLEM` but those ``without``; ``other`` ones replace theirs."""
    for name, option in reversed(PROBLEM.items()):
        if name not in without:
            command = other.get(name, option)(command)
    return command


def knobs_of(texts: Iterable[str], **old: Any) -> dict[str, Any]:
    """Return what -O says by key, with what ``old`` spellings of the same say."""
    found = {name: value for name, value in old.items() if value is not None}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.UsageError(f"-O: '{shown(text, 40)}' is not of the form KEY=VALUE")
        found[name] = {"true": True, "false": False}.get(value, value)
    return found


def asked_of(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of :data:`PROBLEM` out of a command's; return them as :class:`..api.asked.Asked` has them."""
    asked = {name: options.pop(name) for name in PROBLEM if name in options and name != "profile"}
    if asked.pop("no_checkpointing", False):
        if asked.get("checkpointing") not in (None, "none"):
            raise click.UsageError(
                f"--no-checkpointing and --checkpointing {asked['checkpointing']} contradict each other"
            )
        asked["checkpointing"] = "none"
    return asked


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


GAP = click.option(
    "--gap",
    type=Share(),
    metavar="PERCENT",
    help="auto: stop at a plan this near to what no plan can beat, such as 1%; 0% to try all.  [default: 0.1%]",
)


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
