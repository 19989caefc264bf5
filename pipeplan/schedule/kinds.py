"""A plan's simulated timeline, whatever its kind of schedule: validator, figures, reports and runtime share it."""

from __future__ import annotations

from ..cost.stage_graph import StageGraph, stage_graph
from ..errors import BadInput
from ..plan import Pattern, Plan, Schedule
from .message_driven import message_driven
from .nf1b import nf1b
from .pattern import most_in_flight, starts_of
from .program import Program, unroll
from .simulate import simulate
from .timeline import Timeline

SIMULATED = ("nf1b", "message-driven")  # kinds of schedules that are judged through their simulated timeline
MOST_JUDGED = 10**7  # steps of a run that a plan is judged by, which take minutes


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
