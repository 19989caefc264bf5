"""Under which schedules can stages be simulated, by name, whether or not plans are made for them?"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from ..cost.stage_graph import StageGraph
from ..errors import PipeplanError
from .kinds import KINDS, one_f_one_b
from .program import Program, operations_of
from .registered import ProgramSchedule

OTHERS: dict[str, ProgramSchedule] = {
    "pattern": ProgramSchedule(None, "the plan's own periodic pattern, any allocation", "MadPipe section 3", None),
    "pipedream": ProgramSchedule(
        one_f_one_b,
        "1F1B without flush, NOAM microbatches in flight, one weight version for each; 1F1B-RR with replicas",
        "PipeDream section 3.2",
        "stash",
        options=("depth",),
    ),
}


def schedules() -> dict[str, ProgramSchedule]:
    """Return every schedule by name: those above, and the kinds of schedules that plans are made for."""
    own: dict[str, ProgramSchedule] = {
        name: kind.simulated for name, kind in KINDS.items() if kind.simulated is not None and not kind.written
    }
    return {**OTHERS, **own}


def named(name: str) -> ProgramSchedule:
    """Return a schedule by its name, or what runs plans of the kind that has the name."""
    found = schedules().get(name) or next(kind.simulated for own, kind in KINDS.items() if own == name)
    assert found is not None, "a plan without a pattern is simulated"
    return found


def drained_programs(graph: StageGraph, microbatches: int, weight_keeps: Fraction = Fraction(1)) -> Iterator[Program]:
    """Yield a mini-batch under every schedule that drains and can run these stages, whose passes are the usual ones."""
    for entry in schedules().values():
        if entry.build is None or not entry.drains or entry.refuses(graph) is not None:
            continue
        options = {"weight_keeps": weight_keeps} if "weight_keeps" in entry.options else {}
        try:
            program = entry.build(graph, microbatches, **options)
        except PipeplanError:  # which says more than ``refuses``
            continue
        if program.operations == operations_of(graph, 1, program.split):
            yield program
