"""Which stages have weights of each other, and what do their devices hold of them: whose copies, whose gradients?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..plan import Stage
from ..problem import Chain, Platform, Policy, SharedWeights, connected
from . import memory_model, time_model
from .stage_cost import StageCost


def tied_stages(chain: Chain, stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of several stages that hold weights of each other, in order; no stage is in two of them."""
    return _several(stages_with(stages, layers) for layers in connected(chain.tied))


def summed_stages(chain: Chain, stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    """Return of the :func:`tied_stages` those that have copies and sum their gradients: of each weight the first on
    each group of devices, where there are several groups."""
    return _several(first_on_devices(stages, stages_with(stages, shared.layers)) for shared in chain.ties)


def lending_stages(chain: Chain, stages: Sequence[Stage]) -> list[list[int]]:
    """Return for each stage the earlier ones on the same devices that may keep weights which it uses."""
    found: list[list[int]] = [[] for _ in stages]
    for layers in connected(chain.tied):
        holders = stages_with(stages, layers)
        for place, s in enumerate(holders):
            found[s] = sorted({*found[s], *(q for q in holders[:place] if stages[q].devices == stages[s].devices)})
    return found


def _several(sets: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(sorted(found)) for found in connected(x for x in map(set, sets) if len(x) > 1)))


def stages_with(stages: Sequence[Stage], layers: Iterable[int]) -> list[int]:
    """Return which of ``stages`` have any of ``layers``."""
    return [s for s, stage in enumerate(stages) if any(stage.start <= layer < stage.stop for layer in layers)]


def first_on_devices(stages: Sequence[Stage], chosen: Iterable[int]) -> list[int]:
    """Return of the ``chosen`` stages the first on each group of devices, in order."""
    return sorted({stages[s].devices: s for s in sorted(chosen, reverse=True)}.values())


def borrowed_weights(chain: Chain, stages: Sequence[Stage]) -> list[list[int]]:
    """Return for each stage which of ``chain.shared`` it uses and an earlier stage on the same devices holds."""
    if not chain.sums.shared:
        return [[] for _ in stages]
    held: dict[tuple[int, ...], set[int]] = {}
    found = []
    for stage in stages:
        used = {n for n, x in enumerate(chain.sums.shared) if x.inside(stage.start, stage.stop)}
        before = held.setdefault(stage.devices, set())
        found.append(sorted(used & before))
        before |= used
    return found


def waiting_gradients(chain: Chain, policy: Policy, stages: Sequence[Stage], parts: Sequence[StageCost]) -> list[int]:
    """Return what waits in each stage of its gradients, those of shared weights once on a group of devices."""
    if policy.waits_for_norm:
        return [int(memory_model.gradient_bytes(policy, part.weight_bytes, part.parameters)) for part in parts]
    found = [0] * len(stages)
    for shared in chain.ties:
        held: set[tuple[int, ...]] = set()
        for s in stages_with(stages, shared.layers) if _on_several(chain, stages, shared) else ():
            stage = stages[s]
            if stage.devices not in held and memory_model.waits(chain, policy, shared, stage.start, stage.stop):
                found[s] += memory_model.shared_gradient(policy, shared)
                if chain.shared is not None:
                    held.add(stage.devices)
    return found


def lent_gradients(chain: Chain, policy: Policy, stages: Sequence[Stage]) -> list[tuple[tuple[int, int], ...]]:
    """Return :attr:`StageCost.lent` of each stage, for weights whose gradients wait for those of no other device."""
    found: list[tuple[tuple[int, int], ...]] = [()] * len(stages)
    for shared in () if policy.drains else chain.ties:
        if policy.updates_together and _on_several(chain, stages, shared):
            continue
        holders = stages_with(stages, shared.layers)
        for home in first_on_devices(stages, holders):
            last = max(s for s in holders if stages[s].devices == stages[home].devices)
            if last > home:
                found[home] += ((last, memory_model.shared_gradient(policy, shared)),)
    return found


def _on_several(chain: Chain, stages: Sequence[Stage], shared: SharedWeights) -> bool:
    """Whether there are copies: on several groups of devices, or wherever it isn't known what layers share."""
    homes = first_on_devices(stages, stages_with(stages, shared.layers))
    return len(homes) > 1 or chain.shared is None


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
            rules = policy.sharing  # where replicas share the steps, they still gather the new weights
            own, own_load = own * rules.sums // 2, own_load * rules.sums // 2
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
