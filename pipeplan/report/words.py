"""What is there to say of a plan beside its stages? How good it is, what it was chosen from, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..check.bounds import bounded
from ..check.evaluate import Evaluation, evaluate, gap
from ..check.lateness import plan_delays
from ..check.targets import TARGETS
from ..cost.saved import for_weights
from ..names import shown
from ..partition.contiguous.claims import coarseness
from ..partition.devices.orders import Orders
from ..plan import Bound, Plan
from ..problem import Chain, Platform
from ..schedule.weight_versions import Delay, average_delay
from ..units import format_bandwidth, format_bytes, format_ns
from .searched import longer, number_in

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
    own = "replicas", "checkpointing", "any_interval", "schedule", "period_ns"
    return [
        {"class": bound.allocation, **{name: getattr(bound, name) for name in own}, "checked": not bound.claimed}
        | {"gap": None if bound.claimed else gap(period, bound)}
        for bound in plan.lower_bounds
    ]


def orders_sentence(plan: Plan, bound: Bound) -> str | None:
    """Return in which orders stages were given unequal devices for ``bound``, in words; None where there is but one."""
    searched = bound.allocation == "contiguous" and _of_all_cuts(plan)
    return Orders.of(bounded(plan, bound)).sentence() if searched else None


def _of_all_cuts(plan: Plan) -> bool:
    return plan.provenance.algorithm in ("auto", "contiguous") and not plan.policy.drains


def coarse_sentence(plan: Plan) -> str | None:
    """Return what a search among very many GPUs or cuts has left out, in words."""
    searched = plan.lower_bounds and _of_all_cuts(plan)
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
    joints = (
        f"{x.count} at {format_bandwidth(x.bandwidth)}"
        + ("" if x.links is None else f" by {x.links} link{'s' if x.links > 1 else ''} each")
        for x in platform.levels
    )
    return f"GPUs of {memory}, joined {' / '.join(joints)}{how}"


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
    found = number_in(options, "pipeline_ns")
    if "pipeline_ns" not in options:
        other = ""
    elif found is not None:
        other = f"; the best pipeline of single GPUs takes {format_ns(found)} ({longer(found, result)})"
    else:
        other = "; no pipeline of single GPUs fits"
    return [f"best        plain data parallelism, one stage on {count} GPUs{other}"]


def _unpipelined(plan: Plan, result: Evaluation) -> list[str]:
    found, count = number_in(plan.provenance.options, "unpipelined_ns"), len(plan.platform)
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
    taken = {shown(str(k)): format_ns(v) if (v := number_in(found, k)) else "no plan" for k in found}
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


SHARED = (
    "",
    ", state shared by replicas",
    ", state and gradients shared by replicas",
    ", state, gradients and weights shared by replicas",
)  # by --zero


def state(plan: Plan) -> str:
    """Return what is held for each weight, and how it is updated, in words."""
    policy, size = plan.policy, ""
    if policy.bytes_per_parameter is not None:
        shared = policy.shared_bytes_per_parameter
        parts = policy.bytes_per_parameter if shared is None else f"{policy.bytes_per_parameter - shared} + {shared}"
        size = f", {parts} bytes a parameter"
    return (
        f"{policy.optimizer} in {policy.precision.replace('autocast', f'fp32, {plan.chain.dtype}')}"
        + size
        + (", state on the host" if policy.offload else "")
        + SHARED[policy.zero]
        + ("" if policy.coarsening is None else f", steps overlap with sums of {policy.coarsening} buckets")
        + (", vertical sync" if policy.vertical_sync else "")
        + (", gradients clipped" if policy.clip else "")
        + (", weights predicted" if policy.predict and not policy.drains else "")
    )
