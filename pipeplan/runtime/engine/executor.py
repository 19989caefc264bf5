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
    work.transport.start()
    walk = _Walk(work, waits=order is not None)
    for index in Repeated.of(instructions).places(work.over) if order is None else order:
        instruction = instructions[index]
        if not work.allows(instruction):
            continue
        work.progress(index)
        try:
            walk.carry_out(instruction)
        except RAISED as error:
            raise OperationFailed(instruction) from error
        if order is not None:
            walk.idle_since = work.recorder.mark()
    work.transport.finish()
    return work.recorder.settle()


class _Walk:
    """One walk through the instructions of a rank: what its stages have made for each other, or for a send.

    An order that ``waits`` does so for the message that comes next, since ``idle_since``.
    """

    def __init__(self, work: RankWork, waits: bool) -> None:
        self._work, self._waits = work, waits
        self._made: dict[tuple[Edge, int], Tensor] = {}  # not sent or used yet
        self._mark, self._note = work.recorder.mark, work.recorder.note
        self.idle_since = self._mark()

    def carry_out(self, instruction: Instruction) -> None:
        """Do it, and note when."""
        work, start = self._work, self._mark
        match instruction:
            case Forward():
                self._forward(instruction)
            case Backward():
                self._backward(instruction)
            case Recompute(s, m, version, lent):
                begun = start()
                work.stages[s].recompute(m, version, lent)
                self._note("R", s, m, begun)
            case BackwardWeights(s, m, version, lent):
                begun = start()
                split(work.stages[s]).backward_weights(m, version, lent)
                self._note("W", s, m, begun)
            case Send():
                self._send(instruction)
            case Receive():
                work.transport.post(instruction)
            case Agree(version):
                begun = start()
                work.agree(version)
                self._note("AGREE", -1, version, begun)
            case Reduce(s, version):
                work.updates[s].reduce(version)
            case ReduceTied(stages, version):
                work.reduce_tied(stages, version)
            case PutAside(s, _):
                work.updates[s].put_aside()
            case Norm(version):
                begun = start()
                work.norm(version)
                self._note("NORM", -1, version, begun)
            case Update(s, version):
                work.updates[s].update(version)
                work.updated(s, version)
            case Save(step):
                begun = start()
                work.save(step)
                self._note("SAVE", -1, step, begun)

    def _forward(self, instruction: Forward) -> None:
        s, m, version, lent = instruction.stage, instruction.microbatch, instruction.version, instruction.lent
        stage, work = self._work.stages[s], self._work
        given = self._sample(s, m) if stage.reads and not self._waits else None  # what comes may still be on its way
        x = self._arrived("F", s, m) if s > 0 else None
        inputs, target = given or (self._sample(s, m) if stage.reads else ((), None))
        start = self._mark()
        target = target if stage.takes_targets else None
        if work.evaluates:
            out = stage.evaluate(m, version, x, target, lent, inputs)
        else:
            out = stage.forward(m, version, x, target, m < work.counted, lent, inputs)
        self._note("F", s, m, start)
        if s < work.last:
            self._made[("F", s), m] = out

    def _backward(self, instruction: Backward) -> None:
        s, m, version, lent = instruction.stage, instruction.microbatch, instruction.version, instruction.lent
        stage = self._work.stages[s]
        gradient = self._arrived("B", s, m) if s < self._work.last else None
        start = self._mark()
        if instruction.inputs_only:
            back = split(stage).backward_inputs(m, version, gradient, lent)
        else:
            back = stage.backward(m, version, gradient, instruction.covers, lent)
        self._note("B", s, m, start)
        if isinstance(stage, SplitStage) and not instruction.inputs_only:
            self._note("W", s, m, self._mark())  # was part of it
        if s > 0:
            assert back is not None, "later stages return the gradient of their input"
            self._made[("B", s), m] = back

    def _send(self, send: Send) -> None:
        transport = self._work.transport
        tensor = self._made.pop((send.edge, send.microbatch))
        start = self._mark()
        if transport.await_room(send):
            self._note("ROOM_F" if send.kind == "F" else "ROOM_B", send.stage, send.microbatch, start)
            start = self._mark()
        transport.send(send, tensor)
        self._note("SEND_F" if send.kind == "F" else "SEND_B", send.stage, send.microbatch, start)

    def _arrived(self, kind: Pass, stage: int, microbatch: int) -> Tensor:
        edge = edge_into(kind, stage)
        if edge[1] in self._work.stages:
            return self._made.pop((edge, microbatch))
        start = self.idle_since if self._waits else self._mark()
        tensor = self._work.transport.take(edge, microbatch)
        self._note("WAIT_F" if kind == "F" else "WAIT_B", stage, microbatch, start)
        self._work.transport.look_ahead(edge)
        return tensor

    def _sample(self, stage: int, microbatch: int) -> tuple[Any, Any]:
        start = self._mark()
        pair = self._work.data(microbatch)
        self._note(self._work.reading, stage, microbatch, start)
        return pair
