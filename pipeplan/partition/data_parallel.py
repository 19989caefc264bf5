"""The baseline of plain data parallelism: the whole chain as one stage, replicated on every device."""

from __future__ import annotations

from collections.abc import Iterator

from .. import costs
from ..groups import ceil_div
from ..plan import Allocation, Stage
from ..problem import Problem


def data_parallel(problem: Problem) -> Iterator[Allocation]:
    """Yield one stage on all devices: storing every activation, then, where allowed, recomputing the whole chain.

    The claimed period is the most of compute / devices and weight synchronisation. Nothing comes when there are several
    devices and replicas are not allowed.
    """
    platform, count = problem.platform, len(problem.chain)
    devices = tuple(range(len(platform)))
    if len(devices) > 1 and not problem.replicas:
        return
    sums, policy = problem.chain.sums, problem.policy
    gradient = costs.gradient_bytes(policy, int(sums.weight_bytes[-1]), int(sums.parameters[-1]))
    bandwidth, _ = platform.paths[platform.level_of(devices)]
    sync = costs.sync_period_ns(policy, gradient, len(devices), bandwidth)
    speed = platform.slowest(devices).speed
    for checkpoint in ((),) if problem.checkpointing == "none" else ((), ((0, count),)):
        _, _, recompute = costs.activations(problem.chain, 0, count, checkpoint)
        work = costs.forward_ns(problem.chain, 0, count, speed) + costs.backward_ns(
            problem.chain, policy, 0, count, recompute, len(devices), speed
        )
        claim = max(ceil_div(work, len(devices)), sync)
        yield Allocation((Stage(0, count, devices, checkpoint),), claim)
