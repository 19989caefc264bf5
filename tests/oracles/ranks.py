"""``torch.distributed`` for one rank, whose groups are NCCL's: what it issues goes to its :class:`oracles.gpu.Gpu`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from oracles.gpu import Clock, Gpu, HostsMeet, Together
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class Group:
    """A process group: the how manieth that was made."""

    number: int
    ranks: tuple[int, ...]
    backend: str | None


class Work:
    """What is under way in a communicator's stream."""

    def __init__(self, gpu: Gpu, event: int, clock: Clock) -> None:
        self._gpu, self._at = gpu, (event, clock)

    def wait(self, timeout: Any = None) -> None:
        """As NCCL's: the current stream waits, the host doesn't."""
        self._gpu.wait(self._gpu.current, *self._at)

    def is_completed(self) -> bool:
        self._gpu.host_waits(*self._at)
        return True


class Ranks:
    """``torch.distributed`` for one rank of ``world`` whose groups are NCCL's; ``groups`` are those that it has made.

    Every group has a communicator and a stream of its own. The hosts meet in it when it is used first, and for
    each kind of exchange anew, which connects.
    """

    def __init__(self, gpu: Gpu, world: int) -> None:
        self.gpu, self.everybody = gpu, tuple(range(world))
        self.groups: list[Group] = []
        self.options: list[Any] = []  # that groups were made with, and timeouts
        self.timeouts: list[Any] = []
        self._connected: set[tuple[Group, str]] = set()

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
    ) -> Group:
        group = Group(len(self.groups), self.everybody if ranks is None else tuple(ranks), backend)
        self.groups.append(group)
        self.options.append(pg_options)
        self.timeouts.append(timeout)
        self._meet(("a new group", group))
        return group

    def get_world_size(self, group: Group | None = None) -> int:
        return len(self._ranks(group))

    def get_rank(self, group: Group | None = None) -> int:
        return self._ranks(group).index(self.gpu.rank)

    def get_process_group_ranks(self, group: Group | None) -> list[int]:
        return list(self._ranks(group))

    def isend(self, tensor: Tensor, dst: int, group: Group, tag: int = 0) -> Work:
        return self._together(group, self._message(self.gpu.rank, dst, tensor), [tensor], [])

    def irecv(self, tensor: Tensor, src: int, group: Group, tag: int = 0) -> Work:
        _clear(tensor)
        self.gpu.receive(tensor)
        return self._together(group, self._message(src, self.gpu.rank, tensor), [], [tensor])

    def send(self, tensor: Tensor, dst: int, group: Group, tag: int = 0) -> None:
        self.isend(tensor, dst, group).wait()

    def recv(self, tensor: Tensor, src: int, group: Group, tag: int = 0) -> None:
        self.irecv(tensor, src, group).wait()

    def all_to_all_single(
        self, into: Tensor, source: Tensor, coming: list[int], going: list[int], group: Group, async_op: bool
    ) -> Work:
        assert sum(coming) == into.numel()
        assert sum(going) == source.numel()
        assert async_op
        _clear(into)
        what = ("sum", self.gpu.doing, tuple(coming), tuple(going))
        return self._together(group, what, [source], [into])

    def broadcast(self, tensor: Tensor, src: int, group: Group) -> None:
        self._together(group, ("broadcast", src, tensor.numel(), tensor.dtype), [tensor], [tensor]).wait()

    def barrier(self, *_: Any) -> None:
        self._meet("a barrier")

    def all_reduce(
        self, tensor: Tensor, op: Any = None, group: Group | None = None, async_op: bool = False
    ) -> Work | None:
        if group is None:
            self.gpu.memory(tensor).on_host = True  # of the default group, which is gloo's
            self._meet("an agreement")
            return None
        work = self._together(group, ("norm", self.gpu.doing), [tensor], [tensor])
        return work if async_op else work.wait()

    def all_gather(self, into: list[Tensor], tensor: Tensor, group: Group | None = None) -> None:
        self._meet("a comparison")
        for other in into:
            other.copy_(tensor)

    def init_process_group(self, *_: Any, **__: Any) -> None:
        self._meet("the meeting")

    def _ranks(self, group: Group | None) -> tuple[int, ...]:
        return self.everybody if group is None else group.ranks

    def _meet(self, what: Hashable) -> None:
        self.gpu.trace.append(HostsMeet(self.everybody, what))

    def _message(self, sender: int, receiver: int, tensor: Tensor) -> tuple[Any, ...]:
        doing = self.gpu.doing
        carried = (doing.edge, doing.microbatch) if hasattr(doing, "edge") else doing
        return "message", sender, receiver, carried, tuple(tensor.shape), tensor.dtype

    def _together(self, group: Group, what: Any, reads: list[Tensor], writes: list[Tensor]) -> Work:
        gpu, stream = self.gpu, f"communicator {group.number}"
        kind = group, what[0]
        if kind not in self._connected:
            self._connected.add(kind)
            gpu.trace.append(HostsMeet(group.ranks, ("connecting", *kind)))
        gpu.wait(stream, *gpu.record(gpu.current))
        gpu.use(stream, what[0], reads, writes)
        gpu.trace.append(Together(stream, group.ranks, what))
        return Work(gpu, *gpu.record(stream))


def _clear(tensor: Tensor) -> None:
    """Let finite numbers have come."""
    with _disable_current_modes():
        tensor.zero_()
