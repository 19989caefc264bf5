"""Which schedules can a plan be simulated under, by name, whether or not it was made for them?"""

from __future__ import annotations

from .dualpipev import dualpipev
from .kinds import KINDS, vee
from .one_f_one_b import one_f_one_b
from .registered import ProgramSchedule
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
    "dualpipev": ProgramSchedule(
        dualpipev,
        "two chunks per GPU placed like a V, forwards run together with backwards of other microbatches",
        "DualPipe (DeepSeek-V3 2024), as in torch",
        homes=vee,
        refuses=lambda graph: no_vee(graph, "dualpipev"),
        options=("overlap", "weight_keeps"),
    ),
}


def schedules() -> dict[str, ProgramSchedule]:
    """Return every schedule by name: those above, and the kinds of schedules that plans are made for."""
    own: dict[str, ProgramSchedule] = {
        name: kind.simulated for name, kind in KINDS.items() if kind.simulated is not None
    }
    return {**OTHERS, **own}
