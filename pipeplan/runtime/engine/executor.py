"""How does a rank carry out its instructions? One loop, in the order that it is given. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from ..measure.recorder import Times
from ..measure.times import Activity
from ..model.user_code import RAISED
from ..training.split_stage import SplitStage
from .minibatch_end import MiniBatchEnd
from .own_stages import RankRun


class OperationFailed(Exception):
    """An instruction raised; the cause is chained."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        super().__init__(sentence(instruction))


def execute(run: RankRun, end: MiniBatchEnd, transport: Transport, order: Iterable[int] | None = None) -> Times:
    """Carry out the instructions of a rank and return when everything happened.

    ``order`` gives their indices one by one, and may wait to see what came of one before it gives the next; without it
    they are carried out as listed, but for those of mini-batches that ``end`` doesn't allow. Raises OperationFailed
    with the instruction at which anything failed. A receive is posted at its place at the latest, and waited for where
    it is used. Between stages of one rank tensors are handed over as they are.
    """
    instructions, recorder = run.rank.lowered.instructions[run.rank.number], run.meeting.recorder
    transport.start()
    walk = _Walk(run, end, transport, waits=order is not None)
    for index in Repeated.of(instructions).places(end.over) if order is None else order:
        instruction = instructions[index]
        if not end.allows(instruction):
            continue
        end.at(index)
        try:
            walk.carry_out(instruction)
        except RAISED as error:
            raise OperationFailed(instruction) from error
        if order is not None:
            walk.idle_since = recorder.mark()
    transport.finish()
    return recorder.settle()


class _Walk:
    """One walk through the instructions of a rank: what its stages have made for each other, or for a send.

    An order that ``waits`` does so for the message that comes next, since ``idle_since``.
    """

    def __init__(self, run: RankRun, end: MiniBatchEnd, transport: Transport, waits: bool) -> None:
        lowered = run.rank.lowered
        self._own, self._reader, self._end, self._transport, self._waits = run.stages, run.reader, end, transport, waits
        self._last, self._evaluates = len(lowered.plan.allocation.stages) - 1, lowered.evaluates
        # hooks that are there anyway can count everything
        first = lowered.first.microbatch
        self._counted = lowered.last.microbatch if lowered.reads_newest else first + lowered.filled
        self._made: dict[tuple[Edge, int], Tensor] = {}  # not sent or used yet
        self._mark, self._note = run.meeting.recorder.mark, run.meeting.recorder.note
        self.idle_since = self._mark()

    def carry_out(self, instruction: Instruction) -> None:
        """Do it, and note when."""
        own, end = self._own, self._end
        match instruction:
            case Forward():
                self._forward(instruction)
            case Backward():
                self._backward(instruction)
            case Recompute(s, m, version, lent):
                self._noted("R", s, m, own.runners[s].recompute, m, version, lent)
            case BackwardWeights(s, m, version, lent):
                self._noted("W", s, m, own.split(s).backward_weights, m, version, lent)
            case Send():
                self._send(instruction)
            case Receive():
                self._transport.post(instruction)
            case Agree(version):
                self._noted("AGREE", -1, version, end.agree, version)
            case Reduce(s, version):
                own.updates[s].reduce(version)
            case ReduceTied(stages, version):
                own.tied_sums.reduce(stages, version)
            case PutAside(s, _):
                own.updates[s].gradients.put_aside()
            case Norm(version):
                self._noted("NORM", -1, version, own.measure, version)
            case Update(s, version):
                own.updates[s].update(version)
                end.updated(s, version)
            case Save(step):
                self._noted("SAVE", -1, step, end.pause, step)

    def _noted(self, activity: Activity, stage: int, number: int, does: Callable[..., Any], *given: Any) -> Any:
        """Return what is done, whose time is noted."""
        start = self._mark()
        found = does(*given)
        self._note(activity, stage, number, start)
        return found

    def _forward(self, instruction: Forward) -> None:
        s, m, version, lent = instruction.stage, instruction.microbatch, instruction.version, instruction.lent
        stage = self._own.runners[s]
        given = self._sample(s, m) if stage.reads and not self._waits else None  # what comes may still be on its way
        x = self._arrived("F", s, m) if s > 0 else None
        inputs, target = given or (self._sample(s, m) if stage.reads else ((), None))
        target = target if stage.takes_targets else None
        if self._evaluates:
            out = self._noted("F", s, m, stage.evaluate, m, version, x, target, lent, inputs)
        else:
            out = self._noted("F", s, m, stage.forward, m, version, x, target, m < self._counted, lent, inputs)
        if s < self._last:
            self._made[("F", s), m] = out

    def _backward(self, instruction: Backward) -> None:
        s, m, version, lent = instruction.stage, instruction.microbatch, instruction.version, instruction.lent
        stage = self._own.runners[s]
        gradient = self._arrived("B", s, m) if s < self._last else None
        if instruction.inputs_only:
            back = self._noted("B", s, m, self._own.split(s).backward_inputs, m, version, gradient, lent)
        else:
            back = self._noted("B", s, m, stage.backward, m, version, gradient, instruction.covers, lent)
        if isinstance(stage, SplitStage) and not instruction.inputs_only:
            self._note("W", s, m, self._mark())  # was part of it
        if s > 0:
            assert back is not None, "later stages return the gradient of their input"
            self._made[("B", s), m] = back

    def _send(self, send: Send) -> None:
        tensor = self._made.pop((send.edge, send.microbatch))
        start = self._mark()
        if self._transport.await_room(send):
            self._note("ROOM_F" if send.kind == "F" else "ROOM_B", send.stage, send.microbatch, start)
            start = self._mark()
        self._transport.send(send, tensor)
        self._note("SEND_F" if send.kind == "F" else "SEND_B", send.stage, send.microbatch, start)

    def _arrived(self, kind: Pass, stage: int, microbatch: int) -> Tensor:
        edge = edge_into(kind, stage)
        if edge[1] in self._own.runners:
            return self._made.pop((edge, microbatch))
        start = self.idle_since if self._waits else self._mark()
        tensor = self._transport.take(edge, microbatch)
        self._note("WAIT_F" if kind == "F" else "WAIT_B", stage, microbatch, start)
        self._transport.look_ahead(edge)
        return tensor

    def _sample(self, stage: int, microbatch: int) -> Any:
        return self._noted(self._reader.activity, stage, microbatch, self._reader.take, microbatch)
