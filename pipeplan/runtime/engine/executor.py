"""How does a rank carry out its instructions? One loop, in the order that it is given. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..exchange.transport import Transport
from ..lowering.instructions import (
    Agree,
    Backward,
    BackwardWeights,
    Edge,
    Forward,
    Instruction,
    Norm,
    Pass,
    PutAside,
    Receive,
    Recompute,
    Reduce,
    ReduceTied,
    Save,
    Send,
    Update,
    edge_into,
    sentence,
)
from ..lowering.repeats import Repeated
from ..measure.recorder import HostRecorder, Recorder, Times
from ..measure.times import Activity
from ..model.user_code import RAISED
from ..training.split_stage import SplitStage
from ..training.stage import StageModule
from ..training.update.update import StageUpdate


class OperationFailed(Exception):
    """An instruction raised; the cause is chained."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        super().__init__(sentence(instruction))


def _nothing_tied(stages: tuple[int, ...], version: int) -> None:
    raise AssertionError(f"nobody sums what stages {stages} share")


def _nothing_clipped(version: int) -> None:
    raise AssertionError(f"nobody clips the gradients of update {version}")


@dataclass(frozen=True)
class RankWork:
    """All that one rank needs to walk its instructions.

    ``stages`` are its own by index; ``last`` is the index of the chain's last stage. ``data(microbatch)`` gives inputs
    and target, which is noted as ``reading``; ``updates`` make the stages' updates, after ``agree(version)`` where all
    ranks must agree on them, after ``reduce_tied(stages, version)`` where stages share weights, and ``norm(version)``
    where gradients are clipped; ``progress`` hears the index of each instruction before it is carried out. Microbatches
    below ``counted`` are counted.
    ``allows(instruction)`` is False for those of mini-batches that the run was asked not to begin, and
    ``over(instruction)`` True where it will be, of those behind it too; ``save(step)`` writes a checkpoint and
    ``updated(stage, version)`` hears of updates. ``recorder`` notes when all this happens.
    """

    stages: Mapping[int, StageModule]
    last: int
    transport: Transport
    data: Callable[[int], tuple[Any, Any]]
    updates: Mapping[int, StageUpdate]
    agree: Callable[[int], None]
    progress: Callable[[int], None]
    counted: int
    allows: Callable[[Instruction], bool]
    over: Callable[[Instruction], bool]
    save: Callable[[int], None]
    updated: Callable[[int, int], None]
    evaluates: bool = False
    reading: Activity = "DATA"
    reduce_tied: Callable[[tuple[int, ...], int], None] = _nothing_tied
    norm: Callable[[int], None] = _nothing_clipped
    recorder: Recorder = field(default_factory=HostRecorder)


def split(stage: StageModule) -> SplitStage:
    """Return a stage whose backwards come in two parts."""
    assert isinstance(stage, SplitStage), "stages of programs that split backwards do so"
    return stage


def execute(instructions: Sequence[Instruction], work: RankWork, order: Iterable[int] | None = None) -> Times:
    """Carry out ``instructions`` and return when everything happened.

    ``order`` gives their indices one by one, and may wait to see what came of one before it gives the next; without it
    they are carried out as listed. Raises OperationFailed with the instruction at which anything failed. A receive is
    posted at its place at the latest, and waited for where it is used. Between stages of one rank tensors are handed
    over as they are.
    """
    made: dict[tuple[Edge, int], Tensor] = {}  # not sent or used yet
    recorder, transport = work.recorder, work.transport

    def arrived(kind: Pass, stage: int, microbatch: int) -> Tensor:
        edge = edge_into(kind, stage)
        if edge[1] in work.stages:
            return made.pop((edge, microbatch))
        start = recorder.mark() if order is None else idle_since  # an order that waits does so for this message
        tensor = transport.take(edge, microbatch)
        recorder.note("WAIT_F" if kind == "F" else "WAIT_B", stage, microbatch, start)
        transport.look_ahead(edge)
        return tensor

    def sample(stage: int, microbatch: int) -> tuple[Any, Any]:
        start = recorder.mark()
        pair = work.data(microbatch)
        recorder.note(work.reading, stage, microbatch, start)
        return pair

    def carry_out(instruction: Instruction) -> None:
        match instruction:
            case Forward(s, m, version, lent):
                stage = work.stages[s]
                given = sample(s, m) if stage.reads and order is None else None  # what comes may still be on its way
                x = arrived("F", s, m) if s > 0 else None
                inputs, target = given or (sample(s, m) if stage.reads else ((), None))
                start = recorder.mark()
                target = target if stage.takes_targets else None
                if work.evaluates:
                    out = stage.evaluate(m, version, x, target, lent, inputs)
                else:
                    out = stage.forward(m, version, x, target, m < work.counted, lent, inputs)
                recorder.note("F", s, m, start)
                if s < work.last:
                    made[("F", s), m] = out
            case Backward(s, m, version, covers, lent):
                gradient = arrived("B", s, m) if s < work.last else None
                start = recorder.mark()
                stage = work.stages[s]
                if instruction.inputs_only:
                    back = split(stage).backward_inputs(m, version, gradient, lent)
                else:
                    back = stage.backward(m, version, gradient, covers, lent)
                recorder.note("B", s, m, start)
                if isinstance(stage, SplitStage) and not instruction.inputs_only:
                    recorder.note("W", s, m, recorder.mark())  # was part of it
                if s > 0:
                    assert back is not None, "later stages return the gradient of their input"
                    made[("B", s), m] = back
            case Recompute(s, m, version, lent):
                start = recorder.mark()
                work.stages[s].recompute(m, version, lent)
                recorder.note("R", s, m, start)
            case BackwardWeights(s, m, version, lent):
                start = recorder.mark()
                split(work.stages[s]).backward_weights(m, version, lent)
                recorder.note("W", s, m, start)
            case Send():
                kind, s, m = instruction.kind, instruction.stage, instruction.microbatch
                tensor = made.pop((instruction.edge, m))
                start = recorder.mark()
                if transport.await_room(instruction):
                    recorder.note("ROOM_F" if kind == "F" else "ROOM_B", s, m, start)
                    start = recorder.mark()
                transport.send(instruction, tensor)
                recorder.note("SEND_F" if kind == "F" else "SEND_B", s, m, start)
            case Receive():
                transport.post(instruction)
            case Agree(version):
                start = recorder.mark()
                work.agree(version)
                recorder.note("AGREE", -1, version, start)
            case Reduce(s, version):
                work.updates[s].reduce(version)
            case ReduceTied(stages, version):
                work.reduce_tied(stages, version)
            case PutAside(s, _):
                work.updates[s].put_aside()
            case Norm(version):
                start = recorder.mark()
                work.norm(version)
                recorder.note("NORM", -1, version, start)
            case Update(s, version):
                work.updates[s].update(version)
                work.updated(s, version)
            case Save(step):
                start = recorder.mark()
                work.save(step)
                recorder.note("SAVE", -1, step, start)

    transport.start()
    idle_since = recorder.mark()
    for index in Repeated.of(instructions).places(work.over) if order is None else order:
        instruction = instructions[index]
        if not work.allows(instruction):
            continue
        work.progress(index)
        try:
            carry_out(instruction)
        except RAISED as error:
            raise OperationFailed(instruction) from error
        if order is not None:
            idle_since = recorder.mark()
    transport.finish()
    return recorder.settle()
