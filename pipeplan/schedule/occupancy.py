"""How many microbatches do the stages of one pipeline hold under a schedule, if all of them take the same?"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import takewhile

from ..choices import DRAINED
from ..cost.stage_graph import stage_graph
from ..plan import Schedule, ScheduleKind, Stage
from ..problem import Chain, Layer, Platform, Policy
from .kinds import KINDS, program_of_kind
from .memory import in_flight
from .simulate import simulate
from .timeline import Timeline


def homes_of(kind: ScheduleKind, ranks: int, chunks: int) -> list[int]:
    """Return which of ``ranks`` has each stage where they have ``chunks`` each; one each where a kind places none."""
    simulated = KINDS[kind].simulated
    homes = None if simulated is None else simulated.homes
    return list(range(ranks)) if homes is None else homes(ranks, chunks)


@lru_cache(maxsize=512)
def most_held(kind: ScheduleKind, ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
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
