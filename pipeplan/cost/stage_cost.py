"""What does one stage cost on each of its replicas: how long do its passes take, and what do they hold?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..integers import ceil_div
from ..plan import Stage
from ..problem import Chain, Platform, Policy
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
    ``update_share_ns`` is the part of ``backward_ns`` that is the microbatch's share of the optimizer's step,
    ``recompute_ns`` the part, rounded down, in which layers run forward again; where that is a pass of its own, it is
    ``recomputed_bytes`` that a microbatch holds behind it.
    ``update_ns`` is the time from the last backward of a drained batch to the next batch: the all-reduce, and the
    optimizer's step where it overlaps with that instead of being charged to backwards. ``step_ns`` is that step where
    it waits for the norm of all gradients.
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
    chain = chain.of(stage.tensor, stage.selective)
    start, stop, r = stage.start, stage.stop, stage.replicas
    kept, peak, recompute = memory_model.stage_activations(policy, chain, start, stop, stage.checkpoint)
    slowest = platform.slowest(stage.devices)
    speed, timed = slowest.speed, chain.timed(slowest.times)
    if timed is not chain:
        recompute = memory_model.activations(timed, start, stop, stage.checkpoint)[2]
    weight_bytes, parameters = memory_model.weights_of(chain, start, stop, borrowed)
    own = memory_model.own_of(chain, start, stop, borrowed)
    elsewhere = sum(timed.sums.shared[n].optimizer_ns for n in borrowed)
    path = platform.paths[platform.level_of(stage.devices)]
    gradient = memory_model.summed_bytes(policy, (weight_bytes, parameters), own)
    sync_period = time_model.sync_period_ns(policy, gradient, r, *path)
    update = sync_period * policy.update_interval(r)
    step = int(time_model.step_ns(timed, policy, start, stop, r, speed, elsewhere)) if policy.steps_apart else 0
    if policy.coarsening is not None and not policy.clip:
        update = time_model.overlapped_ns(policy, update, step, parameters)
    everywhere = policy.engine is not None  # which has buffers also between stages of one device
    between = for_weights_bytes(chain, start, stop)
    share = time_model.step_share_ns(timed, policy, start, stop, r, elsewhere)
    saved = max(peak, int(saved_bytes(chain, start, stop)))
    return StageCost(
        forward_ns=time_model.forward_ns(timed, start, stop, speed),
        backward_ns=time_model.backward_ns(timed, policy, start, stop, recompute, r, speed, elsewhere),
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
            + chain.working_bytes(start, stop)
        ),
        sync_period_ns=sync_period,
        update_interval=policy.update_interval(r),
        resource=resource,
        backward_weight_ns=time_model.backward_weight_ns(timed, policy, start, stop, r, speed, elsewhere),
        saved_bytes=saved,
        split_buffer_bytes=int(memory_model.split_message_bytes(policy, chain.cut_bytes[start] * (start > 0), r)),
        update_ns=update,
        update_share_ns=time_model.scaled(share, speed),
        step_ns=step if policy.clip else 0,
        held_between_bytes=None if between is None else between[0],
        gradient_bytes=0 if between is None else between[1],
        recompute_ns=time_model.recompute_ns(recompute, speed),
        recomputed_bytes=max(saved, kept + memory_model.recomputed_bytes(chain, stage.checkpoint)),
        own=own,
    )


def least_load_ns(chain: Chain, platform: Platform, stages: Sequence[Stage]) -> int:
    """Return the most that a device has to do for a microbatch, without recomputation and steps: no period is less."""
    slowest = {devices: platform.slowest(devices) for devices in {stage.devices for stage in stages}}
    loads = dict.fromkeys(slowest, 0)
    for stage in stages:
        passes = chain.of(stage.tensor, stage.selective).timed(slowest[stage.devices].times).sums.passes_ns
        loads[stage.devices] += passes[stage.stop] - passes[stage.start]
    floor = 0
    for devices, work in loads.items():
        floor = max(floor, ceil_div(time_model.scaled(work, slowest[devices].speed), len(devices)))
    return floor
