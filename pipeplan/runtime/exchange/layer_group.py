"""What do the ranks that run each layer together do together? They exchange inside layers, and put parts together.

All of equal place in their groups, such as all second ones, are a world of their own to torch, in which a plan runs as
if a group were one device: messages, sums over replicas and of tied weights, checkpoints and reports are theirs. So
counterparts send to counterparts. What crosses these worlds is here alone. Each rank of a group runs the same
instructions, so exchanges inside layers come in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..device import CPU, exchange_of, gpu_of, group_timeout
from .collective import this_machine
from .transport import exchanging, number_processes

INSIDE = "an exchange inside of a layer"
BESIDE = "an exchange of those that run layers together"


class LayerGroup:
    """The ``ranks`` that run the layers of one lane together, of which this is the one at ``place``; they meet in
    ``store``, of which those at that place in other lanes have a part for themselves. Tensors go from GPU
    to GPU where all have one of their own, else through the host."""

    def __init__(self, store: Any, lane: int, place: int, ranks: int, device: torch.device, timeout: timedelta) -> None:
        self.place, self._ranks = place, ranks
        number_processes(ranks, place)
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
        parts = [torch.empty_like(own) for _ in range(self._ranks)]
        with exchanging(BESIDE):
            self._hosts.allgather([parts], [own]).wait()
        return joined(parts)

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
