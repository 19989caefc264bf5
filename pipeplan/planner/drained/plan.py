"""Which plan costs least where its cost is a run: a drained mini-batch (patterned or message-driven), or nF1B?

Partitioners seek the shortest period of a pattern, one stage at a time. A drained or simulated run may cost least on
other stages, and so may a pattern whose stages all keep as many versions of the weights as the first: here is what is
tried beside a partitioner's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, pairwise, product, takewhile
from math import comb

from ...check.bounds import any_bound
from ...check.validate import structure_violations
from ...cost.stage_graph import StageGraph, stage_graph
from ...deadline import Deadline
from ...errors import BadInput
from ...partition.balance import balance, simplest
from ...partition.contiguous.claims import by_first_use, longest_period_ns
from ...partition.contiguous.contiguous import feasible
from ...partition.moves.wander import wander
from ...partition.pipedream.paper import pipedream
from ...plan import Allocation, Pattern, Plan, Provenance, Schedule, ScheduleKind, Stage
from ...problem import MICROBATCHES_PER_DEVICE, Problem
from ...schedule.kinds import KINDS, too_long
from ...schedule.program import unroll
from ...schedule.simulate import STEP_S, simulate
from ...schedule.synthesis.problem import NoRoom
from ...schedule.synthesis.synthesize import least_ns
from ...schedule.timeline import flush_makespan_ns
from ...schedule.written import order_of_program
from ..grids.pipelines import Pipelines, held
from ..grids.space import GridConfig
from ..periodic.incumbent import Incumbent, Propose, Scheduled, Settings, run_search
from ..periodic.interval import at_interval
from ..periodic.limits import ENOUGH, LimitSearch, drained_floor_ns
from ..periodic.portfolio import on_less_memory
from ..simulated.other_schedules import schedule_stages
from ..what_if.best_order import best_order
from .run import drained_run
from .search import ALTERNATING, search_stages, until_ended
from .tables import Layout, tables_of_pipelines

PASSES, MOST_ORDERED = 3, 120  # of a stage and microbatch; that the open question orders itself
FEW_SPLITS, ORDERED_STAGES, FULLY_ORDERED, ORDER_MOVES = 500, 64, 8, 20_000
DRAINED_STEPS = 3000  # of a walk from a plan whose cost is a simulated run
QUICK_RUN = 200  # operations that a run has which is simulated in the time that scheduling takes


def widened(propose: Propose, walks: bool = True) -> Propose:
    """Return ``propose``, then more contiguous plans, and with ``walks`` grids and walks from the best.

    The shortest period of a pattern need not drain fastest, nor be the shortest of nF1B.
    """

    def proposed(incumbent: Incumbent) -> None:
        propose(incumbent)
        limits = incumbent.limits
        if incumbent.best is None or limits is None or not limits.kind.by_arrival:  # whose grids hold better ones
            incumbent.try_all(_others(incumbent))
        if walks:
            move(incumbent)
            walked = incumbent.best
            incumbent.try_all(() if limits is None else _grids(incumbent, limits))
            if incumbent.best is not walked:
                move(incumbent)

    return proposed


def move(incumbent: Incumbent) -> None:
    """Walk from the best allocation so far, if there is one, to better ones."""
    best = incumbent.best
    if best is None:
        return
    start, try_ = best.allocation, incumbent.try_

    def misfit(stages: tuple[Stage, ...], enough: float) -> float:
        return float(stages != start.stages and incumbent.lower_bound(Allocation(stages)) is None)

    def times(stages: tuple[Stage, ...]) -> int:
        return max(1, 4 * len(stages) * (incumbent.problem.policy.accumulate or 1) // QUICK_RUN)

    wander(incumbent.problem, start, misfit, try_, DRAINED_STEPS, lambda: incumbent.expired, hot=0.0, times=times)


def _others(incumbent: Incumbent) -> Iterator[Allocation]:
    """Yield the baselines' splits, those that hold what a limit admits, then the best contiguous plans of periods
    longer than the best so far has; the last are also what fits little memory, or has replicas."""
    problem = incumbent.problem
    yield from chain(balance(problem), pipedream(problem), pipedream(problem, straight=True))
    if incumbent.limits is not None:
        yield from holding(problem, incumbent.limits)
        if incumbent.best is not None and not problem.replicas:
            return
    elif incumbent.best is None:
        return
    for period in _longer_periods(_period(incumbent), longest_period_ns(problem)):
        slower = feasible(problem, period)
        if slower is not None:
            yield slower


def _grids(incumbent: Incumbent, limits: LimitSearch) -> Iterator[Allocation]:
    """Yield the best split of every grid of equal pipelines that may drain sooner than the best so far."""
    problem, count = incumbent.problem, limits.schedule.mini_batch
    for stages in range(min(len(problem.platform), len(problem.chain)), 0, -1):
        pipelines = len(problem.platform) // stages if problem.replicas else 1
        if count % pipelines:
            continue
        groups = GridConfig(stages, pipelines, 1).groups()
        grid = Pipelines(problem, groups, count // pipelines, limits.schedule.limit)
        grid.bound(incumbent.best_ns)
        if incumbent.best_ns is not None and grid.bound_ns >= incumbent.best_ns:
            continue
        proposals = (proposal for limit in grid.limits() for proposal in grid.splits(limit))
        for _ in grid.try_(takewhile(lambda _: not incumbent.expired, proposals)):
            pass  # the last is the best
        if grid.best is not None:
            yield Allocation(grid.best.stages)


def holding(problem: Problem, limits: LimitSearch) -> Iterator[Allocation]:
    """Yield splits into one stage per GPU that recompute no more than they must to hold what a limit admits.

    For the limit that was asked for, or for some.
    """
    count, size = min(len(problem.platform), len(problem.chain)), limits.schedule.mini_batch
    groups = tuple((device,) for device in range(count))
    tables = tables_of_pipelines(problem, groups, size)
    if tables is None:
        return
    batch = size if limits.kind.joins else 1
    asked = limits.schedule.limit
    for limit in [asked] if asked else dict.fromkeys((count, 2 * count - 1, max(1, count // 2), 1)):
        for in_flight in dict.fromkeys(held(count, limit, batch)):
            layout = Layout(tables, groups, in_flight)
            yield from (Allocation(layout.stages(cuts)) for cuts in layout.starts())


def _period(incumbent: Incumbent) -> int:
    """Return the period of the best so far, without a pattern that of its busiest resource; first a lower bound."""
    problem, best = incumbent.problem, incumbent.best
    if best is None:
        return any_bound(problem).period_ns
    if best.pattern is not None:
        return best.pattern.period_ns
    return stage_graph(problem.chain, problem.platform, problem.policy, best.allocation.stages).period_floor_ns


def _longer_periods(period: int, longest: int, parts: int = 4) -> Iterator[int]:
    """Yield periods above ``period``, ``parts`` to an octave, the last at least ``longest``."""
    step = 0
    while period * 2 ** (step / parts) < longest:
        step += 1
        yield int(period * 2 ** (step / parts)) + 1


def synced(propose: Propose) -> Propose:
    """Return ``propose``, then contiguous plans of periods up to that of the best, and for less memory; a heuristic.

    Partitioners see one stage at a time, but under vertical sync the first one decides how many versions all keep. So
    their split may run only at a long period where others, made for a longer one or with room to spare, fit.
    """

    def proposed(incumbent: Incumbent) -> None:
        problem = incumbent.problem
        propose(incumbent)
        longest = incumbent.best_ns or longest_period_ns(problem)
        for period in _longer_periods(any_bound(problem).period_ns, longest, 16):
            if incumbent.expired or (incumbent.best_ns is not None and period >= incumbent.best_ns):
                return
            for share in range(16, 8, -2):
                found = feasible(on_less_memory(problem, share), period)
                if found is not None:
                    incumbent.try_(found)

    return proposed


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

    status = None
    if incumbent.limits is None or not incumbent.limits.places:
        status = run_search(simplest_first, incumbent)
    phases: dict[str, Callable[[Incumbent], None]] = {
        "stages that drain soonest": partial(search_stages, kinds=searched, effort=effort)
    }
    if kinds:
        phases["other schedules"] = partial(_under_others, kinds=kinds)
        few = PASSES * schedule.mini_batch * len(problem.chain) <= MOST_ORDERED
        phases["by messages"] = partial(_by_arrival, kinds=kinds, propose=widened(propose) if few else None)
        phases["orders of their own"] = _in_own_order
    for phase, search in phases.items():
        if status is None:
            settings.status.phase = phase
            status = until_ended(problem, partial(search, incumbent), lambda: incumbent.best is not None)
    return incumbent, status


def _by_arrival(incumbent: Incumbent, kinds: Sequence[ScheduleKind], propose: Propose | None) -> None:
    """Let stages that were tried, some near the best, and what else is proposed, beat it where GPUs decide as they go,
    which any stages may share."""
    problem = incumbent.problem
    for kind in (kind for kind in kinds if KINDS[kind].by_arrival):
        limits = LimitSearch(Schedule(kind, problem.policy.accumulate), problem.platform)
        walk = Incumbent(problem, incumbent.settings, limits=limits, start=incumbent.best)
        try:
            walk.try_all(map(Allocation, incumbent.seen))
            move(walk)
            for asked in (problem, replace(problem, checkpointing="none")):
                alone = Incumbent(asked, incumbent.settings, limits=limits)
                if propose is not None:
                    propose(alone)
                if alone.best is not None:
                    walk.take(alone.best)
        finally:
            found, incumbent.best = incumbent.best, walk.best
        if incumbent.best is not found:
            _under_others(incumbent, kinds)


def _in_own_order(incumbent: Incumbent) -> None:
    """Let the soonest stages that were tried, in the best order of few passes that a quick search finds, beat it."""
    problem, best = incumbent.problem, incumbent.best
    if best is None:  # nothing fits
        return
    count = problem.policy.accumulate or 1
    graphs, most = [], MOST_ORDERED // (PASSES * count)
    every = (best.allocation.stages, *incumbent.seen, *_few_splits(problem, most))
    for stages in dict.fromkeys(by_first_use(problem.platform, x) for x in every):  # as orders name GPUs
        if len(stages) <= most and not any(x.replicas > 1 for x in stages):
            graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
            graphs.append((count * graph.period_floor_ns, stages, graph))
    hopeful = []
    for floor_ns, stages, graph in sorted(graphs, key=lambda one: one[0])[:ORDERED_STAGES]:
        if not structure_violations(problem.chain, problem.platform, problem.policy, stages):
            with suppress(NoRoom):  # of parts of backwards
                floor_ns = least_ns(graph, count)
            hopeful.append((floor_ns, stages, graph))
    for number, (floor_ns, stages, graph) in enumerate(sorted(hopeful, key=lambda one: one[0]), 1):
        if incumbent.expired or floor_ns >= best.cost:
            return
        with suppress(BadInput, NoRoom):
            found = best_order(graph, count, moves=ORDER_MOVES // max(1, number - FULLY_ORDERED), solver=None)
            if found.value_ns < best.cost - best.cost // ENOUGH:
                order = Schedule("written", count, order=order_of_program(found.program))
                best = Scheduled(found.value_ns, Allocation(stages), None, schedule=order)
                incumbent.take(best)


def _few_splits(problem: Problem, most: int) -> Iterator[tuple[Stage, ...]]:
    """Yield every split into so many stages, at ``most``, nothing recomputed, on any GPUs, where these are few."""
    layers, gpus = len(problem.chain), range(len(problem.platform))
    for stages in range(1, min(layers, most) + 1):
        if comb(layers - 1, stages - 1) * len(gpus) ** stages <= FEW_SPLITS:
            for cuts, homes in product(combinations(range(1, layers), stages - 1), product(gpus, repeat=stages)):
                if all(a != b for a, b in pairwise(homes)):
                    parts = zip(pairwise((0, *cuts, layers)), homes, strict=True)
                    yield tuple(Stage(*part, (home,)) for part, home in parts)


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
