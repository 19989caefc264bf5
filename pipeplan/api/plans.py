"""What is asked of a plan that there is: how does it run in simulation, what is on its page, what is it elsewhere?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from pathlib import PurePath
from typing import Any

from ..choices import BEST
from ..deadline import NEVER, Deadline
from ..errors import BadInput
from ..files.schedule_csv import read_schedule
from ..files.text import write_text
from ..names import shown
from ..plan import Plan
from ..planner.simulated import simulation
from ..planner.simulated.other_schedules import default_microbatches, mini_batch, own_schedule, schedule_stages
from ..schedule.kinds import schedules
from ..status import Status
from .given.problems import whole_microbatches

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
    runs: int = simulation.RUNS,
    deadline: Deadline = NEVER,
    status: Status | None = None,
) -> tuple[list[simulation.Simulation], list[simulation.Refused]]:
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
    _refuse_unused(options, [] if files else chosen)
    refused: list[simulation.Refused] = []
    if files:
        found = [replace(simulation.simulate_written(plan, read_schedule(files[0]), files[0]), barrier=barrier)]
    elif len(chosen) == 1:
        found = [simulation.simulate_plan(plan, microbatches, chosen[0], options, barrier, deadline, status)]
    else:
        found, refused = simulation.compare_schedules(plan, chosen, microbatches, options, barrier, deadline, status)
    if jitter is not None:
        found = [simulation.under_jitter(run, jitter, simulation.run_seeds(seed, runs), status) for run in found]
    return found, refused


def _refuse_unused(options: Mapping[str, Any], chosen: Sequence[str]) -> None:
    """Raise BadInput for an option, the size of mini-batches apart, that none of the chosen schedules takes."""
    for option in (name for name, value in options.items() if value is not None and name != "batch"):
        takers = [name for name, entry in schedules().items() if option in entry.options]
        takers += [BEST] if option == "weight_keeps" else []
        if not set(takers) & set(chosen):
            what = f"the schedule is {', '.join(chosen)}" if chosen else "the order is a file's"
            raise BadInput(f"--{option.replace('_', '-')} is for {', '.join(takers)}; {what}")


def refuse_unknown(names: Iterable[str], *others: str) -> None:
    """Raise BadInput unless all ``names`` of --schedule are schedules or among ``others``."""
    known = [*schedules(), *others]
    for name in names:
        if name not in known:
            raise BadInput(f"--schedule: '{shown(name)}' is not one of {', '.join(known)}")


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
    from ..report.page.html import Measured, microbatches_shown, report_html
    from ..runtime.measure.trace_file import read_operations, read_run_of

    refuse_unknown(list(names), ALL)
    chosen = list(schedules()) if ALL in names else list(dict.fromkeys(names)) or [own_schedule(plan)]
    main = chosen[0] if len(chosen) == 1 else own_schedule(plan)
    if trace is not None and main != own_schedule(plan):
        raise BadInput(f"--trace: the run was one of the plan's own schedule, not of {main}")
    measured = None
    if trace is not None:
        run, text = read_run_of(plan, trace)
        measured = Measured(run, read_operations(plan, trace, text))
    batch = lcm(*(mini_batch(plan, name) for name in {main, *chosen}))
    wanted = microbatches or default_microbatches(plan, main)
    several = chosen if len(chosen) > 1 else []
    count = microbatches_shown(plan, wanted, batch, len({main, *several}))
    if several and count % batch:
        count += batch - count % batch
    runs, refused = simulation.compare_schedules(plan, several, count, status=status)
    return report_html(simulation.simulate_plan(plan, count, main), runs, refused, measured=measured), count


@dataclass(frozen=True, slots=True)
class Exported:
    """What a target reads: ``text``, further files ``beside`` it by path, and ``notes`` for the user."""

    path: str
    text: str
    beside: dict[str, str]
    notes: list[str]

    def write(self) -> None:
        """Write all files."""
        for path, text in {self.path: self.text, **self.beside}.items():
            write_text(path, text)


def exported(
    plan: Plan,
    target: str,
    path: str = "-",
    *,
    schedule: str | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    rename: Iterable[str] = (),
) -> Exported:
    """Return ``plan`` for ``target`` under ``schedule`` (None: its own), to be written to ``path``.

    ``chunks`` are stages per GPU of interleaved schedules; ``rename`` are rules ``PATTERN=NAME,..`` by which the target
    calls the profile's layers. CannotExpress says what the target has no words for.
    """
    from ..files.frameworks import WRITERS, Asked, notes, parsed_renames

    if target not in WRITERS:
        raise BadInput(f"--to: '{shown(target)}' is not one of {', '.join(WRITERS)}")
    if not PurePath(path).name:
        raise BadInput(f"path: '{shown(path)}' names no file")
    refuse_unknown([] if schedule is None else [schedule])
    renames = parsed_renames(tuple(rename))
    name = schedule or own_schedule(plan)
    stages = schedule_stages(plan, name, chunks)
    run = simulation.simulate_plan(plan, microbatches, name, {"chunks": chunks}).timeline
    writer, asked = WRITERS[target], Asked(plan, stages, run, renames, path)
    beside = {}
    if writer.beside is not None and path != "-":
        ending, write = writer.beside
        beside[str(PurePath(path).with_suffix(ending))] = write(asked)
    return Exported(path, writer.write(asked), beside, notes(plan, target, stages))


def own_export(plan: Plan, target: str) -> Exported | str:
    """Return the plan of a ``target`` in its terms, or why no form of it takes it without more words, such as names."""
    from ..check.units import CannotExpress
    from ..files.frameworks import WRITERS

    why = ""
    for name in (name for name, writer in WRITERS.items() if writer.target == target):
        try:
            return exported(plan, name)
        except CannotExpress as error:
            why = why or str(error)
    return why
