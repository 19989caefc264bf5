"""Which problem do the words of a question describe: which machine, which weights, what may be recomputed?

The names are those of the command line's options, and so are the sentences that refuse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypedDict, Unpack, get_args

from ..choices import OPTIMIZERS, Optimizer
from ..deadline import NEVER, Deadline
from ..errors import BadInput
from ..files.machines import platform_of_gpus
from ..files.platforms import read_platform, reserving
from ..names import shown
from ..partition.merging import AUTO, merging
from ..problem import (
    CLIPPED_TOGETHER,
    MICROBATCHES_PER_DEVICE,
    WEIGHTS,
    Chain,
    Checkpointing,
    Platform,
    Policy,
    Precision,
    Problem,
    Weights,
    Zero,
)
from ..schedule.periodic.solvers import Solver
from ..units import gpu_counts, parse_time, parse_wait
from .profiles import Profile

RESERVE = "2GB"  # docs/memory.md says for what, and from where that is known
USUAL_WEIGHTS: Weights = "2bw"  # where nobody says and nothing drains; plan and compare take what is less late
ANY = "any"  # batch
Effort = Literal["quick", "normal", "high"]
Order = Literal["best", "given"]
CHOICES = {
    "weights": get_args(Weights),
    "optimizer": tuple(OPTIMIZERS),
    "precision": get_args(Precision),
    "checkpointing": get_args(Checkpointing),
    "zero": get_args(Zero),
    "effort": get_args(Effort),
    "order": get_args(Order),
    "solver": get_args(Solver),
}


class Asked(TypedDict, total=False):
    """What can be said of a problem, all of it optional: see :func:`problem_of`."""

    gpus: int | str | tuple[int, ...] | None
    gpu: str | None
    mem: int | str | None
    reserve: int | str | None
    bandwidth: int | str | None
    network: int | str | None
    latency: str | None
    overhead: str | None
    platform: str | Platform | None
    blocking_transfers: bool
    granularity: str
    blocks: str | None
    weights: Weights | None
    accumulate: int | None
    batch: int | str | None
    optimizer: Optimizer
    precision: Precision | None
    offload: bool | None
    bytes_per_parameter: int | str | None
    zero: Zero
    clipped: bool
    no_replicas: bool
    checkpointing: Checkpointing | None
    vertical_sync: bool


MOST_BYTES = 1000  # per parameter
DEFAULTS: Asked = {"granularity": AUTO, "optimizer": "sgd", "zero": 0}  # of the rest None, False


def problem_of(
    profile: Profile, *, segments: bool = True, deadline: Deadline = NEVER, **asked: Unpack[Asked]
) -> tuple[Problem, list[str]]:
    """Return the problem of a profile and what is said of it, and the assumptions made where nothing is said.

    Sizes are texts such as ``"16GB"`` or bytes, rates ``"12GB/s"`` or bytes per second, times texts such as ``"5us"``.
    ``gpus`` are a number or ``"2x8"``, ``platform`` a file or a Platform instead. ``segments`` says whether segments of
    layers may be recomputed where ``checkpointing`` doesn't say what may. Without ``batch`` and ``accumulate`` an
    update is made of four microbatches a GPU; ``batch`` ``"any"`` leaves that to the planner. BadInput for what
    contradicts.
    """
    unknown = asked.keys() - Asked.__annotations__
    if unknown:
        raise TypeError(
            f"got an unexpected keyword argument '{min(unknown)}'; there are {', '.join(Asked.__annotations__)}"
        )
    asked = {**DEFAULTS, **asked}
    refuse_others(**{name: asked.get(name) for name in CHOICES if name in Asked.__annotations__})
    accumulate, batch = asked.get("accumulate"), asked.get("batch")
    if batch == ANY and accumulate is not None:
        raise BadInput(f"--batch any leaves the batch open, --accumulate {accumulate} says it; leave out one of them")
    said = accumulate is not None or batch is not None
    batch = None if batch == ANY else batch
    if isinstance(batch, str):
        raise BadInput(f"--batch: '{shown(batch)}' is neither a number of samples nor any")
    for name, count in {"accumulate": accumulate, "batch": batch}.items():
        if count is not None and count < 1:
            raise BadInput(f"--{name}: {count} is not positive")
    whole = profile.chain
    where, assumptions = _machine(asked, whole)
    every = _microbatches(accumulate, batch, whole.microbatch)
    if not said:
        every = MICROBATCHES_PER_DEVICE * len(where)
        assumptions = [assumed_batch(f"{every * whole.microbatch} samples"), *assumptions]
    policy = _policy(asked, whole, every)
    own_times = where.devices[0].times is not None
    granularity = "node" if own_times and asked["granularity"] == AUTO else asked["granularity"]
    chain = merging(granularity, asked.get("blocks"))(whole)
    if chain is not whole and own_times:
        raise BadInput("--granularity merges layers of one profile; devices with their own need node")
    allowed = asked.get("checkpointing") or ("segments" if segments else "stages")
    problem = Problem(chain, where, policy, not asked.get("no_replicas"), allowed, deadline=deadline)
    more = [chain.worth]
    if granularity == AUTO and chain is not whole:
        more.append(f"whole blocks, {len(chain)} layers for {len(whole)}; --granularity node cuts inside blocks, too")
    return problem, [*assumptions, *profile.assumptions, *filter(None, more)]


def assumed_batch(what: str) -> str:
    """Return in words that this is the batch where nobody said one."""
    return f"batch {what} (assumed; --batch says another, --batch any the best of any)"


def _policy(asked: Asked, chain: Chain, every: int | None) -> Policy:
    """Return how weights are kept, with an update every so many microbatches; BadInput for what contradicts."""
    size, zero = bytes_per_parameter(asked.get("bytes_per_parameter")), asked["zero"]
    offload, sync, clip = (bool(asked.get(name)) for name in ("offload", "vertical_sync", "clipped"))
    if offload and size is not None:
        raise BadInput("--bytes-per-parameter says what is on the GPU, --offload what isn't; say one of them")
    weights = asked.get("weights") or USUAL_WEIGHTS
    if (zero or offload) and not OPTIMIZERS[asked["optimizer"]].elementwise:
        raise BadInput(
            f"--optimizer {asked['optimizer']}: steps whole matrices, and {'--zero 1' if zero else '--offload'} parts"
        )
    if sync and WEIGHTS[weights].synced is None:
        raise BadInput("--vertical-sync goes with --weights stash and --weights latest")
    if zero and asked.get("no_replicas"):
        raise BadInput("--zero 1 and --no-replicas contradict each other: there is nobody to share with")
    if zero and size is not None and size[1] is None:
        raise BadInput(
            f"--zero 1: say how many of the {size[0]} --bytes-per-parameter are shared, such as 6+12 of "
            "Megatron-LM's 18"
        )
    if clip and not WEIGHTS[weights].together:
        raise BadInput("--clipped: " + CLIPPED_TOGETHER.format(weights=weights))
    precision = asked.get("precision") or chain.precision
    misfit = chain.misfit(precision)
    if misfit is not None:
        raise BadInput(misfit)
    policy = Policy(weights, every, asked["optimizer"], precision, offload, sync, zero=zero, clip=clip)
    if size is None:
        return policy
    return replace(policy, bytes_per_parameter=size[0], shared_bytes_per_parameter=size[1] if zero else None)


def bytes_per_parameter(said: int | str | None) -> tuple[int, int | None] | None:
    """Return the bytes in all that ``18`` or ``6+12`` says, and those after the ``+``, which replicas may share."""
    if said is None:
        return None
    parts = str(said).split("+")
    if len(parts) > 2 or not all(x.isascii() and x.isdigit() and 1 <= int(x[:5]) <= MOST_BYTES for x in parts):
        raise BadInput(
            f"--bytes-per-parameter: '{shown(str(said), 40)}' is no number from 1 to {MOST_BYTES} such as 18, nor two, "
            "of which replicas may share the second, such as 6+12"
        )
    return sum(map(int, parts)), int(parts[1]) if len(parts) == 2 else None


def _machine(asked: Asked, chain: Chain) -> tuple[Platform, list[str]]:
    """Return the platform that is asked for, less what is reserved, and what was assumed."""
    where, assumptions = _platform(
        asked.get("platform"),
        chain,
        {
            "gpus": asked.get("gpus"),
            "mem": _size(asked.get("mem")),
            "gpu": asked.get("gpu"),
            "bandwidth": _rate(asked.get("bandwidth")),
            "network": _rate(asked.get("network")),
            "latency": asked.get("latency"),
        },
    )
    where = replace(where, blocking=where.blocking or asked.get("blocking_transfers", False))
    overhead = asked.get("overhead")
    if overhead is not None:
        where = replace(where, overhead_ns=parse_wait(overhead, "--overhead"))
    reserve = asked.get("reserve")
    if reserve == "auto":
        reserve = None if chain.of_cpu else RESERVE
    return where if reserve is None else reserving(where, str(_size(reserve)), "--reserve"), assumptions


def refuse_others(**said: object) -> None:
    """Raise BadInput for what is none of the values that an option of that name has, or None."""
    for name, value in said.items():
        if value is not None and value not in CHOICES[name]:
            among = ", ".join(map(str, CHOICES[name]))
            raise BadInput(f"--{name}: '{shown(str(value), 40)}' is not one of {among}")


def deadline_of(time_limit: str | Deadline | None) -> Deadline:
    """Return the deadline that a time such as ``"30s"`` sets from now on; one that is given already as it is."""
    if time_limit is None or isinstance(time_limit, Deadline):
        return time_limit or NEVER
    return Deadline.within(parse_time(time_limit, "--time-limit") / 1e9)


def whole_microbatches(batch: int, each: int) -> int:
    """Return how many microbatches of ``each`` samples a batch has; BadInput names the nearest that have whole ones."""
    if batch % each == 0:
        return batch // each
    nearest = [str(x) for x in (batch - batch % each, batch - batch % each + each) if x]
    raise BadInput(
        f"--batch: {batch} samples are no multiple of the profile's microbatches of {each}; "
        f"the nearest {'is' if len(nearest) == 1 else 'are'} {' and '.join(nearest)}"
    )


def _microbatches(accumulate: int | None, batch: int | None, each: int) -> int | None:
    """Return the microbatches per update that --accumulate or --batch says, with ``each`` so many samples."""
    if batch is None:
        return accumulate
    count = whole_microbatches(batch, each)
    if accumulate not in (None, count):
        raise BadInput(
            f"--batch {batch} is {count} microbatches of {each} samples an update, --accumulate says {accumulate}"
        )
    return count


def _platform(
    given: str | Platform | None, chain: Chain, said: dict[str, int | str | tuple[int, ...] | None]
) -> tuple[Platform, list[str]]:
    """Return the platform that is given, or in a file, or that of GPUs by name and number, and what was assumed."""
    if given is not None:
        more = [f"--{name}" for name, value in said.items() if value is not None]
        if more:
            raise BadInput(f"--platform already says what {', '.join(more)} would")
        return given if isinstance(given, Platform) else read_platform(given, chain), []
    counts = said.pop("gpus")
    if counts is None:
        raise BadInput("say the platform: --gpus, and --mem or --gpu, or --platform FILE")
    counts = counts if isinstance(counts, tuple) else gpu_counts(str(counts))
    return platform_of_gpus(counts, **said, chain=chain)  # type: ignore[arg-type]  # texts but for the counts


def _size(value: int | str | None) -> str | None:
    return f"{value}B" if isinstance(value, int) else value


def _rate(value: int | str | None) -> str | None:
    return f"{value}B/s" if isinstance(value, int) else value
