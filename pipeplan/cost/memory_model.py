"""How many bytes do ``layers[start:stop]`` take on a device? Weights in all their versions, and activations.

The one memory model. Its unit is a stage on one of its replicas: weights, gradient and optimizer state once, and
activations for each microbatch in flight, that is, between its forward and its backward. With ZeRO a replica has its
part of what replicas share. Every function takes integers or integer arrays (shape of the ranges), so that the
partitioners' vectorised searches and the validator compute the same numbers from the same lines. Rules: ALGORITHMS
section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..integers import IntLike, Ints, ceil_div, plain
from ..problem import Chain, Policy, SharedWeights
from .saved import entering_bytes, inner_bytes, storages

Pair = tuple[IntLike, IntLike]  # bytes of one copy of weights, and parameters
MOST_SEGMENTS = 50_000  # whose costs are remembered with their chain


def weights_of(chain: Chain, start: IntLike, stop: IntLike, borrowed: Sequence[int] = ()) -> Pair:
    """Return (bytes of one copy of the weights, parameters) of ``layers[start:stop]``, without those ``borrowed`` (of
    ``chain.shared``); what several of them share, as far as that is known, counts once."""
    sums = chain.sums
    shares = [(x.weight_bytes, x.parameters) for x in sums.shared]
    return _counted_once(chain, start, stop, (sums.weight_bytes, sums.parameters), shares, borrowed)


def own_of(chain: Chain, start: IntLike, stop: IntLike, borrowed: Sequence[int] = ()) -> Pair:
    """Return the same of the weights whose gradients a rank sums with its replicas', and whose state it keeps where
    these share it: of those that ranks of a group have in common each has a part, once the group has summed them. So
    experts, of which a rank's replicas alone have the same, are summed and shared over fewer ranks than all else."""
    sums = chain.sums
    return _counted_once(
        chain, start, stop, (sums.own_bytes, sums.own_parameters), [x.own for x in sums.shared], borrowed
    )


def _counted_once(
    chain: Chain,
    start: IntLike,
    stop: IntLike,
    totals: tuple[Ints, Ints],
    shares: Sequence[tuple[int, int]],
    borrowed: Sequence[int],
) -> Pair:
    """Return the difference of two prefix sums, each of ``chain.shared`` counted once, and of those ``borrowed`` none,
    of which every layer that has it has its part of ``shares``."""
    size, count = (plain(x[stop] - x[start]) for x in totals)
    for n, (shared, (own_size, own_count)) in enumerate(zip(chain.sums.shared, shares, strict=True)):
        again = shared.again(start, stop) + (n in borrowed)
        size, count = size - again * own_size, count - again * own_count
    return size, count


def gradient_of(chain: Chain, policy: Policy, start: IntLike, stop: IntLike) -> IntLike:
    """Return the bytes of one gradient of ``layers[start:stop]``."""
    return gradient_bytes(policy, *weights_of(chain, start, stop))


def gradient_bytes(policy: Policy, weight_bytes: IntLike, parameters: IntLike) -> IntLike:
    """Bytes of one gradient: what replicas exchange and what every policy accumulates into."""
    return 2 * parameters if policy.precision == "mixed" else weight_bytes


def shared_gradient(policy: Policy, shared: SharedWeights) -> int:
    """Return the bytes of one gradient of weights that layers share."""
    return int(gradient_bytes(policy, shared.weight_bytes, shared.parameter_count))


def waiting_bytes(chain: Chain, policy: Policy, start: IntLike, stop: IntLike) -> IntLike:
    """Return the bytes of gradients that wait in ``layers[start:stop]`` for those of earlier stages.

    A microbatch's backward comes to the first stage last, and meanwhile later stages are at the next interval's. So
    each of them that shares weights with another stage has two gradients of those, and of all weights where the norm of
    all gradients is waited for; a drained pipeline needs no second.
    """
    if policy.waits_for_norm:
        return gradient_of(chain, policy, start, stop)
    total: IntLike = 0
    for shared in chain.ties:
        total = total + waits(chain, policy, shared, start, stop) * shared_gradient(policy, shared)
    return plain(total)


def waits(chain: Chain, policy: Policy, shared: SharedWeights, start: IntLike, stop: IntLike) -> IntLike:
    """Whether the gradient of ``shared`` waits in ``layers[start:stop]`` for that of an earlier stage."""
    if policy.drains or not policy.updates_together:
        return np.zeros(np.broadcast(start, stop).shape, dtype=np.bool_)
    first = min(map(min, chain.tied))
    behind = (np.asarray(start) > first) | (np.asarray(stop) <= first)
    here = np.sum([(np.asarray(start) <= i) & (i < np.asarray(stop)) for i in shared.layers], axis=0)
    return behind & (here > 0) & (here < len(shared.layers))


def versions(policy: Policy, in_flight: IntLike, replicas: int = 1) -> IntLike:
    """Weight versions that a device keeps of a stage of which it holds ``in_flight`` microbatches at the peak.

    Where every microbatch goes back with the weights that it came with, r replicas that hold g microbatches each keep
    the newest weights and up to ceil((r * g - 1) / k) older ones, with an update every k microbatches: when microbatch
    m comes, all up to m - r * g have gone back, and until it goes back itself only those before it are updated with.
    That is g with one replica and an update every microbatch. With vertical sync no stage keeps fewer than the first.
    """
    return policy.rules.most_versions or updates_over(policy, in_flight, replicas) + 1


def updates_over(policy: Policy, held: IntLike, replicas: int = 1) -> IntLike:
    """Return how many updates are due, at most, while ``replicas`` replicas hold ``held`` microbatches each: from when
    the last of them comes until it goes."""
    return ceil_div(replicas * held - 1, policy.update_interval(replicas))


def versions_grow(policy: Policy) -> bool:
    """Whether a stage keeps more weight versions the more microbatches it has in flight."""
    return policy.rules.most_versions is None


def without_vertical_sync(policy: Policy) -> Policy:
    """Return the policy under which each stage keeps the versions that its own microbatches need and no more: a
    relaxation, for searches that see one stage at a time."""
    return replace(policy, weights=policy.rules.alone or policy.weights, vertical_sync=False)


def weights_bytes(
    policy: Policy,
    weight_bytes: IntLike,
    parameters: IntLike,
    in_flight: IntLike,
    replicas: int = 1,
    own: Pair | None = None,
) -> IntLike:
    """Device bytes of weights, gradient and optimizer state with ``in_flight`` microbatches at the peak."""
    return versioned_bytes(policy, weight_bytes, parameters, versions(policy, in_flight, replicas), replicas, own)


def versioned_bytes(
    policy: Policy,
    weight_bytes: IntLike,
    parameters: IntLike,
    kept: IntLike,
    replicas: int = 1,
    own: Pair | None = None,
) -> IntLike:
    """Device bytes of ``kept`` versions of the weights, of gradient and optimizer state (ALGORITHMS section 3, table).

    In mixed precision versions and gradient take 2 bytes per parameter, the state holds fp32 weights and gradient
    beside the optimizer's own; with ``offload`` one bucket of the state is on the device at a time. With ``zero`` the
    state is that of the largest share of ``replicas``, and so are versions and gradient as far as they are shared,
    beside the buckets that are whole. Where the policy has ``bytes_per_parameter`` they are all of that for one
    version, less what other replicas have of what is shared. ``own`` are those of :func:`own_of`, None: all.
    """
    copy = gradient_bytes(policy, weight_bytes, parameters)
    of_weights, of_gradient = policy.sharing.weights, policy.sharing.gradient
    if policy.bytes_per_parameter is not None:
        per = policy.shared_bytes_per_parameter or 0
        alone, shared = (policy.bytes_per_parameter - per) * parameters, per * (parameters if own is None else own[1])
        return alone + _spread(policy, shared, (of_weights or 0) + (of_gradient or 0), replicas) + (kept - 1) * copy
    mixed = policy.precision == "mixed"
    eighths = policy.state_eighths + (16 if mixed else 0)
    shared = (weight_bytes, parameters) if own is None or not policy.zero else own
    if policy.offload:
        each = ceil_div(shared[1], policy.sharers(replicas))
        state = ceil_div(eighths * 4 * plain(np.minimum(each, policy.bucket_parameters)), 8)
    else:
        state = ceil_div(eighths * _state_copy(policy, *shared, replicas), 8)
    weights = kept * copy if of_weights is None else _spread(policy, kept * copy, of_weights, replicas)
    gradient = copy if of_gradient is None else _spread(policy, copy, of_gradient, replicas)
    return weights + gradient + state


def bucket_bytes(policy: Policy) -> int:
    """Return the most bytes of weights, or of a gradient, that replicas gather or scatter together."""
    return (2 if policy.precision == "mixed" else 4) * policy.bucket_parameters


def _spread(policy: Policy, whole: IntLike, buckets: int, replicas: int) -> IntLike:
    """Return what a replica holds of ``whole`` bytes that all share, of which so many buckets are whole at a time.

    Never less for two parts by themselves than for both together: bounds rely on it.
    """
    return plain(
        np.minimum(whole, _largest_share(policy, whole, replicas) + buckets * np.minimum(whole, bucket_bytes(policy)))
    )


def host_bytes(
    policy: Policy, weight_bytes: IntLike, parameters: IntLike, replicas: int = 1, own: Pair | None = None
) -> IntLike:
    """Host bytes of the state that ``offload`` moves off the device: fp32 weights and optimizer state (12 per parameter
    for mixed Adam, whose fp32 gradient exists for one bucket only); with ``zero`` the share of one of ``replicas``."""
    if not policy.offload:
        return 0
    eighths = policy.state_eighths + (8 if policy.precision == "mixed" else 0)
    shared = (weight_bytes, parameters) if own is None or not policy.zero else own
    return ceil_div(eighths * _state_copy(policy, *shared, replicas), 8)


def depends_on_replicas(policy: Policy) -> bool:
    """Whether a stage's :func:`versioned_bytes` are others with more replicas, as its bytes themselves say.

    Where a bucket of the state is on the device at a time, only stages of few parameters differ.
    """
    counts = policy.bucket_parameters, 2**20, 2**6 * policy.bucket_parameters
    return any(versioned_bytes(policy, 4 * x, x, 1) != versioned_bytes(policy, 4 * x, x, 1, 2) for x in counts)


def _state_copy(policy: Policy, weight_bytes: IntLike, parameters: IntLike, replicas: int) -> IntLike:
    """Bytes of one number of the state for every parameter that the replica with most of them steps."""
    return _largest_share(policy, 4 * parameters if policy.precision == "mixed" else weight_bytes, replicas)


def _largest_share(policy: Policy, whole: IntLike, replicas: int) -> IntLike:
    """Return the most bytes that one of ``replicas`` has of ``whole``, in shares of whole numbers of 4 bytes.

    Never less for two parts by themselves than for both together, nor for fewer replicas: bounds rely on it.
    """
    return plain(4 * ceil_div(whole, 4 * policy.sharers(replicas))) if policy.zero else whole


def held_bytes(kept: IntLike, peak: IntLike, in_flight: IntLike) -> IntLike:
    """Most bytes that ``in_flight`` microbatches of one stage hold: one of them may be in its backward."""
    return (in_flight - 1) * kept + peak


def message_bytes(policy: Policy, entering: IntLike, leaving: IntLike, replicas: int = 1) -> IntLike:
    """Return the bytes of buffers for what a stage exchanges with its neighbours, ``entering`` and ``leaving`` bytes of
    a microbatch: two of each, half of them for gradients.

    An engine of torch has one to receive each microbatch of a mini-batch, and its gradient, beside gradients that are
    made and sent.
    """
    if policy.engine is None:
        return 2 * entering + 2 * leaving
    count = ceil_div(policy.accumulate or 1, replicas)
    return (count + 2) * entering + count * leaving


def split_message_bytes(policy: Policy, entering: IntLike, replicas: int = 1) -> IntLike:
    """Return the bytes that are held beside :func:`message_bytes` where backwards come in two parts: with an engine of
    torch the gradients of what was received, to the end."""
    return 0 if policy.engine is None else ceil_div(policy.accumulate or 1, replicas) * entering


def stage_activations(
    policy: Policy,
    chain: Chain,
    start: int,
    stop: int,
    checkpoint: Sequence[tuple[int, int]],
    cores: Sequence[tuple[int, int]] = (),
) -> tuple[int, int, int]:
    """Return the :func:`activations` of a stage as the policy's engine holds them.

    Those of torch have the input in a receive buffer, and hold the output until its gradient is there.
    """
    if policy.engine is None:
        return activations(chain, start, stop, checkpoint, cores)
    kept, peak, recompute = activations(chain, start, stop, checkpoint, cores, received=start > 0)
    sent = chain.cut_bytes[stop]
    return kept + sent, peak + sent, recompute


def activations(
    chain: Chain,
    start: int,
    stop: int,
    checkpoint: Sequence[tuple[int, int]],
    cores: Sequence[tuple[int, int]] = (),
    received: bool = False,
) -> tuple[int, int, int]:
    """Return (kept, peak, recompute_ns) of one microbatch of ``layers[start:stop]`` with recomputed segments.

    ``checkpoint`` lists the half-open recomputed segments in order; the layers between them are stored, those of
    ``cores``, which are as they are where their cores run again, as parts of their own. A recomputed
    segment keeps its input and, while it is recomputed and run backward, the transient; release is segment by segment,
    so ``peak`` is the largest of (kept up to and with a segment) + its transient. In a chain the parts keep each
    storage once: a stored run may keep its output, which is what the part behind it would keep as its input. In a DAG
    each part counts all it keeps. What was ``received`` in a buffer that is there anyway is not counted in a chain.
    """
    kept = peak = recompute = 0
    position, held = start, received
    known = chain.__dict__.setdefault("_segments", {})
    if len(known) > MOST_SEGMENTS:
        known.clear()
    ends = sorted({x for both in cores for x in both})
    for first, last in (*checkpoint, (stop, stop)):
        for a, b in pairwise((position, *(x for x in ends if position < x < first), first) if position < first else ()):
            kept += int(stored(chain, a, b, held, a > start))
            held = bool(keeps_output(chain, a, b, held, recomputed=False))
            peak = max(peak, kept)
        if first < last:
            key = first, last, held, first > start
            if key not in known:
                known[key] = *segment(chain, *key), bool(keeps_output(chain, first, last, held, recomputed=True))
            keeps, transient, cost, held = known[key]
            kept += keeps
            peak = max(peak, kept + transient)
            recompute += cost
        position = last
    return kept, peak, recompute


def recomputed_bytes(chain: Chain, checkpoint: Sequence[tuple[int, int]]) -> int:
    """Return what a microbatch holds beside what its stage keeps when all of its segments have run again, and none has
    run backward."""
    return sum(int(inner_bytes(chain, first, last)) for first, last in checkpoint)


def stored(chain: Chain, start: IntLike, stop: IntLike, held: bool = False, inside: bool = False) -> IntLike:
    """Return the bytes that the stored run ``layers[start:stop]`` adds to what the stage keeps before it.

    ``held`` says that the storage of its input is kept already (in a chain), ``inside`` that the stage begins before
    it: then a view that enters takes the whole storage in which it was made.
    """
    return plain(storages(chain).stored(start, stop, held, inside))


def segment(
    chain: Chain, start: IntLike, stop: IntLike, held: bool = False, inside: bool = False
) -> tuple[Any, Any, Any]:
    """Return (kept bytes, transient bytes, recompute ns) of the recomputed segment ``layers[start:stop]``.

    The transient is what the layers save beside the segment's input; ``held`` and ``inside`` as in :func:`stored`.
    """
    keeps = storages(chain).segment_input(entering_bytes(chain, start, stop), start, held, inside)
    total = chain.sums.forward_ns
    return plain(keeps), inner_bytes(chain, start, stop), plain(total[stop] - total[start])


def keeps_output(chain: Chain, start: IntLike, stop: IntLike, held: IntLike, recomputed: bool) -> IntLike:
    """Return whether the storage of its output is kept behind ``layers[start:stop]``, a stored run or a segment.

    A stored run may save its output; a segment keeps its input, of which its output may be a view. Views pass on what
    was ``held`` before. Nothing is said of a DAG, where several tensors may leave.
    """
    return storages(chain).keeps_behind(start, stop, held, recomputed)
