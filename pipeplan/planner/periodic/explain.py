"""Why does no plan exist, and which least change would give one? Memory, GPUs, checkpointing, weights policy.

Every answer on memory is computed with the exact contiguous planner at a period so long that one microbatch runs at a
time, where memory alone decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...check.bounds import IMPOSSIBLE, proof
from ...check.evaluate import evaluate_simulated, fits
from ...check.validate import kept_together
from ...cost import memory_model
from ...cost.saved import storages
from ...cost.stage_graph import stage_graph
from ...integers import smallest
from ...names import shown
from ...partition.contiguous.claims import coarseness, longest_period_ns
from ...partition.contiguous.contiguous import feasible
from ...partition.devices.orders import Orders
from ...plan import Allocation, Schedule, ScheduleKind, Stage
from ...problem import WEIGHTS, Level, Platform, Problem
from ...schedule.kinds import KINDS
from ...schedule.pattern import DeviceUse, one_at_a_time, resource_use, starts_of
from ...units import format_bytes, format_ns

MOST_GPUS = 1024


def why_infeasible(problem: Problem, rejected: Allocation | None = None, broken: str | None = None) -> str:
    """Return one sentence: what binds, then what would help, each with numbers.

    It says that no plan of any kind fits where the bounds prove it, and else what was proved and what was not found.
    ``rejected`` is an allocation that a partitioner proposed and no period made fit, ``broken`` a rule that one broke.
    """
    if (rejected or broken) and possible(problem) is not None:
        over = f"no period makes the algorithm's split fit: {_worst(problem, rejected)}" if rejected else None
        reason = over or f"the algorithm's split breaks a rule: {broken}"
        return f"{reason}; --algorithm contiguous finds a plan that fits"
    least = least_memory(problem)
    remedies = _remedies(problem, least)
    advice = (
        f"; feasible {either(remedies)}" if remedies else "; no number of GPUs up to 1024 and no other policy helps"
    )
    impossible = proof(problem)
    head = "no contiguous plan fits, and no other was found"
    if coarseness(problem) is not None or not Orders.of(problem).exact:  # not all of them were looked at
        head = "no plan was found that fits"
    if impossible.infeasible:
        head = f"no plan of any kind fits (proved: {IMPOSSIBLE[impossible.part]})"
    return f"{head}: {_binding(problem, least)}{advice}"


def claimed(algorithm: str, stages: Sequence[Stage], period_ns: int) -> str:
    """Return in words what an algorithm claims for stages that make no plan."""
    split = ", ".join(f"{stage.start}-{stage.stop - 1} on {stage.replicas}" for stage in stages)
    return (
        f"{algorithm}'s own claim for its split (layers {split} GPUs) is {format_ns(period_ns)} per microbatch, which "
        "no schedule or validator has confirmed"
    )


def shortfall(problem: Problem) -> str:
    """Return in few words how much a problem that no plan fits lacks: the stage that binds, what it needs at least."""
    least = least_memory(problem)
    if least is None:
        return _binding(problem, least)
    allocation = possible(_with_memory(problem, least))
    assert allocation is not None, "so much memory suffices"
    stage, use, _ = _tightest(problem, allocation)
    return (
        f"stage {allocation.stages.index(stage)} of layers {stage.start} to {stage.stop - 1} needs "
        f"{format_bytes(use.peak_bytes)} with one microbatch in flight, {format_bytes(use.over_bytes)} too much"
    )


def why_not_admitted(
    problem: Problem, schedule: Schedule, rejected: Allocation | None = None, broken: str | None = None
) -> str:
    """Return one sentence on why nothing fits a schedule that admits up to a limit, and what would.

    ``schedule.limit`` is the user's, or None; ``rejected`` and ``broken`` are as for :func:`why_infeasible`.
    """
    if possible(problem) is None:
        return why_infeasible(problem)
    if rejected is None:
        reason = f"the algorithm's split cannot run: {broken}" if broken else "the algorithm proposes no split"
        return f"{reason}; --algorithm contiguous may find one that can"
    graph = stage_graph(problem.chain, problem.platform, problem.policy, rejected.stages)
    kind = KINDS[schedule.kind]
    admitted = replace(schedule, limit=schedule.limit or (1 if kind.limit else None))
    uses = evaluate_simulated(graph, admitted, problem.platform, problem.deadline).devices
    device = max(range(len(uses)), key=lambda d: uses[d].over_bytes)
    use = uses[device]
    stage = next(stage for stage in rejected.stages if device in stage.devices)
    what = "in its order"
    if kind.limit is not None:
        count = f"{admitted.limit} {kind.limit.noun if admitted.limit == 1 else kind.limit.nouns}"
        size = f" of {schedule.microbatches}" if kind.joins else kind.limit.where
        what = f"{'even ' if admitted.limit == 1 else ''}with {count}{size} admitted"
    remedies = []
    if schedule.limit is not None:
        fewer = _most(lambda limit: _admits(problem, rejected, replace(schedule, limit=limit)), schedule.limit)
        remedies += [f"with --limit {fewer}"] if fewer else []
    if kind.joins and schedule.microbatches is not None and not remedies:
        smaller = _most(lambda n: _admits(problem, rejected, replace(admitted, microbatches=n)), schedule.microbatches)
        remedies += [f"with --accumulate {smaller}"] if smaller else []
    remedies.append(f"from {format_bytes(round_up(use.peak_bytes + problem.platform.reserved_bytes))} per GPU")
    held = ", ".join(map(str, use.in_flight))
    return (
        f"no plan fits {schedule.kind}: {what}, "
        f"{named(problem, stage)} on device {device} need {format_bytes(use.peak_bytes)} "
        f"(weights {format_bytes(use.weights_bytes)}, activations {format_bytes(use.activation_bytes)} of {held} "
        f"microbatches, buffers {format_bytes(use.buffer_bytes)}), the device has {format_bytes(use.memory_bytes)}; "
        f"feasible {either(remedies)}"
    )


def why_not_placed(problem: Problem, kind: ScheduleKind) -> str:
    """Return why there is no plan under a schedule of equal pipelines, with several stages on each GPU or one."""
    gpus, layers = len(problem.platform), len(problem.chain)
    if KINDS[kind].homes is None:
        return f"no equal pipelines were found that fit the memory as {kind} runs them"
    if gpus < 2 or layers < 4:
        return f"{kind} puts at least 2 stages on each of 2 GPUs or more; there are {layers} layers and {gpus} GPUs"
    return f"no pipelines were found that fit the memory with several stages on each GPU, as {kind} runs them"


def _admits(problem: Problem, allocation: Allocation, schedule: Schedule) -> bool:
    policy = replace(problem.policy, accumulate=schedule.microbatches)
    graph = stage_graph(problem.chain, problem.platform, policy, allocation.stages)
    return fits(evaluate_simulated(graph, schedule, problem.platform, problem.deadline))


def _most(holds: Callable[[int], bool], below: int) -> int | None:
    """Return the largest count under ``below`` that ``holds``, which is monotone, or None."""
    found = smallest(lambda less: holds(below - less) or None, 1, below - 1) if below > 1 else None
    return None if found is None else below - found[0]


def possible(problem: Problem) -> Allocation | None:
    """Return a contiguous allocation that fits the memory at some period, or None when none does."""
    enough = _enough(problem)
    return feasible(enough, longest_period_ns(enough))


def _enough(problem: Problem) -> Problem:
    """Return the problem without what helps nobody while one microbatch is inside at a time: replicas, unless they
    share optimizer state, and of equal devices more than there are layers."""
    if problem.policy.zero:
        return problem
    platform, count = problem.platform, len(problem.chain)
    if count < len(platform) and all(device == platform.devices[0] for device in platform.devices):
        platform = _extended(platform, count)
    return replace(problem, platform=platform, replicas=False)


def _binding(problem: Problem, least: int | None) -> str:
    """Name the stage that is over its memory with one microbatch in flight, in the split that needs least."""
    if least is not None:
        allocation = possible(_with_memory(problem, least))
        assert allocation is not None
        tied = kept_together(problem.chain, problem.policy)
        return _worst(problem, allocation) + (f" ({tied})" if tied else "")
    return kept_together(problem.chain, problem.policy) or "no split is possible"


def _tightest(problem: Problem, allocation: Allocation) -> tuple[Stage, DeviceUse, str]:
    """Return the stage that is most over its memory with one microbatch in flight, its memory, its devices' name."""
    uses = uses_alone(problem, allocation)
    stages, use, where = max(uses, key=lambda item: item[1].over_bytes)
    return allocation.stages[stages[0]], use, where


def uses_alone(problem: Problem, allocation: Allocation) -> list[tuple[list[int], DeviceUse, str]]:
    """Return of each device group its stages, the memory of a device with one microbatch in flight, and its name."""
    graph = stage_graph(problem.chain, problem.platform, problem.policy, allocation.stages)
    pattern = one_at_a_time(graph)
    starts, period = starts_of(pattern), pattern.period_ns
    return [
        (graph.stages_on(r), resource_use(graph, starts, period, r), resource.name)
        for r, resource in enumerate(graph.resources)
        if not resource.is_link
    ]


def _worst(problem: Problem, allocation: Allocation) -> str:
    stage, use, where = _tightest(problem, allocation)
    layers = named(problem, stage)
    return (
        f"even with one microbatch in flight, {layers} on {where} need "
        f"{format_bytes(use.peak_bytes)} (weights {format_bytes(use.weights_bytes)}, activations "
        f"{format_bytes(use.activation_bytes)}, buffers {format_bytes(use.buffer_bytes)}), "
        f"the device has {format_bytes(use.memory_bytes)}"
    )


def named(problem: Problem, stage: Stage) -> str:
    """Return a stage's layers by numbers and names."""
    names = [shown(layer.name) for layer in problem.chain.layers[stage.start : stage.stop]]
    if len(names) == 1:
        return f"layer {stage.start} ({names[0]})"
    return f"layers {stage.start} to {stage.stop - 1} ({names[0]} to {names[-1]})"


def _remedies(problem: Problem, least: int | None) -> list[str]:
    found = []
    if least is not None:
        found.append(f"from {format_bytes(round_up(least + problem.platform.reserved_bytes))} per GPU")
    gpus = fewest_gpus(problem)
    if gpus is not None:
        found.append(f"with {gpus} GPUs")
    if problem.checkpointing == "none" and possible(replace(problem, checkpointing="stages")) is not None:
        found.append("with checkpointing")
    lighter = [weights for weights, rules in WEIGHTS.items() if rules.most_versions is not None and not rules.fresher]
    for weights in filter(problem.policy.goes_with, reversed(lighter)):
        policy = replace(problem.policy, weights=weights)
        if weights != problem.policy.weights and possible(problem.with_policy(policy)) is not None:
            found.append(f"with --weights {weights}")
    if problem.policy.optimizer != "sgd" and not problem.policy.offload and _fits(problem, offload=True):
        found.append("with --offload")
    shares = memory_model.depends_on_replicas(replace(problem.policy, zero=1))
    if problem.most_replicas > 1 and shares and not problem.policy.zero and _fits(problem, zero=1):
        found.append("with --zero 1")
    return found


def _fits(problem: Problem, **otherwise: Any) -> bool:
    return possible(problem.with_policy(replace(problem.policy, **otherwise))) is not None


def least_memory(problem: Problem) -> int | None:
    """Return the least memory (bytes, the same on every device) with which a contiguous plan exists, or None."""
    sums = problem.chain.sums
    enough = 64 * (int(sums.weight_bytes[-1]) + int(sums.parameters[-1]) + int(storages(problem.chain).totals[-1]) + 1)
    found = smallest(lambda memory: possible(_with_memory(problem, memory)), 1, enough)
    return None if found is None else found[0]


def fewest_gpus(problem: Problem) -> int | None:
    """Return the fewest equal devices (same memory, top-level network extended) with which a plan exists, or None."""
    if any(device != problem.platform.devices[0] for device in problem.platform.devices):
        return None

    def attempt(count: int) -> Allocation | None:
        return possible(replace(problem, platform=_extended(problem.platform, count)))

    found = smallest(attempt, len(problem.platform) + 1, min(MOST_GPUS, max(len(problem.chain), 1)))
    return None if found is None else found[0]


def _extended(platform: Platform, count: int) -> Platform:
    """Return a platform of so many of its first devices, joined as the top level joins its units."""
    level = Level(count, *platform.paths[-1])
    return replace(platform, devices=platform.devices[:1] * count, levels=(level,))


def _with_memory(problem: Problem, memory: int) -> Problem:
    platform = problem.platform
    devices = tuple(replace(device, memory_bytes=memory) for device in platform.devices)
    return replace(problem, platform=replace(platform, devices=devices))


def round_up(count: int) -> int:
    """Round bytes up to the two decimals of a GB that are printed, so that the printed figure suffices."""
    unit = 10**7 if count >= 10**8 else 10**4
    return -(-count // unit) * unit


def either(options: list[str]) -> str:
    """Return options as a list in words: ``a, b, or c``."""
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])}, or {options[-1]}"
