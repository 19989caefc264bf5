"""Which problem do the words of a question describe: which machine, which weights, what may be recomputed?

The names are those of the command line's options, and so are the sentences that refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

from ...check.targets import TARGETS
from ...check.units import whole_blocks
from ...check.validate import unsaid_of_variants
from ...choices import DRAINED, OPTIMIZERS
from ...cost.roofline import with_exchanges, with_offloaded
from ...deadline import NEVER, Deadline
from ...errors import BadInput
from ...files.machines.platforms import grouped, platform_of_gpus, read_platform, reserving
from ...names import shown
from ...partition.granularity import AUTO, merging
from ...problem import MICROBATCHES_PER_DEVICE, SHARING, WEIGHTS, Chain, Platform, Policy, Problem, Weights, Zero
from ...problem.policy import CLIPPED_TOGETHER, NOT_PREDICTED
from ...units import gpu_counts, parse_time, parse_wait
from ..asked import Asked, defaults
from .profiles import Profile

RESERVE = "2GB"  # docs/reference/memory.md says for what, and from where that is known
USUAL_WEIGHTS: Weights = "2bw"  # where nobody says and nothing drains; plan and compare take what is less late
ANY = "any"  # batch
MOST_BYTES = 1000  # per parameter
DEFAULTS: Asked = defaults(Asked)


def problem_of(
    profile: Profile, *, segments: bool = True, each: bool = False, deadline: Deadline = NEVER, **asked: Unpack[Asked]
) -> tuple[Problem, list[str]]:
    """Return the problem of a profile and what is said of it, and the assumptions made where nothing is said.

    Sizes are texts such as ``"16GB"`` or bytes, rates ``"12GB/s"`` or bytes per second, times texts such as ``"5us"``.
    ``gpus`` are a number or ``"2x8"``, ``platform`` a file or a Platform instead. ``segments`` says whether segments of
    layers may be recomputed where ``checkpointing`` doesn't say what may. Without ``batch`` and ``accumulate`` an
    update is made of four microbatches a GPU; ``batch`` ``"any"`` leaves that to the planner. With ``each`` stages
    choose among the profile's variants. BadInput for what contradicts.
    """
    asked = {**DEFAULTS, **asked}
    accumulate, batch = asked.get("accumulate"), asked.get("batch")
    if batch == ANY and accumulate is not None:
        raise BadInput(f"--batch any leaves the batch open, --accumulate {accumulate} fixes it; leave out one of them")
    said = accumulate is not None or batch is not None
    batch = None if batch == ANY else batch
    if isinstance(batch, str):
        raise BadInput(f"--batch: '{shown(batch)}' is neither a number of samples nor any")
    where, assumptions = _machine(asked, profile.chain)
    every = _microbatches(accumulate, batch, profile.microbatch)
    if not said:
        every = max(1, MICROBATCHES_PER_DEVICE * len(where) // profile.chain.several)
        assumptions = [assumed_batch(f"{every * profile.microbatch} samples"), *assumptions]
    whole, where = on_groups(profile.chain, where, each)
    policy = _policy(asked, whole, every)
    own_times = where.devices[0].times is not None
    granularity = "node" if own_times and asked["granularity"] == AUTO else asked["granularity"]
    chain = _merged(whole, merging(granularity, asked.get("blocks")))
    if own_times and any(x.width > 1 or x.selective or x.offloaded for x in chain.choices):
        raise BadInput(f"GPUs have times of their own, which aren't known of layers in variant {chain.variant}")
    if chain is not whole and own_times:
        raise BadInput("--granularity merges layers of one profile; devices with their own need node")
    allowed = asked.get("checkpointing") or ("segments" if segments else "stages")
    replicas = not (asked.get("no_replicas") or chain.changed)
    problem = Problem(with_offloaded(chain), where, policy, replicas, allowed, deadline=deadline)
    more = [chain.worth]
    if chain.changed and not asked.get("no_replicas"):
        more.append(f"no replicas: {chain.one_of_each}")
    if granularity == AUTO and chain is not whole:
        more.append(f"whole blocks, {len(chain)} layers for {len(whole)}; --granularity node cuts inside blocks, too")
    return problem, [*assumptions, *profile.assumptions, *filter(None, more)]


def on_groups(chain: Chain, where: Platform, each: bool = False) -> tuple[Chain, Platform]:
    """Return a rank's chain, of no other degree, with what its group's exchanges take, and the platform of such groups;
    BadInput where there are none. With ``each`` the chain keeps those variants whose groups there are."""
    if each:
        fitting = (x for x in chain.variants if where.levels[0].count % x.tensor == 0 and x.width == x.tensor)
        layers = ((x, with_exchanges(chain.part(x), where).layers) for x in fitting)
        chain = replace(chain, variants=tuple(replace(x, layers=own) for x, own in layers))
        unsaid = unsaid_of_variants(chain, where)
        if unsaid is not None:
            raise BadInput(f"--tensor each: {unsaid}; --tensor any finds the best single degree")
        if not chain.variants:
            raise BadInput("--tensor each: the profile has degree 1 alone that servers have groups of")
        return chain, where
    chain = replace(chain, variants=()) if chain.variants else chain
    if chain.width == 1:
        return chain, where
    return with_exchanges(chain, where), grouped(where, chain, "--tensor")


def _merged(chain: Chain, merge: Callable[[Chain], Chain]) -> Chain:
    """Return the chain with layers merged, and so those of its variants; BadInput where others are."""
    if not chain.variants:
        return merge(chain)
    own, *others = map(merge, chain.choices)
    if any([x.name for x in other.layers] != [x.name for x in own.layers] for other in others):
        raise BadInput("--tensor each: --granularity would merge different layers for each degree; pass node or block")
    return replace(
        own, variants=tuple(replace(x, layers=y.layers) for x, y in zip(chain.variants, others, strict=True))
    )


def assumed_batch(what: str) -> str:
    """Return in words that this is the batch where nobody said one."""
    return f"batch {what} (assumed; --batch says another, --batch any the best of any)"


def _policy(asked: Asked, chain: Chain, every: int | None) -> Policy:
    """Return how weights are kept, with an update every so many microbatches; BadInput for what contradicts."""
    size = bytes_per_parameter(asked.get("bytes_per_parameter"))
    zero = asked["zero"]
    if isinstance(zero, str):
        raise BadInput("--zero any: only plan tries them all; pass 0, 1, 2 or 3")
    offload, sync, clip = (bool(asked.get(name)) for name in ("offload", "vertical_sync", "clipped"))
    if offload and size is not None:
        raise BadInput("--bytes-per-parameter and --offload exclude each other; pass one of them")
    option, exchanges = f"--zero {zero}", SHARING[zero].scattered > 0
    weights = asked.get("weights") or (DRAINED if exchanges else USUAL_WEIGHTS)
    if exchanges and not WEIGHTS[weights].drains:
        raise BadInput(f"{option}: replicas exchange parts in their passes with --weights flush alone")
    if (zero or offload) and not OPTIMIZERS[asked["optimizer"]].elementwise:
        raise BadInput(
            f"--optimizer {asked['optimizer']}: steps whole matrices, and {option if zero else '--offload'} parts"
        )
    if sync and WEIGHTS[weights].synced is None:
        raise BadInput("--vertical-sync goes with --weights stash and --weights latest")
    if zero and asked.get("no_replicas"):
        raise BadInput(f"{option} and --no-replicas contradict each other: there is nobody to share with")
    if zero and chain.changed:
        raise BadInput(f"{option}: {chain.one_of_each}")
    if zero and SHARING[zero].weights is None and size is not None and size[1] is None:
        raise BadInput(
            f"{option}: say how many of the {size[0]} --bytes-per-parameter are shared, such as 6+12 of "
            "Megatron-LM's 18"
        )
    if clip and not WEIGHTS[weights].together:
        raise BadInput("--clipped: " + CLIPPED_TOGETHER.format(weights=weights))
    precision = asked.get("precision") or chain.precision
    misfit = chain.misfit(precision)
    if misfit is not None:
        raise BadInput(misfit)
    policy = Policy(weights, every, asked["optimizer"], precision, offload, sync, clip=clip)
    policy = with_zero(policy, chain, zero)
    if asked.get("predicted"):
        if not policy.predictable:
            raise BadInput(f"--predicted: {NOT_PREDICTED}")
        policy = replace(policy, predict=True)
    return policy if size is None else holding(policy, *size)


def holding(policy: Policy, size: int, shared: int | None) -> Policy:
    """Return the policy that holds so many bytes per parameter, of which replicas that share the state share so many,
    and those that share weights all."""
    if not policy.zero:
        shared = None
    elif SHARING[policy.zero].weights is not None:
        shared = size
    return replace(policy, bytes_per_parameter=size, shared_bytes_per_parameter=shared)


def as_held(problem: Problem, target: str) -> tuple[Problem, list[str]]:
    """Return a problem that says no bytes per parameter with those that a target holds, and what is assumed so."""
    policy = problem.policy
    said = TARGETS[target].holds.get((policy.optimizer, policy.precision))
    size = bytes_per_parameter(said)
    if size is None or policy.bytes_per_parameter is not None or policy.offload:
        return problem, []
    words = f"bytes per parameter {said} as {TARGETS[target].what} has them; --bytes-per-parameter says others"
    return problem.with_policy(holding(policy, *size)), [words]


def with_zero(policy: Policy, chain: Chain, zero: Zero) -> Policy:
    """Return the policy whose replicas share what ``zero`` says; where they exchange it in passes, block by block."""
    if not SHARING[zero].scattered:
        return replace(policy, zero=zero)
    sums = chain.sums.parameters
    return replace(
        policy, zero=zero, bucket_parameters=max(int(sums[x.stop] - sums[x.start]) for x in whole_blocks(chain)) or 1
    )


def bytes_per_parameter(said: int | str | None) -> tuple[int, int | None] | None:
    """Return the bytes in all that ``18`` or ``6+12`` says, and those after the ``+``, which replicas may share."""
    if said is None:
        return None
    parts = str(said).split("+")
    if len(parts) > 2 or not all(x.isascii() and x.isdigit() and 1 <= int(x[:5]) <= MOST_BYTES for x in parts):
        raise BadInput(
            f"--bytes-per-parameter: '{shown(str(said), 40)}' isn't a number from 1 to {MOST_BYTES} such as 18, "
            "nor two, of which replicas may share the second, such as 6+12"
        )
    return sum(map(int, parts)), int(parts[1]) if len(parts) == 2 else None


def _machine(asked: Asked, chain: Chain) -> tuple[Platform, list[str]]:
    """Return the platform that is asked for, less what is reserved, and what was assumed."""
    said = {name: asked.get(name) for name in ("gpus", "mem", "gpu", "bandwidth", "network", "latency")}
    given, counts, assumptions = asked.get("platform"), said.pop("gpus"), list[str]()
    if given is not None:
        more = [f"--{name}" for name, value in {"gpus": counts, **said}.items() if value is not None]
        if more:
            raise BadInput(f"--platform already says what {', '.join(more)} would")
        where = given if isinstance(given, Platform) else read_platform(given, chain)
    elif counts is None:
        raise BadInput("say the platform: --gpus, and --mem or --gpu, or --platform FILE")
    else:
        counts = counts if isinstance(counts, tuple) else gpu_counts(str(counts))
        units = {"mem": "B", "bandwidth": "B/s", "network": "B/s"}
        texts = {name: f"{x}{units[name]}" if isinstance(x, int) else x for name, x in said.items()}
        where, assumptions = platform_of_gpus(counts, **texts, chain=chain)  # type: ignore[arg-type]  # all texts
    where = replace(where, blocking=where.blocking or asked.get("blocking_transfers", False))
    overhead = asked.get("overhead")
    if overhead is not None:
        where = replace(where, overhead_ns=parse_wait(overhead, "--overhead"))
    reserve = asked.get("reserve")
    if reserve == "auto":
        reserve = None if chain.of_cpu else RESERVE
    if isinstance(reserve, int):
        reserve = f"{reserve}B"
    return where if reserve is None else reserving(where, reserve, "--reserve"), assumptions


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
        f"--batch: {batch} samples aren't a multiple of the profile's microbatches of {each}; "
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
