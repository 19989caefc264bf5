"""A plan's simulated timeline, whatever its kind of schedule: validator, figures, reports and runtime share it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .errors import BadInput
from .groups import ceil_div
from .message_driven import message_driven
from .nf1b import nf1b
from .plan import Pattern, Plan, Schedule
from .program import Program, unroll
from .simulate import Timeline, simulate
from .stages import StageGraph, most_in_flight, stage_graph, starts_of

MOST_STEPS = 40_000  # that are simulated to find a steady state
MOST_JUDGED = 10**7  # steps of a run that a plan is judged by, which take minutes
MOST_CYCLE = 64  # mini-batches after which a steady state is looked for to repeat


def graph_of(plan: Plan) -> StageGraph:
    """Return the stage graph of a plan."""
    return stage_graph(plan.chain, plan.platform, plan.policy, plan.allocation.stages)


def program_of_kind(graph: StageGraph, schedule: Schedule, pattern: Pattern | None, microbatches: int) -> Program:
    """Return the program that runs ``microbatches`` microbatches of ``graph`` under a plan's schedule.

    ``pattern`` is what the kinds ``pattern`` and ``flush`` unroll.
    """
    match schedule.kind:
        case "nf1b":
            return nf1b(graph, microbatches, schedule.microbatches or 1, schedule.limit)
        case "message-driven":
            return message_driven(graph, microbatches, schedule.limit)
        case "pattern" | "flush":
            if pattern is None:
                raise BadInput("the plan has no pattern: nothing says when its operations run")
            return unroll(graph, pattern, microbatches)


def plan_program(plan: Plan, microbatches: int) -> Program:
    """Return the program that runs ``microbatches`` microbatches of ``plan`` under its own schedule."""
    return program_of_kind(graph_of(plan), plan.schedule, plan.pattern, microbatches)


def plan_timeline(plan: Plan, microbatches: int | None = None) -> Timeline:
    """Return the simulated run of ``plan`` under its own schedule.

    By default one mini-batch of a schedule that drains, and otherwise as many microbatches as show a steady state.
    """
    if microbatches is None:
        microbatches = shown_microbatches(plan)
    return simulate(plan_program(plan, microbatches))


def shown_microbatches(plan: Plan) -> int:
    """Return how many microbatches a run of ``plan`` needs to show all that matters: see :func:`plan_timeline`."""
    schedule = plan.schedule
    match schedule.kind:
        case "flush" | "message-driven":
            return schedule.microbatches or 1
        case "nf1b":
            batch, limit = schedule.microbatches or 1, schedule.limit or len(plan.allocation.stages)
            return batch * max(-(-64 // batch), 8 * limit)
        case "pattern":
            if plan.pattern is None:
                raise BadInput("the plan has no pattern: nothing says when its operations run")
            return max(64, 16 * most_in_flight(graph_of(plan), starts_of(plan.pattern), plan.pattern.period_ns))


def too_long(operations: int, schedule: Schedule) -> str | None:
    """Return in words why no plan is judged that takes so long to simulate, or None.

    ``operations`` are those on the path of a microbatch. Nothing is simulated of an endless pattern; of nF1B it is the
    shortest run that could show a steady state.
    """
    count, limit = schedule.microbatches or 1, schedule.limit or 1
    match schedule.kind:
        case "pattern":
            return None
        case "nf1b":
            steps = 4 * limit * (count + 1) * (operations // 2)
            what = f"mini-batches of {count} microbatches, {limit} admitted at once,"
        case "flush" | "message-driven":
            steps = count * operations
            what = f"a mini-batch of {count} microbatches"
    if steps <= MOST_JUDGED:
        return None
    return f"{what} would take {steps} steps to simulate; plans of up to {MOST_JUDGED} are judged"


# --- the steady state of nF1B ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SteadyRun:
    """An nF1B run from the empty pipeline into its steady state, in which ``cycle`` mini-batches take ``cycle_ns``.

    It is ``settled`` when the state of the pipeline has come again: from then on the run repeats itself, so its peaks
    are those of any longer run. Otherwise the cycle is the mean of its second half.
    """

    timeline: Timeline
    cycle: int
    cycle_ns: int
    settled: bool

    @property
    def period_ns(self) -> int:
        """Time per microbatch in the steady state, rounded up; never less than the busiest device or link needs."""
        program = self.timeline.program
        return max(program.graph.period_floor_ns, ceil_div(self.cycle_ns, self.cycle * program.batch))


@lru_cache(maxsize=16)
def steady_nf1b(graph: StageGraph, batch: int, limit: int) -> SteadyRun:
    """Return the run of nF1B until its state repeats; exact and deterministic.

    The state when a mini-batch enters is what the up to ``limit`` - 1 mini-batches inside have started, and when. All
    that follows depends on it alone, so two equal states are one period apart. Looks at runs of doubled lengths up to
    :data:`MOST_STEPS` steps: stages that are nearly, but not quite, as slow as the slowest fill up to the limit over
    so many mini-batches that no steady state shows before.
    """
    steps = batch * (len(graph.operations) // 2) + len(graph.operations) // 2
    most = max(4 * limit + 4, MOST_STEPS // steps)
    count = min(most, max(4 * limit, 2 * limit + 8))
    while True:
        timeline = simulate(nf1b(graph, count * batch, batch, limit))
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
