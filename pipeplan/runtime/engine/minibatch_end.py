"""What does a rank do between two mini-batches? It agrees with the others, saves, tells of losses, or stops."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from ...registry import Late
from ..exchange.collective import share_from
from ..lowering.instructions import Instruction
from ..measure.progress import StepDone
from .own_stages import RankRun

if TYPE_CHECKING:
    from .held_out import HeldOut

write = Late("runtime.training.state.state:write")
check_savable, training_state = (
    Late(f"runtime.training.state.state:{name}") for name in ("check_savable", "training_state")
)
BEST: Final = "best"  # the folder, among the checkpoints, with that of the best evaluation


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

    def allows(self, instruction: Instruction) -> bool:
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

    def over(self, instruction: Instruction) -> bool:
        """Whether the instruction's mini-batch will not be begun any more, as one was refused."""
        return self._refused is not None and self._rank.lowered.minibatch(instruction) > self._begun

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
            if len(self._rank.lowered.plan.allocation.stages) - 1 in self._rank.first_of:
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
        write(folder, rank.lowered.at(step), job.plan.chain.name, options.seed, state, keep, good)
        self._saved = step if folder == job.folder else self._saved

    def updated(self, stage: int, version: int) -> None:
        """Note that ``stage`` has made ``version``; the last one's losses are told when they are there."""
        lowered = self._rank.lowered
        if version > lowered.first.step + lowered.filled // lowered.interval + 2:
            self._stages.states.open = False  # every version and all of the optimizer's state have been there
        if stage == len(lowered.plan.allocation.stages) - 1:
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
