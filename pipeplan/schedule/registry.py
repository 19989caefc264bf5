"""Which schedules can a plan be simulated under, by name, whether or not it was made for them?"""

from __future__ import annotations

from .gpipe import gpipe
from .kinds import KINDS, ProgramSchedule
from .one_f_one_b import one_f_one_b

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
}


def schedules() -> dict[str, ProgramSchedule]:
    """Return every schedule by name: those above, and the kinds of schedules that plans are made for."""
    own: dict[str, ProgramSchedule] = {
        name: kind.simulated for name, kind in KINDS.items() if kind.simulated is not None
    }
    return {**OTHERS, **own}
