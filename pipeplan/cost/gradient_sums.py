"""What do sums over several stages take: of the gradients of weights that they share, and of their norms?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..plan import Stage
from ..problem import Chain, Platform, Policy
from . import memory_model, time_model
from .shared_weights import first_on_devices, stages_with
from .stage_cost import StageCost

NORM_BYTES = 8  # of the one number that all stages sum for the norm of their gradients


def with_tied_sums(
    chain: Chain, platform: Platform, policy: Policy, stages: Sequence[Stage], parts: Sequence[StageCost]
) -> list[StageCost]:
    """Return ``parts`` with what the sums of weights in several stages take more than those over one stage's replicas.

    A ring over all devices that have a copy sums them instead of those over replicas, once for each group of devices.
    After a drained batch the sum comes before the update; otherwise it is one more load of every interval, like the
    replicas' sums.
    """
    parts = list(parts)
    for shared in chain.ties:
        homes = first_on_devices(stages, stages_with(stages, shared.layers))
        if len(homes) < 2:
            continue
        gradient = memory_model.shared_gradient(policy, shared)
        devices = sorted({d for s in homes for d in stages[s].devices})
        interval = policy.update_interval(max(stages[s].replicas for s in homes))
        for s in homes:
            whole, own = (_ring_ns(platform, gradient, x, 1) for x in (devices, stages[s].devices))
            load, own_load = (_ring_ns(platform, gradient, x, interval) for x in (devices, stages[s].devices))
            if policy.zero:  # where replicas share the steps, they still gather the new weights
                own, own_load = own // 2, own_load // 2
            part = replace(parts[s], update_ns=parts[s].update_ns + whole - own)
            parts[s] = part if policy.drains else replace(part, sync_period_ns=part.sync_period_ns + load - own_load)
    return parts


def with_norm_sum(
    platform: Platform, policy: Policy, stages: Sequence[Stage], parts: Sequence[StageCost]
) -> tuple[list[StageCost], int]:
    """Return ``parts`` and the time of the sum, over all devices, from which the norm of all gradients is known.

    After a drained batch everybody waits for it; otherwise it is one more load of every interval on each device.
    """
    devices = sorted({d for stage in stages for d in stage.devices})
    if policy.drains:
        return list(parts), _ring_ns(platform, NORM_BYTES, devices, 1)
    firsts = set(first_on_devices(stages, range(len(stages))))
    load = _ring_ns(platform, NORM_BYTES, devices, policy.update_interval(max(stage.replicas for stage in stages)))
    more = [load if s in firsts else 0 for s in range(len(stages))]
    pairs = zip(parts, more, strict=True)
    return [replace(part, sync_period_ns=part.sync_period_ns + ns) for part, ns in pairs], 0


def _ring_ns(platform: Platform, size: int, devices: Sequence[int], interval: int) -> int:
    """Return what each of ``interval`` microbatches has to leave for a sum over ``devices``."""
    path = platform.paths[platform.level_of(devices)]
    return int(time_model.ring_all_reduce_ns(size, len(devices), *path, shared_by=interval))
