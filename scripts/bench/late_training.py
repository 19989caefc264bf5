"""How does one process train what a plan's processes would? Passes read the versions of weights that theirs would.

Of a stage's microbatches those that read the same version are one batch, which is what ``run`` does but for rounding
(tests/runtime/training/test_time_to_loss.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import groupby

import torch
from torch import Tensor, nn

from pipeplan.check.lateness import plan_delays
from pipeplan.plan import Plan
from pipeplan.runtime.lowering.instructions import Forward
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.training.update.optimizers import compensated, delayed, predicted
from pipeplan.schedule.kinds import graph_of

STAGES = 4  # that a plan has at most
Reads = Mapping[tuple[int, int], int]  # (stage, microbatch) -> updates that the weights of its forward have had


def reads_of(plan: Plan, updates: int) -> Reads:
    """Return what forwards of ``plan`` read."""
    listings = lower_run(plan, updates).instructions
    return {(x.stage, x.microbatch): x.version for listing in listings for x in listing if isinstance(x, Forward)}


class Part:
    """A stage's layers, and copies of them that read other versions of the weights; the optimizer has ``masters``."""

    def __init__(self, layers: Sequence[nn.Module], delay: float) -> None:
        self.copies = [nn.Sequential(*layers)]
        self.masters = [delayed(nn.Parameter(p.detach().clone()), delay) for p in self.copies[0].parameters()]
        self.versions = [[x.detach().clone() for x in self.masters]]

    def run(self, x: Tensor, reads: Sequence[int]) -> Tensor:
        """Run as many microbatches as there are ``reads``, the versions before the newest of their weights."""
        runs = [(back, len(list(some))) for back, some in groupby(reads)]
        self.copies += [deepcopy(self.copies[0]) for _ in runs[len(self.copies) :]]
        given = x.split([len(x) // len(reads) * count for _, count in runs])
        return torch.cat([self._read(i, back)(given[i]) for i, (back, _) in enumerate(runs)])

    @torch.no_grad()
    def _read(self, copy: int, back: int) -> nn.Module:
        put(self.copies[copy], self.versions[-1 - back])
        return self.copies[copy]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give the masters the sums of the copies' gradients."""
        for master, *found in zip(self.masters, *(copy.parameters() for copy in self.copies), strict=True):
            master.grad = sum((p.grad for p in found if p.grad is not None), torch.zeros_like(master))
            for p in found:
                p.grad = None

    def keep(self, weights: Iterable[Tensor]) -> None:
        """Let passes to come read ``weights`` as the newest version."""
        self.versions = [*self.versions[-2 * STAGES :], [x.detach().clone() for x in weights]]


@torch.no_grad()
def put(module: nn.Module, values: Sequence[Tensor]) -> None:
    """Let a module read ``values``, a backward whose forward has read others, too."""
    torch._foreach_copy_([p.data for p in module.parameters()], list(values))


def trained(
    stages: Sequence[Sequence[nn.Module]],
    loss: Callable[[Tensor, Tensor], Tensor],
    plan: Plan,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    correction: str,
    samples: Callable[[int, int], tuple[Tensor, Tensor]],
    rates: Sequence[float],
) -> Iterator[float]:
    """Yield each update's loss, an update for each of ``rates``; then the layers of ``stages`` have the weights.

    ``samples(first, count)`` are those of so many microbatches.
    """
    interval, drains = plan.interval, plan.policy.drains
    delays = [0.0] * len(stages) if drains else [x.mean for x in plan_delays(plan, graph_of(plan))]
    reads: Reads = {} if drains else reads_of(plan, len(rates))
    parts = [Part(layers, delay) for layers, delay in zip(stages, delays, strict=True)]
    optimizer = make([x for part in parts for x in part.masters])
    if any(delays) and correction in ("sc", "both"):
        optimizer = compensated(optimizer)
    (group,) = optimizer.param_groups
    ahead = any(delays) and correction in ("predict", "both")
    for update, rate in enumerate(rates):
        microbatches = range(update * interval, (update + 1) * interval)
        x, target = samples(microbatches.start, interval)
        for s, part in enumerate(parts):
            x = part.run(x, [update - reads.get((s, m), update) for m in microbatches])
        value = loss(x, target)
        for part in parts if plan.policy.weights == "latest" else ():
            for copy in part.copies:
                put(copy, [x.data for x in part.masters])
        value.backward()  # type: ignore[no-untyped-call]  # as torch has it
        yield value.item()
        group["lr"] = rate
        coming = rates[min(update + 1, len(rates) - 1)]
        for part in parts:
            part.take_gradients()
        optimizer.step()
        for part in parts:
            part.keep(predicted(optimizer, group, x, coming) if ahead else x for x in part.masters)
    for part in parts:
        put(part.copies[0], [x.data for x in part.masters])
