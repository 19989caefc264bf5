"""What does a rank have before it builds its stages? Its model, and what it got when all met."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...registry import Late
from ..device import Exchange, exchange_of, gpu_of, kind_of, own_device, place, watch_last
from ..exchange.collective import (
    PATIENCE,
    agree,
    clock_offset,
    greet,
    replica_groups,
    share_from,
    stage_groups,
    this_machine,
)
from ..exchange.layer_group import LayerGroup
from ..exchange.links import Links, open_links
from ..exchange.transport import Group, everybodys, exchanging, spare_sockets
from ..lowering.instructions import Edge
from ..lowering.lowered_run import LoweredRun
from ..measure.recorder import Recorder, recorder_of
from ..measure.times import Compared
from ..model.build.fitting import check_model, fitted
from ..model.build.loading import OwnPart, load_weights, versions_of
from ..model.deferred import SMALL
from ..model.loaded import LoadedModel
from ..model.network import TARGET, TensorSpec
from ..training.half import conversion, halved
from ..training.rank import Rank, groups_of
from ..training.update.update import Stages, Tie, check_ties, separated, share_ties, ties_of
from ..training.weights.versions import read_weights_themselves
from .job import Job, Launcher

COMPARED: Final = "compared"  # what the widest rank puts into the store when it has compared the model
COMPARING: Final = 3  # times the usual patience that others wait for that, as the model may have to be built whole
compared = Late("runtime.engine.comparison:compared")
refuse_copies = Late("runtime.model.trace.weight_copies:refuse_copies")
Masters = dict[nn.Parameter, Tensor]  # of 16-bit weights the values in full precision


# --- the model ------------------------------------------------------------------------------------------------------


def _compares(job: Job, lowered: LoweredRun, model: LoadedModel) -> bool:
    return job.compares and (not model.chain or max(lowered.widths) > 1)


def build_model(
    job: Job, number: int, launcher: Launcher, together: LayerGroup | None = None
) -> tuple[Rank, list[Tie], Masters]:
    """Return the rank with its model, the weights that stages share, and those in full precision of a model in 16 bits.

    BadInput when it isn't what the plan is for, or other ranks have built another one.
    """
    plan, options, lowered = job.plan, job.options, job.lowered()
    device, chain = own_device(kind_of(options.device, plan.chain), launcher.local_rank), lowered.chain_of(number)
    cuts = [stage.start for stage in plan.allocation.stages[1:]]
    half, autocast = conversion(plan, options.half, device)
    small, training = sys.maxsize if len(lowered.devices) == 1 else SMALL, not options.evaluates
    model_of = {"training": training, "dtype": half, "autocast": autocast}
    part = OwnPart(job.model, chain.microbatch, options.seed, device, small=small, **model_of)
    model = part.load()
    launcher.compare(job.model, model)
    model = fitted(model, chain)
    if number == lowered.widest and _compares(job, lowered, model):
        model = compared(job, lowered, model, device, half, autocast, together)
    check_ties(model, chain, cuts)
    ties = ties_of(lowered, model)
    source = options.load or model.source
    given = source is not None or job.resume is not None
    model = part.filled(
        model, lambda found: _own_modules(lowered, number, found), lambda found: fitted(found, chain), given
    )
    if source is not None:
        load_weights(model, source)
    groups = groups_of(model, options.no_decay, options.groups)
    model = separated(lowered, number, replace(model, versions=versions_of(model)))
    masters: Masters = {}
    if half is not None:
        model, masters = halved(model, half, _own_modules(lowered, number, model), device)
    check_model(model, chain)
    for stage in (plan.allocation.stages[s] for s in lowered.stages_of(number)):
        cores = {i for first, last in stage.selective for i in range(first, last)}
        model = model.storing(set(range(stage.start, stage.stop)) - cores) if cores else model
    rank = Rank(lowered, number, device, model, groups, together)
    for s in rank.stages:
        place(rank.modules(s), device)
    if isinstance(model.loss, nn.Module):
        place([model.loss], device)
    if lowered.reads_newest and not options.evaluates:
        for s in rank.stages:
            _prepare_for_newer_weights(rank, s)
    _release_others(rank)
    return rank, ties, masters


def _own_modules(lowered: LoweredRun, number: int, model: LoadedModel) -> list[nn.Module]:
    """Return the modules of ``model`` that rank ``number`` runs, the loss among them if it is one."""
    stages = [lowered.plan.allocation.stages[s] for s in lowered.stages_of(number)]
    loss = [model.loss] if isinstance(model.loss, nn.Module) else []
    return [*(module for stage in stages for module in model.modules(stage)), *loss]


def _release_others(rank: Rank) -> None:
    """Give back the memory of layers that other ranks train, but for what the rank's own have of theirs."""
    mine = _own_modules(rank.lowered, rank.number, rank.model)
    kept = {tensor for module in mine for tensor in (*module.parameters(), *module.buffers())}
    for part in (part for layer in rank.model.layers for part in layer.module.modules()):
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter not in kept:
                part._parameters[name] = nn.Parameter(_without_memory(parameter), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer not in kept:
                part._buffers[name] = _without_memory(buffer)


def _without_memory(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _prepare_for_newer_weights(rank: Rank, s: int) -> None:
    """See to it that backwards can use newer weights; BadInput for a layer where they cannot. Recomputed ones can."""
    stage = rank.stage(s)
    again = {i for first, last in stage.checkpoint for i in range(first, last)}
    read_weights_themselves(rank.modules(s))
    for i, layer in enumerate(rank.layers(s), stage.start):
        for code in () if i in again else layer.codes:
            if TARGET not in code.reads:
                specs = [rank.model.specs[value] for value in code.reads]
                refuse_copies(f"layer {i}", code.name, code.module, *specs, run=code.run)


# --- the meeting ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meeting:
    """What a rank has once all have met: how messages and ``sums`` of gradients travel, and the groups that are summed.

    ``groups`` are those of replicated stages, ``tied_groups`` of stages that share weights; ``specs`` has what crosses
    each edge. ``clock`` is the comparison of clocks before the run. Where
    gradients are clipped ``everybody`` is the group that sums for their norm. ``patient`` is one of all hosts for what
    may take long. ``compared`` says how the first microbatch compared with plain training, where it was.
    """

    links: Links
    sums: Exchange
    groups: Mapping[int, Group]
    tied_groups: Mapping[Stages, Group]
    specs: Mapping[Edge, TensorSpec]
    recorder: Recorder
    clock: Compared
    everybody: Group = None
    patient: Group = None
    compared: str = ""


def meet(job: Job, rank: Rank, launcher: Launcher, ties: Sequence[Tie], masters: Masters) -> Meeting:
    """Meet the other ranks: compare models, connect, and let copies of weights begin equal."""
    lowered, number, device = rank.lowered, rank.number, rank.device
    timeout = timedelta(seconds=job.timeout_s(lowered))
    world = len(lowered.devices)
    watch_last(device)
    spare_sockets()
    words = ""
    with exchanging("the meeting of the ranks"):
        store = launcher.meet() if rank.together is None else rank.together.store
        if _compares(job, lowered, rank.model):
            if number == lowered.widest:
                store.set(COMPARED, rank.model.compared)
            else:
                store.wait([COMPARED], COMPARING * timeout)
            words = store.get(COMPARED).decode()
        dist.init_process_group("gloo", store=store, rank=number, world_size=world, timeout=timeout)
    cuts = {0, *(stage.start for stage in lowered.plan.allocation.stages)}
    agree(number, rank.model.boundaries, cuts if len(set(job.lowered().widths)) > 1 else None)
    with exchanging("the comparison of devices at the start"):
        sums = exchange_of(everybodys(gpu_of(device, this_machine())))
    # messages that come in any order, or late, are for threads, which exchange between hosts alone; sums, which come
    # when all messages are through, need not
    threads = lowered.limit is not None or job.options.link_delay_s > 0
    messages: Exchange = "staged" if threads and sums == "nccl" else sums
    nearby = None if threads else this_machine()
    links = open_links(lowered, number, messages, device, timeout, nearby)
    groups = replica_groups(lowered, sums, timeout)
    for s in rank.stages:
        if s in groups:
            share_from(lowered.ranks_of(s)[0], groups[s], _tensors(rank, s, masters))
    tied_groups = stage_groups(lowered, dict.fromkeys(tie.stages for tie in ties), sums, timeout)
    share_ties(rank, ties, tied_groups, masters)
    every = tuple(range(len(lowered.plan.allocation.stages)))
    everybody = stage_groups(lowered, [every] if lowered.plan.policy.clip else [], sums, timeout).get(every)
    if sums == "nccl":
        own = [group for s, group in groups.items() if s in rank.stages]
        own += [group for stages, group in tied_groups.items() if set(stages) & set(rank.stages)]
        greet(own, everybody, device)
    for parameter, master in masters.items():
        parameter.data.copy_(master)
    specs = _edge_specs(rank)
    clock = compared_clocks(number)
    recorder = recorder_of(device, clock.offset_ns, timeout)
    with exchanging("the making of groups"):
        patient = dist.new_group(timeout=PATIENCE, backend="gloo")
    return Meeting(links, sums, groups, tied_groups, specs, recorder, clock, everybody, patient, words)


def compared_clocks(number: int, lag_ns: int = 0) -> Compared:
    """Return what the clock of this rank's device, which lags behind the host's, lacks to rank 0's host's now; all
    ranks compare together."""
    return Compared(clock_offset(number, this_machine()) + lag_ns, time.monotonic_ns())


def _tensors(rank: Rank, s: int, masters: Masters) -> Iterator[Tensor]:
    """Yield a stage's weights, in full precision, and its buffers, on the device; keep what becomes of ``masters``."""
    for module in rank.modules(s):
        for parameter in module.parameters():
            if parameter in masters:
                master = masters[parameter].to(parameter.device)
                yield master
                masters[parameter].copy_(master)
            else:
                yield parameter.data
        yield from module.buffers()


def _edge_specs(rank: Rank) -> dict[Edge, TensorSpec]:
    specs: dict[Edge, TensorSpec] = {}
    covers = rank.lowered.program.batch
    for s, stage in enumerate(rank.lowered.plan.allocation.stages[:-1]):
        cut = rank.model.cut(stage.stop)
        specs["F", s], spec = cut.forward, cut.backward
        specs["B", s + 1] = spec if covers == 1 else TensorSpec((covers, *spec.shape), spec.dtype)
    return specs
