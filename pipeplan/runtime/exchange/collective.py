"""What do all ranks, or a stage's replicas, do together outside the pipeline? Agree, compare clocks, sum, gather.

Gradients are summed over replicas in chunks that are under way while others are used. A chunk is summed as by a ring,
each rank adding up one share of it, with as many bytes: 2(r-1)/r of the chunk to and from each rank. But every element
is added in the order of the ranks, wherever it stands in a chunk, and 16-bit ones in 32 bits; so the sum's bits don't
depend on how a gradient is cut into chunks.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import RunFailed
from ..device import Exchange, group_timeout
from ..lowering.lowered_run import LoweredRun
from ..model.network import TensorSpec
from .links import in_hosts_order
from .transport import Group, everybodys, exchanging, received_words, send_words

PINGS = 10
PATIENCE: Final = timedelta(hours=4)  # to read a sample, or for a turn to give what was trained; who has gone shows
Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shapes and types by name
Take = Callable[[str, Tensor], None]
T = TypeVar("T")
BOOT = Path("/proc/sys/kernel/random/boot_id")  # on Linux, whose monotonic clock counts from there


def agree(rank: int, boundaries: Sequence[TensorSpec], cuts: Collection[int] | None = None) -> None:
    """Raise RunFailed unless all ranks see the same tensor at every cut, or at some ``cuts`` before layers: nobody must
    receive what it doesn't expect."""
    mine = [str(spec) if cuts is None or index in cuts else "" for index, spec in enumerate(boundaries)]
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
            chunk = ChunkSum(torch.zeros(dist.get_world_size(group), device=device), group)
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


WHAT = "the sum of gradients"


# --- sums over replicas -----------------------------------------------------------------------------------------------


def added(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of ``parts`` in their order, in the first one's place or, of 16-bit ones, in 32 bits elsewhere."""
    total = parts[0].float() if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total


def shares(size: int, ranks: int, first: int = 0) -> list[int]:
    """Return how many of ``size`` elements each of ``ranks`` adds up; those from ``first`` on have one more."""
    share, more = divmod(size, ranks)
    return [share + ((rank - first) % ranks < more) for rank in range(ranks)]


class ChunkSum:
    """The sum of ``chunk`` over ``group``, in place: call :meth:`begin`, :meth:`turn`, :meth:`end` in this order.

    Between them nothing waits. Who has use for its own share of the sum alone, and then something to give to all in its
    place, calls :meth:`add` and :meth:`spread` instead of :meth:`turn`. All ranks of the group call the methods of all
    chunks in one order, with one ``first`` for each chunk (:func:`shares`).
    """

    def __init__(self, chunk: Tensor, group: Group, first: int = 0) -> None:
        self._chunk, self._group = chunk, group
        self._ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._others = [other for other in dist.get_process_group_ranks(group) if other != dist.get_rank()]
        self._shares = shares(chunk.numel(), self._ranks, first)
        self._own = self._shares[rank]
        begin = sum(self._shares[:rank])
        self._place = slice(begin, begin + self._own)
        self._parts = self._nothing = chunk.new_empty(0)
        self._work: Any = None

    def begin(self) -> None:
        """Send every rank its share of the chunk."""
        self._parts = self._chunk.new_empty(self._own * self._ranks)
        self._exchange(self._parts, self._chunk, [self._own] * self._ranks, self._shares)

    def turn(self) -> None:
        """Wait for everybody's part of the own share, add them up, and send the sum to all."""
        self._wait()
        parts = self._parts.view(self._ranks, self._own)
        parts.copy_(added(parts.unbind()).to(parts.dtype, copy=True))
        self._exchange(self._chunk, self._parts, self._shares, [self._own] * self._ranks)

    def add(self) -> None:
        """Wait for everybody's part of the own share and put their sum into it."""
        self._wait()
        self._chunk[self._place].copy_(added(self._parts.view(self._ranks, self._own).unbind()))
        self._parts = self._nothing

    def spread(self) -> None:
        """Send what the own share of the chunk has by now to all."""
        self._parts = self._chunk[self._place].repeat(self._ranks)
        self._exchange(self._chunk, self._parts, self._shares, [self._own] * self._ranks)

    def end(self) -> None:
        """Wait until the chunk is summed, or has what all have spread."""
        self._wait()
        self._parts = self._nothing

    @property
    def scratch(self) -> Tensor:
        """What is needed beside the chunk while something is under way: as much again."""
        return self._parts

    def _exchange(self, into: Tensor, source: Tensor, coming: list[int], going: list[int]) -> None:
        with exchanging(WHAT, *self._others):
            self._work = dist.all_to_all_single(into, source, coming, going, group=self._group, async_op=True)

    def _wait(self) -> None:
        with exchanging(WHAT, *self._others):
            self._work.wait()
