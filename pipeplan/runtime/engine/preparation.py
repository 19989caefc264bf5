"""What does a rank have before it trains? Its model, what it got when all met, and its stages.

Stages are as they are at the start or at a checkpoint.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...registry import Late
from ..device import CPU, Exchange, exchange_of, gpu_of, kind_of, own_device, place, watch_last
from ..exchange.collective import (
    agree,
    any_rank,
    clock_offset,
    greet,
    patient_group,
    replica_groups,
    share_from,
    stage_groups,
    this_machine,
    transfer_times,
)
from ..exchange.gloo import spare_sockets
from ..exchange.links import Links, open_links
from ..exchange.replica_sum import SumGroup
from ..exchange.transport import EmulatedLink, Group, everybodys, exchanging
from ..lowering.instructions import Edge
from ..lowering.lowered_run import LoweredRun
from ..measure.held_bytes import HeldBytes, StateBytes
from ..measure.recorder import Recorder, recorder_of
from ..measure.times import Compared
from ..model.build.fitting import check_model, fitted
from ..model.build.loading import OwnPart, load_weights, versions_of
from ..model.deferred import SMALL
from ..model.loaded import LoadedModel
from ..model.network import TARGET, TensorSpec
from ..training.draws import Draws
from ..training.groups import groups_of
from ..training.half import conversion, first_scale, half_type, halved
from ..training.rank import Rank
from ..training.split_stage import SplitStage
from ..training.stage import StageModule
from ..training.trial import Trial
from ..training.update.beside import OnStream, OnThread, Way
from ..training.update.clipping import Clipping
from ..training.update.loss_scale import Scaling
from ..training.update.offload import BucketBuffers
from ..training.update.optimizers import MakeOptimizer, check_state, rates_maker
from ..training.update.shards import Sharing
from ..training.update.stage_optimizer import Stepping
from ..training.update.stepper import Stepper
from ..training.update.tied import Stages, Tie, TiedSums, check_ties, copies_added, separated, share_ties, ties_of
from ..training.update.update import StageUpdate, sums_of
from ..training.weights.gradients import Gradients
from ..training.weights.late import compensated
from ..training.weights.newest_weights import read_weights_themselves
from ..training.weights.versions import Versions, borrowers
from .job import Job, Launcher

COMPARED: Final = "compared"  # what rank 0 puts into the store when it has compared the model
COMPARING: Final = 3  # times the usual patience that others wait for that, as the model may have to be built whole
compared = Late("runtime.engine.comparison:compared")
restore, take_averages = (Late(f"runtime.training.state.state:{name}") for name in ("restore", "take_averages"))
refuse_crossing = Late("runtime.engine.torch_engine:refuse_crossing")
refuse_copies = Late("runtime.model.trace.weight_copies:refuse_copies")
Masters = dict[nn.Parameter, Tensor]  # of 16-bit weights the values in full precision


# --- the model ------------------------------------------------------------------------------------------------------


def build_model(job: Job, number: int, launcher: Launcher) -> tuple[Rank, list[Tie], Masters]:
    """Return the rank with its model, the weights that stages share, and those in full precision of a model in 16 bits.

    BadInput when it isn't what the plan is for, or other ranks have built another one.
    """
    plan, options, lowered = job.plan, job.options, job.lowered()
    device = own_device(kind_of(options.device, plan.chain), launcher.local_rank)
    cuts = [stage.start for stage in plan.allocation.stages[1:]]
    half, autocast = conversion(plan, options.half, device)
    small, training = sys.maxsize if len(lowered.devices) == 1 else SMALL, not options.evaluates
    part = OwnPart(job.model, plan.chain.microbatch, options.seed, device, small, training, half, autocast)
    model = part.load()
    launcher.compare(job.model, model)
    model = fitted(model, plan.chain)
    if number == 0 and job.compares and not model.chain:
        model = compared(job, model, device, half, autocast)
    if options.engine == "torch":
        refuse_crossing(model, cuts)
    check_ties(model, plan.chain, cuts)
    ties = ties_of(lowered, model)
    source = options.load or model.source
    given = source is not None or job.resume is not None
    model = part.filled(
        model, lambda found: _own_modules(lowered, number, found), lambda found: fitted(found, plan.chain), given
    )
    if source is not None:
        load_weights(model, source)
    groups = groups_of(model, options.no_decay, options.groups)
    model = separated(lowered, number, replace(model, versions=versions_of(model)))
    masters: Masters = {}
    if half is not None:
        model, masters = halved(model, half, _own_modules(lowered, number, model), device)
    check_model(model, plan.chain)
    rank = Rank(lowered, number, device, model, groups)
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
    each edge and ``transfer_ns`` how long that takes. ``clock`` is the comparison of clocks before the run. Where
    gradients are clipped ``everybody`` is the group that sums for their norm. ``patient`` is one of all hosts for what
    may take long.
    """

    links: Links
    sums: Exchange
    groups: Mapping[int, Group]
    tied_groups: Mapping[Stages, Group]
    specs: Mapping[Edge, TensorSpec]
    recorder: Recorder
    clock: Compared
    transfer_ns: Mapping[Edge, int]
    everybody: Group = None
    patient: Group = None


def meet(job: Job, rank: Rank, launcher: Launcher, ties: Sequence[Tie], masters: Masters) -> Meeting:
    """Meet the other ranks: compare models, connect, and let copies of weights begin equal."""
    lowered, number, device = rank.lowered, rank.number, rank.device
    timeout = timedelta(seconds=job.timeout_s(lowered))
    world = len(lowered.devices)
    watch_last(device)
    spare_sockets()
    with exchanging("the meeting of the ranks"):
        store = launcher.meet()
        if job.compares and not rank.model.chain:
            if number == 0:
                store.set(COMPARED, "")
            else:
                store.wait([COMPARED], COMPARING * timeout)
        dist.init_process_group("gloo", store=store, rank=number, world_size=world, timeout=timeout)
    agree(number, rank.model.boundaries)
    with exchanging("the comparison of devices at the start"):
        sums = exchange_of(everybodys(gpu_of(device, this_machine())))
    # threads exchange between hosts alone; sums come when all messages are through, so they need not
    threads = by_threads(job, lowered)
    messages: Exchange = "staged" if threads and sums == "nccl" else sums
    nearby = None if threads or job.options.engine == "torch" else this_machine()
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
    transfer_ns = transfer_times(lowered, number, specs, links)
    clock = compared_clocks(number)
    recorder = recorder_of(device, clock.offset_ns, timeout)
    return Meeting(links, sums, groups, tied_groups, specs, recorder, clock, transfer_ns, everybody, patient_group())


def compared_clocks(number: int, lag_ns: int = 0) -> Compared:
    """Return what the clock of this rank's device, which lags behind the host's, lacks to rank 0's host's now; all
    ranks compare together."""
    return Compared(clock_offset(number, this_machine()) + lag_ns, time.monotonic_ns())


def by_threads(job: Job, lowered: LoweredRun) -> bool:
    """Whether threads send and receive, so that messages can come in any order, or late."""
    return lowered.limit is not None or job.options.slows_links


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


# --- the stages -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnStages:
    """A rank's stages, ready to run: by index what passes them, and what updates them; and the memory they take.

    ``tied_sums`` adds up the gradients of ``ties``, the weights that stages share; ``clipping`` is None where gradients
    aren't clipped. ``trial`` is the best evaluation before the run.
    """

    runners: Mapping[int, StageModule]
    updates: Mapping[int, StageUpdate]
    ties: Sequence[Tie]
    tied_sums: TiedSums
    scaling: Scaling | None
    activations: HeldBytes
    states: StateBytes
    clipping: Clipping | None = None
    trial: Trial = Trial()  # noqa: RUF009 -- it is frozen

    def measure(self, version: int) -> None:
        """Begin with the norm of all gradients for ``version``."""
        assert self.clipping is not None, "only then are norms asked for"
        self.clipping.begin(version, [x for update in self.updates.values() for x in update.measured()])


def build_stages(job: Job, rank: Rank, meeting: Meeting, ties: Sequence[Tie], masters: Masters) -> OwnStages:
    """Return the rank's stages, as they are at the start or at the checkpoint to go on from; ``masters`` are theirs."""
    plan, options, lowered = job.plan, job.options, rank.lowered
    activations, states, buffers = HeldBytes(), StateBytes(), BucketBuffers()
    link = None if options.link_rate is None else EmulatedLink(options.link_rate)
    half = half_type(plan, options.half)
    scaling = None
    if half is not None:
        scaling = Scaling(first_scale(plan, half, options.half), any_rank if lowered.drains else None)
    clipping = None
    if options.clip_norm is not None:
        home = rank.device if meeting.sums == "nccl" else CPU
        clipping = Clipping(options.clip_norm, meeting.everybody, home, meeting.recorder, scaling)
    over = {stages: SumGroup(group, link) for stages, group in meeting.tied_groups.items()}
    borrowing = borrowers({s: rank.modules(s) for s in rank.stages})
    gradients: dict[int, Gradients] = {}
    updates: dict[int, StageUpdate] = {}
    for s in rank.stages:
        group = SumGroup(meeting.groups[s], link) if s in meeting.groups else None
        how = _stepping(job, rank, meeting, s, group, buffers, states)
        owners = {owner: gradients[owner] for owner, others in borrowing.items() if s in others}
        tied = [tie.copy_in(s, rank.model) for tie in ties if s in tie.places]
        gradients[s] = _gradients(job, rank, s, tied, owners, borrowing[s], how)
        stepper = _stepper(job, rank, s, gradients[s], _for_delays(job, rank, s, ties, gradients[s], how), masters)
        way = _way_beside(meeting.sums, rank.device) if s in lowered.beside else None
        exchange = sums_of(s, gradients[s], stepper, meeting.recorder, group, job.chunk_buckets, way)
        added, counted = copies_added(lowered, s, ties), _counted_once(rank, s, ties, gradients[s])
        about = stepper, meeting.recorder, exchange, scaling, clipping
        updates[s] = StageUpdate(s, gradients[s], *about, added, counted)
        states.watch(updates[s].tensors)
    runners = {
        s: _stage_module(rank, s, activations, meeting.recorder, gradients[s], options.seed) for s in rank.stages
    }
    masters.clear()
    trial = Trial()
    torch.manual_seed(options.seed + 1 + rank.number)
    if job.resume is not None:
        trial = restore(job.resume, rank, updates, scaling)
    if options.evaluates and options.averaged:
        take_averages(rank, updates, meeting.groups)
    for layer in rank.model.layers if options.evaluates else ():
        layer.module.eval()
    tied_sums = TiedSums(rank.model, ties, updates, over, meeting.recorder, scaling)
    return OwnStages(runners, updates, ties, tied_sums, scaling, activations, states, clipping, trial)


def _way_beside(sums: Exchange, device: torch.device) -> Callable[[int], Way] | None:
    """Return what makes the way on which sums go on beside passes; None where GPUs' go through the host."""
    if sums == "gloo":
        return OnThread
    return partial(OnStream, device=device) if sums == "nccl" else None


def _stepping(
    job: Job, rank: Rank, meeting: Meeting, s: int, group: SumGroup | None, buffers: BucketBuffers, states: StateBytes
) -> Stepping:
    """Return how the weights of stage ``s`` are stepped."""
    policy, sharing = job.plan.policy, None
    if group is not None and policy.zero:
        hosts = None if meeting.sums == "nccl" else group.group
        sharing = Sharing(dist.get_rank(group.group), rank.stage(s).replicas, job.chunk_buckets, group, hosts)
    bucket = job.bucket_of(s, rank.lowered.graph.stages[s].parameters)
    return Stepping(bucket, policy.offload, sharing, buffers, states.note)


def _stepper(job: Job, rank: Rank, s: int, gradients: Gradients, how: Stepping, masters: Masters) -> Stepper:
    """Return what steps the weights of stage ``s``; BadInput where its state would be another than planned."""
    options = job.options
    if not options.evaluates:
        trained = dict.fromkeys(p for module in rank.modules(s) for p in module.parameters() if p.requires_grad)
        check_state(options.optimizer or job.plan.policy.optimizer, trained, f"stage {s}")
    rates = rates_maker(options.scheduler, options.warmup, options.steps)
    make = job.make_optimizer
    if any(how.delays) and options.delay_correction != "predict":
        make = partial(_compensated, make)
    return Stepper(gradients.versions, make, rates, how, masters, partial(rank.parted, s))


def _compensated(make: MakeOptimizer, parameters: Any) -> torch.optim.Optimizer:
    return compensated(make(parameters))


def _for_delays(job: Job, rank: Rank, s: int, ties: Sequence[Tie], gradients: Gradients, how: Stepping) -> Stepping:
    """Return ``how`` with the delays of the weights of stage ``s``; copies of one have the largest of their stages'."""
    if job.options.delay_correction == "none" or not gradients.versions.installed:
        return how
    means = [delay.mean for delay in rank.lowered.delays]
    delays = [means[s]] * len(gradients.versions.installed)
    for tie in ties:
        if s in tie.places and (place := gradients.versions.place_of(tie.copy_in(s, rank.model))) is not None:
            delays[place] = max(means[x] for x in tie.stages)
    return replace(how, delays=delays, predicts=job.plan.policy.predict and any(delays))


def _counted_once(rank: Rank, s: int, ties: Sequence[Tie], gradients: Gradients) -> list[int]:
    """Return the places of the copies of shared weights that stage ``s`` counts for all stages in norms."""
    copies = [x.copy_in(s, rank.model) for x in ties if x.stages[0] == s in rank.first_of]
    return [i for x in copies if (i := gradients.versions.place_of(x)) is not None]


def _gradients(
    job: Job,
    rank: Rank,
    s: int,
    tied: Collection[nn.Parameter],
    owners: Mapping[int, Gradients],
    borrowing: Set[int],
    how: Stepping,
) -> Gradients:
    """Return weights and gradients of stage ``s``, some of which ``owners`` keep, and which it keeps for those
    ``borrowing``."""
    lowered = rank.lowered
    if how.bucket is not None or how.sharing is not None:
        for parameter in (p for module in rank.modules(s) for p in module.parameters() if p.requires_grad):
            parameter.data = parameter.data.contiguous()  # so that pieces of it are views
    versions = Versions(
        rank.modules(s),
        None if job.options.engine == "torch" else lowered.instructions[rank.number].uses(s, borrowing),
        lowered.first.step,
        lowered.reads_newest,
        tied,
        {owner: found.versions for owner, found in owners.items()},
    )
    replicated = rank.stage(s).replicas > 1
    ahead = lowered.puts_aside or (s in lowered.beside and not lowered.drains)
    return Gradients(versions, replicated, ahead, bool(tied) and lowered.waits(s), owners)


def _stage_module(
    rank: Rank, s: int, activations: HeldBytes, recorder: Recorder, gradients: Gradients, seed: int
) -> StageModule:
    lowered, model, stage = rank.lowered, rank.model, rank.stage(s)
    has_loss = stage.stop == len(lowered.plan.chain)
    make = SplitStage if lowered.program.split else StageModule
    return make(
        index=s,
        pieces=model.pieces(stage),
        cuts=(model.cut(stage.start), None if has_loss else model.cut(stage.stop)),
        gradients=gradients,
        activations=activations,
        divisor=lowered.interval,
        reads_newest=lowered.reads_newest,
        device=rank.device,
        later=recorder.later,
        draws=Draws(seed, rank.device),
        data=model.read_by(stage),
        trained=model.trained,
    )
