"""What do the ranks that run each layer together do together? They exchange inside layers, and put parts together.

All of equal place in their groups, such as all second ones, are a world of their own to torch, in which a plan runs as
if a group were one device: messages, sums over replicas and of tied weights, checkpoints and reports are theirs. So
counterparts send to counterparts; who has none, in a wider group than the one that sends, hears of the first. What
crosses these worlds is here alone. Each rank of a group runs the same instructions, so exchanges inside layers come in
one order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..device import CPU, exchange_of, gpu_of, group_timeout
from ..lowering.instructions import NOBODY, Edge, Receive, Send
from ..lowering.lowered_run import LoweredRun
from ..model.network import TensorSpec
from .collective import this_machine
from .transport import Transport, exchanging

INSIDE = "an exchange inside of a layer"
BESIDE = "an exchange of those that run layers together"


class LayerGroup:
    """The ``ranks`` that run the layers of one lane together, of which this is the one at ``place``; they meet in
    ``store``, of which those at that place in other lanes have a part for themselves. Tensors go from GPU
    to GPU where all have one of their own, else through the host."""

    def __init__(self, store: Any, lane: int, place: int, ranks: int, device: torch.device, timeout: timedelta) -> None:
        self.place, self.ranks = place, ranks
        self.store = store  # of all first ones, some of which may be alone
        if place:
            self.store = dist.PrefixStore(f"place {place}", store)  # type: ignore[attr-defined]  # torch exports it not
        store = dist.PrefixStore(f"layers of lane {lane}", store)  # type: ignore[attr-defined]  # as above
        with exchanging(BESIDE):
            store.set(f"gpu {place}", gpu_of(device, this_machine()) or "")
            gpus = [store.get(f"gpu {other}").decode() or None for other in range(ranks)]
            own: Any = dist.PrefixStore("hosts", store)  # type: ignore[attr-defined]  # as above
            self._hosts: Any = dist.ProcessGroupGloo(own, place, ranks, timeout)
            self._gpus: Any = None
            if exchange_of(gpus) == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = group_timeout(timeout, "nccl")
                own = dist.PrefixStore("gpus", store)  # type: ignore[attr-defined]  # as above
                self._gpus = dist.ProcessGroupNCCL(own, place, ranks, options)

    def exchange(self, x: Tensor, kind: str) -> Tensor:
        """Return the sum of all ranks' ``x``, or of each entry the ``greatest``."""
        with exchanging(INSIDE):
            return self._reduced(x, dist.ReduceOp.MAX if kind == "greatest" else dist.ReduceOp.SUM)

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return of each of ``numbers`` the greatest of all ranks."""
        with exchanging(BESIDE):
            found: list[int] = self._reduced(torch.tensor(numbers), dist.ReduceOp.MAX).tolist()
        return found

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``."""
        with exchanging(BESIDE):
            return self._reduced(x, dist.ReduceOp.SUM)

    def whole(self, part: Tensor, joined: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return, in host memory, what all ranks have a ``part`` of, ``joined``; all call it together."""
        own = part.detach().to(CPU).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        with exchanging(BESIDE):
            self._hosts.allgather([parts], [own]).wait()
        return joined(parts)

    def of_first(self, x: Tensor) -> Tensor:
        """Return what the first rank has; of all ranks ``x`` has its shape and type."""
        on_gpus = self._gpus is not None and x.is_cuda
        flat = x.detach() if on_gpus else x.detach().to(CPU)
        flat = flat.contiguous() if self.place == 0 else torch.empty(x.shape, dtype=x.dtype, device=flat.device)
        with exchanging(BESIDE):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            group = self._gpus if on_gpus else self._hosts
            group.broadcast([flat.view(-1).view(torch.uint8)], options).wait()
        return flat.to(x.device)

    def told(self, value: Any) -> Any:
        """Return the first rank's ``value``, of what JSON has."""
        said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        room = torch.zeros(int(self.of_first(torch.tensor([len(said)]))), dtype=torch.uint8)
        return json.loads(self.of_first(room if self.place else said).numpy().tobytes())

    def _reduced(self, x: Tensor, how: Any) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = how
        if self._gpus is not None and x.is_cuda:
            out = x.clone(memory_format=torch.contiguous_format)
            self._gpus.allreduce([out], options).wait()
            return out
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        host = x.detach().to(CPU, wide, copy=True, memory_format=torch.contiguous_format)
        self._hosts.allreduce([host], options).wait()
        return host.to(x.device, x.dtype)


def handed_on(counterparts: Transport, rank: Any, specs: Mapping[Edge, TensorSpec]) -> HandedOn:
    """Return the messages of ``rank``, which several processes are, from what ``counterparts`` send with ``specs``."""
    lowered: LoweredRun = rank.lowered
    edges: Iterator[tuple[Edge, int]] = ((edge, s) for s in rank.stages for edge in (("F", s - 1), ("B", s + 1)))
    into = [(edge, s) for edge, s in edges if edge in specs]
    given = {edge: specs[edge] for edge, s in into if lowered.width_of(edge[1]) < lowered.width_of(s)}
    return HandedOn(counterparts, rank.together, given, rank.device)


class HandedOn:
    """The messages of one of several processes that are a rank: ``given`` are the edges on which so narrow a rank sends
    that not all of them have a counterpart, and what comes there."""

    def __init__(
        self, counterparts: Transport, together: LayerGroup, given: Mapping[Edge, TensorSpec], device: torch.device
    ) -> None:
        self._counterparts, self._together, self._given, self._device = counterparts, together, given, device
        self.start, self.finish = counterparts.start, counterparts.finish
        self._nothing: set[Edge] = set()  # where nothing comes to this process

    def post(self, receive: Receive) -> None:
        """Be ready for a message, if it comes to this process."""
        if receive.peer == NOBODY:
            self._nothing.add(receive.edge)
        else:
            self._counterparts.post(receive)

    def take(self, edge: Edge, microbatch: int) -> Tensor:
        """Return a message, of which all have what the first one has."""
        if edge not in self._given:
            return self._counterparts.take(edge, microbatch)
        if edge in self._nothing:
            spec = self._given[edge]
            return self._together.of_first(torch.empty(spec.shape, dtype=spec.dtype, device=self._device))
        return self._together.of_first(self._counterparts.take(edge, microbatch))

    def look_ahead(self, edge: Edge) -> None:
        """Be ready for what comes next, if it comes to this process."""
        if edge not in self._nothing:
            self._counterparts.look_ahead(edge)

    def await_room(self, send: Send) -> bool:
        """Wait for room for what is sent from here."""
        return send.peer != NOBODY and self._counterparts.await_room(send)

    def send(self, send: Send, tensor: Tensor) -> None:
        """Send what has a counterpart to go to."""
        if send.peer != NOBODY:
            self._counterparts.send(send, tensor)
