"""What every stage offers: its time per microbatch as a function of how many microbatches it must hold.

A stage that holds more microbatches may have to recompute, and then takes longer. The partitioners read this trade from
tables over pairs of cuts, computed once per class of devices by the one cost model.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from .. import costs
from ..problem import IntLike, Ints, Problem

NEVER = 2**61  # ns; above every time, and two of them still fit into an int64
UNLIMITED = 2**20  # microbatches; more than any schedule keeps in flight

Row = tuple[Ints, Ints]  # times and in-flight limits of one option


@dataclass(frozen=True)
class Menu:
    """The options of the stages ``layers[cuts[i]:cuts[j]]`` on devices of one class, the quickest option first.

    Option o takes ``times[o][r][i, j]`` ns per microbatch with r + 1 replicas, and fits while at most
    ``limits[o][i, j]`` microbatches are in flight (0: never). Where the time doesn't depend on the replicas there is
    one entry r = 0.
    """

    times: tuple[tuple[Ints, ...], ...]
    limits: tuple[Ints, ...]

    def select(self, index: Ints) -> Menu:
        """Return the menu of the stages between the cuts ``index`` alone."""
        both = np.ix_(index, index)
        times = tuple(tuple(table[both] for table in tables) for tables in self.times)
        return Menu(times, tuple(limit[both] for limit in self.limits))

    def row(self, start: int, stops: Ints, replicas: Ints) -> list[Row]:
        """Return the options of the stages from cut ``start`` to ``stops``; ``replicas`` has their shape last."""
        rows = []
        for tables, limit in zip(self.times, self.limits, strict=True):
            if len(tables) == 1:
                time = tables[0][start][stops]
            else:
                time = np.stack([table[start] for table in tables])[np.maximum(replicas, 1) - 1, stops]
            rows.append((time, limit[start][stops]))
        return rows

    def option(self, start: int, stop: int, in_flight: int) -> int:
        """Return the index of the quickest option that can hold ``in_flight`` microbatches."""
        return next(o for o, limit in enumerate(self.limits) if in_flight <= limit[start, stop])


def work(options: list[Row], in_flight: Ints) -> Ints:
    """Return the least time of stages that hold ``in_flight`` microbatches, NEVER where they don't fit."""
    time, limit = options[-1]
    least: Ints = np.where(in_flight <= limit, time, NEVER)
    for time, limit in options[-2::-1]:
        np.copyto(least, time, where=in_flight <= limit)
    return least


def stage_times(problem: Problem, cuts: Ints, speed: Fraction) -> tuple[tuple[Ints, ...], ...]:
    """Return :attr:`Menu.times` between ``cuts`` (layer positions) on devices of this speed, NEVER for no stage."""
    chain, policy = problem.chain, problem.policy
    start, stop = cuts[:, None], cuts[None, :]
    forward = costs.forward_ns(chain, start, stop, speed)
    by_replicas = policy.accumulate is not None and problem.replicas and int(chain.sums.optimizer_ns[-1]) > 0
    counts = range(1, len(problem.platform) + 1) if by_replicas else [1]
    options = []
    for _, _, recompute in _choices(problem, start, stop):
        tables = [
            forward + costs.backward_ns(chain, policy, start, stop, recompute, replicas, speed) for replicas in counts
        ]
        for table in tables:
            table[(stop <= start) | (table == 0)] = NEVER  # a stage without work would leave orders ambiguous
        options.append(tuple(tables))
    return tuple(options)


def stage_limits(problem: Problem, cuts: Ints, memory: int) -> tuple[Ints, ...]:
    """Return :attr:`Menu.limits` between ``cuts`` (layer positions) on devices of ``memory`` bytes."""
    start, stop = cuts[:, None], cuts[None, :]
    limits = []
    for kept, peak, _ in _choices(problem, start, stop):
        limit = in_flight_limit(problem, start, stop, kept, peak, memory)
        limit[stop <= start] = 0
        limits.append(limit)
    return tuple(limits)


def _choices(problem: Problem, start: Ints, stop: Ints) -> list[tuple[IntLike, IntLike, IntLike]]:
    """Return (kept, peak, recompute ns) of ``layers[start:stop]`` stored and, where allowed, recomputed."""
    kept = problem.chain.saved_bytes(start, stop)
    choices = [(kept, kept, 0)]
    if problem.checkpointing == "stages":
        keeps, transient, recompute = costs.segment(problem.chain, start, stop)
        choices.append((keeps, keeps + transient, recompute))
    return choices


def in_flight_limit(
    problem: Problem, start: IntLike, stop: IntLike, kept: IntLike, peak: IntLike, memory: int
) -> npt.NDArray[np.int64]:
    """Return how many microbatches in flight ``layers[start:stop]`` fits into ``memory`` bytes with, 0 if none.

    What a stage holds is linear in that number: each one more costs ``kept`` and, where every microbatch has its own
    weights, another version.
    """
    chain, policy = problem.chain, problem.policy
    total, parameters = chain.sums.weight_bytes, chain.sums.parameters
    cut = np.array((0, *chain.cut_bytes[1:-1], 0), dtype=np.int64)  # the chain's two ends are no cuts
    size, count = total[stop] - total[start], parameters[stop] - parameters[start]

    def held(in_flight: int) -> IntLike:
        weights = costs.weights_bytes(policy, size, count, in_flight)
        return weights + costs.held_bytes(kept, peak, in_flight) + 2 * (cut[start] + cut[stop])

    first = held(1)
    more = held(2) - first
    room = memory - first
    limit = np.where(more > 0, 1 + room // np.maximum(more, 1), UNLIMITED)
    return np.where(room < 0, 0, np.minimum(limit, UNLIMITED)).astype(np.int64)
