"""How does a rank carry out its instructions? One loop, in the order that it is given, which decides nothing; and what
it does between two mini-batches: it agrees with the others, saves, tells of losses, or stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ...registry import Late
from ..exchange.collective import share_from
from ..exchange.transport import Transport
from ..lowering import instructions as do
from ..lowering.segments import Repeated
from ..measure.progress import StepDone
from ..measure.recorder import Times
from ..measure.times import Activity
from ..model.user_code import RAISED
from .own_stages import RankRun

if TYPE_CHECKING:
    from .held_out import HeldOut

check_savable, training_state, write = (
    Late(f"runtime.training.state.{name}") for name in ("state:check_savable", "state:training_state", "written:write")
)
BEST: Final = "best"  # the folder, among the checkpoints, with that of the best evaluation


class OperationFailed(Exception):
    """An instruction raised; the cause is chained."""

    def __init__(self, instruction: do.Instruction) -> None:
        self.instruction = instruction
        super().__init__(do.sentence(instruction))


def execute(run: RankRun, end: MiniBatchEnd, transport: Transport, order: Iterable[int] | None = None) -> Times:
    """Carry out the instructions of a rank and return when everything happened.

    ``order`` gives their indices one by one, and may wait to see what came of one before it gives the next; without it
    they are carried out as listed, but for those of mini-batches that ``end`` doesn't allow. Raises OperationFailed
    with the instruction at which anything failed. A receive is posted at its place at the latest, and waited for where
    it is used. Between stages of one rank tensors are handed over as they are.
    """
    instructions, recorder = run.rank.lowered.instructions[run.rank.number], run.meeting.recorder
    transport.start()
    walk, refused, longest = _Walk(run, end, transport, waits=order is not None), 0, Repeated.of(instructions).longest
    for index in range(len(instructions)) if order is None else order:
        instruction = instructions[index]
        refused = 0 if end.allows(instruction) else refused + 1
        if refused > 2 * longest:
            break  # two turns are over as a whole, and so is all behind them
        if refused:
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
        self._made: dict[tuple[do.Edge, int], Tensor] = {}  # not sent or used yet
        self._mark, self._note = run.meeting.recorder.mark, run.meeting.recorder.note
        self.idle_since = self._mark()

    def carry_out(self, instruction: do.Instruction) -> None:
        """Do it, and note when."""
        own, end = self._own, self._end
        match instruction:
            case do.Forward():
                self._forward(instruction)
            case do.Backward():
                self._backward(instruction)
            case do.Recompute(s, m, version, lent):
                self._noted("R", s, m, own.runners[s].recompute, m, version, lent)
            case do.BackwardWeights(s, m, version, lent):
                self._noted("W", s, m, own.split(s).backward_weights, m, version, lent)
            case do.Send():
                self._send(instruction)
            case do.Receive():
                self._transport.post(instruction)
            case do.Agree(version):
                self._noted("AGREE", -1, version, end.agree, version)
            case do.Reduce(s, version):
                own.updates[s].reduce(version)
            case do.ReduceTied(stages, version):
                own.tied_sums.reduce(stages, version)
            case do.PutAside(s, _):
                own.updates[s].gradients.put_aside()
            case do.Norm(version):
                self._noted("NORM", -1, version, own.measure, version)
            case do.Update(s, version):
                own.updates[s].update(version)
                end.updated(s, version)
            case do.Save(step):
                self._noted("SAVE", -1, step, end.pause, step)

    def _noted(self, activity: Activity, stage: int, number: int, does: Callable[..., Any], *given: Any) -> Any:
        """Return what is done, whose time is noted."""
        start = self._mark()
        found = does(*given)
        self._note(activity, stage, number, start)
        return found

    def _forward(self, instruction: do.Forward) -> None:
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

    def _backward(self, instruction: do.Backward) -> None:
        s, m, version, lent = instruction.stage, instruction.microbatch, instruction.version, instruction.lent
        stage = self._own.runners[s]
        gradient = self._arrived("B", s, m) if s < self._last else None
        if instruction.inputs_only:
            back = self._noted("B", s, m, self._own.split(s).backward_inputs, m, version, gradient, lent)
        else:
            back = self._noted("B", s, m, stage.backward, m, version, gradient, instruction.covers, lent)
        if stage.splits and not instruction.inputs_only:
            self._note("W", s, m, self._mark())  # was part of it
        if s > 0:
            assert back is not None, "later stages return the gradient of their input"
            self._made[("B", s), m] = back

    def _send(self, send: do.Send) -> None:
        tensor = self._made.pop((send.edge, send.microbatch))
        start = self._mark()
        if self._transport.await_room(send):
            self._note("ROOM_F" if send.kind == "F" else "ROOM_B", send.stage, send.microbatch, start)
            start = self._mark()
        self._transport.send(send, tensor)
        self._note("SEND_F" if send.kind == "F" else "SEND_B", send.stage, send.microbatch, start)

    def _arrived(self, kind: do.Pass, stage: int, microbatch: int) -> Tensor:
        edge = do.edge_into(kind, stage)
        if edge[1] in self._own.runners:
            return self._made.pop((edge, microbatch))
        start = self.idle_since if self._waits else self._mark()
        tensor = self._transport.take(edge, microbatch)
        self._note("WAIT_F" if kind == "F" else "WAIT_B", stage, microbatch, start)
        self._transport.look_ahead(edge)
        return tensor

    def _sample(self, stage: int, microbatch: int) -> Any:
        return self._noted(self._reader.activity, stage, microbatch, self._reader.take, microbatch)


# --- between two mini-batches -----------------------------------------------------------------------------------------


class MiniBatchEnd:
    """One rank's part in what its run comes to between mini-batches, until the launcher lets no further one begin."""

    def __init__(self, run: RankRun, held_out: HeldOut | None = None) -> None:
        job, rank, stages = run.job, run.rank, run.stages
        self._run, self._job, self._rank, self._stages, self._held_out = run, job, rank, stages, held_out
        self.at = run.launcher.at
        if held_out is not None:
            held_out.trial = stages.trial
        self._saved = rank.lowered.first.step  # the newest checkpoint is of so many updates
        self._good = {self._saved}  # checkpoints that were written, or found good, by this run
        self._best: set[int] = set()  # the same of those in the folder for the best
        self._begun = rank.lowered.first.step - 1
        self._refused: int | None = None
        if job.folder is not None:
            check_savable(rank, stages.updates)

    def allows(self, instruction: do.Instruction) -> bool:
        """Whether the instruction's mini-batch may be begun, or has been."""
        minibatch = self._rank.lowered.minibatch(instruction)
        if minibatch <= self._begun:
            return True
        if self._refused is not None:
            return False
        if not self._run.launcher.may_begin(minibatch):
            self._refused = minibatch
            return False
        self._begun = minibatch
        return True

    def save_if_refused(self) -> None:
        """Write a checkpoint of what there is if the run was asked to stop, unless there is one already."""
        if self._refused not in (None, self._saved) and self._job.folder is not None:
            self._write(self._job.folder, self._refused, self._job.options.keep)

    def scale_losses(self) -> None:
        """Let the passes to come use the loss scale that is agreed on."""
        scaling = self._stages.scaling
        if scaling is not None:
            for runner in self._stages.runners.values():
                runner.scale_loss(scaling.current.scale)

    def agree(self, version: int) -> None:
        """Decide with all ranks whether ``version`` is made from the gradients there are."""
        stages = self._stages
        assert stages.scaling is not None, "only mixed precision has to agree"
        found = [update.overflows() for update in stages.updates.values()]
        flags = [flag for flag in found if flag is not None]
        stages.scaling.agree(version, bool(flags) and bool(torch.stack(flags).any()))  # the one wait for the device
        self.scale_losses()

    def pause(self, step: int) -> None:
        """Evaluate after ``step`` updates, and write a checkpoint, as far as that is asked for, with all ranks."""
        folder, options, last = self._job.folder, self._job.options, self._rank.lowered.last.step
        asked, best = options.held_out, False
        if self._held_out is not None and asked is not None and (step % asked.every == 0 or step == last):
            means, best = self._held_out.judge(step, self._run)
            last_of = self._rank.first_of if self._rank.leads else []
            if len(self._rank.lowered.plan.allocation.stages) - 1 in last_of:
                self._run.launcher.done(StepDone(step, (), time.monotonic_ns(), metrics=means, best=best))
            if self._held_out.ends and step < last:
                self._refused = step
        if folder is not None and best:
            self._write(folder / BEST, step, 1)
        if folder is not None and (step == last or (options.every is not None and step % options.every == 0)):
            self._write(folder, step, options.keep)

    def _write(self, folder: Path, step: int, keep: int | None) -> None:
        job, rank, stages, meeting = self._job, self._rank, self._stages, self._run.meeting
        options = job.options
        meeting.recorder.settle()
        for s, group in meeting.groups.items():
            if s in stages.runners:  # replicas see different microbatches; the first one's statistics are kept
                buffers = [buffer for module in rank.modules(s) for buffer in module.buffers()]
                share_from(rank.lowered.ranks_of(s)[0], group, buffers)
        trial = None if self._held_out is None else self._held_out.trial
        state = training_state(rank, stages.updates, stages.scaling, trial)
        good = self._good if folder == job.folder else self._best
        if rank.leads:
            plan = job.plan_text if rank.number == 0 else None
            write(folder, rank.lowered.at(step), job.plan.chain.name, options.seed, state, keep, good, plan)
        self._saved = step if folder == job.folder else self._saved

    def updated(self, stage: int, version: int) -> None:
        """Note that ``stage`` has made ``version``; the last one's losses are told when they are there."""
        lowered = self._rank.lowered
        if version > lowered.first.step + lowered.filled // lowered.interval + 2:
            self._stages.states.open = False  # every version and all of the optimizer's state have been there
        if stage == len(lowered.plan.allocation.stages) - 1 and self._rank.leads:
            runner = self._stages.runners[stage]
            rate = self._stages.updates[stage].stepper.rates.used
            self._run.meeting.recorder.later(lambda: self._tell_of(version, runner.losses, rate))

    def _tell_of(self, version: int, losses: Mapping[int, float], rate: float | None) -> None:
        lowered = self._rank.lowered
        begin = lowered.at(version - 1).microbatch
        found = tuple(losses[m] for m in range(begin, begin + lowered.interval) if m in losses)
        clipping = self._stages.clipping
        norm = None if clipping is None else clipping.norms.get(version)
        last = len(lowered.plan.allocation.stages) - 1  # its update may wait for others: the passes tell the pace
        through = self._run.meeting.recorder.times.last_end_ns("B", last, range(begin, begin + lowered.interval))
        self._run.launcher.done(StepDone(version, found, through or time.monotonic_ns(), norm, rate))
