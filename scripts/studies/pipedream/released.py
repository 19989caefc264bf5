"""Which stages does the optimizer find that was published with PipeDream? Recurrence for recurrence, to compare.

It differs from the paper: transfers are divided among replicas, the first stage of a range pays for synchronisation
another way than the later ones, and it works on the states of a DAG of antichains. ALGORITHMS section 5 has it in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeplan.partition.granularity import articulation_cuts
from pipeplan.partition.pipedream.paper import (
    Solved,
    StageRange,
    Table,
    device_stages,
    on_consecutive_devices,
    solve_level,
)
from pipeplan.plan import Allocation
from pipeplan.problem import Chain, Problem

Floats = npt.NDArray[np.float64]
MOST_STATES = 2000  # of an antichain DAG; beyond it the chain is cut where one tensor is live


@dataclass(frozen=True)
class _States:
    """States in topological order, boundary 0 before the first: sums over all their layers, shape (states + 1,).

    ``output_bytes`` is what the state hands on, ``stop`` the number of layers that it has done, and ``before[j]`` lists
    the boundaries of the states that come before state j - 1.
    """

    compute_s: Floats
    parameter_bytes: Floats
    output_bytes: Floats
    stop: npt.NDArray[np.int64]
    before: list[npt.NDArray[np.int64] | slice]


def pipedream_released(problem: Problem, straight: bool = False) -> Iterator[Allocation]:
    """Yield the published optimizer's allocation, claiming its period, rounded up to ns.

    Optimal for its own costs, with activation costs on and without a memory limit. Devices are taken to be equal and
    latencies zero. Stages go on consecutive devices; a state that is no prefix of the chain's order is cut after as
    many layers as it has. A DAG of more than 2000 antichains is cut only where one tensor is live. Nothing comes where
    the recurrence has no solution (``straight`` with fewer states than devices). Time O(m^2 S^3) per level of m units
    for S states; source: ``optimizer_graph_hierarchical.py`` of msr-fiddle/pipedream.
    """
    states = _states(problem.chain)
    solved = _solve(problem, states, straight)
    seconds = float(solved[-1].table[-1, -1, 0])
    if seconds < math.inf:
        units = [level.count for level in problem.platform.levels]
        stages = [
            StageRange(int(states.stop[cut.start]), int(states.stop[cut.stop]), cut.replicas)
            for cut in device_stages(solved, units, len(states.stop) - 1)
        ]
        yield on_consecutive_devices(stages, math.ceil(seconds * 1e9 * (1 - 1e-12)))


def released_period_ns(problem: Problem, straight: bool = False) -> float:
    """Return the period in ns that the published optimizer claims, in floats as there; infinite for no solution."""
    return float(_solve(problem, _states(problem.chain), straight)[-1].table[-1, -1, 0]) * 1e9


def _solve(problem: Problem, states: _States, straight: bool) -> list[Solved]:
    """Return the solved levels, lowest first."""
    solved: list[Solved] = []
    levels = problem.platform.levels
    for k, level in enumerate(levels):
        stages = _Stages(
            states,
            np.arange(1, level.count + 1, dtype=np.float64)[:, None],
            float(level.bandwidth),
            levels[k - 1].count if k else 1,
            solved[-1].table[-1] if k else None,
        )
        solved.append(
            solve_level(
                len(states.stop) - 1,
                level.count,
                stages.first,
                stages.later,
                before=lambda stop: states.before[stop],
                every_start=k < len(levels) - 1,
                fewer_units=False,
                most_replicas=1 if straight else level.count,
                deadline=problem.deadline,
            )
        )
    return solved


@dataclass(frozen=True)
class _Stages:
    """What stages cost on 1, 2, .. ``workers`` (a column) of one level, in seconds, shape (workers, start).

    ``below`` is the table of the level below for all of its ``workers_below``: there it stands for the compute time.
    """

    states: _States
    workers: Floats
    bandwidth: float
    workers_below: int
    below: Table | None

    def _time(self, stop: int) -> Floats:
        compute = self.states.compute_s
        time: Floats = compute[stop] - compute[:stop] if self.below is None else self.below[stop, :stop]
        return time

    def _sync(self, stop: int) -> Floats:
        parameters = self.states.parameter_bytes[stop] - self.states.parameter_bytes[:stop]
        sync: Floats = 4 * (self.workers - 1) * parameters / (self.bandwidth * self.workers)
        return sync

    def first(self, stop: int) -> Floats:
        """A range as one stage: synchronisation is divided among the workers of the level below."""
        return (self._time(stop) + self._sync(stop) / self.workers_below) / self.workers

    def later(self, stop: int) -> Floats:
        """The last of several stages: synchronisation in full, and the transfers at both of its ends."""
        outputs, last = self.states.output_bytes, stop == len(self.states.stop) - 1
        stage = (self._time(stop) + self._sync(stop)) / self.workers
        moved = np.maximum(outputs[:stop], 0.0 if last else outputs[stop])
        return np.maximum(stage, 2 * moved / (self.bandwidth * self.workers))


# --- states -----------------------------------------------------------------------------------------------------------


def _states(chain: Chain) -> _States:
    """Return the states of ``chain``: those of its antichain DAG, or its articulation cuts if these are too many."""
    compute = np.array([x.forward_ns + x.backward_ns for x in chain.layers]) / 1e9
    parameters = np.array([x.weight_bytes for x in chain.layers], dtype=np.float64)
    found = _antichains(chain) if chain.edges is not None else None
    if found is None:
        cuts = np.array(articulation_cuts(chain) if chain.edges is not None else range(len(chain) + 1))
        return _States(
            np.concatenate([[0.0], np.cumsum(compute)])[cuts],
            np.concatenate([[0.0], np.cumsum(parameters)])[cuts],
            np.array(chain.cut_bytes, dtype=np.float64)[cuts],
            cuts,
            [slice(1, stop) for stop in range(len(cuts))],
        )
    count, dropped = len(chain), _dropped(chain)
    sums, outputs, stops = [(0.0, 0.0)], [0.0], [0]
    outgoing = np.array([x.output_bytes for x in chain.layers], dtype=np.float64)
    for done, augmented in zip(found.done, found.augmented, strict=True):
        inside = _layers_in(done, count)
        sums.append((float(compute[inside].sum()), float(parameters[inside].sum())))
        outputs.append(float(outgoing[_layers_in(augmented, count)].sum()))
        stops.append(int(inside.sum()) + sum(done & sources == sources for sources in dropped.values()))
    stops[-1] = count
    totals = np.array(sums)
    before: list[npt.NDArray[np.int64] | slice] = [slice(1, 1)]
    for stop, earlier in enumerate(found.earlier, start=1):
        every = earlier == (1 << (stop - 1)) - 1  # a slice is a view, much faster than picking
        before.append(slice(1, stop) if every else np.array(_members(earlier), dtype=np.int64) + 1)
    return _States(totals[:, 0], totals[:, 1], np.array(outputs), np.array(stops), before)


@dataclass(frozen=True)
class _Antichains:
    """Antichains in topological order as bit sets: of layers done with it, of its augmented antichain (the layers whose
    outputs it hands on), and of the antichains earlier in the DAG."""

    done: list[int]
    augmented: list[int]
    earlier: list[int]


def _dropped(chain: Chain) -> dict[int, int]:
    """Return the ``__getitem__`` layers that nothing reads, each with the set of layers that it reads."""
    sources = {i: 0 for i, layer in enumerate(chain.layers) if layer.name.startswith("__getitem__")}
    for i, j in chain.edges or ():
        sources.pop(i, None)
        if j in sources:
            sources[j] |= 1 << i
    return sources


def _antichains(chain: Chain) -> _Antichains | None:
    """Return the antichain DAG that the published optimizer builds; None for more than :data:`MOST_STATES` antichains.

    It starts from the first source. The augmented antichain adds every ancestor with a reader that is not done yet; a
    next antichain replaces one of its members by a reader of which no descendant is in it, and keeps what is maximal.
    """
    count, dropped = len(chain), _dropped(chain)
    readers: list[list[int]] = [[] for _ in range(count)]
    ancestors, descendants = [0] * count, [0] * count
    edges = [(i, j) for i, j in chain.edges or () if j not in dropped]
    for i, j in edges:  # sorted by i, so those of i are complete only when sorted by j
        readers[i].append(j)
    for i, j in sorted(edges, key=lambda edge: edge[1]):
        ancestors[j] |= ancestors[i] | 1 << i
    for i, j in sorted(edges, reverse=True):
        descendants[i] |= descendants[j] | 1 << j
    read_by = [sum(1 << j for j in set(targets)) for targets in readers]
    waiting = [
        sum(1 << p for p in _members(ancestors[a]) if read_by[p] & ~(ancestors[a] | 1 << a)) for a in range(count)
    ]

    source = 1 << next(i for i in range(count) if i not in dropped)
    augmented: dict[int, int] = {}
    following: dict[int, list[int]] = {}
    queue, queued = [source], {source}
    for antichain in queue:
        whole = augmented[antichain] = antichain | _union(waiting[a] for a in _members(antichain))
        found: dict[int, None] = {}
        for u in _members(whole):
            for v in readers[u]:
                if antichain >> v & 1 or descendants[v] & whole:
                    continue
                more = whole | 1 << v  # u, which v reads, is no longer maximal
                found[sum(1 << x for x in _members(more) if not descendants[x] & more)] = None
        following[antichain] = list(found)
        queue += [x for x in found if x not in queued]
        queued |= found.keys()
        if len(queue) > MOST_STATES:
            return None

    from networkx import DiGraph, dfs_postorder_nodes  # which takes longer to load than most plans to find

    order = list(dfs_postorder_nodes(DiGraph(following), source))[::-1]
    index = {antichain: n for n, antichain in enumerate(order)}
    earlier = [0] * len(order)
    for n, antichain in enumerate(order):
        for x in following[antichain]:
            earlier[index[x]] |= earlier[n] | 1 << n
    done = [antichain | _union(ancestors[a] for a in _members(antichain)) for antichain in order]
    return _Antichains(done, [augmented[x] for x in order], earlier)


def _union(sets: Iterable[int]) -> int:
    result = 0
    for x in sets:
        result |= x
    return result


def _members(bits: int) -> list[int]:
    """Return the members of a bit set in order."""
    return [i for i in range(bits.bit_length()) if bits >> i & 1]


def _layers_in(bits: int, count: int) -> npt.NDArray[np.bool_]:
    return np.array([bits >> i & 1 for i in range(count)], dtype=np.bool_)
