"""What are a rank's stages, that it runs and updates? As they are at the start, or at a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ...registry import Late
from ..device import CPU
from ..exchange.collective import any_rank
from ..exchange.transport import Group
from ..measure.progress import Trial
from ..measure.recorder import HeldBytes, StateBytes
from ..model.loaded import LoadedModel
from ..training.half import first_scale, half_type
from ..training.held import Waiting
from ..training.rank import Rank
from ..training.repeatable import Draws
from ..training.stage import StageModule
from ..training.update.exchanges import OnStream, OnThread, Way
from ..training.update.factors import Clipping, Later, Scaling
from ..training.update.offload import BucketBuffers
from ..training.update.optimizers import MakeOptimizer, check_state, compensated, rates_maker
from ..training.update.stepper import Stepper, Stepping, stepper_kind
from ..training.update.update import StageUpdate, Tie, TiedSums, copies_added, sums_of
from ..training.weights.buckets import Sharing
from ..training.weights.gradients import Gradients
from ..training.weights.versions import Versions, borrowers
from .job import Job, Launcher
from .preparation import Masters, Meeting
from .reading import Reader

if TYPE_CHECKING:
    from ..training.split_stage import SplitStage

splitting = Late("runtime.training.split_stage:SplitStage")
restore, take_averages = (Late(f"runtime.training.state.state:{name}") for name in ("restore", "take_averages"))


class OwnStages:
    """A rank's stages, as they are at the start or at the checkpoint to go on from: by index ``runners``, which pass
    them, and ``updates``; and the memory that they take. ``masters`` are theirs.

    ``tied_sums`` adds up the gradients of weights that stages share; ``clipping`` is None where gradients aren't
    clipped. ``trial`` is the best evaluation before the run.
    """

    def __init__(self, job: Job, rank: Rank, meeting: Meeting, ties: Sequence[Tie], masters: Masters) -> None:
        options, lowered = job.options, rank.lowered
        self._job, self._rank, self._meeting, self._ties, self._masters = job, rank, meeting, ties, masters
        self.activations, self.states, self._buffers = HeldBytes(), StateBytes(), BucketBuffers()
        self.scaling, self.clipping, self.trial = None, None, Trial()
        half = half_type(job.plan, options.half)
        if half is not None:
            self.scaling = Scaling(first_scale(job.plan, half, options.half), self._any if lowered.drains else None)
        if options.clip_norm is not None:
            home = rank.device if meeting.sums == "nccl" else CPU
            about = meeting.recorder, self.scaling, rank.together
            self.clipping = Clipping(options.clip_norm, meeting.everybody, home, *about)
        self._borrowing = borrowers({s: rank.modules(s) for s in rank.stages})
        self._gradients: dict[int, Gradients] = {}
        self.updates: Mapping[int, StageUpdate] = {s: self._update(s) for s in rank.stages}
        self.runners: Mapping[int, StageModule] = self._made_runners()
        masters.clear()
        torch.manual_seed(options.seed + 1 + rank.number)
        if job.resume is not None:
            self.trial = restore(job.resume, rank, self.updates, self.scaling)
        if options.evaluates and options.averaged:
            take_averages(rank, self.updates, meeting.groups)
        for layer in rank.model.layers if options.evaluates else ():
            layer.module.eval()
        self.tied_sums = TiedSums(rank.model, ties, self.updates, meeting.tied_groups, meeting.recorder, self.scaling)

    def split(self, s: int) -> SplitStage:
        """Return a stage whose backwards come in two parts."""
        return self.runners[s]  # type: ignore[return-value]  # those of programs that split backwards do so

    def measure(self, version: int) -> None:
        """Begin with the norm of all gradients for ``version``."""
        assert self.clipping is not None, "only then are norms asked for"
        self.clipping.begin(version, [x for update in self.updates.values() for x in update.measured()])

    def _any(self, flag: bool) -> bool:
        """Whether ``flag`` is set in any process; all ask together."""
        together = self._rank.together
        if together is None:
            return any_rank(flag)
        found = any_rank(together.most([int(flag)]) > [0])
        return together.most([int(found)]) > [0]  # some ranks may have no process at this place

    def _update(self, s: int) -> StageUpdate:
        """Return what updates stage ``s``; earlier ones of the rank come first."""
        rank, meeting, lowered = self._rank, self._meeting, self._rank.lowered
        copies = [(tie, tie.copy_in(s, rank.model)) for tie in self._ties if s in tie.places]
        group = meeting.groups.get(s)
        how = self._stepping(s, group)
        gradients = self._gradients[s] = self._gradients_of(s, [copy for _, copy in copies], how)
        places = [(tie, i) for tie, copy in copies if (i := gradients.versions.place_of(copy)) is not None]
        stepper = self._stepper(s, self._for_delays(s, gradients, places, how))
        exchange = sums_of(s, gradients, stepper, meeting.recorder, group, self._job.chunk_buckets)
        way = Way(exchange)
        if s in lowered.beside and meeting.sums != "staged":  # GPUs' sums through the host are waited for
            on_host = meeting.sums == "gloo"
            way = OnThread(exchange) if on_host else OnStream(exchange, rank.device)
        counted = [i for tie, i in places if tie.stages[0] == s in rank.first_of]
        if not rank.leads:
            names = rank.names(s)
            parts = {i for i, x in enumerate(gradients.versions.installed) if names.get(x) in rank.model.shards}
            exchange.answers, counted = parts.__contains__, [i for i in counted if i in parts]
        added = copies_added(lowered, s, self._ties)
        found = StageUpdate(way, meeting.recorder, self.scaling, self.clipping, added, counted)
        self.states.watch(found.tensors)
        return found

    def _stepping(self, s: int, group: Group) -> Stepping:
        """Return how the weights of stage ``s`` are stepped."""
        job, policy, sharing = self._job, self._job.plan.policy, None
        if group is not None and policy.zero:
            hosts = None if self._meeting.sums == "nccl" else group
            replicas = self._rank.stage(s).replicas
            sharing = Sharing(dist.get_rank(group), replicas, job.chunk_buckets, group, hosts)
        bucket = job.bucket_of(s, self._rank.lowered.graph.stages[s].parameters)
        return Stepping(bucket, policy.offload, sharing, self._buffers, self.states.note)

    def _gradients_of(self, s: int, tied: Collection[nn.Parameter], how: Stepping) -> Gradients:
        """Return weights and gradients of stage ``s``, some of which earlier stages keep, and which it keeps for
        later ones."""
        lowered, modules = self._rank.lowered, self._rank.modules(s)
        if how.bucket is not None or how.sharing is not None:
            for parameter in (p for module in modules for p in module.parameters() if p.requires_grad):
                parameter.data = parameter.data.contiguous()  # so that pieces of it are views
        owners = {owner: self._gradients[owner] for owner, others in self._borrowing.items() if s in others}
        instructions = lowered.instructions[self._rank.number]
        versions = Versions(
            modules,
            instructions.uses(s, self._borrowing[s]),
            lowered.first.step,
            lowered.reads_newest,
            tied,
            {owner: found.versions for owner, found in owners.items()},
        )
        ahead = lowered.plan.policy.waits_for_norm or (s in lowered.beside and not lowered.drains)
        return Gradients(versions, self._rank.stage(s).replicas > 1, ahead, bool(tied) and lowered.waits(s), owners)

    def _for_delays(self, s: int, gradients: Gradients, places: Sequence[tuple[Tie, int]], how: Stepping) -> Stepping:
        """Return ``how`` with the delays of the weights of stage ``s``; copies of one have the largest of their
        stages'."""
        if self._job.options.delay_correction == "none" or not gradients.versions.installed:
            return how
        means = [delay.mean for delay in self._rank.lowered.delays]
        delays = [means[s]] * len(gradients.versions.installed)
        for tie, index in places:
            delays[index] = max(means[x] for x in tie.stages)
        return replace(how, delays=delays, predicts=self._job.plan.policy.predict and any(delays))

    def _stepper(self, s: int, how: Stepping) -> Stepper:
        """Return what steps the weights of stage ``s``; BadInput where its state would be another than planned."""
        job, rank, options = self._job, self._rank, self._job.options
        if not options.evaluates and job.plan.policy.bytes_per_parameter is None:
            trained = dict.fromkeys(p for module in rank.modules(s) for p in module.parameters() if p.requires_grad)
            check_state(options.optimizer or job.plan.policy.optimizer, trained, f"stage {s}")
        make = job.make_optimizer
        if any(how.delays) and options.delay_correction != "predict":
            make = partial(_compensated, make)
        rates = rates_maker(options.rates, options.warmup, options.steps)
        versions = self._gradients[s].versions
        kind: Callable[..., Stepper] = stepper_kind(versions, how)
        return kind(versions, make, rates, how, self._masters, partial(rank.parted, s))

    def _made_runners(self) -> dict[int, StageModule]:
        job, rank = self._job, self._rank
        draws, later = Draws(job.options.seed, rank.device), self._meeting.recorder.later
        waits = not job.options.evaluates and any(x.offloaded for x in job.plan.chain.choices)
        waiting = Waiting(rank.device, self.activations) if waits else None
        about = self.activations, later, rank.model, waiting
        return {s: runner_of(rank, s, draws, self.updates[s].gradients, *about) for s in rank.stages}


@dataclass(frozen=True)
class RankRun:
    """A rank's part in a run: what it is told, who it is, and what it has when all have met and its stages stand."""

    job: Job
    rank: Rank
    launcher: Launcher
    meeting: Meeting
    stages: OwnStages
    reader: Reader


def runner_of(
    rank: Rank,
    s: int,
    draws: Draws,
    gradients: Gradients,
    activations: HeldBytes,
    later: Later,
    model: LoadedModel,
    waiting: Waiting | None = None,
) -> StageModule:
    """Return what passes stage ``s`` of ``model``, which is the rank's, or watched, or whole; where the plan lets its
    activations wait that is with ``waiting``, of each layer all that it saves, or what it reads, and it runs again."""
    lowered, stage = rank.lowered, rank.stage(s)
    chain = lowered.plan.chain.of(stage.way)
    waiting = waiting if chain.offloaded else None
    if waiting is not None:
        again = (i for i in range(stage.start, stage.stop) if chain.layers[i].again_bytes)
        stage = replace(stage, checkpoint=tuple((i, i + 1) for i in again))
    has_loss = stage.stop == len(lowered.plan.chain)
    found: StageModule = (splitting if lowered.program.split else StageModule)(
        index=s,
        pieces=model.pieces(stage, waiting is not None),
        cuts=(model.cut(stage.start), None if has_loss else model.cut(stage.stop)),
        gradients=gradients,
        activations=activations,
        divisor=lowered.interval,
        reads_newest=lowered.reads_newest,
        device=rank.device,
        later=later,
        draws=draws,
        data=model.read_by(stage),
        trained=model.trained,
        waiting=waiting,
    )
    return found


def _compensated(make: MakeOptimizer, parameters: Any) -> torch.optim.Optimizer:
    return compensated(make(parameters))
