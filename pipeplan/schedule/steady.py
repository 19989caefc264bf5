"""When does a run of nF1B repeat itself? Its steady state, by which plans are judged.

nF1B has no pattern: its devices decide as they go. But their times are whole numbers, so that after some mini-batches
the pipeline is mostly in a state in which it was before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..cost.stage_graph import StageGraph
from ..deadline import NEVER, Deadline
from ..integers import ceil_div
from .programs.nf1b import nf1b
from .simulate import STEP_S, simulate
from .timeline import Timeline

MOST_STEPS = 40_000  # that are simulated to find a steady state
MOST_CYCLE = 64  # mini-batches after which a steady state is looked for to repeat


@dataclass(frozen=True)
class SteadyRun:
    """An nF1B run from the empty pipeline into its steady state, in which ``cycle`` mini-batches take ``cycle_ns``.

    It ``repeats`` when the state of the pipeline has come again: from then on the run goes on as before, so its peaks
    are those of any longer run. Otherwise the cycle is the mean of its second half.
    """

    timeline: Timeline
    cycle: int
    cycle_ns: int
    repeats: bool

    @property
    def period_ns(self) -> int:
        """Time per microbatch in the steady state, rounded up; never less than the busiest device or link needs."""
        program = self.timeline.program
        return max(program.graph.period_floor_ns, ceil_div(self.cycle_ns, self.cycle * program.batch))


@lru_cache(maxsize=16)
def steady_nf1b(graph: StageGraph, batch: int, limit: int, deadline: Deadline = NEVER) -> SteadyRun:
    """Return the run of nF1B until its state repeats; exact and deterministic.

    The state when a mini-batch enters is what the up to ``limit`` - 1 mini-batches inside have started, and when. All
    that follows depends on it alone, so two equal states are one period apart. Looks at runs of doubled lengths up to
    :data:`MOST_STEPS` steps: stages that are nearly, but not quite, as slow as the slowest fill up to the limit over
    so many mini-batches that no steady state shows before.
    """
    steps = (batch + 1) * len(graph.round_trips)
    most = max(4 * limit + 4, MOST_STEPS // steps)
    count = min(most, max(4 * limit, 2 * limit + 8))
    while True:
        deadline.check(count * steps * STEP_S)
        timeline = simulate(nf1b(graph, count * batch, batch, limit), deadline=deadline)
        found = _repeat(timeline, limit)
        if found is not None:
            return SteadyRun(timeline, *found, True)
        if count == most:
            half = count // 2
            first, last = half * batch - 1, count * batch - 1
            return SteadyRun(timeline, count - half, timeline.left_ns(last) - timeline.left_ns(first), False)
        count = min(most, 2 * count)


def _repeat(timeline: Timeline, limit: int) -> tuple[int, int] | None:
    """Return the fewest mini-batches, and their time, after which the state at the last entry had been there before."""
    batch = timeline.program.batch
    entries = [row[0] for row in timeline.start_ns[::batch]]
    last = len(entries) - 1
    state = _state(timeline, last, limit)
    for cycle in range(1, min(MOST_CYCLE, last - limit) + 1):
        if _state(timeline, last - cycle, limit) == state:
            return cycle, entries[last] - entries[last - cycle]
    return None


def _state(timeline: Timeline, entering: int, limit: int) -> list[int | None]:
    """Return when, before mini-batch ``entering`` enters, each step of those inside started; None if not yet."""
    batch = timeline.program.batch
    now = timeline.start_ns[entering * batch][0]
    rows = timeline.start_ns[(entering - limit + 1) * batch : entering * batch]
    return [start - now if start < now else None for row in rows for start in row]
