"""Which plan costs least where its cost is a run: a drained mini-batch (patterned or message-driven), or nF1B?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain

from ...check.validate import structure_violations
from ...cost.stage_graph import StageGraph, stage_graph
from ...deadline import Deadline
from ...errors import BadInput
from ...partition.balance import simplest
from ...plan import Allocation, Pattern, Plan, Provenance, Schedule, ScheduleKind, Stage
from ...problem import MICROBATCHES_PER_DEVICE, Problem
from ...schedule.kinds import KINDS, too_long
from ...schedule.program import unroll
from ...schedule.simulate import STEP_S, simulate
from ...schedule.timeline import flush_makespan_ns
from ..periodic.incumbent import Incumbent, Propose, Scheduled, Settings, run_search
from ..periodic.limits import ENOUGH, LimitSearch
from ..simulated.other_schedules import schedule_stages
from .proposals import holding, move, widened
from .run import drained_run
from .search import ALTERNATING, search_stages, searches, until_ended


def plan_drained(
    problem: Problem,
    propose: Propose,
    settings: Settings,
    widen: bool,
    kind: ScheduleKind,
    limit: int | None,
    effort: str | None = None,
    kinds: Sequence[ScheduleKind] = (),
) -> tuple[Incumbent, str | None]:
    """Plan for the shortest drained mini-batch, in a pattern's order or message-driven. A heuristic.

    With an ``effort`` stages are searched for that drain soonest, under any of ``kinds`` (none: ``kind`` alone).
    """
    if problem.policy.accumulate is None:
        microbatches = MICROBATCHES_PER_DEVICE * len(problem.platform)
        problem = problem.with_policy(replace(problem.policy, accumulate=microbatches))
    schedule = Schedule(kind, problem.policy.accumulate, limit)
    if KINDS[kind].simulated is None:
        incumbent = Incumbent(problem, settings, partial(_drained, schedule.mini_batch))
    else:
        incumbent = Incumbent(problem, settings, limits=LimitSearch(schedule, problem.platform))
    if effort is None or KINDS[kind].limit is not None:
        return incumbent, run_search(widened(propose) if widen else propose, incumbent)
    searched = [name for name in kinds or (kind,) if KINDS[name].limit is None]
    searched = [name for name in searched if not kinds or not searches(name)]
    status = None
    if incumbent.limits is None or not incumbent.limits.places:
        status = run_search(_simplest_first(propose) if kind in ALTERNATING else propose, incumbent)
    phases: dict[str, Callable[[Incumbent], None]] = {
        "stages that drain soonest": partial(search_stages, kinds=searched, effort=effort)
    }
    if kinds:
        phases["other schedules"] = partial(_under_others, kinds=kinds)
        phases["by messages"] = partial(_by_arrival, kinds=kinds)
    for phase, search in phases.items():
        status = status or _with_best(incumbent, phase, search)
    return incumbent, status


def _simplest_first(propose: Propose) -> Propose:
    """Let what takes no search be tried before what ``propose`` tries, which are heuristics that may miss it."""

    def proposed(incumbent: Incumbent) -> None:
        incumbent.try_all(simplest(incumbent.problem))
        propose(incumbent)

    return proposed


def _by_arrival(incumbent: Incumbent, kinds: Sequence[ScheduleKind]) -> None:
    """Let stages that were tried, and some near the best, beat it where GPUs decide as they go, which any may share."""
    problem = incumbent.problem
    for kind in (kind for kind in kinds if KINDS[kind].by_arrival):
        limits = LimitSearch(Schedule(kind, problem.policy.accumulate), problem.platform)
        walk = Incumbent(problem, incumbent.settings, limits=limits, start=incumbent.best)
        try:
            walk.try_all(map(Allocation, incumbent.seen))
            move(walk)
        finally:
            found, incumbent.best = incumbent.best, walk.best
        if incumbent.best is not found:
            _under_others(incumbent, kinds)


def _under_others(incumbent: Incumbent, kinds: Sequence[ScheduleKind]) -> None:
    """Let the best's stages, or balanced ones on its GPUs, under every kind beat it, as they are simulated when others
    are asked for; until none does."""
    seen: set[tuple[ScheduleKind, tuple[Stage, ...]]] = set()
    before: Scheduled | None = None
    while incumbent.best is not before:
        before = incumbent.best
        assert before is not None, "it was the best"
        for kind in kinds:
            stages = _stages_under(incumbent.problem, before, kind)
            if stages is not None and (kind, stages) not in seen:
                seen.add((kind, stages))
                found = _scheduled(incumbent.problem, stages, kind, before.cost)
                if found is not None:
                    incumbent.take(found)


def _stages_under(problem: Problem, best: Scheduled, kind: ScheduleKind) -> tuple[Stage, ...] | None:
    """Return the stages that a kind of schedule runs on the GPUs of the best; None where it can't."""
    schedule = best.schedule or Schedule(ALTERNATING[0], problem.policy.accumulate)
    plan = Plan(
        problem.chain, problem.platform, problem.policy, best.allocation, best.pattern, (), Provenance(""), schedule
    )
    if KINDS[kind].simulated is None:
        return best.allocation.stages
    with suppress(BadInput):
        stages = schedule_stages(plan, kind)  # what was recomputed whole may be a part of one then
        in_part = any(x.checkpoint not in ((), ((x.start, x.stop),)) for x in stages)
        return None if in_part and problem.checkpointing != "segments" else stages
    return None


def _scheduled(problem: Problem, stages: tuple[Stage, ...], kind: ScheduleKind, cutoff_ns: int) -> Scheduled | None:
    """Return stages under a kind of schedule, under one that admits so many with the limit that is best, or the usual
    one where it searches for its order; None where it takes ``cutoff_ns``."""
    graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
    schedule, limit = Schedule(kind, problem.policy.accumulate), KINDS[kind].limit
    if too_long(len(graph.operations), schedule) is not None:
        return None
    if schedule.mini_batch * (graph.period_floor_ns - 1) >= cutoff_ns:
        return None
    if limit is None:
        run = drained_run(problem, stages, kind)
        return None if run is None else run.scheduled
    if searches(kind):
        schedule = replace(schedule, limit=limit.usual(graph)[0])
    limits = LimitSearch(schedule, problem.platform)
    if limits.refuses(graph) is not None:
        return None
    choice = limits.choose(graph, problem.deadline)
    if choice is None or structure_violations(problem.chain, problem.platform, problem.policy, stages):
        return None
    return Scheduled(choice.cost_ns, Allocation(stages), None, schedule=choice.schedule)


def _with_best(incumbent: Incumbent, phase: str, search: Callable[[Incumbent], None]) -> str | None:
    """Let a search of its own beat the best so far; return why that ended early, or None."""
    incumbent.settings.status.phase = phase
    return until_ended(incumbent.problem, partial(search, incumbent), lambda: incumbent.best is not None)


def plan_nf1b(
    problem: Problem, propose: Propose, settings: Settings, widen: bool, kind: ScheduleKind, limit: int | None
) -> tuple[Incumbent, str | None]:
    """Plan for the shortest period of nF1B, whose stages have one GPU each. A heuristic.

    Of several sizes of mini-batches the one with the shortest period is taken, the largest of those that differ by no
    more than a thousandth (the smallest where none fits), and its plan improved by local moves. The allocations
    proposed for the first size are tried with the others too.
    """
    problem = replace(problem, replicas=False)
    sizes = [problem.policy.accumulate] if problem.policy.accumulate else _mini_batches(len(problem.platform))
    chosen: Incumbent | None = None
    status = None
    proposals = widened(propose, walks=False) if widen else propose
    for size in sizes:
        here = problem.with_policy(replace(problem.policy, accumulate=size))
        incumbent = Incumbent(
            here, _naming(settings, size), limits=LimitSearch(Schedule(kind, size, limit), here.platform)
        )
        status = run_search(proposals, incumbent, chosen is not None)
        if chosen is None:
            proposals = _again(incumbent, widen)
        if incumbent.best_ns is not None and chosen is not None and chosen.best_ns is not None:
            shorter = incumbent.best_ns < chosen.best_ns - chosen.best_ns // ENOUGH
        else:
            shorter = incumbent.best_ns is not None
        chosen = incumbent if chosen is None or chosen.best is None or shorter else chosen
        if status is not None:
            break
    assert chosen is not None
    if widen and status is None:
        status = run_search(move, chosen)
    return chosen, status


def _naming(settings: Settings, size: int) -> Settings:
    """Return the settings with a progress that says the size of mini-batches which its lines are about."""
    progress = settings.progress
    if progress is None:
        return settings
    return replace(settings, progress=lambda line: progress(f"{line}, in mini-batches of {size}"))


def _again(earlier: Incumbent, widen: bool) -> Propose:
    """Return what proposes the allocations that ``earlier`` has tried, and those that hold other mini-batches."""

    def proposed(incumbent: Incumbent) -> None:
        assert incumbent.limits is not None
        more = holding(incumbent.problem, incumbent.limits) if widen else ()
        incumbent.try_all(chain(map(Allocation, earlier.seen), more))

    return proposed


def _mini_batches(devices: int) -> list[int]:
    """Return the sizes of nF1B's mini-batches to choose from: W - 1, its half, the half of that, .., 1.

    W - 1 is the fewest microbatches whose gradients are taken at weights that miss no more than one update (the paper's
    version difference of 1), for its backward of one time point and vertical sync. Stages hold in proportion to them.
    """
    sizes = [max(1, devices - 1)]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def _drained(microbatches: int, graph: StageGraph, pattern: Pattern, deadline: Deadline) -> int:
    deadline.check(microbatches * len(graph.operations) * STEP_S)
    return flush_makespan_ns(simulate(unroll(graph, pattern, microbatches), deadline=deadline))
