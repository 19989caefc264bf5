"""What is to be exported, and under which names?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...check.targets import CannotExpress, Expressed, Shape, express
from ...errors import BadInput
from ...names import shown
from ...plan import Plan, ScheduleKind, Stage
from ...problem import AUTOCAST
from ...schedule.timeline import Timeline

Renames = tuple[tuple[re.Pattern[str], str], ...]


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
        return express(self.plan.chain, self.stages, target)

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
