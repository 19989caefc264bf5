"""The composition: propose, schedule, keep the best, bound, and judge. Reads like the picture in the design.

Takes and returns values; the clock belongs to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from . import __version__
from .admission import ENOUGH, Admission
from .bounds import any_bound
from .errors import BadInput, Infeasible
from .evaluate import flush_makespan_ns
from .explain import longest_period_ns, why_infeasible, why_not_admitted
from .judge import Judge, Settings, Verdict
from .partition import ALGORITHMS
from .partition.balance import balance
from .partition.contiguous import feasible
from .partition.drained import held, pipeline, splits
from .partition.local_search import local_search
from .partition.pipedream import pipedream
from .plan import Allocation, Bound, Pattern, Plan, Provenance, Schedule, ScheduleKind
from .portfolio import EFFORTS, propose_contiguous, search
from .problem import Problem, Weights
from .program import unroll
from .simulate import simulate
from .stages import StageGraph, most_in_flight, stage_graph, starts_of
from .timelines import too_long
from .validate import check, class_violations

AUTO = "auto"
MINI_BATCH_PER_DEVICE = 4  # default microbatches of a drained mini-batch for each device, GPipe's rule of thumb
DRAINED_MOVES = 300  # local moves of a plan whose cost is a simulated run
KINDS: dict[Weights, tuple[ScheduleKind, ...]] = {  # of schedules that a weights policy goes with, the default first
    "2bw": ("pattern",),
    "stash": ("pattern",),
    "flush": ("flush", "message-driven"),
    "latest": ("nf1b", "pattern"),
}
Propose = Callable[[Problem, Judge], None]


def make_plan(
    problem: Problem,
    algorithm: str = AUTO,
    options: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    effort: str = "normal",
    schedule: ScheduleKind | None = None,
    limit: int | None = None,
) -> Plan:
    """Return the validated plan that ``algorithm`` (or the portfolio, ``auto``) gives; Infeasible, explained, if none.

    ``options`` go to the algorithm. ``schedule`` is one of :data:`KINDS` for the weights policy, by default its first;
    ``limit`` is what nF1B or message-driven admit at once (None: chosen). An undecided ``policy.accumulate`` is decided
    here: under 2bw as many microbatches as are in flight, four per device where mini-batches are drained, under nF1B
    the best of :func:`_mini_batches`, otherwise one. A KeyboardInterrupt ends the search with the best plan so far, if
    there is one.
    """
    kind = _kind(problem.policy.weights, schedule, limit)
    _refuse_endless(problem, Schedule(kind, problem.policy.accumulate, limit))
    settings, options = settings or Settings(), dict(options or {})
    if algorithm == AUTO:
        settings = replace(settings, time_limit_s=min(settings.time_limit_s, EFFORTS[effort].solver_s))
    propose = _proposer(algorithm, options, effort)
    widen = algorithm in (AUTO, "contiguous")
    if kind == "pattern":
        relaxed = widen and problem.policy.vertical_sync
        problem, judge, status = _plan_pattern(problem, _synced(propose) if relaxed else propose, settings)
    elif kind == "nf1b":
        problem, judge, status = _plan_nf1b(problem, propose, settings, widen, limit)
    else:
        problem, judge, status = _plan_drained(problem, propose, settings, widen, kind, limit)
    if judge.best is None:
        if judge.admission is not None:
            raise Infeasible(why_not_admitted(problem, judge.admission.schedule, judge.rejected, judge.broken))
        raise Infeasible(why_infeasible(problem, judge.rejected, judge.broken))
    allocation, pattern = _tidy(problem, judge.best.allocation), judge.best.pattern
    plan = Plan(
        chain=problem.chain,
        platform=problem.platform,
        policy=problem.policy,
        allocation=allocation,
        pattern=pattern,
        lower_bounds=(*_class_bounds(judge), any_bound(problem)),
        provenance=Provenance(
            algorithm,
            options if algorithm != AUTO else {**options, "effort": effort},
            allocation.claimed_period_ns,
            solver=None if judge.best.status is None else settings.solver,
            solver_status=status or judge.best.status,
            version=__version__,
        ),
        schedule=judge.best.schedule
        or (Schedule("flush", problem.policy.accumulate) if kind == "flush" else Schedule()),
    )
    check(plan)
    return plan


def _kind(weights: Weights, wanted: ScheduleKind | None, limit: int | None) -> ScheduleKind:
    """Return the kind of schedule to plan for; BadInput when ``wanted`` or ``limit`` doesn't go with the weights."""
    kind = wanted or KINDS[weights][0]
    if kind not in KINDS[weights]:
        raise BadInput(f"schedule: {kind} doesn't go with weights {weights}; only {' and '.join(KINDS[weights])}")
    if limit is not None and limit < 1:
        raise BadInput(f"limit: {limit} is not positive")
    if limit is not None and kind not in ("nf1b", "message-driven"):
        raise BadInput(f"limit: a {kind} schedule holds what its order says; nf1b and message-driven have a limit")
    return kind


def _refuse_endless(problem: Problem, schedule: Schedule) -> None:
    """Raise BadInput where a stage on every GPU would take too long to simulate."""
    stages = min(len(problem.platform), len(problem.chain))
    endless = too_long(4 * stages - 2, schedule)
    if endless is not None:
        raise BadInput(f"--accumulate, --limit: on {stages} stages {endless}")


def _proposer(algorithm: str, options: dict[str, Any], effort: str) -> Propose:
    if algorithm == AUTO:
        return lambda problem, judge: search(problem, judge, EFFORTS[effort])

    def propose(problem: Problem, judge: Judge) -> None:
        if algorithm == "contiguous":
            found = propose_contiguous(problem, judge)
        else:
            found = ALGORITHMS[algorithm].partition(problem, **options)
        for allocation in found:
            judge(allocation)
            if judge.expired:
                return

    return propose


def _plan_pattern(problem: Problem, propose: Propose, settings: Settings) -> tuple[Problem, Judge, str | None]:
    """Plan for the shortest period; decide ``accumulate`` from what the best plan has in flight and plan again with it.

    Fewer updates per microbatch only make stages cheaper, so the first plan stays feasible in the second round, which
    is left out when nothing would get cheaper.
    """
    if problem.policy.accumulate is None and problem.policy.weights != "2bw":
        problem = problem.with_policy(replace(problem.policy, accumulate=1))
    judge = Judge(problem, settings)
    status = _run(propose, problem, judge)
    if problem.policy.accumulate is not None or judge.best is None:
        return problem, judge, status
    decided = problem.with_policy(replace(problem.policy, accumulate=_depth(problem, judge.best)))
    if not _updates_cost_time(problem):
        return decided, judge, status
    again = Judge(decided, settings)
    if status != "interrupted":
        status = _run(propose, decided, again) or status
    again(judge.best.allocation)
    return decided, again, status


def _updates_cost_time(problem: Problem) -> bool:
    """Whether any cost depends on how often weights are updated: optimizer steps, or all-reduces between replicas."""
    sums = problem.chain.sums
    return bool(sums.optimizer_ns[-1]) or (problem.replicas and len(problem.platform) > 1 and bool(sums.parameters[-1]))


def _run(propose: Propose, problem: Problem, judge: Judge, dispensable: bool = False) -> str | None:
    """Let ``propose`` feed the judge; return why it stopped early, or None. A ``dispensable`` judge may end empty."""
    try:
        propose(problem, judge)
    except KeyboardInterrupt:
        if judge.best is None and not dispensable:
            raise
        return "interrupted"
    return "time limit" if judge.stopped else None


def _depth(problem: Problem, best: Verdict) -> int:
    assert best.pattern is not None
    graph = stage_graph(problem.chain, problem.platform, problem.policy, best.allocation.stages)
    return most_in_flight(graph, starts_of(best.pattern), best.pattern.period_ns)


def _plan_drained(
    problem: Problem, propose: Propose, settings: Settings, widen: bool, kind: ScheduleKind, limit: int | None
) -> tuple[Problem, Judge, str | None]:
    """Plan for the shortest drained mini-batch, in a pattern's order or message-driven. A heuristic."""
    if problem.policy.accumulate is None:
        microbatches = MINI_BATCH_PER_DEVICE * len(problem.platform)
        problem = problem.with_policy(replace(problem.policy, accumulate=microbatches))
    count = problem.policy.accumulate or 1
    if kind == "flush":
        judge = Judge(problem, settings, partial(_drained, count))
    else:
        judge = Judge(problem, settings, admission=Admission(Schedule(kind, count, limit), problem.platform))
    return problem, judge, _run(_widened(propose) if widen else propose, problem, judge)


def _plan_nf1b(
    problem: Problem, propose: Propose, settings: Settings, widen: bool, limit: int | None
) -> tuple[Problem, Judge, str | None]:
    """Plan for the shortest period of nF1B, whose stages have one GPU each. A heuristic.

    Of several sizes of mini-batches the one with the shortest period is taken, the largest of those that differ by no
    more than a thousandth (the smallest where none fits), and its plan improved by local moves. The allocations
    proposed for the first size are judged with the others too.
    """
    problem = replace(problem, replicas=False)
    sizes = [problem.policy.accumulate] if problem.policy.accumulate else _mini_batches(len(problem.platform))
    chosen: Judge | None = None
    status = None
    proposals = _proposed_around(propose) if widen else propose
    for size in sizes:
        here = problem.with_policy(replace(problem.policy, accumulate=size))
        judge = Judge(here, _naming(settings, size), admission=Admission(Schedule("nf1b", size, limit), here.platform))
        status = _run(proposals, here, judge, chosen is not None)
        if chosen is None:
            proposals = _again(judge, widen)
        if judge.limit is not None and chosen is not None and chosen.limit is not None:
            shorter = judge.limit < chosen.limit - chosen.limit // ENOUGH
        else:
            shorter = judge.limit is not None
        chosen = judge if chosen is None or chosen.best is None or shorter else chosen
        if status is not None:
            break
    assert chosen is not None
    if widen and status is None:
        status = _run(_moved, chosen.problem, chosen)
    return chosen.problem, chosen, status


def _naming(settings: Settings, size: int) -> Settings:
    """Return the settings with a progress that says the size of mini-batches which its lines are about."""
    progress = settings.progress
    if progress is None:
        return settings
    return replace(settings, progress=lambda line: progress(f"{line}, in mini-batches of {size}"))


def _again(earlier: Judge, widen: bool) -> Propose:
    """Return what proposes the allocations that ``earlier`` has judged, and those that hold other mini-batches."""

    def proposed(problem: Problem, judge: Judge) -> None:
        assert judge.admission is not None
        more = _holding(problem, judge.admission) if widen else ()
        for allocation in chain(map(Allocation, earlier.seen), more):
            if judge.expired:
                return
            judge(allocation)

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


def _widened(propose: Propose) -> Propose:
    """Return ``propose``, then more contiguous plans, then local moves.

    The shortest period of a pattern need not drain fastest, nor be the shortest of nF1B, so others are judged too: see
    :func:`_around`.
    """

    def widened(problem: Problem, judge: Judge) -> None:
        _proposed_around(propose)(problem, judge)
        _moved(problem, judge)

    return widened


def _proposed_around(propose: Propose) -> Propose:
    def proposed(problem: Problem, judge: Judge) -> None:
        propose(problem, judge)
        for allocation in _around(problem, judge):
            if judge.expired:
                return
            judge(allocation)

    return proposed


def _on_less_memory(problem: Problem, share: int) -> Problem:
    """Return the problem on devices with ``share`` sixteenths of their memory."""
    platform = problem.platform
    devices = tuple(replace(device, memory_bytes=device.memory_bytes * share // 16) for device in platform.devices)
    return replace(problem, platform=replace(platform, devices=devices))


def _synced(propose: Propose) -> Propose:
    """Return ``propose``, then contiguous plans of periods up to that of the best, and for less memory; a heuristic.

    Partitioners see one stage at a time, but under vertical sync the first one decides how many versions all keep. So
    their split may run only at a long period where others, made for a longer one or with room to spare, fit.
    """

    def proposed(problem: Problem, judge: Judge) -> None:
        propose(problem, judge)
        longest = judge.limit or longest_period_ns(problem)
        for period in _longer(any_bound(problem).period_ns, longest, 16):
            if judge.expired or (judge.limit is not None and period >= judge.limit):
                return
            for share in range(16, 8, -2):
                found = feasible(_on_less_memory(problem, share), period)
                if found is not None:
                    judge(found)

    return proposed


def _moved(problem: Problem, judge: Judge) -> None:
    """Walk from the best allocation so far, if there is one, to better ones."""
    if judge.best is not None:
        start = judge.best.allocation
        local_search(problem, start, judge.promise, judge.improves, DRAINED_MOVES, lambda: judge.expired)


def _around(problem: Problem, judge: Judge) -> Iterator[Allocation]:
    """Yield the baselines' splits, those that hold what a limit admits, then the best contiguous plans of periods
    longer than the best so far has; the last are also what fits little memory, or has replicas."""
    yield from chain(balance(problem), pipedream(problem), pipedream(problem, straight=True))
    if judge.admission is not None:
        yield from _holding(problem, judge.admission)
        if judge.best is not None and not problem.replicas:
            return
    elif judge.best is None:
        return
    for period in _longer(_period(problem, judge), longest_period_ns(problem)):
        slower = feasible(problem, period)
        if slower is not None:
            yield slower


def _holding(problem: Problem, admission: Admission) -> Iterator[Allocation]:
    """Yield splits into one stage per GPU that recompute no more than they must to hold what a limit admits.

    For the limit that was asked for, or for some: see :func:`.partition.drained.splits`.
    """
    count, size = min(len(problem.platform), len(problem.chain)), problem.policy.accumulate or 1
    offer = pipeline(problem, [(device,) for device in range(count)], size)
    if offer is None:
        return
    batch = size if admission.schedule.kind == "nf1b" else 1
    asked = admission.schedule.limit
    for limit in [asked] if asked else dict.fromkeys((count, 2 * count - 1, max(1, count // 2), 1)):
        for in_flight in dict.fromkeys(held(count, limit, batch)):
            for cuts in splits(offer, in_flight):
                stages = offer.stages(cuts, in_flight)
                assert stages is not None, "splits only yields what fits"
                yield Allocation(stages)


def _period(problem: Problem, judge: Judge) -> int:
    """Return the period of the best so far, without a pattern that of its busiest resource; first a lower bound."""
    if judge.best is None:
        return any_bound(problem).period_ns
    if judge.best.pattern is not None:
        return judge.best.pattern.period_ns
    return stage_graph(problem.chain, problem.platform, problem.policy, judge.best.allocation.stages).period_floor_ns


def _longer(period: int, longest: int, parts: int = 4) -> Iterator[int]:
    """Yield periods above ``period``, ``parts`` to an octave, the last at least ``longest``."""
    step = 0
    while period * 2 ** (step / parts) < longest:
        step += 1
        yield int(period * 2 ** (step / parts)) + 1


def _drained(microbatches: int, graph: StageGraph, pattern: Pattern) -> int:
    return flush_makespan_ns(simulate(unroll(graph, pattern, microbatches)))


def _tidy(problem: Problem, allocation: Allocation) -> Allocation:
    """Return the allocation with equal devices on one level numbered by first use, which changes nothing else."""
    platform = problem.platform
    if len(platform.levels) > 1 or len(set(platform.devices)) > 1:
        return allocation
    names: dict[int, int] = {}
    for stage in allocation.stages:
        for device in stage.devices:
            names.setdefault(device, len(names))
    stages = (replace(stage, devices=tuple(names[d] for d in stage.devices)) for stage in allocation.stages)
    return replace(allocation, stages=tuple(stages))


def _class_bounds(judge: Judge) -> list[Bound]:
    """Return the bounds that the search proved and whose class contains its best plan."""
    assert judge.best is not None
    if not judge.periodic:  # those are bounds on a period that never drains
        return []
    return [bound for bound in judge.bounds if not class_violations(bound, judge.best.allocation)]
