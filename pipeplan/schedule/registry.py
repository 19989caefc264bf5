"""Which schedules can a plan be simulated under, by name, whether or not it was made for them?"""

from __future__ import annotations

from .breadth_first import breadth_first
from .controlled import v_half, v_min
from .gpipe import gpipe
from .interleaved import not_interleaved
from .interleaved_zero_bubble import interleaved_zero_bubble
from .kinds import KINDS, ProgramSchedule, loop
from .one_f_one_b import one_f_one_b
from .program import no_pipelines
from .zbv import no_vee, zbv
from .zero_bubble import zb1p, zb2p


def vee(devices: int, chunks: int) -> list[int]:
    """Place two stages on each device, down the devices and back up again."""
    return [*range(devices), *reversed(range(devices))]


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
    "zb1p": ProgramSchedule(
        zb1p,
        "split backward, weight gradients fill the bubble within 1F1B's memory (ZB-H1)",
        "Zero Bubble (Qi et al. 2024)",
        refuses=lambda graph: no_pipelines(graph, "zb1p"),
        options=("weight_keeps",),
    ),
    "zb2p": ProgramSchedule(
        zb2p,
        "split backward, twice the activations, nearly no bubble (ZB-H2)",
        "Zero Bubble (Qi et al. 2024)",
        refuses=lambda graph: no_pipelines(graph, "zb2p"),
        options=("weight_keeps",),
    ),
    "zbv": ProgramSchedule(
        zbv,
        "split backward, two chunks per GPU placed like a V, nearly no bubble within 1F1B's memory",
        "Controllable Memory (Qi et al. 2024)",
        homes=vee,
        refuses=no_vee,
        options=("weight_keeps",),
    ),
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
