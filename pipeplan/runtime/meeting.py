"""How do the ranks of a run meet: are their models the same, how do tensors travel, and who sums with whom?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor, nn

from .device import exchange_of
from .exchange.collective import (
    agree,
    clock_offset,
    replica_groups,
    share_from,
    stage_groups,
    this_machine,
    transfer_times,
)
from .exchange.links import Group, Links, open_links
from .exchange.transport import exchanging
from .job import Job
from .launcher import Launcher
from .lowering.instructions import Edge
from .lowering.lowered_run import LoweredRun
from .measure.recorder import Recorder, recorder_of
from .model.network import TensorSpec
from .training.rank import Rank
from .training.tied import Stages, Tie, share_ties

Masters = dict[nn.Parameter, Tensor]  # of 16-bit weights the values in full precision


@dataclass(frozen=True)
class Meeting:
    """What a rank has once all have met: how tensors travel, and the groups with which it sums gradients.

    ``groups`` are those of replicated stages, ``tied_groups`` of stages that share weights; ``specs`` has what crosses
    each edge and ``transfer_ns`` how long that takes.
    """

    links: Links
    groups: Mapping[int, Group]
    tied_groups: Mapping[Stages, Group]
    specs: Mapping[Edge, TensorSpec]
    recorder: Recorder
    transfer_ns: Mapping[Edge, int]


def meet(job: Job, rank: Rank, launcher: Launcher, ties: Sequence[Tie], masters: Masters) -> Meeting:
    """Meet the other ranks: compare models, connect, and let copies of weights begin equal."""
    lowered, number, device = rank.lowered, rank.number, rank.device
    timeout = timedelta(seconds=job.timeout_s(lowered))
    world = len(lowered.devices)
    with exchanging("the meeting of the ranks"):
        store = launcher.open_store()
        dist.init_process_group("gloo", store=store, rank=number, world_size=world, timeout=timeout)
    agree(number, rank.model.boundaries)
    with exchanging("the comparison of devices at the start"):
        exchange = exchange_of(device, this_machine())
    if by_threads(job, lowered) and exchange == "nccl":  # threads exchange between hosts alone
        exchange = "staged"
    links = open_links(lowered, number, exchange, device, timeout)
    groups = replica_groups(lowered, exchange, timeout)
    for s in rank.stages:
        if s in groups:
            share_from(lowered.ranks_of(s)[0], groups[s], _tensors(rank, s, masters))
    tied_groups = stage_groups(lowered, dict.fromkeys(tie.stages for tie in ties), exchange, timeout)
    share_ties(rank, ties, tied_groups, masters)
    for parameter, master in masters.items():
        parameter.data.copy_(master)
    specs = _edge_specs(rank)
    transfer_ns = transfer_times(lowered, number, specs, links)
    recorder = recorder_of(device, clock_offset(number, this_machine()))
    return Meeting(links, groups, tied_groups, specs, recorder, transfer_ns)


def by_threads(job: Job, lowered: LoweredRun) -> bool:
    """Whether threads send and receive, so that messages can come in any order, or late."""
    return lowered.limit is not None or bool(job.options.link_delay_ns)


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
