"""What is to be exported, under which names, and what do a framework's arguments say of a profile?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ...check.targets import TARGETS, Expressed, Recompute, Shape, express, refusals, weight_bytes
from ...check.units import CannotExpress, Unit
from ...choices import Optimizer
from ...errors import BadInput
from ...names import shown
from ...plan import Plan, ScheduleKind, Stage
from ...problem import AUTOCAST, Chain, Precision, Zero
from ...schedule.timeline import Timeline
from .options import Options

Renames = tuple[tuple[re.Pattern[str], str], ...]
SCHEDULES: dict[ScheduleKind, str] = {  # as torchtitan calls them, and torch with Schedule before
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """The ``stages`` to export of ``plan``, and the simulated ``run`` of the schedule. ``renames`` are patterns of
    names of the profile and what the target calls them, none to keep them. ``path`` is the file to be written."""

    plan: Plan
    stages: tuple[Stage, ...]
    run: Timeline
    renames: Renames = ()
    path: str = "-"

    def expressed(self, target: str) -> Expressed:
        """Return the stages in a target's terms; CannotExpress says what it has no words for."""
        found = express(self.plan.chain, self.stages, target)
        self.refuse_unshared(target, found.shape)
        return found

    def refuse_unshared(self, target: str, shape: Shape) -> None:
        """Raise CannotExpress where replicas don't share there what those of the plan do."""
        unshared = TARGETS[target].unshared(self.plan.policy.zero, shape)
        if unshared is not None:
            raise CannotExpress(f"{target}: {unshared}")

    def kind(self, shape: Shape) -> ScheduleKind:
        """Return the schedule that a target with its own orders runs on stages of a shape: the plan's, or the usual."""
        own, several = self.plan.schedule.kind, shape.chunks > 1
        known = ("interleaved", "interleaved-zb", "zbv") if several else ("1f1b",)
        if self.stages == self.plan.allocation.stages and own in known:
            return own
        return "zbv" if shape.vee else "interleaved" if several else "1f1b"

    @property
    def microbatches(self) -> int:
        """Microbatches of a mini-batch, in all pipelines together."""
        return self.run.program.microbatches

    @property
    def autocast(self) -> str:
        """The type that operations are cast to, as torch names it; empty where none is."""
        return self.plan.chain.dtype.removeprefix(AUTOCAST) if self.plan.policy.precision == "autocast" else ""

    @property
    def title(self) -> str:
        """The model's name, as it may stand in a docstring."""
        return repr(shown(self.plan.chain.name))[1:-1].replace('"', "'")

    def renamed(self, target: str, name: str) -> str:
        """Return what the target calls a layer; CannotExpress where no pattern is for it."""
        return renamed(self.renames, target, name)


def renamed(renames: Renames, target: str, name: str) -> str:
    """Return what a target calls a layer of a profile; CannotExpress where no pattern is for it."""
    for pattern, to in renames:
        found = pattern.fullmatch(name)
        if found:
            return found.expand(to)
    raise CannotExpress(
        f"{target}: --rename has no pattern for layer '{shown(name)}'; those that keep their names need one too, "
        r"such as (.*)=\1"
    )


def parsed_renames(texts: Sequence[str]) -> Renames:
    r"""Return the patterns of ``block(\d+)=layers.\1,head=lm_head``; BadInput where one is none."""
    found = []
    for text in texts:
        for part in re.split(r",(?=[^,=]*=)", text):
            name, equals, to = part.partition("=")
            try:
                pattern = re.compile(name)
                if equals and name:
                    re.compile(rf"(?:{name})|").fullmatch("").expand(to)  # type: ignore[union-attr]  # it matches
            except (re.error, IndexError) as error:
                raise BadInput(f"--rename: '{shown(part)}': {error}") from error
            if not (equals and name and to):
                raise BadInput(
                    rf"--rename: '{shown(part)}' is not of the form PATTERN=NAME, such as block(\d+)=layers.\1"
                )
            found.append((pattern, to))
    return tuple(found)


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
    "selective recomputation is inside of layers, of which the profile knows nothing (profile --selective): it is "
    "judged as none, so memory is at most as said and the time at least"
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
    zero: Zero = 0,
) -> tuple[Stage, ...]:
    """Return the stages that hold ``counts`` units each, in order; BadInput where the target itself runs no such.

    ``microbatches`` are those of all pipelines.
    """
    if 0 in counts:
        raise BadInput(f"{source.path}: stage {counts.index(0)} holds nothing; plans have a layer in every stage")
    reasons = refusals(TARGETS[target], kind, shape, microbatches, zero)
    if reasons:
        raise BadInput(f"{source.path}: {reasons[0]}")
    weights = weight_bytes(source.chain)
    parts = [units[a:b] for a, b in pairwise(accumulate(counts, initial=0))]
    return tuple(
        Stage(part[0].start, part[-1].stop, group, recompute.segments(TARGETS[target], part, weights))
        for part, group in zip(parts, shape.groups(), strict=True)
    )
