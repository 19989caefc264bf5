"""What does a rank do at the end of a mini-batch? It agrees with the others, saves, and tells of losses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from .exchange.collective import share_from
from .job import Job
from .measure.progress import StepDone
from .meeting import Meeting
from .own_stages import OwnStages
from .training.checkpoint import write
from .training.loss_scale import overflows
from .training.rank import Rank
from .training.state import training_state
from .training.tied import copies_added


class MiniBatchEnd:
    """One rank's part in what its run comes to between mini-batches; ``tell`` hears of updates of the last stage."""

    def __init__(
        self, job: Job, rank: Rank, meeting: Meeting, stages: OwnStages, tell: Callable[[StepDone], None]
    ) -> None:
        self._job, self._rank, self._meeting, self._stages, self._tell = job, rank, meeting, stages, tell
        self.saved = rank.lowered.first.step  # the newest checkpoint is of so many updates

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
        found = [
            overflows(runner.versions.gradients(), copies_added(self._rank.lowered, s, stages.ties))
            for s, runner in stages.runners.items()
        ]
        stages.scaling.agree(version, any(found))
        self.scale_losses()

    def save(self, step: int) -> None:
        """Write a checkpoint of ``step`` updates, with all ranks."""
        job, rank, stages, meeting = self._job, self._rank, self._stages, self._meeting
        folder, options = job.folder, job.options
        assert folder is not None, "only then are there checkpoints among the instructions"
        meeting.recorder.settle()
        for s, group in meeting.groups.items():
            if s in stages.runners:  # replicas see different microbatches; the first one's statistics are kept
                buffers = [buffer for module in rank.modules(s) for buffer in module.buffers()]
                share_from(rank.lowered.ranks_of(s)[0], group, buffers)
        state = training_state(rank, stages.runners, stages.scaling)
        write(folder, rank.lowered.at(step), job.plan.chain.name, options.seed, state, options.keep)
        self.saved = step

    def updated(self, stage: int, version: int) -> None:
        """Note that ``stage`` has made ``version``; the last one's losses are told when they are there."""
        lowered = self._rank.lowered
        if version > lowered.first.step + lowered.filled // lowered.interval + 2:
            self._stages.states.open = False  # every version and all of the optimizer's state have been there
        if stage == len(lowered.plan.allocation.stages) - 1:
            self._meeting.recorder.later(lambda: self._tell_of(version, self._stages.runners[stage].losses))

    def _tell_of(self, version: int, losses: Mapping[int, float]) -> None:
        lowered = self._rank.lowered
        begin = lowered.at(version - 1).microbatch
        found = tuple(losses[m] for m in range(begin, begin + lowered.interval) if m in losses)
        self._tell(StepDone(version, found, time.monotonic_ns()))
