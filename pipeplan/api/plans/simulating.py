"""How does a plan run in simulation, under its own schedule, others, or one that is written in a file?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ...choices import BEST
from ...deadline import NEVER, Deadline
from ...errors import BadInput
from ...files.schedule_csv import read_schedule
from ...names import shown
from ...plan import Plan
from ...planner.simulated.other_schedules import own_schedule
from ...planner.simulated.simulation import (
    RUNS,
    Refused,
    Simulation,
    compare_schedules,
    run_seeds,
    simulate_plan,
    simulate_written,
    under_jitter,
)
from ...schedule.kinds import schedules
from ...status import Status
from ..problems import whole_microbatches

ALL = "all"  # of the list; BEST is none of them and takes some seconds a placement, so that it is named beside it


def simulations(
    plan: Plan,
    names: Sequence[str] = (),
    microbatches: int | None = None,
    *,
    batch: int | None = None,
    depth: int | None = None,
    chunks: int | None = None,
    limit: int | None = None,
    weight_keeps: float | None = None,
    overlap: float | None = None,
    barrier: bool = True,
    jitter: float | None = None,
    seed: int = 0,
    runs: int = RUNS,
    deadline: Deadline = NEVER,
    status: Status | None = None,
) -> tuple[list[Simulation], list[Refused]]:
    """Return the runs of ``plan`` under each schedule that is named, best first, and those that it cannot run under.

    No name is its own, ``all`` are all, ``best`` is the best order that is found, one that ends in .csv is read as
    torch writes it and stands alone. One alone is not refused but BadInput. ``batch`` are samples per update;
    ``depth``, ``chunks``, ``limit``, and the shares ``weight_keeps`` and ``overlap``, are options of the schedules that
    have them. Without a ``barrier`` between updates, drained runs take the longest span of a GPU instead of the
    makespan. With ``jitter``, a share, each is run ``runs`` times more with durations drawn around the planned ones;
    The search for the best order heeds the ``deadline``; ``status`` says what is going on.
    """
    files = [name for name in names if name.endswith(".csv")]
    refuse_unknown([name for name in names if name not in files], ALL, BEST)
    if files and len(names) > 1:
        raise BadInput("--schedule: one that is written in a file is simulated by itself")
    options: dict[str, Any] = {"depth": depth, "chunks": chunks, "limit": limit}
    for name, share in (("weight_keeps", weight_keeps), ("overlap", overlap)):
        if share is not None:
            options[name] = Fraction(share).limit_denominator(10**6)
    if batch is not None:
        options["batch"] = whole_microbatches(batch, plan.chain.microbatch)
    every = list(schedules()) if ALL in names else []
    chosen = list(dict.fromkeys([*every, *(name for name in names if name != ALL)])) or [own_schedule(plan)]
    refused: list[Refused] = []
    if files:
        found = [replace(simulate_written(plan, read_schedule(files[0]), files[0]), barrier=barrier)]
    elif len(chosen) == 1:
        found = [simulate_plan(plan, microbatches, chosen[0], options, barrier, deadline, status)]
    else:
        found, refused = compare_schedules(plan, chosen, microbatches, options, barrier, deadline, status)
    if jitter is not None:
        found = [under_jitter(run, jitter, run_seeds(seed, runs), status) for run in found]
    return found, refused


def refuse_unknown(names: Iterable[str], *others: str) -> None:
    """Raise BadInput unless all ``names`` of --schedule are schedules or among ``others``."""
    known = [*schedules(), *others]
    for name in names:
        if name not in known:
            raise BadInput(f"--schedule: '{shown(name)}' is not one of {', '.join(known)}")
