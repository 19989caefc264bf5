"""What can a rank be told to do, and what does a list of that ask of it? Instructions, in words and counted.

The executor walks lists of them, which :mod:`.lowered` makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...schedule.weight_versions import Lent, kept

Pass = Literal["F", "B"]
Edge = tuple[Pass, int]  # what travels: activations ("F") or gradients ("B"), and the stage that sends them


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage forward with weights ``version``; ``lent`` are those that other stages of the rank keep for it."""

    stage: int
    microbatch: int
    version: int
    lent: Lent = ()


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a stage backward; ``version`` is what it differentiates (and recomputes) with.

    What ``covers`` several microbatches, here and in exchanges of gradients, names the last of them. With
    ``inputs_only`` the gradients of weights are left for :class:`BackwardWeights`.
    """

    stage: int
    microbatch: int
    version: int
    covers: int = 1
    lent: Lent = ()
    inputs_only: bool = False


@dataclass(frozen=True, slots=True)
class Recompute:
    """Run again what a stage recomputes, which its backward then finds done."""

    stage: int
    microbatch: int
    version: int
    lent: Lent = ()


@dataclass(frozen=True, slots=True)
class BackwardWeights:
    """Compute the gradients of a stage's weights, which its backward has left for later."""

    stage: int
    microbatch: int
    version: int
    lent: Lent = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Send what ``stage`` made in pass ``kind`` to rank ``peer``."""

    kind: Pass
    stage: int
    microbatch: int
    peer: int
    covers: int = 1

    @property
    def edge(self) -> Edge:
        """The edge that it uses."""
        return self.kind, self.stage


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive from rank ``peer`` what ``stage`` needs for pass ``kind``."""

    kind: Pass
    stage: int
    microbatch: int
    peer: int
    covers: int = 1

    @property
    def edge(self) -> Edge:
        """The edge that it uses."""
        return edge_into(self.kind, self.stage)


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the gradients of a stage's replicas before it makes ``version``."""

    stage: int
    version: int


@dataclass(frozen=True, slots=True)
class ReduceTied:
    """Sum the gradients of the weights that ``stages`` share, over all their replicas, for ``version``.

    It comes before the updates of all of them, or where nothing drains before that of the first stage, when the others
    have made ``version`` of the weights that they don't share: then they make it of the shared ones, too.
    """

    stages: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class PutAside:
    """Put the gradient for ``version`` of a stage aside: passes add to the next before this one's norm is known."""

    stage: int
    version: int


@dataclass(frozen=True, slots=True)
class Norm:
    """Begin the sum over all ranks that tells the norm of all gradients for ``version``; updates wait for it.

    It comes behind the last backward for that version on any rank, and all sums.
    """

    version: int


@dataclass(frozen=True, slots=True)
class Update:
    """Make ``version`` of a stage's weights from the gradient that has been accumulated."""

    stage: int
    version: int


@dataclass(frozen=True, slots=True)
class Agree:
    """Decide with all ranks, whose pipeline is empty, whether ``version`` can be made from the gradients."""

    version: int


@dataclass(frozen=True, slots=True)
class Save:
    """Evaluate, or write a checkpoint, with a drained pipeline after ``step`` updates of all stages."""

    step: int


Instruction = (
    Forward
    | Recompute
    | Backward
    | BackwardWeights
    | Send
    | Receive
    | PutAside
    | Reduce
    | ReduceTied
    | Norm
    | Update
    | Agree
    | Save
)


def edge_into(kind: Pass, stage: int) -> Edge:
    """Return the edge on which ``stage`` gets its input (``F``) or the gradient of its output (``B``)."""
    return kind, stage - 1 if kind == "F" else stage + 1


def sentence(instruction: Instruction) -> str:
    """Return how messages name an instruction: ``the forward of microbatch 3 on stage 1``."""
    match instruction:
        case Forward(stage, microbatch, _):
            return f"the forward of microbatch {microbatch} on stage {stage}"
        case Recompute(stage, microbatch, _):
            return f"the recomputation of microbatch {microbatch} on stage {stage}"
        case Backward(stage, microbatch, _, covers):
            return f"the backward of {_which(microbatch, covers)} on stage {stage}"
        case BackwardWeights(stage, microbatch, _):
            return f"the gradients of weights of microbatch {microbatch} on stage {stage}"
        case Send(kind, stage, microbatch, peer, covers):
            return f"stage {stage}'s send of {_what(kind)} of {_which(microbatch, covers)} to rank {peer}"
        case Receive(kind, stage, microbatch, peer, covers):
            return f"stage {stage}'s receive of {_what(kind)} of {_which(microbatch, covers)} from rank {peer}"
        case Reduce(stage, version):
            return f"the gradient sum over the replicas of stage {stage} for update {version}"
        case ReduceTied(stages, version):
            return f"the gradient sum of what stages {' and '.join(map(str, stages))} share for update {version}"
        case PutAside(stage, version):
            return f"the putting aside of stage {stage}'s gradient for update {version}"
        case Norm(version):
            return f"the norm of all gradients for update {version}"
        case Update(stage, version):
            return f"update {version} of stage {stage}"
        case Agree(version):
            return f"the agreement on update {version}"
        case Save(step):
            return f"the evaluation or checkpoint after update {step}"


def _what(kind: Pass) -> str:
    return "the activations" if kind == "F" else "the gradient"


def _which(last: int, covers: int) -> str:
    return f"microbatch {last}" if covers == 1 else f"microbatches {last - covers + 1} to {last}"


def later(instruction: Instruction, microbatches: int, versions: int) -> Instruction:
    """Return ``instruction`` with microbatches and versions counted on by so many."""
    if microbatches == versions == 0:
        return instruction
    match instruction:  # passes and messages as a run makes each of them, which replace() would take longer for
        case Forward(s, m, version, lent):
            return Forward(s, m + microbatches, version + versions, _lent_later(lent, versions))
        case Backward(s, m, version, covers, lent, inputs_only):
            return Backward(s, m + microbatches, version + versions, covers, _lent_later(lent, versions), inputs_only)
        case Recompute(s, m, version, lent):
            return Recompute(s, m + microbatches, version + versions, _lent_later(lent, versions))
        case BackwardWeights(s, m, version, lent):
            return BackwardWeights(s, m + microbatches, version + versions, _lent_later(lent, versions))
        case Send(kind, s, m, peer, covers):
            return Send(kind, s, m + microbatches, peer, covers)
        case Receive(kind, s, m, peer, covers):
            return Receive(kind, s, m + microbatches, peer, covers)
        case PutAside() | Reduce() | ReduceTied() | Norm() | Update() | Agree():
            return replace(instruction, version=instruction.version + versions)
        case Save(step):
            return Save(step + versions)


def _lent_later(lent: Lent, versions: int) -> Lent:
    return tuple((s, version + versions) for s, version in lent) if lent else lent


def version_uses(instructions: Sequence[Instruction], stage: int, by: Collection[int] = ()) -> Counter[int]:
    """Return how many passes of ``stage``, and of those that use weights that it keeps, use each version of these.

    When the last is over, the version can be overwritten.
    """
    found: Counter[int] = Counter()
    for x in instructions:
        if isinstance(x, Forward | Recompute | Backward | BackwardWeights) and (x.stage == stage or x.stage in by):
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
            case (
                Forward(s, _, version)
                | Recompute(s, _, version)
                | Backward(s, _, version)
                | BackwardWeights(s, _, version)
            ) if s == stage:
                passes.append((newest, version))
            case Forward() | Recompute() | Backward() | BackwardWeights():
                passes += [(newest, version) for s, version in x.lent if s == stage]
            case Update(s, version) if s == stage:
                newest = version
    return kept(passes)
