"""What can a rank be told to do, and what does a list of that ask of it? Instructions, in words and counted.

The executor walks lists of them, which :mod:`.lowered` makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ...schedule.weight_versions import Lent, kept

NOBODY = -1  # in place of a peer: what is sent is what others send, and what is received comes from whom they hear
Pass = Literal["F", "B"]
Edge = tuple[Pass, int]  # what travels: activations ("F") or gradients ("B"), and the stage that sends them


@dataclass(frozen=True, slots=True)
class StagePass:
    """A pass of a stage with weights ``version``; ``lent`` are those that other stages of the rank keep for it.

    ``told`` and ``brief`` are how instructions are named, in words and in short: see :func:`sentence`, :func:`word`.
    """

    stage: int
    microbatch: int
    version: int
    lent: Lent = ()


@dataclass(frozen=True, slots=True)
class Forward(StagePass):
    """Run a stage forward."""

    told: ClassVar = "the forward of microbatch {x.microbatch} on stage {x.stage}"
    brief: ClassVar = "{x.stage}F{span}v{x.version}"


@dataclass(frozen=True, slots=True)
class Backward(StagePass):
    """Run a stage backward; ``version`` is what it differentiates (and recomputes) with.

    What ``covers`` several microbatches, here and in exchanges of gradients, names the last of them. With
    ``inputs_only`` the gradients of weights are left for :class:`BackwardWeights`.
    """

    covers: int = 1
    inputs_only: bool = False
    told: ClassVar = "the backward of {which} on stage {x.stage}"
    brief: ClassVar = "{x.stage}{part}{span}v{x.version}"


@dataclass(frozen=True, slots=True)
class Recompute(StagePass):
    """Run again what a stage recomputes, which its backward then finds done."""

    told: ClassVar = "the recomputation of microbatch {x.microbatch} on stage {x.stage}"
    brief: ClassVar = "{x.stage}R{span}v{x.version}"


@dataclass(frozen=True, slots=True)
class BackwardWeights(StagePass):
    """Compute the gradients of a stage's weights, which its backward has left for later."""

    told: ClassVar = "the gradients of weights of microbatch {x.microbatch} on stage {x.stage}"
    brief: ClassVar = "{x.stage}W{span}v{x.version}"


@dataclass(frozen=True, slots=True)
class Message:
    """What stages of two ranks exchange for pass ``kind`` of ``stage``; ``peer`` is the other rank."""

    kind: Pass
    stage: int
    microbatch: int
    peer: int
    covers: int = 1

    @property
    def edge(self) -> Edge:
        """The edge that it uses."""
        return edge_into(self.kind, self.stage) if isinstance(self, Receive) else (self.kind, self.stage)


@dataclass(frozen=True, slots=True)
class Send(Message):
    """Send what ``stage`` made in pass ``kind`` to rank ``peer``."""

    told: ClassVar = "stage {x.stage}'s send of {what} of {which} to rank {x.peer}"
    brief: ClassVar = "{x.stage}{kind}{span}>{x.peer}"


@dataclass(frozen=True, slots=True)
class Receive(Message):
    """Receive from rank ``peer`` what ``stage`` needs for pass ``kind``."""

    told: ClassVar = "stage {x.stage}'s receive of {what} of {which} from rank {x.peer}"
    brief: ClassVar = "{x.stage}{kind}{span}<{x.peer}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the gradients of a stage's replicas before it makes ``version``."""

    stage: int
    version: int
    told: ClassVar = "the gradient sum over the replicas of stage {x.stage} for update {x.version}"
    brief: ClassVar = "{x.stage}R{x.version}"


@dataclass(frozen=True, slots=True)
class ReduceTied:
    """Sum the gradients of the weights that ``stages`` share, over all their replicas, for ``version``.

    It comes before the updates of all of them, or where nothing drains before that of the first stage, when the others
    have made ``version`` of the weights that they don't share: then they make it of the shared ones, too.
    """

    stages: tuple[int, ...]
    version: int
    told: ClassVar = "the gradient sum of what stages {both} share for update {x.version}"
    brief: ClassVar = "{sum}R{x.version}"


@dataclass(frozen=True, slots=True)
class PutAside:
    """Put the gradient for ``version`` of a stage aside: passes add to the next before this one's norm is known."""

    stage: int
    version: int
    told: ClassVar = "the putting aside of stage {x.stage}'s gradient for update {x.version}"
    brief: ClassVar = "{x.stage}G{x.version}"


@dataclass(frozen=True, slots=True)
class Norm:
    """Begin the sum over all ranks that tells the norm of all gradients for ``version``; updates wait for it.

    It comes behind the last backward for that version on any rank, and all sums.
    """

    version: int
    told: ClassVar = "the norm of all gradients for update {x.version}"
    brief: ClassVar = "N{x.version}"


@dataclass(frozen=True, slots=True)
class Update:
    """Make ``version`` of a stage's weights from the gradient that has been accumulated."""

    stage: int
    version: int
    told: ClassVar = "update {x.version} of stage {x.stage}"
    brief: ClassVar = "{x.stage}U{x.version}"


@dataclass(frozen=True, slots=True)
class Agree:
    """Decide with all ranks, whose pipeline is empty, whether ``version`` can be made from the gradients."""

    version: int
    told: ClassVar = "the agreement on update {x.version}"
    brief: ClassVar = "A{x.version}"


@dataclass(frozen=True, slots=True)
class Save:
    """Evaluate, or write a checkpoint, with a drained pipeline after ``step`` updates of all stages."""

    step: int
    told: ClassVar = "the evaluation or checkpoint after update {x.step}"
    brief: ClassVar = "S{x.step}"


Passing = Forward | Recompute | Backward | BackwardWeights | Send | Receive
Instruction = Passing | PutAside | Reduce | ReduceTied | Norm | Update | Agree | Save


def edge_into(kind: Pass, stage: int) -> Edge:
    """Return the edge on which ``stage`` gets its input (``F``) or the gradient of its output (``B``)."""
    return kind, stage - 1 if kind == "F" else stage + 1


def sentence(instruction: Instruction) -> str:
    """Return how messages name an instruction: ``the forward of microbatch 3 on stage 1``."""
    return _filled(instruction.told, instruction)


def word(instruction: Instruction) -> str:
    """Return one instruction in the short form of :func:`.dry_run.program_lines`."""
    return _filled(instruction.brief, instruction)


def _filled(words: str, x: Instruction) -> str:
    kind, last, stages = getattr(x, "kind", "F"), getattr(x, "microbatch", 0), list(map(str, getattr(x, "stages", ())))
    first = last - getattr(x, "covers", 1) + 1
    return words.format(
        x=x,
        kind=kind.lower(),
        what="the activations" if kind == "F" else "the gradient",
        which=f"microbatch {last}" if first == last else f"microbatches {first} to {last}",
        span=last if first == last else f"{first}-{last}",
        part="I" if getattr(x, "inputs_only", False) else "B",
        both=" and ".join(stages),
        sum="+".join(stages),
    )


def later(instruction: Instruction, microbatches: int, versions: int) -> Instruction:
    """Return ``instruction`` with microbatches and versions counted on by so many."""
    if microbatches == versions == 0:
        return instruction
    match instruction:  # passes and messages as a run makes each of them, which replace() would take longer for
        case Backward(s, m, version, lent, covers, inputs_only):
            return Backward(s, m + microbatches, version + versions, _lent_later(lent, versions), covers, inputs_only)
        case StagePass(s, m, version, lent):
            return type(instruction)(s, m + microbatches, version + versions, _lent_later(lent, versions))
        case Message(kind, s, m, peer, covers):
            return type(instruction)(kind, s, m + microbatches, peer, covers)
        case Save(step):
            return Save(step + versions)
        case _:
            return replace(instruction, version=instruction.version + versions)


def _lent_later(lent: Lent, versions: int) -> Lent:
    return tuple((s, version + versions) for s, version in lent) if lent else lent


def version_uses(instructions: Sequence[Instruction], stage: int, by: Collection[int] = ()) -> Counter[int]:
    """Return how many passes of ``stage``, and of those that use weights that it keeps, use each version of these.

    When the last is over, the version can be overwritten.
    """
    found: Counter[int] = Counter()
    for x in instructions:
        if isinstance(x, StagePass) and (x.stage == stage or x.stage in by):
            found[x.version if x.stage == stage else dict(x.lent)[stage]] += 1
    return found


def most_versions(instructions: Sequence[Instruction], stage: int) -> int:
    """Return how many versions of the weights of ``stage`` must be there at once: the newest, and those still used.

    Others that use weights of it need them too.
    """
    passes: list[tuple[int, int]] = []
    newest = min(version_uses(instructions, stage), default=0)
    for x in instructions:
        match x:
            case StagePass(s, _, version) if s == stage:
                passes.append((newest, version))
            case StagePass():
                passes += [(newest, version) for s, version in x.lent if s == stage]
            case Update(s, version) if s == stage:
                newest = version
    return kept(passes)
