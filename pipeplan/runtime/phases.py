"""What does one rank do from start to end? Five phases, each from what those before it have made.

It builds its model, meets the others, builds its stages, walks its instructions, and reports.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import BadInput
from .arrival_order import arrival_order
from .device import begin_peak, kind_of, label, moved, own_device, peak_bytes, place
from .exchange.collective import (
    barrier,
    gathered,
    pipeline_group,
)
from .exchange.threaded import ThreadedTransport
from .executor import RankWork, execute
from .job import Job
from .launcher import Launcher, MiniBatchGate
from .lowering.lowered_run import LoweredRun
from .measure.recorder import Times
from .measure.report import RunReport, make_report
from .measure.times import RankMeasurement
from .meeting import Masters, Meeting, by_threads, meet
from .minibatch_end import MiniBatchEnd
from .model.fitting import check_buffers, check_model, fitted
from .model.loaded import LoadedModel
from .model.loading import load_model, load_weights
from .model.weight_copies import refuse_copies
from .own_stages import OwnStages, build_stages
from .torch_engine import execute_on_torch
from .training.half import half_type, halved
from .training.newest_weights import read_weights_themselves
from .training.rank import Rank
from .training.state import trained_state
from .training.tied import Tie, TiedSums, check_ties, separated, ties_of


def run_rank(job: Job, number: int, launcher: Launcher) -> RunReport | None:
    """Play rank ``number`` in the run of ``job``; return the report on rank 0, None elsewhere."""
    torch.set_num_threads(job.options.threads)
    rank, ties, masters = build_model(job, number, launcher)
    meeting = meet(job, rank, launcher, ties, masters)
    stages = build_stages(job, rank, meeting, ties, masters)
    times = train(job, rank, meeting, stages, launcher)
    return report(job, rank, meeting, stages, times)


# --- the model ------------------------------------------------------------------------------------------------------


def build_model(job: Job, number: int, launcher: Launcher) -> tuple[Rank, list[Tie], Masters]:
    """Return the rank with its model, the weights that stages share, and those in full precision of a model in 16 bits.

    Nobody waits yet, so what is wrong with a model shows first. BadInput when it isn't what the plan is for.
    """
    plan, options, lowered = job.plan, job.options, job.lowered()
    device = own_device(kind_of(options.device, plan.chain.device), launcher.local_rank)
    cuts = [stage.start for stage in plan.allocation.stages[1:]]
    model = load_model(job.model, plan.chain.microbatch, options.seed, device)
    if not model.chain:
        _refuse_traced(job, lowered)
    model = fitted(model, plan.chain)
    if options.load is not None:
        load_weights(model, options.load)
    check_buffers(model, plan.chain, cuts)
    check_ties(model, plan.chain, cuts)
    ties = ties_of(lowered, model)
    model = separated(lowered, number, model)
    masters: Masters = {}
    half = half_type(plan, options.half)
    if half is not None:
        own = [module for s in lowered.stages_of(number) for module in model.modules(plan.allocation.stages[s])]
        model, masters = halved(model, half, own, device)
    check_model(model, plan.chain, cuts)
    rank = Rank(lowered, number, device, model)
    for s in rank.stages:
        place(rank.modules(s), device)
    if isinstance(model.loss, nn.Module):
        place([model.loss], device)
    if lowered.renews and not options.evaluates:
        for s in rank.stages:
            _prepare_for_newer_weights(rank, s)
    return rank, ties, masters


def _refuse_traced(job: Job, lowered: LoweredRun) -> None:
    """Raise BadInput with one sentence for what cannot be done with a traced model."""
    what = {
        "evaluated, as its trace is that of its training": job.options.evaluates,
        "run on torch's engine": job.options.engine == "torch",
        "trained in mixed precision, as its trace has the types of its weights": job.plan.policy.precision == "mixed",
        "differentiated with newer weights than those of its forwards (weights latest)": lowered.renews,
    }
    for words, asked in what.items():
        if asked:
            raise BadInput(f"model: {job.model.build} is traced and cannot be {words}; return its layers as a list")


def _prepare_for_newer_weights(rank: Rank, s: int) -> None:
    """See to it that backwards can use newer weights; BadInput for a layer where they cannot. Recomputed ones can."""
    stage = rank.stage(s)
    again = {i for first, last in stage.checkpoint for i in range(first, last)}
    read_weights_themselves(rank.modules(s))
    for i, layer in enumerate(rank.layers(s), stage.start):
        if i not in again:
            refuse_copies(f"layer {i}", layer.name, layer.module, rank.model.cut(i).forward)


# --- the training ---------------------------------------------------------------------------------------------------


def train(job: Job, rank: Rank, meeting: Meeting, stages: OwnStages, launcher: Launcher) -> Times:
    """Walk the rank's instructions; return when everything happened."""
    lowered, recorder, links = rank.lowered, meeting.recorder, meeting.links
    instructions, depth = lowered.instructions[rank.number], len(lowered.plan.allocation.stages)
    gate = MiniBatchGate(lowered, launcher.may_begin)
    end = MiniBatchEnd(job, rank, meeting, stages, launcher.done)
    inbox = _inbox(job, rank, meeting) if by_threads(job, lowered) else None
    work = RankWork(
        stages=stages.runners,
        last=depth - 1,
        transport=links.transport(rank.number, instructions, meeting.specs, depth)
        if inbox is None
        else links.through_host(inbox),
        data=lambda microbatch: _sample(rank.model, job, microbatch, rank.device),
        updates=stages.updates,
        agree=end.agree,
        reduce_tied=TiedSums(
            rank.model, stages.ties, stages.runners, meeting.tied_groups, recorder, stages.scaling
        ).reduce,
        progress=launcher.at,
        # hooks that are there anyway can account everything
        accounted=lowered.last.microbatch if lowered.renews else lowered.first.microbatch + lowered.filled,
        allows=gate.allows,
        save=end.save,
        updated=end.updated,
        evaluates=job.options.evaluates,
        recorder=recorder,
    )
    end.scale_losses()
    gc.collect()
    gc.freeze()  # nothing made so far will be garbage, so collections during the run stay short
    begin_peak(rank.device)
    barrier()
    if job.options.engine == "torch":
        times = execute_on_torch(rank, stages.runners, work.data, end.updated, links, recorder)
    else:
        order = None
        if inbox is not None and lowered.limit is not None:
            order = arrival_order(
                instructions,
                work,
                inbox,
                lowered.rule(rank.number),
                lowered.limit,
                lowered.most_held(rank.number),
                lowered.minibatch,
                lowered.program.position,
            )
        times = execute(instructions, work, order)
    if gate.refused is not None and gate.refused != end.saved:
        end.save(gate.refused)
    return times


def _inbox(job: Job, rank: Rank, meeting: Meeting) -> ThreadedTransport:
    lowered = rank.lowered
    room = 1 if lowered.limit is None else lowered.limit * lowered.plan.allocation.stages[0].replicas
    timeout_s = job.timeout_s(lowered)
    group = pipeline_group(lowered, rank.number, timedelta(seconds=timeout_s))
    instructions = lowered.instructions[rank.number]
    return ThreadedTransport(instructions, meeting.specs, room, timeout_s, job.options.link_delay_ns, group)


def _sample(model: LoadedModel, job: Job, microbatch: int, device: torch.device) -> tuple[Tensor, Any]:
    length, seed = job.options.epoch, job.options.seed
    epoch, index = divmod(microbatch, length) if length else (0, microbatch)
    x, target = model.data(index, seed + epoch)
    return moved(x, device), pytree.tree_map_only(Tensor, lambda tensor: moved(tensor, device), target)


# --- the report -----------------------------------------------------------------------------------------------------


def report(job: Job, rank: Rank, meeting: Meeting, stages: OwnStages, times: Times) -> RunReport | None:
    """Give rank 0 what everybody has measured, and write the trained model's state if that is asked for."""
    runners, scaling = stages.runners, stages.scaling
    measurements = gathered(
        rank.number,
        RankMeasurement(
            rank=rank.number,
            times=tuple(times),
            losses={m: loss for runner in runners.values() for m, loss in runner.losses.items()},
            peak_activation_bytes=stages.activations.peak_bytes,
            transfer_ns={edge: ns + job.options.link_delay_ns for edge, ns in meeting.transfer_ns.items()},
            versions={s: runner.versions.most for s, runner in runners.items()},
            device=label(rank.device),
            exchange=meeting.links.exchange,
            peak_device_bytes=peak_bytes(rank.device),
            state_bytes=stages.states.device_bytes,
            host_bytes=stages.states.host_bytes,
            skipped=() if scaling is None else tuple(scaling.skipped),
            loss_scale=None if scaling is None else scaling.current.scale,
            forgotten=times.forgotten,
        ),
    )
    if job.options.save is not None:
        trained = trained_state(rank, rank.first_of, runners)
        everybodys = gathered(rank.number, {key: value.cpu() for key, value in trained.items()})
        if everybodys is not None:
            whole = {key: value for state in everybodys for key, value in state.items()}
            _write(job.options.save, {name: whole[first] for name, first in rank.model.first_names.items()} | whole)
    dist.destroy_process_group()
    return make_report(rank.lowered, measurements) if measurements is not None else None


def _write(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write ``state`` to ``path`` at once or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(dict(state), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
