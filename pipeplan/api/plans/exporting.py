"""What is a plan in the terms of another runtime: the texts of its files, and what to know beside them?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from ...errors import BadInput
from ...files.export import WRITERS, Asked, notes
from ...files.export.asked import parsed_renames
from ...files.text import write_text
from ...names import shown
from ...plan import Plan
from ...planner.simulated.other_schedules import own_schedule, schedule_stages
from ...planner.simulated.simulation import simulate_plan
from .simulating import refuse_unknown


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
    if target not in WRITERS:
        raise BadInput(f"--to: '{shown(target)}' is not one of {', '.join(WRITERS)}")
    refuse_unknown([] if schedule is None else [schedule])
    renames = parsed_renames(tuple(rename))
    name = schedule or own_schedule(plan)
    stages = schedule_stages(plan, name, chunks or 2)
    run = simulate_plan(plan, microbatches, name, {"chunks": chunks}).timeline
    writer, asked = WRITERS[target], Asked(plan, stages, run, renames, path)
    beside = {}
    if writer.beside is not None and path != "-":
        ending, write = writer.beside
        beside[str(PurePath(path).with_suffix(ending))] = write(asked)
    return Exported(path, writer.write(asked), beside, notes(plan, target, stages))
