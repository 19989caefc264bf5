"""What does a rank run and update? Its stages, as they are at the start or at a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .exchange.collective import (
    any_rank,
)
from .job import Job
from .measure.accounts import Account, StateAccount
from .measure.recorder import Recorder
from .meeting import Masters, Meeting
from .training.half import first_scale, half_type
from .training.loss_scale import Scaling
from .training.optimizers import schedule_maker
from .training.rank import Rank
from .training.stage import StageModule
from .training.stage_optimizer import BucketBuffers
from .training.state import restore
from .training.tied import Tie
from .training.update import StageUpdate
from .training.versions import Keeping, Versions


@dataclass(frozen=True)
class OwnStages:
    """A rank's stages, ready to run: by index what passes them, and what updates them; and the memory they take."""

    runners: Mapping[int, StageModule]
    updates: Mapping[int, StageUpdate]
    ties: Sequence[Tie]
    scaling: Scaling | None
    activations: Account
    states: StateAccount


def build_stages(job: Job, rank: Rank, meeting: Meeting, ties: Sequence[Tie], masters: Masters) -> OwnStages:
    """Return the rank's stages, as they are at the start or at the checkpoint to go on from; ``masters`` are theirs."""
    plan, options, lowered = job.plan, job.options, rank.lowered
    activations, states, buffers = Account(), StateAccount(), BucketBuffers()
    half = half_type(plan, options.half)
    scaling = None
    if half is not None:
        scaling = Scaling(first_scale(plan, half, options.half), any_rank if lowered.drains else None)
    runners: dict[int, StageModule] = {}
    updates: dict[int, StageUpdate] = {}
    for s in rank.stages:
        bucket = job.bucket_of(s, lowered.graph.stages[s].parameters)
        tied = [tie.copy_in(s, rank.model) for tie in ties if s in tie.places]
        group, replicas = meeting.groups.get(s), rank.stage(s).replicas
        keeping = Keeping(masters, bucket, plan.policy.offload, group is not None, tied, buffers, states.note)
        runners[s] = _stage_module(job, rank, s, activations, meeting.recorder, keeping)
        versions = runners[s].versions
        updates[s] = StageUpdate(s, versions, meeting.recorder, group, replicas, job.chunk_buckets, scaling)
        states.watch(updates[s].tensors)
    masters.clear()
    torch.manual_seed(options.seed + 1 + rank.number)
    if job.resume is not None:
        restore(job.resume, rank, runners, scaling)
    for layer in rank.model.layers if options.evaluates else ():
        layer.module.eval()
    return OwnStages(runners, updates, ties, scaling, activations, states)


def _stage_module(
    job: Job, rank: Rank, s: int, activations: Account, recorder: Recorder, keeping: Keeping
) -> StageModule:
    lowered, model, stage = rank.lowered, rank.model, rank.stage(s)
    scheduler = job.options.scheduler
    versions = Versions(
        rank.modules(s),
        Counter() if job.options.engine == "torch" else lowered.instructions[rank.number].uses(s),
        job.make_optimizer,
        None if scheduler is None else schedule_maker(scheduler),
        lowered.first.step,
        lowered.renews,
        keeping,
    )
    has_loss = stage.stop == len(lowered.plan.chain)
    return StageModule(
        index=s,
        pieces=model.pieces(stage),
        cuts=(model.cut(stage.start), None if has_loss else model.cut(stage.stop)),
        versions=versions,
        account=activations,
        divisor=lowered.interval,
        renews=lowered.renews,
        device=rank.device,
        later=recorder.later,
    )
