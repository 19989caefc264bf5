"""Which plan costs least where its cost is a run: a drained mini-batch (patterned or message-driven), or nF1B?

Stages that drain soonest are searched for, then MadPipe's, then all under other schedules, by messages and in orders of
their own.
"""

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
from ...registry import Late
from ...schedule.kinds import KINDS, too_long
from ...schedule.program import unroll
from ...schedule.simulate import STEP_S, simulate
from ...schedule.timeline import flush_makespan_ns
from ..periodic.incumbent import Incumbent, Propose, Scheduled, Settings, run_search
from ..periodic.interval import at_interval
from ..periodic.limits import ENOUGH, LimitSearch, drained_floor_ns
from ..simulated.other_schedules import schedule_stages
from .proposals import holding, move, widened
from .run import drained_run
from .search import ALTERNATING, search_stages, until_ended

Start = tuple[Problem, Propose]  # what is asked, and what proposes stages
PASSES, MOST_ORDERED = 3, 120  # of a stage and microbatch; that the open question orders itself
MOST_PROPOSED = 2000  # that it tries as if by messages were asked for
PARTS = (Late("planner.grids.pipelines:try_parts"),)  # what tries more for what is driven by messages
SPECIAL = {"one GPU with several stages": Late("planner.periodic.special:try_smallest")}  # phases of patterns alone
LAST = {"orders of their own": Late("planner.what_if.best_order:in_own_order")}  # phases that let others beat the best


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
        problem = at_interval(problem, MICROBATCHES_PER_DEVICE * len(problem.platform))
    schedule = Schedule(kind, problem.policy.accumulate, limit)
    if KINDS[kind].build is None:
        incumbent = Incumbent(problem, settings, partial(_drained, schedule.mini_batch))
    else:
        incumbent = Incumbent(problem, settings, limits=LimitSearch(schedule, problem.platform))
    if problem.chain.variants:  # of which no other search knows
        return incumbent, run_search(propose, incumbent)
    if effort is None or KINDS[kind].limit is not None:
        return incumbent, run_search(widened(propose) if widen else propose, incumbent)
    rows = ((name, KINDS[name]) for name in kinds or (kind,))
    searched = [name for name, row in rows if row.limit is None and not (kinds and row.searches)]

    def simplest_first(incumbent: Incumbent) -> None:
        if kind in ALTERNATING:  # heuristics may miss it
            incumbent.try_all(simplest(problem))
        propose(incumbent)

    def then_moved(incumbent: Incumbent) -> None:
        propose(incumbent)
        move(incumbent)

    status = None
    if incumbent.limits is None or not incumbent.limits.places:
        status = run_search(simplest_first, incumbent)
    phases: dict[str, Callable[[Incumbent], None]] = {
        "stages that drain soonest": partial(search_stages, kinds=searched, effort=effort)
    }
    if incumbent.limits is None:
        phases |= SPECIAL
    if kinds:
        phases["other schedules"] = partial(_under_others, kinds=kinds)
        passes = PASSES * schedule.mini_batch * len(problem.chain)
        starts: list[Start] = [(problem, then_moved)] if passes <= MOST_PROPOSED else []
        if passes <= MOST_ORDERED:
            starts = [(x, widened(propose)) for x in (problem, replace(problem, checkpointing="none"))]
        phases["by messages"] = partial(_by_arrival, kinds=kinds, starts=starts)
        phases |= LAST
    for phase, search in phases.items():
        if status is None:
            settings.status.phase = phase
            status = until_ended(problem, partial(search, incumbent), lambda: incumbent.best is not None)
    return incumbent, status


def _by_arrival(incumbent: Incumbent, kinds: Sequence[ScheduleKind], starts: Sequence[Start]) -> None:
    """Let stages that were tried, some near the best, and some near what ``starts`` propose, beat it where GPUs decide
    as they go, which any stages may share."""
    problem = incumbent.problem
    for kind in (kind for kind in kinds if KINDS[kind].by_arrival):
        limits = LimitSearch(Schedule(kind, problem.policy.accumulate), problem.platform)
        walk = Incumbent(problem, incumbent.settings, limits=limits, start=incumbent.best)
        try:
            walk.try_all(map(Allocation, incumbent.seen))
            for parts in PARTS:
                parts(walk)
            move(walk)
            for asked, propose in starts:
                alone = Incumbent(asked, incumbent.settings, limits=limits)
                propose(alone)
                if alone.best is not None:
                    walk.take(alone.best)
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
    if KINDS[kind].build is None:
        return best.allocation.stages
    schedule = best.schedule or Schedule(ALTERNATING[0], problem.policy.accumulate)
    given = problem.chain, problem.platform, problem.policy
    plan = Plan(*given, best.allocation, best.pattern, (), Provenance(""), schedule)
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
    if drained_floor_ns(graph, kind, schedule.mini_batch) >= cutoff_ns:
        return None
    if limit is None:
        run = drained_run(problem, stages, kind)
        return None if run is None else run.scheduled
    if KINDS[kind].searches:
        schedule = replace(schedule, limit=limit.usual(graph)[0])
    limits = LimitSearch(schedule, problem.platform)
    if limits.refuses(graph) is not None:
        return None
    choice = limits.choose(graph, problem.deadline, cutoff_ns)
    if choice is None or structure_violations(problem.chain, problem.platform, problem.policy, stages):
        return None
    return Scheduled(choice[0], Allocation(stages), None, schedule=choice[1])


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
        limits = LimitSearch(Schedule(kind, size, limit), problem.platform)
        incumbent = Incumbent(at_interval(problem, size), _naming(settings, size), limits=limits)
        status = run_search(proposals, incumbent, chosen is not None)
        if chosen is None:
            proposals = partial(_again, incumbent, widen)
        known, found = None if chosen is None else chosen.best_ns, incumbent.best_ns
        if chosen is None or known is None or (found is not None and found < known - known // ENOUGH):
            chosen = incumbent
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


def _again(earlier: Incumbent, widen: bool, incumbent: Incumbent) -> None:
    """Try the allocations that ``earlier`` has tried, and those that hold other mini-batches."""
    assert incumbent.limits is not None
    more = holding(incumbent.problem, incumbent.limits) if widen else ()
    incumbent.try_all(chain(map(Allocation, earlier.seen), more))


def _mini_batches(devices: int) -> list[int]:
    """Return the sizes of nF1B's mini-batches to choose from: W - 1, its half, the half of that, .., 1.

    W - 1 is the fewest microbatches whose gradients are taken at weights that miss no more than one update (the paper's
    version difference of 1), for its backward of one time point and vertical sync. Stages hold in proportion to them.
    """
    largest = max(1, devices - 1)
    return [largest >> halved for halved in range(largest.bit_length())]


def _drained(microbatches: int, graph: StageGraph, pattern: Pattern, deadline: Deadline) -> int:
    deadline.check(microbatches * len(graph.operations) * STEP_S)
    return flush_makespan_ns(simulate(unroll(graph, pattern, microbatches), deadline=deadline))
