"""What a rank does at updates and checkpoints, beside its passes: agree with the others, save, and tell of losses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from .exchange.collective import share_from
from .exchange.replica_sum import Group
from .job import Job
from .lowering.lowered_run import Script
from .measure.accounts import StateAccount
from .measure.progress import StepDone
from .measure.recorder import Recorder
from .model.spec import LoadedModel
from .training.checkpoint import write
from .training.loss_scale import Scaling, overflows
from .training.stage import StageModule
from .training.state import own_layers, training_state
from .training.tied import Tie, copies_added


class Milestones:
    """One rank's part in what its run comes to between mini-batches; ``tell`` hears of updates of the last stage.

    ``groups`` are those of replicated stages, ``ties`` the weights that stages share; ``states`` accounts memory until
    everything has been in it.
    """

    def __init__(
        self,
        job: Job,
        script: Script,
        rank: int,
        device: torch.device,
        model: LoadedModel,
        runners: Mapping[int, StageModule],
        groups: Mapping[int, Group],
        ties: Sequence[Tie],
        scaling: Scaling | None,
        states: StateAccount,
        recorder: Recorder,
        tell: Callable[[StepDone], None],
    ) -> None:
        self._job, self._script, self._rank, self._device, self._model = job, script, rank, device, model
        self._runners, self._groups, self._ties, self._scaling = runners, groups, ties, scaling
        self._states, self._recorder, self._tell = states, recorder, tell
        self.saved = script.first.step  # the newest checkpoint is of so many updates

    def scale_losses(self) -> None:
        """Let the passes to come use the loss scale that is agreed on."""
        if self._scaling is not None:
            for runner in self._runners.values():
                runner.scale_loss(self._scaling.current.scale)

    def agree(self, version: int) -> None:
        """Decide with all ranks whether ``version`` is made from the gradients there are."""
        assert self._scaling is not None, "only mixed precision has to agree"
        found = [
            overflows(runner.versions.gradients(), copies_added(self._script, s, self._ties))
            for s, runner in self._runners.items()
        ]
        self._scaling.agree(version, any(found))
        self.scale_losses()

    def save(self, step: int) -> None:
        """Write a checkpoint of ``step`` updates, with all ranks."""
        job, script = self._job, self._script
        folder, seed, keep = job.folder, job.options.seed, job.options.keep
        assert folder is not None, "only then has the script checkpoints"
        self._recorder.settle()
        for s in self._runners:
            if s in self._groups:  # replicas have seen different microbatches; the first one's statistics are kept
                modules = [self._model.layers[i][1] for i in own_layers(script, s, self._model)]
                buffers = [buffer for module in modules for buffer in module.buffers()]
                share_from(script.ranks_of(s)[0], self._groups[s], buffers)
        state = training_state(script, self._rank, self._model, self._runners, self._device, self._scaling)
        write(folder, script.at(step), job.plan.chain.name, seed, state, keep)
        self.saved = step

    def updated(self, stage: int, version: int) -> None:
        """Note that ``stage`` has made ``version``; the last one's losses are told when they are there."""
        script = self._script
        if version > script.first.step + script.filled // script.interval + 2:
            self._states.open = False  # every version and all of the optimizer's state have been there
        if stage == len(script.plan.allocation.stages) - 1:
            self._recorder.later(lambda: self._tell_of(version, self._runners[stage].losses))

    def _tell_of(self, version: int, losses: Mapping[int, float]) -> None:
        begin = self._script.at(version - 1).microbatch
        found = tuple(losses[m] for m in range(begin, begin + self._script.interval) if m in losses)
        self._tell(StepDone(version, found, time.monotonic_ns()))
