"""How many microbatches in flight leave a stage's weights, buffers and activations within a device's memory?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..cost import memory_model
from ..cost.stage_tables import crossing_bytes
from ..integers import IntLike, Ints
from ..problem import Problem

UNLIMITED = 2**20  # microbatches; more than any schedule keeps in flight


def in_flight_limit(
    problem: Problem, start: IntLike, stop: IntLike, kept: IntLike, peak: IntLike, memory: int, replicas: int = 1
) -> Ints:
    """Return how many microbatches in flight on each of its ``replicas`` ``layers[start:stop]`` fit into ``memory``
    bytes with, 0 if none.

    Each microbatch more costs ``kept`` and, where it has its own weights, another version, so what a stage holds is
    linear; where some share a version, the number is bisected. A relaxation under vertical sync, where the first
    stage's number decides the versions.
    """

    def held(in_flight: IntLike) -> IntLike:
        return fixed_bytes(problem, start, stop, in_flight, replicas) + memory_model.held_bytes(kept, peak, in_flight)

    if memory_model.versions_grow(problem.policy) and problem.policy.update_interval(replicas) > replicas:
        return _most(held, memory, np.broadcast(start, stop, kept, peak).shape)
    first = held(1)
    more = held(2) - first
    room = memory - first
    limit = np.where(more > 0, 1 + room // np.maximum(more, 1), UNLIMITED)
    return np.where(room < 0, 0, np.minimum(limit, UNLIMITED)).astype(np.int64)


def _most(held: Callable[[IntLike], IntLike], memory: int, shape: tuple[int, ...]) -> Ints:
    low, high = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=np.int64)
    while np.any(fits := (high < UNLIMITED) & (held(high) <= memory)):
        low, high = np.where(fits, high, low), np.where(fits, 2 * high, high)
    while np.any(low < high):  # low fits, what is above high doesn't
        middle = low + (high - low + 1) // 2
        fits = held(middle) <= memory
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return low


def fixed_bytes(problem: Problem, start: IntLike, stop: IntLike, in_flight: IntLike, replicas: int = 1) -> IntLike:
    """Return what ``layers[start:stop]`` take beside activations: weights with their versions, buffers, what passes
    work with."""
    size, count = memory_model.weights_of(problem.chain, start, stop)
    crossing = crossing_bytes(problem.chain)
    buffers = 2 * (crossing[start] + crossing[stop]) + problem.chain.working_bytes(start, stop)
    waiting = memory_model.waiting_bytes(problem.chain, problem.policy, start, stop)
    return memory_model.weights_bytes(problem.policy, size, count, in_flight, replicas) + waiting + buffers


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
