"""What does a plan's page show: its run under one schedule, several side by side, or beside what was measured?"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from ...errors import BadInput
from ...plan import Plan
from ...planner.simulated.other_schedules import default_microbatches, mini_batch, own_schedule
from ...planner.simulated.simulation import compare_schedules, simulate_plan
from ...report.page.html import Measured, microbatches_shown, report_html
from ...runtime.measure.trace_file import read_operations, read_run_of
from ...schedule.kinds import schedules
from ...status import Status
from .simulating import ALL, refuse_unknown


def report_page(
    plan: Plan,
    names: Sequence[str] = (),
    microbatches: int | None = None,
    trace: str | None = None,
    status: Status | None = None,
) -> tuple[str, int]:
    """Return the HTML page of a valid plan, and how many microbatches of its run it shows.

    ``names`` are schedules of the run, none for the plan's own; several, or ``all``, stand side by side. ``trace`` is
    the file of a run of the plan, which is set under the planned one. BadInput for what contradicts.
    """
    refuse_unknown(list(names), ALL)
    chosen = list(schedules()) if ALL in names else list(dict.fromkeys(names)) or [own_schedule(plan)]
    main = chosen[0] if len(chosen) == 1 else own_schedule(plan)
    if trace is not None and main != own_schedule(plan):
        raise BadInput(f"--trace: the run was one of the plan's own schedule, not of {main}")
    measured = None if trace is None else _measured(plan, trace)
    batch = lcm(*(mini_batch(plan, name) for name in {main, *chosen}))
    wanted = microbatches or default_microbatches(plan, main)
    several = chosen if len(chosen) > 1 else []
    count = microbatches_shown(plan, wanted, batch, len({main, *several}))
    if several and count % batch:
        count += batch - count % batch
    runs, refused = compare_schedules(plan, several, count, status=status)
    return report_html(simulate_plan(plan, count, main), runs, refused, measured=measured), count


def _measured(plan: Plan, trace: str) -> Measured:
    """Return the run by ``plan`` in the file ``trace``, or raise BadInput."""
    run, text = read_run_of(plan, trace)
    return Measured(run, read_operations(plan, trace, text))
