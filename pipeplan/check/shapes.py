"""Which shapes may equal pipelines have under a kind of schedule, and what do they hold whose stages take the same?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import takewhile

from ..choices import DRAINED
from ..cost.stage_graph import stage_graph
from ..plan import Schedule, ScheduleKind, Stage
from ..problem import Chain, Layer, Platform, Policy, Problem
from ..schedule.kinds import KINDS, program_of_kind, too_long, vee
from ..schedule.simulate import simulate
from ..schedule.timeline import Timeline, in_flight
from .targets import Shape


def homes_of(kind: ScheduleKind, ranks: int, chunks: int) -> list[int]:
    """Return which of ``ranks`` has each stage where they have ``chunks`` each; one each where a kind places none."""
    homes = KINDS[kind].homes
    return list(range(ranks)) if homes is None else homes(ranks, chunks)


def shapes(problem: Problem, kind: ScheduleKind, units: int, chunks: Callable[[int], Iterable[int]]) -> Iterator[Shape]:
    """Yield the shapes of pipelines of at most so many ``units`` under a kind that can be simulated, with one of the
    numbers of ``chunks`` (of ranks) on each rank."""
    count, gpus, like_vee = problem.policy.accumulate or 1, len(problem.platform), KINDS[kind].homes is vee
    for ranks in range(1, min(gpus, units) + 1):
        for each in chunks(ranks):
            stages = len(homes_of(kind, ranks, each))
            if stages == ranks * each <= units and too_long(4 * stages - 2, Schedule(kind, count)) is None:
                for pipelines in range(1, gpus // ranks + 1 if problem.replicas else 2):
                    yield Shape(ranks, pipelines, each, like_vee)


@lru_cache(maxsize=512)
def held_at_most(kind: ScheduleKind, ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """Return how many of ``microbatches`` each stage of one pipeline holds at most, if all take the same."""
    timeline = _even_run(kind, ranks, chunks, microbatches)
    counts = [in_flight(timeline, lane) for lane, _ in enumerate(timeline.program.lanes)]
    return tuple(max(count.get(s, 0) for count in counts) for s in range(len(timeline.program.graph.stages)))


@lru_cache(maxsize=512)
def held_at_first(kind: ScheduleKind, ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """Return how many of ``microbatches`` each stage of one pipeline holds when the first backward of its device
    begins, under a schedule whose forwards and backwards have a fixed order."""
    timeline = _even_run(kind, ranks, chunks, microbatches)
    counts: Counter[int] = Counter()
    for lane in timeline.program.lanes:
        works = [timeline.program.operations[step.position] for step in lane.steps]
        counts.update(work.stage for work in takewhile(lambda work: work.kind == "F", works))
    return tuple(counts[s] for s in range(len(timeline.program.graph.stages)))


def _even_run(kind: ScheduleKind, ranks: int, chunks: int, microbatches: int) -> Timeline:
    homes = homes_of(kind, ranks, chunks)
    chain = Chain("even", tuple(Layer(str(i), 20, 40, 1, 0, backward_weight_ns=20) for i in range(len(homes))), 0)
    policy = Policy(weights=DRAINED, accumulate=microbatches)
    stages = [Stage(s, s + 1, (home,)) for s, home in enumerate(homes)]
    graph = stage_graph(chain, Platform.flat(ranks, 10**9, 10**9), policy, stages)
    return simulate(program_of_kind(graph, Schedule(kind, microbatches), None, microbatches))
