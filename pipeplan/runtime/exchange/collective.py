"""What do all ranks, or a stage's replicas, do together outside the pipeline? Agree, measure links, sum, gather."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import RunFailed
from ..device import Exchange, group_timeout
from ..lowering.instructions import Edge
from ..lowering.lowered_run import LoweredRun
from ..model.network import TensorSpec
from .links import Links, in_hosts_order
from .replica_sum import ChunkSum, SumGroup
from .transport import Group, everybodys, exchanging, received_words, send_words

PINGS = 10
PATIENCE: Final = timedelta(hours=4)  # to read a sample, or for a turn to give what was trained; who has gone shows
Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shapes and types by name
Take = Callable[[str, Tensor], None]
T = TypeVar("T")
BOOT = Path("/proc/sys/kernel/random/boot_id")  # on Linux, whose monotonic clock counts from there


def agree(rank: int, boundaries: Sequence[TensorSpec]) -> None:
    """Raise RunFailed unless all ranks see the same tensor at every cut: nobody must receive what it doesn't expect."""
    mine = [str(spec) for spec in boundaries]
    with exchanging("the comparison of models at the start"):
        first = everybodys(mine)[0]
    for index, (here, there) in enumerate(zip(mine, first, strict=False)):
        if here != there:
            raise RunFailed(f"its model has {here} before layer {index}; rank 0's has {there}")
    if len(mine) != len(first):
        raise RunFailed(f"its model has {len(mine) - 1} layers; rank 0's has {len(first) - 1}")


def replica_groups(lowered: LoweredRun, exchange: Exchange, timeout: timedelta) -> dict[int, Group]:
    """Return the process group of each replicated stage; those that sum beside passes share theirs with none."""
    stages = [(s,) for s in range(len(lowered.plan.allocation.stages))]
    alone = [(s,) for s in lowered.beside]
    groups = stage_groups(lowered, stages, exchange, timeout, alone)
    return {s: group for (s,), group in groups.items()}


def stage_groups(
    lowered: LoweredRun,
    sets: Iterable[tuple[int, ...]],
    exchange: Exchange,
    timeout: timedelta,
    alone: Collection[tuple[int, ...]] = (),
) -> dict[tuple[int, ...], Group]:
    """Return the process group of the ranks of each of ``sets`` of stages, if they are several; ``alone`` have one of
    their own, others share it where the ranks are the same.

    All ranks make all groups, in one order, as torch wants it. gloo's take tensors of GPUs too, through the host.
    """
    backend = "nccl" if exchange == "nccl" else "gloo"
    if backend == "nccl":
        in_hosts_order()
    groups: dict[tuple[int, ...], Group] = {}
    made: dict[tuple[tuple[int, ...], tuple[int, ...]], Group] = {}
    with exchanging("the making of groups that sum gradients"):
        for stages in sets:
            ranks = tuple(sorted({rank for s in stages for rank in lowered.ranks_of(s)}))
            if len(ranks) > 1:
                key = (ranks, stages if stages in alone else ())
                if key not in made:
                    made[key] = dist.new_group(list(ranks), group_timeout(timeout, backend), backend)
                groups[stages] = made[key]
    return groups


def share_from(first: int, group: Group, tensors: Iterable[Tensor]) -> None:
    """Give every rank of ``group`` the values that ``tensors`` have on rank ``first``."""
    with exchanging("the sharing of initial weights"):
        for tensor in tensors:
            dist.broadcast(tensor, first, group=group)


def greet(sums: Iterable[Group], norm: Group, device: torch.device) -> None:
    """Let the groups ``sums`` and ``norm`` (None: there is none) of this GPU do once what they will do in the run.

    NCCL connects a group at its first exchange, and for each kind of them anew; hosts wait, and it takes memory.
    """
    with exchanging("the connecting of GPUs"):
        for group in dict.fromkeys(sums):
            chunk = ChunkSum(torch.zeros(dist.get_world_size(group), device=device), SumGroup(group))
            chunk.begin()
            chunk.turn()
            chunk.end()
        if norm is not None:
            dist.all_reduce(torch.zeros((), dtype=torch.float64, device=device), group=norm)


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is set on any rank; all ranks ask together."""
    flags = torch.tensor([int(flag)])
    with exchanging("the agreement on an update"):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def transfer_times(lowered: LoweredRun, rank: int, specs: Mapping[Edge, TensorSpec], links: Links) -> dict[Edge, int]:
    """Measure how long the tensors of each cut take one way: half of the fastest ping-pong between the first replicas.

    The fastest, because a busy machine delays single ones at random. Cuts are measured one after the other; the
    sender of each returns its times.
    """
    found: dict[Edge, int] = {}
    for s in range(len(lowered.plan.allocation.stages) - 1):
        here, there = lowered.ranks_of(s)[0], lowered.ranks_of(s + 1)[0]
        if here == there or rank not in (here, there):
            continue
        tensor = torch.zeros(specs["F", s].shape, dtype=specs["F", s].dtype, device=links.device)
        with exchanging(f"the measuring of the link between ranks {here} and {there}"):
            _, *rounds = links.round_trips_ns(tensor, rank, here, there, PINGS + 1)  # the first connects
        if rank == here:
            found["F", s] = found["B", s + 1] = min(rounds) // 2
    return found


def clock_offset(rank: int, machine: str, clock: Callable[[], int] = time.monotonic_ns) -> int:
    """Return what to add to this rank's ``clock`` to have rank 0's, in ns; 0 on rank 0's own ``machine``.

    Elsewhere rank 0's clock is taken to be what it says in the middle of the fastest ping-pong; the error is at most
    half of what that took.
    """
    best: tuple[int, int] = (0, 0)
    with exchanging("the comparison of clocks"):
        machines = everybodys(machine)
        for other, its in enumerate(machines):
            if its == machines[0] or rank not in (0, other):
                continue
            rounds = []
            for _ in range(PINGS + 1):
                now = torch.zeros(1, dtype=torch.int64)
                start = clock()
                if rank == other:
                    dist.send(now, 0)
                    dist.recv(now, 0)
                    end = clock()
                    rounds.append((end - start, int(now) - (start + end) // 2))
                else:
                    dist.recv(now, other)
                    dist.send(now.fill_(clock()), other)
            best = min(rounds, default=best)
    return best[1]


def this_machine() -> str:
    """Return what tells machines with clocks of their own apart: the number of the boot, or the machine's address."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"


def barrier() -> None:
    """Wait for all ranks."""
    with exchanging("the barrier before the run"):
        dist.barrier()


def patient_group() -> Group:
    """Return a group of all ranks for what may take long."""
    with exchanging("the making of groups"):
        return dist.new_group(timeout=PATIENCE, backend="gloo")


def told_by_all(value: T, patient: Group) -> list[T]:
    """Return everybody's ``value``, in rank order, to all; wait for it as long as it takes to read the first sample."""
    with exchanging("the comparison of the first samples"):
        return everybodys(value, patient)


def gathered(rank: int, value: T, form: type[T]) -> list[T] | None:
    """Return everybody's ``value``, which msgspec reads as a ``form``, in rank order on rank 0; None elsewhere.

    Nothing is unpickled, as in :func:`.transport.everybodys`.
    """
    with exchanging("the gathering of results"):
        if rank:
            send_words(msgspec.msgpack.encode(value), 0)
            return None
        others = [received_words(other) for other in range(1, dist.get_world_size())]
        return [value, *(msgspec.msgpack.decode(words, type=form) for words in others)]


def handed_over(rank: int, tensors: Mapping[str, Tensor], begin: Callable[[Specs], Take], group: Group) -> None:
    """Give rank 0 everybody's ``tensors`` in host memory: there ``begin(specs)`` returns what takes each of them.

    They come one after the other, so that no more than one is there twice, however long all of them take; of equal
    names the last rank's comes last. ``group`` is a patient one.
    """
    own = [(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]
    said = gathered(rank, own, list[tuple[str, tuple[int, ...], str]])
    with exchanging("the gathering of the trained model"):
        dist.barrier(group=group)  # who has little to send may end before others have connected
        if said is None:
            for tensor in tensors.values():
                if tensor.numel():
                    dist.send(tensor.cpu().contiguous(), 0, group=group)
            return
    named = [[(name, shape, getattr(torch, dtype)) for name, shape, dtype in those] for those in said]
    take = begin({name: (shape, dtype) for those in named for name, shape, dtype in those})
    for name, tensor in tensors.items():
        take(name, tensor.cpu())
    for other, those in enumerate(named[1:], 1):
        for name, shape, dtype in those:
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                with exchanging("the gathering of the trained model"):
                    dist.recv(tensor, other, group=group)
            take(name, tensor)
