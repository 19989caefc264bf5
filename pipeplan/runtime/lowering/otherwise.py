"""How would a plan's stages run under another schedule than the plan's own? As a plan that says so."""

from __future__ import annotations

from dataclasses import replace

from ...choices import BEST
from ...errors import BadInput
from ...names import shown
from ...plan import Plan, Schedule
from ...schedule.kinds import KINDS, graph_of, refused
from ...schedule.program import pipelines
from ...schedule.written import Written, order_of

PIPEDREAM = "pipedream"  # of simulated schedules, the one that plans have as a pattern


def under(plan: Plan, name: str, limit: int | None = None) -> Plan:
    """Return ``plan`` under the kind of schedule ``name``, which admits up to ``limit`` at once if it has a limit.

    BadInput where the kind doesn't go with the plan's weights, or its stages cannot run so.
    """
    kind = next((row for known, row in KINDS.items() if known == name and not row.written), None)
    if kind is None:
        known = ", ".join(known for known, row in KINDS.items() if not row.written)
        raise BadInput(f"--schedule: '{shown(name)}' is not one of {known}, {PIPEDREAM}, {BEST}, nor a .csv file")
    if plan.policy.weights not in kind.weights:
        raise BadInput("plan: " + kind.refusal.format(weights=plan.policy.weights))
    if kind.simulated is None and plan.pattern is None:
        raise BadInput(f"plan: has no pattern, in whose order {name} runs")
    microbatches = None
    if kind.in_mini_batches:
        microbatches = plan.schedule.microbatches or plan.policy.accumulate
    if kind.limit is None and limit is not None:
        raise BadInput(f"--limit: a {name} schedule holds what its order says")
    if kind.limit is not None and limit is None:
        limit = plan.schedule.limit or kind.limit.usual(graph_of(plan))[0]
    schedule = Schedule(name, microbatches, limit)  # type: ignore[arg-type]  # it is a key of the table
    instead = f"; `pipeplan plan --weights {plan.policy.weights} --schedule {name}` plans for it"
    return _fitting(replace(plan, schedule=schedule, pattern=None if kind.simulated else plan.pattern), name, instead)


def written_plan(plan: Plan, written: Written, name: str) -> Plan:
    """Return ``plan``, which drains, with its GPUs in the order of the ``written`` schedule in a file of this name.

    Of equal pipelines each runs it, and an update takes all its microbatches. BadInput where it doesn't fit.
    """
    if plan.policy.weights not in KINDS["written"].weights:
        raise BadInput(f"{name}: " + KINDS["written"].refusal.format(weights=plan.policy.weights))
    count = written.microbatches * pipelines(graph_of(plan), name)
    schedule = Schedule("written", count, order=order_of(written))
    policy = replace(plan.policy, accumulate=count)
    return _fitting(replace(plan, schedule=schedule, pattern=None, policy=policy), name)


def _fitting(plan: Plan, name: str, instead: str = "") -> Plan:
    """Return ``plan`` without bounds of other schedules; BadInput where its stages cannot run under its own, which
    ends with what to do ``instead``."""
    reason = refused(graph_of(plan), plan.schedule)
    if reason is not None:
        raise BadInput(f"{name}: {reason}{instead}")
    return replace(plan, lower_bounds=tuple(x for x in plan.lower_bounds if x.schedule is None))
