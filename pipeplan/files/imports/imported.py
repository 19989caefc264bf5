"""What do a target's arguments say of a profile, and in which words is said that they say nothing?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...check.targets import TARGETS, Recompute, Shape, Unit, refusals, weight_bytes
from ...choices import Optimizer
from ...errors import BadInput
from ...plan import ScheduleKind, Stage
from ...problem import Chain, Precision, Zero
from ..export.asked import Renames
from .shell import Options


@dataclass(frozen=True, slots=True)
class Source:
    """The ``options`` of a file, for a profile on so many GPUs; ``renames`` as exports take them."""

    options: Options
    chain: Chain
    gpus: int
    renames: Renames = ()

    @property
    def path(self) -> str:
        """The file."""
        return self.options.path


@dataclass(frozen=True, slots=True)
class Imported:
    """What somebody runs: stages under a kind of schedule, ``microbatches`` of all pipelines for each update.

    Of the rest None is what the arguments don't say. ``notes`` are what was read as something near to it.
    """

    stages: tuple[Stage, ...]
    kind: ScheduleKind
    microbatches: int
    optimizer: Optimizer | None = None
    precision: Precision | None = None
    zero: Zero | None = None
    notes: tuple[str, ...] = ()


SELECTIVE = (
    "selective recomputation is inside of layers, of which the profile knows nothing: it is judged as none, so memory "
    "is at most as said and the time at least"
)


def placed(
    source: Source,
    target: str,
    units: Sequence[Unit],
    counts: Sequence[int],
    kind: ScheduleKind,
    shape: Shape,
    microbatches: int,
    recompute: Recompute,
) -> tuple[Stage, ...]:
    """Return the stages that hold ``counts`` units each, in order; BadInput where the target itself runs no such.

    ``microbatches`` are those of all pipelines.
    """
    if 0 in counts:
        raise BadInput(f"{source.path}: stage {counts.index(0)} holds nothing; plans have a layer in every stage")
    reasons = refusals(TARGETS[target], kind, shape, microbatches)
    if reasons:
        raise BadInput(f"{source.path}: {reasons[0]}")
    weights, ends = weight_bytes(source.chain), [0]
    for count in counts:
        ends.append(ends[-1] + count)
    parts = [units[a:b] for a, b in pairwise(ends)]
    return tuple(
        Stage(part[0].start, part[-1].stop, group, recompute.segments(TARGETS[target], part, weights))
        for part, group in zip(parts, shape.groups(), strict=True)
    )
