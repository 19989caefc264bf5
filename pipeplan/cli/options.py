"""Where do profile and platform come from, and what may a plan use? Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import isfinite
from typing import Any, TypeVar

import click

from ..deadline import NEVER, Deadline
from ..errors import BadInput
from ..files.machines import DEFAULT_BANDWIDTH, DEFAULT_NETWORK, MOST_COUNT, gpu_counts, platform_of_gpus
from ..problem import Chain, Checkpointing, Platform, Policy, Problem
from ..units import parse_time
from . import TRACEBACK

Command = TypeVar("Command", bound=Callable[..., Any])
RESERVE = "2GB"  # docs/network.md says for what, and from where that is known
MOST = 10**9  # of anything that is counted, where nothing else says how many there may be
LARGEST_SEED = 2**32 - 1  # what every generator of random numbers takes


class Count(click.IntRange):
    """A whole number from ``least`` up to ``most``."""

    def __init__(self, least: int = 1, most: int = MOST) -> None:
        super().__init__(least, most)


class Gpus(click.ParamType[tuple[int, ...]]):
    """GPUs such as ``8``, or ``2x8``: see :func:`..files.machines.gpu_counts`."""

    name = "N|NxN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the counts; BadInput for what is none."""
        return value if isinstance(value, tuple) else gpu_counts(str(value), _name(param))


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
PLAN = click.argument("plan", metavar="PLAN")
EFFORT = click.option(
    "--effort",
    type=click.Choice(["quick", "normal", "high"]),
    default="normal",
    show_default=True,
    help="auto: how many candidates to try beyond the exact contiguous plan; grids: how many local moves.",
)
SOLVER = click.option(
    "--solver",
    type=click.Choice(["cbc", "highs"]),
    default="cbc",
    show_default=True,
    help="Of the integer program that schedules non-contiguous stages; highs needs highspy.",
)


def deadline_of(_: click.Context, option: click.Parameter, text: str | None) -> Deadline:
    """Return the deadline that a --time-limit sets from when it is read, as a click callback."""
    return NEVER if text is None else Deadline.within(parse_time(text, option.opts[0]) / 1e9)


def time_limit(what: str) -> Callable[[Command], Command]:
    """Return the option --time-limit, the ``deadline`` of a command, with what it stops; it counts from the start."""
    return click.option(
        "--time-limit", "deadline", metavar="TIME", callback=deadline_of, default=None, is_eager=True, help=what
    )


GIVE_UP = time_limit("Give up after this long, such as 30s.")

PROBLEM: dict[str, Callable[[Any], Any]] = {  # the options that describe a planning problem, as --help lists them
    "profile": click.argument("profile", metavar="PROFILE"),
    "gpus": click.option("--gpus", type=Gpus(), help="Number of equal GPUs, or 2x8: two servers of eight."),
    "gpu": click.option(
        "--gpu",
        metavar="NAME",
        help="What they are, such as h100: memory and links where --mem and --bandwidth don't say them; pipeplan list "
        "has the names.  [default: without --mem what the profile is of]",
    ),
    "mem": click.option("--mem", metavar="SIZE", help="Usable memory of each GPU, such as 16GB, 16G or 16GiB."),
    "reserve": click.option(
        "--reserve",
        metavar="SIZE|auto",
        help=f"Memory of each GPU that is not for plans: CUDA's, NCCL's, fragments. auto: {RESERVE}, or nothing for a "
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
    "platform": click.option("--platform", metavar="FILE", help="Platform JSON instead of the options above."),
    "blocking_transfers": click.option(
        "--blocking-transfers", is_flag=True, help="Transfers keep the GPUs at both their ends from computing."
    ),
    "granularity": click.option(
        "--granularity",
        default="node",
        show_default=True,
        metavar="node|block|articulation|N%",
        help="Cut after any layer, between items of lists of modules, where one tensor is live, or between neighbours "
        "merged up to that share.",
    ),
    "blocks": click.option(
        "--blocks",
        metavar="NAMES",
        help="The lists whose items are blocks, such as model.layers or stages.*.blocks; means --granularity block.  "
        "[default: the outermost ones]",
    ),
    "weights": click.option(
        "--weights",
        type=click.Choice(["2bw", "stash", "flush", "latest"]),
        default="2bw",
        show_default=True,
        help="How weight versions are kept.",
    ),
    "accumulate": click.option(
        "--accumulate",
        type=Count(),
        help="Microbatches per update.  [default: 2bw the fewest within 0.1% of the best period of any number; "
        "flush 4 per GPU; latest the best up to GPUs - 1; stash 1]",
    ),
    "batch": click.option(
        "--batch", type=Count(), help="Samples per update, instead: a multiple of the profile's microbatch."
    ),
    "optimizer": click.option(
        "--optimizer",
        type=click.Choice(["sgd", "momentum", "adam"]),
        default="sgd",
        show_default=True,
        help="Its state takes 0, 1 or 2 times the fp32 weights.",
    ),
    "precision": click.option("--precision", type=click.Choice(["fp32", "mixed"]), default="fp32", show_default=True),
    "offload": click.option(
        "--offload/--no-offload",
        default=None,
        help="Keep optimizer state in host memory.  [default: no; in grids of pipelines, where that is faster]",
    ),
    "bytes_per_parameter": click.option(
        "--bytes-per-parameter",
        type=Count(1, 1000),
        help="Weights, gradient and optimizer state as another engine holds them, such as 18.  "
        "[default: by --optimizer and --precision]",
    ),
    "zero": click.option(
        "--zero",
        type=click.IntRange(0, 1),
        default=0,
        show_default=True,
        help="1: the replicas of a stage share its optimizer state and steps (ZeRO-1).",
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


def read_problem(
    profile: str,
    gpus: tuple[int, ...] | None,
    gpu: str | None,
    mem: str | None,
    reserve: str | None,
    bandwidth: str | None,
    network: str | None,
    latency: str | None,
    platform: str | None,
    blocking_transfers: bool,
    granularity: str,
    blocks: str | None,
    optimizer: str,
    precision: str,
    offload: bool | None,
    bytes_per_parameter: int | None,
    zero: int,
    checkpointing: Checkpointing | None,
    no_checkpointing: bool,
    *,
    weights: str,
    accumulate: int | None = None,
    batch: int | None = None,
    no_replicas: bool = False,
    vertical_sync: bool = False,
    segments: bool = True,
    deadline: Deadline = NEVER,
) -> tuple[Problem, list[str]]:
    """Return the problem that the shared options describe, and the assumptions made where nothing was said.

    ``segments`` says whether segments of layers may be recomputed where the user didn't say what may.
    """
    from ..files.platforms import reserving
    from ..files.profiles import read_profile

    if no_checkpointing and checkpointing not in (None, "none"):
        raise click.UsageError(f"--no-checkpointing and --checkpointing {checkpointing} contradict each other")
    if offload and bytes_per_parameter is not None:
        raise click.UsageError("--bytes-per-parameter says what is on the GPU, --offload what isn't; say one of them")
    if vertical_sync and weights not in ("stash", "latest"):
        raise click.UsageError("--vertical-sync goes with --weights stash and --weights latest")
    allowed: Checkpointing = "none" if no_checkpointing else checkpointing or ("segments" if segments else "stages")
    merge, whole = merging(granularity, blocks), read_profile(profile)
    where, assumptions = _platform(
        platform, whole, gpus=gpus, mem=mem, gpu=gpu, bandwidth=bandwidth, network=network, latency=latency
    )
    where = replace(where, blocking=where.blocking or blocking_transfers)
    if reserve == "auto":
        reserve = None if whole.of_cpu else RESERVE
    if reserve is not None:
        where = reserving(where, reserve, "--reserve")
    chain = merge(whole)
    if chain is not whole and where.devices[0].times is not None:
        raise click.UsageError("--granularity merges layers of one profile; devices with their own need node")
    if zero and no_replicas:
        raise click.UsageError("--zero 1 and --no-replicas contradict each other: there is nobody to share with")
    if zero and bytes_per_parameter is not None:
        raise click.UsageError("--zero 1 and --bytes-per-parameter contradict each other: the bytes are one GPU's")
    every = _microbatches(accumulate, batch, chain.microbatch)
    policy = Policy(weights, every, optimizer, precision, bool(offload), vertical_sync, zero=zero)  # type: ignore[arg-type]  # click checked them
    if bytes_per_parameter is not None:
        policy = replace(policy, bytes_per_parameter=bytes_per_parameter)
    if chain.microbatch == 1 and not profile.endswith(".json"):
        assumptions.append("the profile doesn't say its microbatch size; throughput counts microbatches")
    return Problem(chain, where, policy, not no_replicas, allowed, deadline=deadline), assumptions


def _microbatches(accumulate: int | None, batch: int | None, each: int) -> int | None:
    """Return the microbatches per update that --accumulate or --batch says, with ``each`` so many samples."""
    if batch is None:
        return accumulate
    count = whole_microbatches(batch, each)
    if accumulate not in (None, count):
        raise click.UsageError(
            f"--batch {batch} is {count} microbatches of {each} samples an update, --accumulate says {accumulate}"
        )
    return count


def whole_microbatches(batch: int, each: int) -> int:
    """Return how many microbatches of ``each`` samples a batch has; BadInput names the nearest that have whole ones."""
    if batch % each == 0:
        return batch // each
    nearest = [str(x) for x in (batch - batch % each, batch - batch % each + each) if x]
    raise BadInput(
        f"--batch: {batch} samples are no multiple of the profile's microbatches of {each}; "
        f"the nearest {'is' if len(nearest) == 1 else 'are'} {' and '.join(nearest)}"
    )


def _platform(file: str | None, chain: Chain, **given: str | tuple[int, ...] | None) -> tuple[Platform, list[str]]:
    """Return the platform in a file, or that of GPUs by name and number, and what was assumed."""
    from ..files.platforms import read_platform

    if file is not None:
        said = [f"--{name}" for name, value in given.items() if value is not None]
        if said:
            raise click.UsageError(f"--platform already says what {', '.join(said)} would")
        return read_platform(file, chain), []
    counts = given.pop("gpus")
    if counts is None:
        raise click.UsageError("say the platform: --gpus, and --mem or --gpu, or --platform FILE")
    return platform_of_gpus(counts, **given, chain=chain)  # type: ignore[arg-type]  # texts but for the counts


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


def refuse_unknown(names: Iterable[str], *others: str) -> None:
    """Raise UsageError unless all ``names`` of --schedule are schedules or among ``others``."""
    from ..schedule.registry import schedules

    known = [*schedules(), *others]
    for name in names:
        if name not in known:
            raise click.UsageError(f"--schedule: {name!r} is not one of {', '.join(known)}")


def refuse_two_documents(as_json: bool, **targets: str | None) -> None:
    """Raise UsageError when the files of the options ``targets`` and the JSON would both go to standard output."""
    said = [f"--{name} -" for name, target in targets.items() if target == "-"] + ["--json"] * as_json
    if len(said) > 1:
        raise click.UsageError(f"{' and '.join(said)} would both go to standard output; name a file for one of them")


def parse_counts(text: str, where: str) -> list[int]:
    """Return the counts that ``2,4-6`` says, in that order; BadInput names ``where``."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,8})(?:-([0-9]{1,8}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if first < 1 or last > MOST_COUNT:
            raise BadInput(f"{where}: {part[:40]!r} is neither a count nor a range such as 2-8, up to {MOST_COUNT}")
        counts += range(first, last + 1)
    if not counts:
        raise BadInput(f"{where}: {text!r} names no count")
    return counts


def merging(text: str, blocks: str | None = None) -> Callable[[Chain], Chain]:
    """Return the function on chains that ``--granularity``, or ``--blocks``, names."""

    def same(chain: Chain) -> Chain:
        return chain

    if text == "node" and blocks is None:
        return same
    from ..partition.granularity import merge_articulation, merge_blocks, merge_share

    if text == "block" or (blocks is not None and text == "node"):
        lists = [name for name in (blocks or "").split(",") if name]
        return lambda chain: merge_blocks(chain, lists)
    if blocks is not None:
        raise click.UsageError(f"--blocks means --granularity block, not {text[:40]}")
    if text == "articulation":
        return merge_articulation
    match = re.fullmatch(r"([0-9]{1,60}(?:\.[0-9]{1,60})?)%", text)
    if match is None or not 0 < Fraction(match[1]) < 100:
        raise click.BadParameter(
            f"{text[:40]!r} is not node, block, articulation or a share such as 1%", param_hint="--granularity"
        )
    share = Fraction(match[1]) / 100
    return lambda chain: merge_share(chain, share)
