"""Every schedule that a plan can be simulated under, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..problem import Weights
from .gpipe import gpipe
from .interleaved import interleaved
from .message_driven import message_driven
from .nf1b import nf1b
from .one_f_one_b import one_f_one_b
from .program import Program
from .zbv import zbv
from .zero_bubble import zb1p, zb2p

Homes = Callable[[int, int], list[int]]  # (devices, chunks per device) -> which device has each stage


@dataclass(frozen=True, slots=True)
class ProgramSchedule:
    """A registered schedule: ``build(graph, microbatches, **options)`` gives its program, None is the plan's pattern.

    ``weights`` is the weight policy that it runs with; under ``flush`` it drains after every mini-batch. ``homes``
    places its stages where they cannot be the plan's own; ``one_each`` needs one stage per GPU and one GPU per stage.
    """

    build: Callable[..., Program] | None
    summary: str
    source: str
    weights: Weights | None = "flush"
    homes: Homes | None = None
    one_each: bool = False
    options: tuple[str, ...] = ()


def loop(devices: int, chunks: int) -> list[int]:
    """Place stages round and round over the devices, ``chunks`` times."""
    return list(range(devices)) * chunks


def vee(devices: int, chunks: int) -> list[int]:
    """Place two stages on each device, down the devices and back up again."""
    return [*range(devices), *reversed(range(devices))]


SCHEDULES: dict[str, ProgramSchedule] = {
    "pattern": ProgramSchedule(None, "the plan's own periodic pattern, any allocation", "MadPipe section 3", None),
    "pipedream": ProgramSchedule(
        one_f_one_b,
        "1F1B without flush, NOAM microbatches in flight, one weight version for each; 1F1B-RR with replicas",
        "PipeDream section 3.2",
        "stash",
        options=("depth",),
    ),
    "gpipe": ProgramSchedule(gpipe, "all forwards, then all backwards, then the update", "GPipe (Huang et al. 2019)"),
    "1f1b": ProgramSchedule(
        one_f_one_b, "1F1B, drained before every update", "PipeDream-Flush (Narayanan et al. 2021)"
    ),
    "interleaved": ProgramSchedule(
        interleaved,
        "1F1B with several chunks of the model per GPU, drained",
        "Megatron-LM (Narayanan et al. 2021)",
        homes=loop,
        options=("chunks",),
    ),
    "zb1p": ProgramSchedule(
        zb1p,
        "split backward, weight gradients fill the bubble within 1F1B's memory (ZB-H1)",
        "Zero Bubble (Qi et al. 2024)",
        one_each=True,
        options=("weight_keeps",),
    ),
    "zb2p": ProgramSchedule(
        zb2p,
        "split backward, twice the activations, nearly no bubble (ZB-H2)",
        "Zero Bubble (Qi et al. 2024)",
        one_each=True,
        options=("weight_keeps",),
    ),
    "zbv": ProgramSchedule(
        zbv,
        "split backward, two chunks per GPU placed like a V, nearly no bubble within 1F1B's memory",
        "Controllable Memory (Qi et al. 2024)",
        homes=vee,
        options=("weight_keeps",),
    ),
    "nf1b": ProgramSchedule(
        nf1b,
        "one backward for a mini-batch of several microbatches, newest weights, no flush",
        "TiMePReSt section 4.2",
        "latest",
        one_each=True,
        options=("batch", "limit"),
    ),
    "message-driven": ProgramSchedule(
        message_driven,
        "every GPU runs what arrives first, at most a limit of microbatches at a time, drained",
        "Myelin section IV, Algorithm 2",
        options=("limit",),
    ),
}
