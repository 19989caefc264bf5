"""Which schedules can a plan be simulated under, by name, whether or not it was made for them?"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from ..cost.stage_graph import StageGraph
from ..errors import PipeplanError
from .breadth_first import breadth_first
from .controlled import v_half, v_min
from .gpipe import gpipe
from .interleaved import not_interleaved
from .interleaved_zero_bubble import interleaved_zero_bubble
from .kinds import KINDS, ProgramSchedule, loop, vee
from .one_f_one_b import one_f_one_b
from .program import Program, operations_of
from .zbv import no_vee

OTHERS: dict[str, ProgramSchedule] = {
    "pattern": ProgramSchedule(None, "the plan's own periodic pattern, any allocation", "MadPipe section 3", None),
    "pipedream": ProgramSchedule(
        one_f_one_b,
        "1F1B without flush, NOAM microbatches in flight, one weight version for each; 1F1B-RR with replicas",
        "PipeDream section 3.2",
        "stash",
        options=("depth",),
    ),
    "gpipe": ProgramSchedule(gpipe, "all forwards, then all backwards, then the update", "GPipe (Huang et al. 2019)"),
    "v-half": ProgramSchedule(
        v_half,
        "split backward, two chunks per GPU placed like a V, half of 1F1B's activations",
        "Controllable Memory (Qi et al. 2024)",
        homes=vee,
        refuses=lambda graph: no_vee(graph, "v-half"),
        options=("weight_keeps",),
    ),
    "v-min": ProgramSchedule(
        v_min,
        "split backward, two chunks per GPU placed like a V, a third of 1F1B's activations",
        "Controllable Memory (Qi et al. 2024)",
        homes=vee,
        refuses=lambda graph: no_vee(graph, "v-min"),
        options=("weight_keeps",),
    ),
    "interleaved-zb": ProgramSchedule(
        interleaved_zero_bubble,
        "interleaved 1F1B with split backward, weight gradients fill the bubble",
        "Zero Bubble (Qi et al. 2024), as in torch",
        homes=loop,
        refuses=lambda graph: not_interleaved(graph, "interleaved-zb"),
        options=("chunks", "weight_keeps"),
    ),
    "breadth-first": ProgramSchedule(
        breadth_first,
        "several chunks of the model per GPU, all microbatches through each of them in turn",
        "Breadth-First (Lamy-Poirier 2023)",
        homes=loop,
        refuses=lambda graph: not_interleaved(graph, "breadth-first"),
        options=("chunks",),
    ),
}


def schedules() -> dict[str, ProgramSchedule]:
    """Return every schedule by name: those above, and the kinds of schedules that plans are made for."""
    own: dict[str, ProgramSchedule] = {
        name: kind.simulated for name, kind in KINDS.items() if kind.simulated is not None
    }
    return {**OTHERS, **own}


def drained_programs(graph: StageGraph, microbatches: int, weight_keeps: Fraction = Fraction(1)) -> Iterator[Program]:
    """Yield a mini-batch under every schedule that drains and can run these stages, whose passes are the usual ones."""
    for entry in schedules().values():
        if entry.build is None or entry.weights != "flush" or entry.refuses(graph) is not None:
            continue
        options = {"weight_keeps": weight_keeps} if "weight_keeps" in entry.options else {}
        try:
            program = entry.build(graph, microbatches, **options)
        except PipeplanError:  # which says more than ``refuses``
            continue
        if program.operations == operations_of(graph, 1, program.split):
            yield program
