"""How many devices do the layers on the two sides of every cut need at least, and how long is a delay at least?

Relaxations that cost far less than a decision (:mod:`.decision`) and spare it most of its transitions: no stage is
looked at that leaves too few devices to the layers before or behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...integers import NEVER, Ints, ceil_div
from ...problem import Problem
from .stages import SearchTables, carried, largest_synced_gradients, longest_delay

TOO_MANY = 10**6  # devices; stands for "cannot be placed"


@dataclass(frozen=True)
class Counts:
    """Lower bounds on devices at one period: ``before[i]`` for the layers before cut i, ``after[i]`` for the others.

    ``reach[i]`` is the last cut at which a stage that starts at cut i can stop.
    """

    before: Ints
    after: Ints
    reach: Ints


def device_counts(tables: SearchTables, period: int, least_delay: Ints) -> Counts | None:
    """Return how many devices each side of every cut needs at least, or None when there are not enough.

    A relaxation of the decision: each stage is charged the best device, the best link, and a lower bound on the delay
    at its end, ``least_delay[j]`` at cut j. O(n^2) for n cuts.
    """
    problem, size = tables.problem, len(tables.cuts)
    enter = least_delay + carried(problem, tables.round_trips[0], 0, period)
    needs = [
        np.minimum(TOO_MANY, width * stage_needs(own.problem, own.best.relaxed, own.gradients, enter, period))
        for own, width in ((own, own.problem.chain.tensor if tables.uniform else 1) for own in tables.variants)
    ]
    need = np.minimum.reduce(needs)
    after = np.zeros(size, dtype=np.int32)
    for i in range(size - 2, -1, -1):
        after[i] = min(TOO_MANY, int((need[i, i + 1 :] + after[i + 1 :]).min()))
    if after[0] > len(problem.platform):
        return None
    before = np.full(size, TOO_MANY, dtype=np.int32)
    before[0] = 0
    for i in range(size - 1):
        np.minimum(before[i + 1 :], need[i, i + 1 :] + before[i], out=before[i + 1 :])
    reach = size - 1 - np.argmax(need[:, ::-1] < TOO_MANY, axis=1)
    return Counts(before.astype(np.int64), after.astype(np.int64), reach)


def stage_needs(
    problem: Problem, relaxed: Sequence[tuple[Ints, Ints]], gradients: Ints, enter: Ints, period: int
) -> npt.NDArray[np.int32]:
    """Return how many devices each stage needs at least, TOO_MANY where none are enough.

    By its options (:attr:`.stages.StageOptions.relaxed`), the gradient bytes that its replicas exchange, and the least
    delay that it sees behind it, ``enter`` by last cut.
    """
    most = len(problem.platform) if problem.replicas else 1
    need = np.full(gradients.shape, TOO_MANY, dtype=np.int32)
    cap = longest_delay(problem, period)
    for time, limit in relaxed:
        problem.deadline.check()
        delay = time + enter
        groups = ceil_div(np.minimum(delay, NEVER), period)
        if most == 1:
            need[(time <= period) & (groups <= limit) & (delay <= cap)] = 1
        else:
            replicas = np.maximum(np.ceil(groups / np.maximum(limit, 1)), ceil_div(time, period))
            replicas[(delay > cap) | (limit == 0)] = TOO_MANY
            np.minimum(need, np.minimum(replicas, TOO_MANY).astype(np.int32), out=need)
    if most > 1:
        need = _synchronised(problem, gradients, period, need)
    need[need > most] = TOO_MANY
    return need


def _synchronised(problem: Problem, gradients: Ints, period: int, need: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Raise each count to the next one at which the stage's replicas can keep up with their all-reduces."""
    most = len(problem.platform)
    allowed = largest_synced_gradients(problem, period)[0, 1:]
    if not gradients.size or int(gradients.max()) <= int(allowed.min()):
        return need
    order = np.unique(allowed)
    following = np.full((len(order) + 1, most + 2), TOO_MANY, dtype=np.int32)
    fits = np.where(allowed >= order[:, None], np.arange(1, most + 1, dtype=np.int32), np.int32(TOO_MANY))
    following[:-1, 1:-1] = np.minimum.accumulate(fits[:, ::-1], axis=1)[:, ::-1]
    following[:, 0] = following[:, 1]
    return following[np.searchsorted(order, gradients), np.minimum(need, most + 1)]
