"""What one rank does from start to end: build its stages, agree with the others, walk its instructions, report."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import BadInput
from .arrival_order import arrival_order
from .device import begin_peak, exchange_of, kind_of, label, moved, own_device, peak_bytes, place
from .exchange.collective import (
    agree,
    any_rank,
    barrier,
    clock_offset,
    gathered,
    pipeline_group,
    replica_groups,
    share_from,
    stage_groups,
    this_machine,
    transfer_times,
)
from .exchange.links import open_links
from .exchange.threaded import ThreadedTransport
from .exchange.transport import exchanging
from .executor import RankWork, execute
from .job import Job
from .launcher import Gate, Launcher
from .lowering.instructions import Edge
from .lowering.lowered_run import Script
from .measure.accounts import Account, StateAccount
from .measure.recorder import Recorder, recorder_of
from .measure.report import RunReport, make_report
from .measure.times import RankMeasurement
from .minibatch_end import Milestones
from .model.contract import check_model
from .model.loading import load_model, load_weights
from .model.network import TensorSpec
from .model.pieces import cut_of, stage_of
from .model.spec import LoadedModel
from .model.weight_copies import refuse_copies
from .torch_engine import execute_on_torch
from .training.half import first_scale, half_type, halved
from .training.loss_scale import Scaling
from .training.newest_weights import read_weights_themselves
from .training.optimizers import schedule_maker
from .training.stage import StageModule
from .training.stage_optimizer import BucketBuffers
from .training.state import first_replicas, own_layers, restore, trained_state
from .training.tied import TiedSums, check_ties, separated, share_ties, ties_of
from .training.update import StageUpdate
from .training.versions import Keeping, Versions


def run_rank(job: Job, rank: int, launcher: Launcher) -> RunReport | None:
    """Play ``rank`` in the run of ``job``; return the report on rank 0, None elsewhere."""
    torch.set_num_threads(job.options.threads)
    device = own_device(kind_of(job.options.device, job.plan.chain.device), launcher.local_rank)
    script = job.script()
    stages = job.plan.allocation.stages
    model = load_model(job.model, job.plan.chain.microbatch, job.options.seed, device)
    if model.traced is not None:
        _refuse_traced(job, script)
        from .model.traced import fitted

        model = fitted(model, job.plan.chain, [stage.start for stage in stages[1:]])
    if job.options.load is not None:
        load_weights(model, job.options.load)
    check_ties(model, job.plan.chain, [stage.start for stage in stages[1:]])
    ties = ties_of(script, model)
    model = separated(script, rank, model)
    half = half_type(job.plan, job.options.half)
    masters: dict[nn.Parameter, Tensor] = {}
    if half is not None:
        own = [i for s in script.stages_of(rank) for i in own_layers(script, s, model)]
        model, masters = halved(model, half, own, device)
    if model.traced is None:
        check_model(model, job.plan.chain, [stage.start for stage in stages[1:]])
    for s in script.stages_of(rank):
        place([model.layers[i][1] for i in own_layers(script, s, model)], device)
    if isinstance(model.loss, nn.Module):
        place([model.loss], device)
    if script.renews and not job.options.evaluates:
        _prepare_renewal(script, rank, model)
    timeout = timedelta(seconds=job.timeout_s(script))
    with exchanging("the meeting of the ranks"):
        dist.init_process_group(
            "gloo",
            store=launcher.open_store(),
            rank=rank,
            world_size=len(script.devices),
            timeout=timeout,
        )
    agree(rank, model.boundaries)
    with exchanging("the comparison of devices at the start"):
        exchange = exchange_of(device, this_machine())
    threaded = script.limit is not None or bool(job.options.link_delay_ns)
    if threaded and exchange == "nccl":  # threads exchange between hosts alone
        exchange = "staged"
    links = open_links(script, rank, exchange, device, timeout)
    groups = replica_groups(script, exchange, timeout)
    for s in script.stages_of(rank):
        if s in groups:
            share_from(script.ranks_of(s)[0], groups[s], _tensors(script, s, model, masters))
    tied_groups = stage_groups(script, dict.fromkeys(tie.stages for tie in ties), exchange, timeout)
    share_ties(script, rank, model, ties, tied_groups, masters)
    for parameter, master in masters.items():
        parameter.data.copy_(master)
    specs = _edge_specs(script, model)
    recorder = recorder_of(device, clock_offset(rank, this_machine()))
    account = Account()
    states, buffers = StateAccount(), BucketBuffers()
    runners: dict[int, StageModule] = {}
    for s in script.stages_of(rank):
        bucket = job.bucket_of(s, script.graph.stages[s].parameters)
        tied = [tie.copy_in(s, model) for tie in ties if s in tie.places]
        keeping = Keeping(masters, bucket, job.plan.policy.offload, s in groups, tied, buffers, states.note)
        runners[s] = _stage_module(script, job, rank, s, model, account, recorder, device, keeping)
    masters.clear()
    scaling = None
    if half is not None:
        scaling = Scaling(first_scale(job.plan, half, job.options.half), any_rank if script.drains else None)
    torch.manual_seed(job.options.seed + 1 + rank)
    if job.resume is not None:
        restore(job.resume, script, rank, model, runners, device, scaling)
    for _, module in model.layers if job.options.evaluates else ():
        module.eval()
    transfer_ns = {
        edge: ns + job.options.link_delay_ns for edge, ns in transfer_times(script, rank, specs, links).items()
    }
    gate = Gate(script, launcher.may_begin)
    milestones = Milestones(
        job, script, rank, device, model, runners, groups, ties, scaling, states, recorder, launcher.done
    )
    instructions = script.instructions[rank]
    mail: ThreadedTransport | None = None
    if threaded:
        room = 1 if script.limit is None else script.limit * stages[0].replicas
        group = pipeline_group(script, rank, timeout)
        mail = ThreadedTransport(instructions, specs, room, job.timeout_s(script), job.options.link_delay_ns, group)
    updates = {
        s: StageUpdate(s, runner.versions, recorder, groups.get(s), stages[s].replicas, job.chunk_buckets, scaling)
        for s, runner in runners.items()
    }
    for update in updates.values():
        states.watch(update.tensors)
    work = RankWork(
        stages=runners,
        last=len(stages) - 1,
        transport=links.transport(rank, instructions, specs, len(stages)) if mail is None else links.through_host(mail),
        data=lambda microbatch: _sample(model, job, microbatch, device),
        updates=updates,
        agree=milestones.agree,
        reduce_tied=TiedSums(model, ties, runners, tied_groups, recorder, scaling).reduce,
        progress=launcher.at,
        # hooks that are there anyway can account everything
        accounted=script.last.microbatch if script.renews else script.first.microbatch + script.filled,
        allows=gate.allows,
        save=milestones.save,
        updated=milestones.updated,
        evaluates=job.options.evaluates,
        recorder=recorder,
    )
    milestones.scale_losses()
    gc.collect()
    gc.freeze()  # nothing made so far will be garbage, so collections during the run stay short
    begin_peak(device)
    barrier()
    if job.options.engine == "torch":
        times = execute_on_torch(script, rank, model, runners, work.data, milestones.updated, links, recorder)
    else:
        order = None
        if script.limit is not None and mail is not None:
            order = arrival_order(
                instructions,
                work,
                mail,
                script.rule(rank),
                script.limit,
                script.most_held(rank),
                script.minibatch,
                script.program.position,
            )
        times = execute(instructions, work, order)
    if gate.refused is not None and gate.refused != milestones.saved:
        milestones.save(gate.refused)
    measurements = gathered(
        rank,
        RankMeasurement(
            rank=rank,
            times=tuple(times),
            losses={m: loss for runner in runners.values() for m, loss in runner.losses.items()},
            peak_activation_bytes=account.peak_bytes,
            transfer_ns=transfer_ns,
            versions={s: runner.versions.most for s, runner in runners.items()},
            device=label(device),
            exchange=exchange,
            peak_device_bytes=peak_bytes(device),
            state_bytes=states.device_bytes,
            host_bytes=states.host_bytes,
            skipped=() if scaling is None else tuple(scaling.skipped),
            loss_scale=None if scaling is None else scaling.current.scale,
            forgotten=times.forgotten,
        ),
    )
    if job.options.save is not None:
        trained = trained_state(script, first_replicas(script, rank), model, runners)
        everybodys = gathered(rank, {key: value.cpu() for key, value in trained.items()})
        if everybodys is not None:
            whole = {key: value for state in everybodys for key, value in state.items()}
            _write(job.options.save, {name: whole[first] for name, first in model.first_names.items()} | whole)
    dist.destroy_process_group()
    return make_report(script, measurements) if measurements is not None else None


def _refuse_traced(job: Job, script: Script) -> None:
    """Raise BadInput with one sentence for what cannot be done with a traced model."""
    what = {
        "evaluated, as its trace is that of its training": job.options.evaluates,
        "run on torch's engine": job.options.engine == "torch",
        "trained in mixed precision, as its trace has the types of its weights": job.plan.policy.precision == "mixed",
        "differentiated with newer weights than those of its forwards (weights latest)": script.renews,
    }
    for words, asked in what.items():
        if asked:
            raise BadInput(f"model: {job.model.build} is traced and cannot be {words}; return its layers as a list")


def _sample(model: LoadedModel, job: Job, microbatch: int, device: torch.device) -> tuple[Tensor, Any]:
    epoch, index = divmod(microbatch, job.options.epoch) if job.options.epoch else (0, microbatch)
    x, target = model.data(index, job.options.seed + epoch)
    return moved(x, device), pytree.tree_map_only(Tensor, lambda tensor: moved(tensor, device), target)


def _tensors(script: Script, s: int, model: LoadedModel, masters: dict[nn.Parameter, Tensor]) -> Iterator[Tensor]:
    """Yield a stage's weights, in full precision, and its buffers, on the device; keep what becomes of ``masters``."""
    for i in own_layers(script, s, model):
        module = model.layers[i][1]
        for parameter in module.parameters():
            if parameter in masters:
                master = masters[parameter].to(parameter.device)
                yield master
                masters[parameter].copy_(master)
            else:
                yield parameter.data
        yield from module.buffers()


def _stage_module(
    script: Script,
    job: Job,
    rank: int,
    s: int,
    model: LoadedModel,
    account: Account,
    recorder: Recorder,
    device: torch.device,
    keeping: Keeping,
) -> StageModule:
    stage = script.plan.allocation.stages[s]
    modules = [model.layers[i][1] for i in own_layers(script, s, model)]
    versions = Versions(
        modules,
        Counter() if job.options.engine == "torch" else script.instructions[rank].uses(s),
        job.make_optimizer,
        None if job.options.scheduler is None else schedule_maker(job.options.scheduler),
        script.first.step,
        script.renews,
        keeping,
    )
    has_loss = stage.stop == len(script.plan.chain)
    return StageModule(
        index=s,
        pieces=stage_of(model, stage.start, stage.stop, stage.checkpoint),
        cuts=(cut_of(model, stage.start), None if has_loss else cut_of(model, stage.stop)),
        versions=versions,
        account=account,
        divisor=script.interval,
        renews=script.renews,
        device=device,
        later=recorder.later,
    )


def _prepare_renewal(script: Script, rank: int, model: LoadedModel) -> None:
    """See to it that backwards can use newer weights; BadInput for a layer where they cannot. Recomputed ones can."""
    for s in script.stages_of(rank):
        again = {i for first, last in script.plan.allocation.stages[s].checkpoint for i in range(first, last)}
        read_weights_themselves(model.layers[i][1] for i in own_layers(script, s, model))
        for i in own_layers(script, s, model):
            if i not in again:
                refuse_copies(f"layer {i}", *model.layers[i], model.boundaries[i])


def _edge_specs(script: Script, model: LoadedModel) -> dict[Edge, TensorSpec]:
    specs: dict[Edge, TensorSpec] = {}
    covers = script.program.batch
    for s, stage in enumerate(script.plan.allocation.stages[:-1]):
        cut = cut_of(model, stage.stop)
        specs["F", s], spec = cut.forward, cut.backward
        specs["B", s + 1] = spec if covers == 1 else TensorSpec((covers, *spec.shape), spec.dtype)
    return specs


def _write(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write ``state`` to ``path`` at once or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(dict(state), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
