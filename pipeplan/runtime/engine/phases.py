"""What does one rank do from start to end? Five phases, each from what those before it have made.

It builds its model, meets the others, builds its stages, walks its instructions, and reports.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from ...errors import BadInput
from ...registry import Late
from ..device import begin_peak, freed_kept, kind_of, label, own_device, peak_bytes
from ..exchange.collective import gathered
from ..exchange.layer_group import LayerGroup, handed_on
from ..exchange.transport import everybodys, exchanging, number_processes
from ..lowering.instructions import NOBODY
from ..lowering.lowered_run import LoweredRun
from ..measure.recorder import Times, kept_off_ns
from ..measure.times import RankMeasurement, straightened
from ..model.trace.adapted import run_uncompiled
from .executor import MiniBatchEnd, execute
from .job import Job, Launcher
from .own_stages import OwnStages, RankRun
from .preparation import build_model, compared_clocks, meet
from .reading import Reader, differing

if TYPE_CHECKING:
    from ..exchange.threaded import ThreadedTransport
    from ..measure.report import RunReport
    from .held_out import HeldOut

make_report = Late("runtime.measure.report:make_report")
assembled, averaged, trained_state, wholes, save_config, save_model = (
    Late(f"runtime.training.state.state:{name}")
    for name in ("assembled", "averaged", "trained_state", "wholes", "save_config", "save_model")
)
arrival_order = Late("runtime.engine.arrival_order:arrival_order")
threaded = Late("runtime.exchange.threaded:ThreadedTransport")
evaluating = Late("runtime.engine.held_out:HeldOut")
OFTEN: Final = (2_000, 10, 10)  # collections, whoever has started the rank: a user's circles may hold activations


def run_rank(job: Job, number: int, launcher: Launcher) -> RunReport | None:
    """Play process ``number`` of the run of ``job``; return the report on the first, None elsewhere.

    Where several run each layer together, these are one rank, and each has its part of the model.
    """
    lowered, together = job.lowered(), None
    of_rank, place = lowered.processes[number]
    width, number = lowered.widths[of_rank], sum(width > place for width in lowered.widths[:of_rank])
    if max(lowered.widths) > 1:
        number_processes([process for process, (_, at) in enumerate(lowered.processes) if at == place])
    if width > 1:
        device = own_device(kind_of(job.options.device, job.plan.chain), launcher.local_rank)
        timeout = timedelta(seconds=job.timeout_s(lowered))
        together = LayerGroup(launcher.meet(), of_rank, place, width, device, timeout)
        job = replace(job, model=replace(job.model, ranks=width, place=place), place=place)
        job.model.exchanges_by(together.exchange)
    if lowered.chain_of(number).selective:
        job = replace(job, model=job.model.selective)
    torch.set_num_threads(job.options.threads)
    held_out = None
    if job.options.held_out is not None and not job.options.evaluates:
        held_out = evaluating(job, number, launcher)
    rank, ties, masters = build_model(job, number, launcher, together)
    reader = Reader(job, rank)
    meeting = meet(job, rank, launcher, ties, masters)
    stages = OwnStages(job, rank, meeting, ties, masters)
    run = RankRun(job, rank, launcher, meeting, stages, reader)
    with freed_kept(), run_uncompiled([module for s in rank.stages for module in rank.modules(s)]):
        times, reading = train(run, held_out)
    found = report(run, times, reading)
    if found is None or held_out is None:
        return found
    return replace(found, evaluations=held_out.found, best_step=held_out.trial.step, ended_early=held_out.ends)


# --- the training ---------------------------------------------------------------------------------------------------


def train(run: RankRun, held_out: HeldOut | None = None) -> tuple[Times, tuple[int, int] | None]:
    """Walk the rank's instructions; return when everything happened, and how reading went."""
    try:
        first = run.reader.begin()
        with exchanging("the comparison of the first samples"):
            wrong = differing(everybodys(first, run.meeting.patient))
        if wrong is not None:
            raise BadInput(wrong)
        times = _walk(run, MiniBatchEnd(run, held_out))
    finally:
        reading = run.reader.close()
    return times, reading


def _walk(run: RankRun, end: MiniBatchEnd) -> Times:
    rank, meeting = run.rank, run.meeting
    lowered, number, links = rank.lowered, rank.number, meeting.links
    inbox = _inbox(run) if links.by_threads else None
    end.scale_losses()
    gc.collect()
    gc.freeze()  # nothing made so far will be garbage, so collections during the run stay short
    gc.set_threshold(*OFTEN)
    begin_peak(rank.device)
    with exchanging("the barrier before the run"):
        dist.barrier()
    order, evaluates = None, lowered.evaluates
    transport = links.through_host(inbox) if inbox else links.transport(number, meeting.specs, evaluates)
    if rank.together is not None:
        transport = handed_on(transport, rank, meeting.specs)
    if inbox is not None and lowered.limit is not None:
        order = arrival_order(rank, end, inbox, lowered.limit, lowered.most_held(number))
    begun, off = time.monotonic_ns(), kept_off_ns()
    times = execute(run, end, transport, order)
    times.kept_off = (kept_off_ns() - off) / (time.monotonic_ns() - begun)
    end.save_if_refused()
    return times


def _inbox(run: RankRun) -> ThreadedTransport:
    lowered, options = run.rank.lowered, run.job.options
    room = 1 if lowered.limit is None else lowered.limit * lowered.plan.allocation.stages[0].replicas
    timeout_s, delay_ns = run.job.timeout_s(lowered), round(options.link_delay_s * 1e9)
    with exchanging("the making of groups"):
        group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo")
    own = lowered.instructions[run.rank.number]
    instructions = own.changed(lambda some: (x for x in some if getattr(x, "peer", 0) != NOBODY))
    made: ThreadedTransport = threaded(instructions, run.meeting.specs, room, timeout_s, delay_ns, group)
    return made


# --- the report -----------------------------------------------------------------------------------------------------


def report(run: RankRun, times: Times, reading: tuple[int, int] | None) -> RunReport | None:
    """Give rank 0 what everybody has measured, and write the trained model's state if that is asked for."""
    job, rank, meeting, stages = run.job, run.rank, run.meeting, run.stages
    runners, scaling = stages.runners, stages.scaling
    clock, together = compared_clocks(rank.number, meeting.recorder.lag_ns), rank.together
    held, states = stages.activations, stages.states
    most = [held.peak_bytes, states.device_bytes, states.host_bytes, held.most_at_home]
    gpu = peak_bytes(rank.device)
    if together is not None:
        most = together.most(most)
        if gpu is not None:
            gpu = tuple(together.most(gpu))
    measurements = gathered(
        rank.number,
        RankMeasurement(
            rank=rank.number,
            times=tuple(straightened(times, meeting.clock, clock)),
            losses={m: loss for runner in runners.values() for m, loss in runner.losses.items()},
            peak_activation_bytes=most[0],
            versions={s: runner.versions.most for s, runner in runners.items()},
            device=label(rank.device),
            exchange=meeting.links.exchange,
            sums=meeting.sums,
            gpu=gpu,
            state_bytes=most[1],
            host_bytes=most[2],
            waiting_bytes=most[3],
            skipped=() if scaling is None else tuple(scaling.skipped),
            loss_scale=None if scaling is None else scaling.current.scale,
            forgotten=times.forgotten,
            kept_off=times.kept_off,
            reading=reading,
            norms={} if stages.clipping is None else stages.clipping.norms,
        ),
        RankMeasurement,
    )
    if job.options.save is not None:
        with assembled(stages.updates):
            trained = trained_state(rank, rank.first_of, stages.updates)
            if job.options.averaged and not job.options.evaluates:
                trained |= averaged(rank, stages.updates)
            if together is not None:
                trained = wholes(trained, rank.model.shards, together)
            if rank.leads:
                save_model(rank.number, trained, rank.model, job.options.save, meeting.patient)
        if rank.number == 0 and rank.leads:
            save_config(job.options.save, job.model)
    meeting.links.close()
    dist.destroy_process_group()
    if measurements is None or not rank.leads:
        return None
    notes = (*job.notes, *rank.model.notes, *of_schedule(rank.lowered))
    made: RunReport = make_report(rank.lowered, measurements)
    return replace(made, notes=notes, compared=meeting.compared)


def of_schedule(lowered: LoweredRun) -> Iterator[str]:
    """Say in what a run is otherwise than its schedule."""
    if lowered.program.fused and not lowered.evaluates:
        yield (
            f"{lowered.plan.schedule.kind}: forwards and backwards that share an operation ran one after the other, so "
            "nothing of one was hidden behind the other"
        )
