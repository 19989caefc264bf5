"""Which plan does MadPipe find as published? Its dynamic program on a grid of values, and its search for the period.

Kept for comparison; ``madpipe`` answers the same question exactly. The paper's letters: t_P and m_P are the time and
the memory in use on the special device, V the delay from the end of a forward to the start of its backward, That the
period that group counts are made for, T the period that the program then finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...integers import Ints, ceil_div, extend_array
from ...plan import Allocation
from ...problem import Problem
from .exact import MadPipeTables, Stages, allocation_of, merged, tables_of, worst_of

LOADS, MEMORIES, DELAYS = 101, 11, 51  # values on the grid for t_P, m_P and V (MadPipe section 5.1)
ITERATIONS = 10  # K of Algorithm 1


def madpipe_paper(problem: Problem) -> Iterator[Allocation]:
    """Yield the allocation that MadPipe's Algorithm 1 returns, which claims min over i of max(T_i, That_i), or nothing.

    A heuristic of the class with one special device, which it charges g - 1 microbatches for group count g, so that
    the claim is often out of reach. Settled here: V' adds C(k - 1), the cut before the stage (printed C(k)), line 7
    takes min(T_i, That_i); values are rounded up to the grid, from 0 to U(1, L) for t_P, to M for m_P, to
    U(1, L) + sum C for V, which stops there. Neighbouring stages on the special device pay their cut, then become one.
    Unequal devices and levels are taken at their worst. MadPipe sections 4.2.2, 4.2.3 and 5.1.
    """
    tables = tables_of(problem, worst_of(problem.platform))
    low, high = tables.periods[0], _longest(tables)
    target = low
    best: tuple[int, Stages] | None = None
    for _ in range(ITERATIONS):
        period, stages = _madpipe_dp(tables, target, high)
        if stages is not None and (best is None or max(period, target) < best[0]):
            best = max(period, target), stages
        low = max(low, min(period, target))
        high = min(high, max(period, target))
        target = (low + high) // 2
    if best is not None:
        yield merged(allocation_of(best[1], tables.cuts, best[0]))


@dataclass(frozen=True, slots=True)
class _GridStates:
    """States of the dynamic program at one cut, as arrays: a key on the grid (:func:`_split`), the period so far, and
    the way back: cut and row of the state behind, and whether the stage between is special."""

    key: Ints
    period: Ints
    cut: Ints
    row: Ints
    special: npt.NDArray[np.bool_]

    @staticmethod
    def start(devices: int) -> _GridStates:
        """Return the one state at the chain's end: all devices but the special one left, nothing used."""
        zero = np.zeros(1, dtype=np.int64)
        return _GridStates(_join(zero + devices - 1, zero, zero, zero), zero, zero - 1, zero, zero > 0)

    @staticmethod
    def best_of(parts: list[_GridStates]) -> _GridStates:
        """Return of each key the state of the shortest period, the earlier one of equals."""
        key, period, cut, row, special = (
            np.concatenate([getattr(part, name) for part in parts]) for name in _GridStates.__slots__
        )
        order = np.lexsort((period, key))  # stable
        order = order[np.concatenate([[True], key[order][1:] != key[order][:-1]])]
        return _GridStates(key[order], period[order], cut[order], row[order], special[order])


def _join(devices: Ints, load: Ints, memory: Ints, delay: Ints) -> Ints:
    return ((devices * LOADS + load) * MEMORIES + memory) * DELAYS + delay


def _split(key: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (devices left, grid indices of t_P, m_P and V)."""
    rest, delay = np.divmod(key, DELAYS)
    rest, memory = np.divmod(rest, MEMORIES)
    devices, load = np.divmod(rest, LOADS)
    return devices, load, memory, delay


def _madpipe_dp(tables: MadPipeTables, target: int, ceiling: int) -> tuple[int, Stages | None]:
    """Return (T, stages) with T = MadPipe-DP(That = ``target``); (``ceiling``, None) when T is above that or infinite.

    States go from the last cut to the first, those of one cut together. States that no period up to ``ceiling`` can
    come of are dropped; that changes no T up to ``ceiling``.
    """
    last = len(tables.cuts) - 1
    waiting: list[list[_GridStates]] = [[] for _ in range(last + 1)]
    waiting[last].append(_GridStates.start(tables.devices))
    reached: dict[int, _GridStates] = {}
    for j in range(last, 0, -1):
        tables.deadline.check()
        if not waiting[j]:
            continue
        reached[j] = _GridStates.best_of(waiting[j])
        waiting[j].clear()
        for i in range(j - 1, -1, -1):
            if tables.work[i][j] > ceiling:
                break
            if tables.work[i][j]:  # a stage that takes no time would leave orders ambiguous
                waiting[i] += _extended(tables, reached[j], i, j, target, ceiling)
    if not waiting[0]:
        return ceiling, None
    ends = _GridStates.best_of(waiting[0])
    _, load, _, _ = _split(ends.key)
    periods = np.maximum(ends.period, ceil_div(load * tables.work[0][last], LOADS - 1))
    row = int(np.argmin(periods))
    return int(periods[row]), _stages(ends, row, reached)


def _extended(
    tables: MadPipeTables, states: _GridStates, i: int, j: int, target: int, ceiling: int
) -> list[_GridStates]:
    """Return the states at cut ``i`` that a stage from there to ``j`` makes of ``states``: alone and on the special
    device."""
    scale = DELAYS - 1  # delays on the grid are multiples of longest / scale: all times count in 1 / scale ns
    total, longest = tables.work[0][-1], _longest(tables)
    work, round_trip = tables.work[i][j], tables.round_trip[i]
    link = ceil_div(round_trip, 2) if tables.duplex else round_trip
    if link > ceiling:
        return []
    devices, load, memory, delay = _split(states.key)
    before = extend_array(delay * longest, np.array([work * scale]), target * scale)
    count = ceil_div(delay * longest + work * scale, target * scale)
    if tables.duplex:
        before = before + round_trip * scale
    else:
        before = extend_array(before, np.array([round_trip * scale]), target * scale)
    delay = np.minimum(ceil_div(before, longest), DELAYS - 1)
    rest = tables.work[0][i]
    found = []
    for special in (False, True):
        if special:
            left, period = devices, np.maximum(states.period, link)
            load = load + ceil_div(work * (LOADS - 1), total)
            held = tables.fixed[i][j] + tables.versions(count) * tables.version[i][j]
            held = held + (count - 1) * tables.saved[i][j]
            held = held + tables.buffers[i] + tables.buffers[j]
            memory = memory + ceil_div(held * (MEMORIES - 1), tables.memory)
            fits = (load < LOADS) & (memory < MEMORIES) & ((devices > 0) | (i == 0))
        else:
            left, period = devices - 1, np.maximum(states.period, max(work, link))
            fits = (devices > 0) & (count <= tables.limit[i][j])
        spent = ceil_div(load * total, LOADS - 1)
        fits &= (spent <= ceiling) & (rest <= left * ceiling + ceiling - spent) & (count <= tables.lifetime)
        row = np.flatnonzero(fits)
        if len(row):
            key = _join(left[row], load[row], memory[row], delay[row])
            found.append(_GridStates(key, period[row], np.full_like(row, j), row, np.full(len(row), special)))
    return found


def _longest(tables: MadPipeTables) -> int:
    """Return U(1, L) + sum C: one layer and one cut at a time."""
    return tables.work[0][-1] + sum(tables.round_trip)


def _stages(states: _GridStates, row: int, reached: dict[int, _GridStates]) -> Stages:
    """Return the stages that led to a state at the first cut, the first of the chain foremost."""
    path = []
    cut = 0
    while states.cut[row] >= 0:
        behind, special = int(states.cut[row]), bool(states.special[row])
        path.append((cut, behind, special))
        row, states, cut = int(states.row[row]), reached[behind], behind
    stages: Stages | None = None
    for start, stop, special in reversed(path):
        stages = Stages(start, stop, special, stages)
    assert stages is not None, "a chain has stages"
    return stages
