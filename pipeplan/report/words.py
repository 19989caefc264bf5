"""What is there to say of a plan beside its stages? How good it is, what it was chosen from, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..check.bounds import bounded
from ..check.evaluate import Evaluation, evaluate, gap
from ..check.lateness import plan_delays
from ..check.targets import TARGETS
from ..cost.saved import for_weights
from ..names import SENTENCE, shown
from ..partition.contiguous.claims import coarseness
from ..partition.devices.orders import Orders
from ..plan import Bound, Plan
from ..problem import Chain, Level, Platform, Policy
from ..schedule.weight_versions import Delay, average_delay
from ..units import format_bandwidth, format_bytes, format_ns

MOST_MEANS = 12  # stages of which a line has a figure each


def bound_class(bound: Bound) -> str:
    """Return the class of plans that a bound holds for, in words, and whether it does however rare updates are."""
    if bound.allocation in TARGETS:
        return f"{bound.allocation}{f' under {bound.schedule}' if bound.schedule else ''}, this interval"
    extras = ["replicas"] if bound.replicas else []
    extras += [] if bound.checkpointing == "none" else [f"checkpointing of {bound.checkpointing}"]
    allowed = f" with {' and '.join(extras)}" if extras else ""
    under = f" under {bound.schedule}" if bound.schedule else ""
    return f"{bound.allocation}{under}{allowed}, {'any' if bound.any_interval else 'this'} interval"


def distance(bound: Bound, period_ns: int) -> str:
    """Return how far a period is above a bound, in words; of a bound that was only claimed, that nobody checked it."""
    return "claimed, not checked" if bound.claimed else f"gap {gap(period_ns, bound):.2%}"


def bound_figures(plan: Plan) -> list[dict[str, Any]]:
    """Return a valid plan's bounds for scripts: class, whether derived here, and if so, how far the plan is above."""
    period = evaluate(plan).period_ns
    return [
        {
            "class": bound.allocation,
            "replicas": bound.replicas,
            "checkpointing": bound.checkpointing,
            "any_interval": bound.any_interval,
            "schedule": bound.schedule,
            "period_ns": bound.period_ns,
            "checked": not bound.claimed,
            "gap": None if bound.claimed else gap(period, bound),
        }
        for bound in plan.lower_bounds
    ]


def orders_sentence(plan: Plan, bound: Bound) -> str | None:
    """Return in which orders stages were given unequal devices for ``bound``, in words; None where there is but one."""
    searched = plan.provenance.algorithm in ("auto", "contiguous") and not plan.policy.drains
    if bound.allocation != "contiguous" or not searched:
        return None
    return Orders.of(bounded(plan, bound)).sentence()


def coarse_sentence(plan: Plan) -> str | None:
    """Return what a search among very many GPUs or cuts has left out, in words."""
    searched = plan.provenance.algorithm in ("auto", "contiguous") and not plan.policy.drains and plan.lower_bounds
    return coarseness(bounded(plan, plan.lower_bounds[0])) if searched else None


def layer_order(plan: Plan) -> str | None:
    """Return in which order the layers of a DAG stand, and what that was chosen from, in words; None for the own."""
    about = plan.provenance.options.get("layer_order")
    whose = "in the profile's order" if plan.chain.order is None else "in another order than the model's own"
    if isinstance(about, dict) and isinstance(about.get("orders"), int) and about["orders"] > 1:
        return f"{whose}, the best of {about['orders']} that were tried"
    return None if plan.chain.order is None else whose


def idle_devices(plan: Plan) -> list[int]:
    """Return the GPUs of the platform on which a plan has no stage."""
    idle = sorted(set(range(len(plan.platform))) - {d for stage in plan.allocation.stages for d in stage.members})
    return [gpu for device in idle for gpu in plan.platform.gpus(device)]


def throughput(plan: Plan, result: Evaluation) -> str:
    """Return microbatches and samples per second."""
    rate = 1e9 / result.period_ns
    text = f"{rate:.2f} microbatches/s"
    return text if plan.chain.microbatch == 1 else f"{text} = {rate * plan.chain.microbatch:.1f} samples/s"


def machine(platform: Platform) -> str:
    """Return what the GPUs are and how they are joined, in words: ``GPUs of 16.00 GB, joined 4 at 12.0 GB/s``."""
    memories = sorted({device.memory_bytes + platform.reserved_bytes for device in platform.devices})
    memory = format_bytes(memories[0]) + (f" to {format_bytes(memories[-1])}" if len(memories) > 1 else "")
    memory += f" less {format_bytes(platform.reserved_bytes)} reserved" if platform.reserved_bytes else ""
    how = ", transfers block" if platform.blocking else ""
    if platform.overhead_ns:
        how += f", messages take {format_ns(platform.overhead_ns)} at each end"
    return f"GPUs of {memory}, joined {' / '.join(map(_joint, platform.levels))}{how}"


def _joint(level: Level) -> str:
    text = f"{level.count} at {format_bandwidth(level.bandwidth)}"
    return text if level.links is None else f"{text} by {level.links} link{'s' if level.links > 1 else ''} each"


def alone_ns(chain: Chain) -> int:
    """Return the time of one microbatch's forward and backward on one GPU, if that had the memory."""
    return int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])


def assumed(assumptions: Sequence[str]) -> list[str]:
    """Return what was assumed in lines; some say so themselves."""
    return [text if "(assumed;" in text else f"assumed: {text}" for text in assumptions]


def data_parallelism(plan: Plan, result: Evaluation) -> list[str]:
    """Return that a plan is plain data parallelism, and what a pipeline would take, or of another what none would take,
    in a line; nothing where that is much longer."""
    if not plan.allocation.data_parallel:
        return _unpipelined(plan, result)
    options, count = plan.provenance.options, plan.allocation.stages[0].replicas
    found = options.get("pipeline_ns")
    if "pipeline_ns" not in options:
        other = ""
    elif isinstance(found, int) and found > 0:
        other = f"; the best pipeline of single GPUs takes {format_ns(found)} ({longer(found, result)})"
    else:
        other = "; no pipeline of single GPUs fits"
    return [f"best        plain data parallelism, one stage on {count} GPUs{other}"]


def _unpipelined(plan: Plan, result: Evaluation) -> list[str]:
    found, count = _ns(plan.provenance.options, "unpipelined_ns"), len(plan.platform)
    if found is None:
        return []
    batch, own = (format_ns(x * plan.interval) for x in (found, result.period_ns))
    return [
        f"{'better' if found <= result.period_ns else 'or':<12}don't pipeline: ZeRO-3 on {count} GPUs takes {batch} an "
        f"update, this pipeline {own}; --zero 3 --algorithm data-parallel plans it"
    ]


def sharing(plan: Plan) -> str | None:
    """Return what plans take whose replicas share more or less; None where nobody tried."""
    found = plan.provenance.options.get("zero")
    if not isinstance(found, dict):
        return None
    taken = {shown(str(k)): format_ns(v) if type(v) is int and v > 0 else "no plan" for k, v in found.items()}
    return f"--zero {plan.policy.zero}; {', '.join(f'{k}: {v}' for k, v in taken.items())}"


def mean_delay(found: Sequence[Delay]) -> str | None:
    """Return by how many updates gradients of stages are late, on average and at most; None where none is."""
    most = max((x.most for x in found), default=0)
    return f"{average_delay(found):.2f} updates on average, {most} at most" if most else None


def late_gradients(plan: Plan, result: Evaluation) -> str | None:
    """Return by how many updates gradients are late, on average and at most, by stages; None where none is."""
    found = plan_delays(plan, result.graph)
    text = mean_delay(found)
    if text is None:
        return None
    means = [x.mean for x in found]
    several = len(set(means)) > 1
    first = f"{means[0]:.2f} in stage 0, {means[-1]:.2f} in the last" if len(means) > MOST_MEANS else ""
    by_stage = f"; by stage {first or ' '.join(f'{x:.2f}' for x in means)}" if several else ""
    return f"gradients by {text}{by_stage}"


def waited_data(plan: Plan, result: Evaluation) -> str | None:
    """Return which stage reads data more slowly than it computes on them, if one does beside its GPU's work."""
    stages = plan.allocation.stages
    read_ns, s = max((plan.chain.reading_ns / stages[s].replicas, s) for s in (0, len(stages) - 1))
    if not plan.chain.reads_beside or read_ns <= result.period_ns:
        return None
    return (
        f"stage {s} waits for its data: reading a microbatch takes {format_ns(round(read_ns))} of a rank's host, which "
        "the period doesn't count; workers of a DataLoader read ahead"
    )


def unknown_between(chain: Chain) -> str | None:
    """Return that peaks of schedules that split backwards are too low, where the profile lacks what they hold."""
    if for_weights(chain) is not None:
        return None
    return (
        "peaks leave out gradients that wait between the two parts of a backward, which the profile doesn't know; "
        "profile --split-backward measures them"
    )


def estimated(plan: Plan, result: Evaluation) -> str | None:
    """Return between which periods nine of ten such plans are, by estimated times; None by measured ones."""
    if plan.chain.within is None:
        return None
    low, high = (format_ns(round(x * result.period_ns)) for x in plan.chain.within)
    return f"from {low} to {high}, as 9 of 10 such estimates were when measured"


SAME_LAYERS = 1.05  # of two estimates of the same layers in other plans the ratios of 9 of 10 pairs were off by less
MOST_NAMED = 3
OTHER_LAYERS = 0.91  # likewise of other layers, of another microbatch or degree: by so much of what one estimate spans


def undecided(plan: Plan, result: Evaluation) -> str | None:
    """Return which of the others that were found may be faster, as two estimates are off by different factors."""
    if plan.chain.within is None:
        return None
    low, high = plan.chain.within
    others = max(SAME_LAYERS, OTHER_LAYERS * high / low)
    told = [name for name, ratio, same in _beside(plan, result) if 1 < ratio < (SAME_LAYERS if same else others)]
    more = f" and {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else ""
    words = f"{', '.join(told[:MOST_NAMED])}{more} may be faster: estimates are off by more than these differ"
    return words if told else None


def _beside(plan: Plan, result: Evaluation) -> Iterator[tuple[str, float, bool]]:
    """Yield the name of each other that was found, by what it takes longer, and whether it has the same layers."""
    options, own = plan.provenance.options, result.period_ns
    zero, tensor, grids, grid = (options.get(name) for name in ("zero", "tensor", "grids", "grid"))
    found: list[tuple[str, int | None, bool]] = [
        (x.weights, x.period_ns, True) for x in plan.provenance.alternatives if x.microbatches == plan.interval
    ]
    found += [(f"--zero {shown(k)}", _ns(zero, k), True) for k in zero] if isinstance(zero, dict) else []
    found += [("one stage on all GPUs", _ns(options, "unpipelined_ns"), True)]
    found += [("a pipeline", _ns(options, "pipeline_ns"), True)]
    yield from ((name, ns / own, same) for name, ns, same in found if ns is not None)
    degrees = {k: _taken(v) for k, v in tensor.items() if isinstance(v, dict)} if isinstance(tensor, dict) else {}
    chosen = degrees.get(plan.chain.variant)
    yield from ((f"tensor degree {shown(k)}", ns / chosen, False) for k, ns in degrees.items() if ns and chosen)
    if isinstance(grids, list) and isinstance(grid, dict):
        for x in grids:
            if "batch_ns" in x:
                name = f"{x['inter']} x {x['data']} of microbatches of {x['microbatch']}"
                yield name, x["batch_ns"] / grid["batch_ns"], x["microbatch"] == grid["microbatch"]


def moves(plan: Plan, result: Evaluation) -> str | None:
    """Return in words what goes on elsewhere where training has come from another plan; None where it hasn't."""
    told = plan.provenance.options.get("resumed")
    if not isinstance(told, dict) or (held := _ns(told, "held_bytes")) is None:
        return None
    coming = _ns(told, "coming_bytes") or 0
    units = "servers" if len((plan.platform.whole or plan.platform).levels) > 1 else "GPUs"
    words = (
        f"{format_bytes(coming)} of {format_bytes(held)}, weights and optimizer state, to {units} without them so far"
    )
    best, more = _ns(told, "best_period_ns"), _ns(told, "best_coming_bytes")
    if not best or more is None:
        return words
    return f"{words}; {format_bytes(more)} in the best plan, {result.period_ns / best - 1:.1%} faster"


def restriction(plan: Plan, result: Evaluation) -> list[str]:
    """Return what a plan was restricted to, and at which price, in lines; nothing where it wasn't."""
    options = plan.provenance.options
    target, price = TARGETS.get(str(options.get("for"))), options.get("price")
    if target is None:
        return []
    lines = [f"for         {target.what}: whole units, equal pipelines, {' or '.join(target.kinds)}"]
    if any(bound.schedule == "interleaved" and bound.period_ns < result.period_ns for bound in plan.lower_bounds):
        lines.append(
            "leaves out  the bound for interleaved: which units stages have beside how many, and waits between them"
        )
    if plan.policy.engine is not None:
        most = max(use.buffer_bytes for use in result.devices)
        lines.append(f"holds       buffers for all microbatches of a step: up to {format_bytes(most)} of a GPU")
    if isinstance(price, dict) and price:
        found = [f"{shown(str(x))} {format_ns(ns)} ({longer(ns, result)})" for x, ns in price.items()]
        lines.append(f"price       without that restriction {', '.join(found)}")
    if isinstance(options.get("binds"), str):
        lines.append(f"binds       {shown(options['binds'], SENTENCE)}")
    return lines


def tensor_degree(plan: Plan) -> list[str]:
    """Return how many GPUs run each layer together, and what other degrees would take, in lines; nothing for one."""
    found = plan.provenance.options.get("tensor")
    tried = {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}
    chain = plan.chain
    if chain.variant == "1" and len(tried) < 2:
        return []
    along = ", with sequence parallelism" if chain.sequence_parallel else ""
    along += ", attention's core again in backwards (selective recomputation)" if chain.selective else ""
    if chain.experts > 1:
        even = (
            "tokens taken evenly over them"
            if chain.imbalance == 1
            else f"the fullest has {chain.imbalance:g} times its share of tokens"
        )
        along += f"; {chain.experts} GPUs share the experts of each layer, {even}"
    if chain.context > 1:
        along += f"; {chain.context} of them share each sequence, " + (
            "by heads in attention" if chain.by_heads else "whose keys and values go round"
        )
    if chain.offloaded:
        along += f"; activations wait in host memory, over a link of {format_bandwidth(chain.offloaded)} per GPU"
    told = [f"tensor degree {chain.tensor}{along}"]
    if chain.variants:
        own = (f"{x.tensor}{' selective' * x.selective}" for x in plan.allocation.stages)
        told = [f"tensor degrees of their own: {', '.join(own)} by stage"]
    if len(tried) > 1:
        told.append(f"  by degree: {', '.join(f'{shown(k)} {_of_degree(v)}' for k, v in tried.items())}")
        least = min((_ns(v, "bound_ns") or 0 for v in tried.values() if v.get("bound_ns") is not None), default=0)
        own = _taken(tried.get(plan.chain.variant, {}))
        if own is not None and 0 < least <= own:
            told[-1] += f"; none is below {format_ns(least)}: gap {own / least - 1:.2%}"
    return told


def _taken(found: dict[str, Any]) -> int | None:
    return _ns(found, "period_ns") or _ns(found, "batch_ns")


def _ns(found: dict[str, Any], name: str) -> int | None:
    value = found.get(name)
    return value if type(value) is int and value > 0 else None


def _of_degree(found: dict[str, Any]) -> str:
    """Return what was found of a degree, in words."""
    taken, bound = _taken(found), _ns(found, "bound_ns")
    if taken is not None:
        return format_ns(taken)
    return "no plan" if bound is None else f"at least {format_ns(bound)}"


def ordering(plan: Plan) -> list[str]:
    """Return how good the order of passes is at least, in a line; nothing of plans whose order no search has found."""
    found = plan.provenance.options.get("order")
    if not isinstance(found, dict):
        return []
    bound, value = found.get("bound_ns"), found.get("value_ns")
    if not isinstance(bound, int) or not isinstance(value, int) or not 0 < bound <= value:
        return []
    gap = "proved best" if bound == value else f"gap {value / bound - 1:.2%}"
    return [f"orders      no other order of these stages drains before {format_ns(bound)}: {gap}"]


def updates(plan: Plan, result: Evaluation) -> str:
    """Return how often weights are updated, in microbatches and samples, and what updating more often would cost."""
    each = plan.chain.microbatch
    text = _every(plan.interval) + ("" if each == 1 else f" = {plan.interval * each} samples")
    for other in plan.provenance.alternatives:
        if other.weights == plan.policy.weights and other.period_ns is not None:
            text += f"; {_every(other.microbatches)}: {longer(other.period_ns, result)} with the same stages"
    return text


def _every(microbatches: int) -> str:
    return "every microbatch" if microbatches == 1 else f"every {microbatches} microbatches"


def other_weights(plan: Plan, result: Evaluation) -> str | None:
    """Return what was found with the same updates of weights that are kept otherwise, or None where nobody looked."""
    found = [
        f"{x.weights} "
        + ("finds no plan" if x.period_ns is None else f"{format_ns(x.period_ns)} ({longer(x.period_ns, result)})")
        + ("" if x.period_ns is None or x.microbatches == plan.interval else f" {_every(x.microbatches)}")
        + (" by a quicker search" if x.quick else "")
        for x in plan.provenance.alternatives
        if x.weights != plan.policy.weights
    ]
    return ", ".join(found) or None


def longer(period_ns: int, result: Evaluation) -> str:
    """Return in words how much longer or shorter a period is than the plan's."""
    ratio = period_ns / result.period_ns
    if max(ratio, 1 / ratio) >= 1.1:
        return f"{ratio:.2f} times longer" if ratio > 1 else f"{1 / ratio:.2f} times shorter"
    share = f"{abs(ratio - 1):.1%}"
    return "as long" if share == "0.0%" else f"{share} {'longer' if ratio > 1 else 'shorter'}"


SHARED = (
    "",
    ", state shared by replicas",
    ", state and gradients shared by replicas",
    ", state, gradients and weights shared by replicas",
)  # by --zero


def state(plan: Plan) -> str:
    """Return what is held for each weight, and how it is updated, in words."""
    policy = plan.policy
    return (
        f"{policy.optimizer} in {policy.precision.replace('autocast', f'fp32, {plan.chain.dtype}')}"
        + _per_parameter(policy)
        + (", state on the host" if policy.offload else "")
        + SHARED[policy.zero]
        + ("" if policy.coarsening is None else f", steps overlap with sums of {policy.coarsening} buckets")
        + (", vertical sync" if policy.vertical_sync else "")
        + (", gradients clipped" if policy.clip else "")
        + (", weights predicted" if policy.predict and not policy.drains else "")
    )


def _per_parameter(policy: Policy) -> str:
    size, shared = policy.bytes_per_parameter, policy.shared_bytes_per_parameter
    if size is None:
        return ""
    return f", {size if shared is None else f'{size - shared} + {shared}'} bytes a parameter"
