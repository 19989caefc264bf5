"""What does one stage cost on each of its replicas: how long do its passes take, and what do they hold?

And which stages have weights of each other: whose copies, and whose gradients, do their devices hold?
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..integers import ceil_div
from ..plan import Stage
from ..problem import Chain, Platform, Policy, SharedWeights, connected
from . import memory_model, time_model
from .saved import for_weights_bytes, saved_bytes


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs on each of its replicas; times in ns per microbatch, sizes in bytes.

    Blocking transfers, and the overhead of messages, are part of ``forward_ns`` and ``backward_ns``.

    What several stages of one group of devices share, as far as that is known, counts in the first of them alone.
    ``waiting_bytes`` are of gradients that wait for those of other stages; ``lent`` are (stage,
    bytes) of the last one on the same devices that begins gradients of weights that this one keeps, of updates to come.
    ``kept_bytes`` stays per microbatch in flight; ``peak_bytes`` is what the one in its backward holds at most (equal
    without recomputation). ``sync_period_ns`` is the least period at which the replicas' all-reduces keep up.
    ``update_share_ns`` is the part of ``backward_ns`` that is the microbatch's share of the optimizer's step, 0 where
    that comes behind a drained batch,
    ``recompute_ns`` the part, rounded down, in which layers run forward again; where that is a pass of its own, it is
    ``recomputed_bytes`` that a microbatch holds behind it.
    ``update_ns`` is what the all-reduce behind a drained batch takes, with the optimizer's step where the two overlap;
    ``step_ns`` is that step where it comes behind all sums of its devices.
    Schedules that split the backward run its last ``backward_weight_ns`` later, and hold all ``saved_bytes`` of the
    microbatch (recomputed ones too) from the backward's start until then, and ``split_buffer_bytes`` of more buffers.
    Where the profile says what is needed until then it is ``held_between_bytes``, from the end of the backward's first
    part on, ``gradient_bytes`` of them made by that.
    """

    forward_ns: int
    backward_ns: int
    weight_bytes: int
    parameters: int
    kept_bytes: int
    peak_bytes: int
    buffer_bytes: int
    sync_period_ns: int
    update_interval: int
    resource: int
    backward_weight_ns: int = 0
    saved_bytes: int = 0
    update_ns: int = 0
    update_share_ns: int = 0
    split_buffer_bytes: int = 0
    step_ns: int = 0
    waiting_bytes: int = 0
    held_between_bytes: int | None = None
    gradient_bytes: int = 0
    lent: tuple[tuple[int, int], ...] = ()
    recompute_ns: int = 0
    recomputed_bytes: int = 0
    working_bytes: int = 0  # of its buffers, what one of its passes works with
    own: tuple[int, int] | None = None  # bytes and parameters, as :func:`.memory_model.own_of`

    @property
    def total_ns(self) -> int:
        """Forward plus backward."""
        return self.forward_ns + self.backward_ns


Known = dict[tuple[Any, ...], Any]  # what is the same in many graphs: costs of stages, groups, links, transfers


def stage_cost(
    chain: Chain,
    platform: Platform,
    policy: Policy,
    stage: Stage,
    resource: int,
    receives: bool,
    sends: bool,
    borrowed: Sequence[int],
) -> StageCost:
    """Return what a stage costs that finds the weights ``borrowed`` (of ``chain.shared``) on its devices."""
    chain = chain.of(stage.way)
    start, stop, r = stage.start, stage.stop, stage.replicas
    kept, peak, _ = memory_model.stage_activations(policy, chain, start, stop, ())
    weight_bytes, parameters = memory_model.weights_of(chain, start, stop, borrowed)
    own = memory_model.own_of(chain, start, stop, borrowed)
    path = platform.paths[platform.level_of(stage.devices)]
    gradient = memory_model.gradient_bytes(policy, *own)
    sync_period = time_model.sync_period_ns(policy, gradient, r, *path)
    update = sync_period * policy.update_interval(r)
    passes = _passes(chain, platform, policy, stage, borrowed)
    step = int(passes.step_ns) if policy.drains else 0
    if policy.overlaps:
        update, step = time_model.overlapped_ns(policy, update, step, parameters), 0
    working = int(chain.working_bytes(start, stop))
    everywhere = policy.engine is not None  # which has buffers also between stages of one device
    between = for_weights_bytes(chain, start, stop)
    saved = max(peak, int(saved_bytes(chain, start, stop)))
    cost = StageCost(
        forward_ns=passes.forward_ns,
        backward_ns=passes.backward_ns(),
        weight_bytes=weight_bytes,
        parameters=parameters,
        kept_bytes=kept,
        peak_bytes=peak,
        buffer_bytes=int(
            memory_model.message_bytes(
                policy,
                chain.cut_bytes[start] * (receives or (everywhere and start > 0)),
                chain.cut_bytes[stop] * (sends or everywhere),
                r,
            )
            + working
        ),
        working_bytes=working,
        sync_period_ns=sync_period,
        update_interval=policy.update_interval(r),
        resource=resource,
        backward_weight_ns=passes.backward_weight_ns,
        saved_bytes=saved,
        split_buffer_bytes=int(memory_model.split_message_bytes(policy, chain.cut_bytes[start] * (start > 0), r)),
        update_ns=update,
        update_share_ns=time_model.scaled(passes.step_share_ns, passes.speed),
        step_ns=step,
        held_between_bytes=None if between is None else between[0],
        gradient_bytes=0 if between is None else between[1],
        recomputed_bytes=max(saved, kept),
        own=own,
    )
    if not (stage.checkpoint or stage.selective):
        return cost
    return recomputing(cost, chain, platform, policy, stage, borrowed)


def _passes(
    chain: Chain, platform: Platform, policy: Policy, stage: Stage, borrowed: Sequence[int]
) -> time_model.Passes:
    """Return what the passes of a stage take on the slowest of its devices."""
    slowest = platform.slowest(stage.devices)
    timed = chain.timed(slowest.times)
    elsewhere = sum(timed.sums.shared[n].optimizer_ns for n in borrowed)
    return time_model.Passes(timed, policy, stage.start, stage.stop, stage.replicas, slowest.speed, elsewhere)


def recomputing(
    cost: StageCost, chain: Chain, platform: Platform, policy: Policy, stage: Stage, borrowed: Sequence[int] = ()
) -> StageCost:
    """Return the cost of a stage, of a ``chain`` as it has it, that costs ``cost`` where all its layers are stored."""
    start, stop = stage.start, stage.stop
    kept, peak, recompute = memory_model.stage_activations(
        policy, chain, start, stop, stage.checkpoint, stage.selective
    )
    passes = _passes(chain, platform, policy, stage, borrowed)
    if passes.chain is not chain:
        recompute = memory_model.activations(passes.chain, start, stop, stage.checkpoint)[2]
    saved = max(peak, int(saved_bytes(chain, start, stop)))
    return replace(
        cost,
        backward_ns=passes.backward_ns(recompute),
        kept_bytes=kept,
        peak_bytes=peak,
        saved_bytes=saved,
        recompute_ns=time_model.recompute_ns(recompute, passes.speed),
        recomputed_bytes=max(saved, kept + memory_model.recomputed_bytes(chain, stage.checkpoint)),
    )


def least_load_ns(chain: Chain, platform: Platform, stages: Sequence[Stage]) -> int:
    """Return the most that a device has to do for a microbatch, without recomputation and steps: no period is less."""
    slowest = {devices: platform.slowest(devices) for devices in {stage.devices for stage in stages}}
    loads = dict.fromkeys(slowest, 0)
    for stage in stages:
        passes = chain.of(stage.way).timed(slowest[stage.devices].times).sums.passes_ns
        loads[stage.devices] += passes[stage.stop] - passes[stage.start]
    floor = 0
    for devices, work in loads.items():
        floor = max(floor, ceil_div(time_model.scaled(work, slowest[devices].speed), len(devices)))
    return floor


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
    """Return which of ``stages``, in their order, have any of ``layers``."""
    starts = [stage.start for stage in stages]
    places = ((bisect_right(starts, layer) - 1, layer) for layer in layers)
    return sorted({s for s, layer in places if s >= 0 and layer < stages[s].stop})


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
            period = 0 if policy.drains else load - own_load
            update_ns, sync_ns = parts[s].update_ns + whole - own, parts[s].sync_period_ns + period
            parts[s] = replace(parts[s], update_ns=update_ns, sync_period_ns=sync_ns)
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
