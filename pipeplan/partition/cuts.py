"""Where may a chain be cut into stages, what crosses there, and how many in flight does a stage between cuts hold?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..cost import memory_model
from ..cost.saved import storages
from ..cost.stage_tables import crossing_bytes
from ..integers import IntLike, Ints, largest_each
from ..plan import Stage
from ..problem import Chain, Platform, Problem

UNLIMITED = 2**20  # microbatches; more than any schedule keeps in flight


def in_flight_limit(
    problem: Problem, start: IntLike, stop: IntLike, kept: IntLike, peak: IntLike, memory: int, replicas: int = 1
) -> Ints:
    """Return how many microbatches in flight on each of its ``replicas`` ``layers[start:stop]`` fit into ``memory``
    bytes with, 0 if none.

    Each microbatch more costs ``kept`` and, where it has its own weights, another version, so what a stage holds is
    linear; where some share a version, it has steps. A relaxation under vertical sync, where the first
    stage's number decides the versions.
    """

    def held(in_flight: IntLike) -> IntLike:
        return fixed_bytes(problem, start, stop, in_flight, replicas) + memory_model.held_bytes(kept, peak, in_flight)

    first, policy = held(1), problem.policy
    interval = policy.update_interval(replicas)
    if memory_model.versions_grow(policy) and interval > replicas:
        if policy.sharing.weights is not None:  # shares are rounded
            low = np.where(first > memory, 0, 1)
            return largest_each(lambda count: np.asarray(held(count) <= memory), low, low * UNLIMITED)
        whole = held(1 + interval) - first  # as many versions as replicas, and an interval's microbatches
        copy, room = (whole - interval * kept) // replicas, memory - first
        old = memory_model.versions(policy, 1, replicas) - 1
        few = (room - copy) / np.maximum(whole, 1) * replicas  # updates meanwhile, at least; at most three more
        most_updates = UNLIMITED * replicas // interval + 1
        updates = np.where(whole == 0, most_updates, np.clip(few, -1, most_updates)).astype(np.int64) + old
        limit: Ints = np.minimum(1, room + 1)
        every = np.maximum(kept, 1)
        for _ in range(5):
            left, most = room - (updates - old) * copy, (interval * updates + 1) // replicas
            count = np.where(kept == 0, most, left // every + 1)
            limit = np.maximum(limit, np.where(left >= 0, np.minimum(most, count), 0))
            if np.all((left < 0) | (count <= most) & (kept > 0)):
                break
            updates = updates + 1
        return limit.clip(0, UNLIMITED)
    more = np.asarray(held(2) - first if memory_model.versions_grow(policy) else kept)
    room = memory - first
    limit = np.where(more > 0, 1 + room // np.maximum(more, 1), UNLIMITED)
    return np.where(room < 0, 0, np.minimum(limit, UNLIMITED)).astype(np.int64)


def fixed_bytes(problem: Problem, start: IntLike, stop: IntLike, in_flight: IntLike, replicas: int = 1) -> IntLike:
    """Return what ``layers[start:stop]`` take beside activations: weights with their versions, buffers, what passes
    work with."""
    size, count = memory_model.weights_of(problem.chain, start, stop)
    own = memory_model.own_of(problem.chain, start, stop)
    crossing = crossing_bytes(problem.chain)
    buffers = 2 * (crossing[start] + crossing[stop]) + problem.chain.working_bytes(start, stop)
    waiting = memory_model.waiting_bytes(problem.chain, problem.policy, start, stop)
    return memory_model.weights_bytes(problem.policy, size, count, in_flight, replicas, own) + waiting + buffers


def memory_counts(problem: Problem) -> range:
    """Return the replica counts between which a stage's weights, gradient and state differ in bytes, the last for all
    beyond it.

    Replicas may share the optimizer's state, and each needs other versions of the weights: see
    :func:`..cost.memory_model.versions`, more replicas than microbatches between updates keep as many as two.
    """
    policy = problem.policy
    if not problem.replicas:
        return range(1, 2)
    if memory_model.depends_on_replicas(policy):
        return range(1, len(problem.platform) + 1)
    if not memory_model.versions_grow(policy):
        return range(1, 2)
    return range(1, min(len(problem.platform), max(2, policy.update_interval())) + 1)


def counts_standing(problem: Problem) -> list[int]:
    """Return for each of :func:`memory_counts` the count whose bytes stand for its own: itself, but between groups of
    devices, of which a search proves nothing, up to a third more replicas, which need no fewer versions."""
    counts = list(memory_counts(problem))
    if problem.policy.pipelines > 1 and not memory_model.depends_on_replicas(problem.policy):
        for i in range(len(counts) - 2, -1, -1):
            counts[i] = counts[i + 1] if 4 * counts[i] > 3 * counts[i + 1] else counts[i]
    return counts


def legal_cuts(problem: Problem, several: bool = False) -> Ints:
    """Return the positions (layers before a cut) at which stages may begin and end, 0 and L included.

    Layers that share weights stay in one stage, but where copies in several stages get equal updates, or where one
    device may have ``several`` stages: see :func:`parting`.
    """
    legal = np.ones(len(problem.chain) + 1, dtype=np.bool_)
    if problem.tied == "together" or not (several or problem.policy.updates_together):
        for one, other in problem.chain.tied:
            legal[min(one, other) + 1 : max(one, other) + 1] = False
    return np.flatnonzero(legal)


def parting(problem: Problem, cuts: Ints) -> npt.NDArray[np.bool_]:
    """Return, over pairs of ``cuts``, whether the layers between them share weights with others that a stage with these
    layers must have on its own device."""
    parts = np.zeros((len(cuts), len(cuts)), dtype=np.bool_)
    if not problem.policy.updates_together:
        for pair in problem.chain.tied:
            one, other = ((cuts[:, None] <= layer) & (layer < cuts[None, :]) for layer in pair)
            parts |= one != other
    return parts


def round_trips_ns(chain: Chain, platform: Platform, cuts: Ints, level: int) -> list[int]:
    """Return the time of both directions of each of ``cuts`` on a path over ``level``; 0 for the chain's two ends."""
    return [2 * platform.transfer_ns(size, level) for size in crossing_bytes(chain)[cuts].tolist()]


def spread_cuts(problem: Problem, cuts: Ints, bins: int) -> Ints | None:
    """Return the indices of up to ``bins`` of the ``cuts`` with small transfers, spread over the chain's time.

    None where that is most of the cuts.
    """
    count, chain = len(cuts), problem.chain
    if 3 * count < 4 * bins:
        return None
    time, saved = (chain.sums.forward_ns + chain.sums.backward_ns)[cuts], storages(chain).totals[cuts]
    share = time / max(1, int(time[-1]))
    if problem.checkpointing == "segments":  # which need cuts where bytes are saved, too
        share = (share + saved / max(1, int(saved[-1]))) / 2
    place = np.minimum((share * bins).astype(np.int64), bins - 1)
    trips = np.array(round_trips_ns(chain, problem.platform, cuts, 0), dtype=np.int64)
    order = np.lexsort((np.arange(count), trips, place))
    first = order[np.concatenate([[True], np.diff(place[order]) > 0])]
    return np.unique(np.concatenate([[0], first, [count - 1]]))


def near_cuts(cuts: Ints, stages: Sequence[Stage], most: int) -> Ints | None:
    """Return the indices of the ``cuts`` between ``stages`` and up to ``most`` neighbours on each side; None where
    those are most of the cuts."""
    count = len(cuts)
    width = min(most, max(2, count // (8 * len(stages))))
    at = np.searchsorted(cuts, [stage.start for stage in stages] + [stages[-1].stop])
    near = np.unique(np.clip(at[:, None] + np.arange(-width, width + 1), 0, count - 1))
    return None if 4 * len(near) > 3 * count else near
