"""What is the shortest period of any placement of the stages, each taken as if alone on its resources in time?

A search over all cuttings into stages, their devices and recomputed segments, from the last stage to the first, always
at the placement of the last stages whose own bound is least. That bound is 1F1B*'s counts on resources that only
loads, sums and memory share (``cost.group_bound``), device by device, and that all devices' time suffices for what is
loaded and what is left. It never falls when a stage is added, so the first whole placement that comes up has the least
of all, and when the budget is spent, the least that is left is a bound as well. Exact about loads, memory, waits and
which device has which stages; what it leaves out is how operations of one device interleave.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import combinations, count, permutations
from math import ceil

from ...cost import memory_model, time_model
from ...cost.group_bound import may_reach
from ...cost.stage_graph import stage_graph
from ...integers import smallest
from ...plan import Stage
from ...problem import Problem

NODES = 200  # placements of last stages that are judged, by default


def placement_bound(problem: Problem, low: int, nodes: int = NODES) -> int | None:
    """Return a period (ns), at least ``low``, below which no placement can be scheduled; None where none ever can.

    At most ``nodes`` placements of last stages are judged.
    """
    search = _Search(problem)
    order = count()
    waiting: list[tuple[int, int, int, tuple[Stage, ...], bool]] = [(low, len(problem.chain), next(order), (), True)]
    while waiting:
        bound, start, _, stages, judged = heappop(waiting)
        if not judged:  # its bound so far is that of fewer stages
            if nodes == 0:
                return bound
            nodes -= 1
            least = search.least(stages, bound)
            if least is not None:
                heappush(waiting, (least, start, next(order), stages, True))
        elif start == 0:
            return bound
        else:
            for longer, work in search.longer(stages, start):
                heappush(waiting, (max(bound, work), longer[0].start, next(order), longer, False))
    return None


Segments = tuple[tuple[int, int], ...]


class _Search:
    """How placements of the last stages grow, and their bounds."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._menus: dict[tuple[int, int], list[tuple[int, Segments]]] = {}
        relaxed = time_model.relative(problem)
        self._speeds = [device.speed for device in relaxed.platform.devices]
        sums = relaxed.chain.sums
        self._before = [int(a + b) for a, b in zip(sums.forward_ns, sums.backward_ns, strict=True)]
        platform = problem.platform
        self._devices, inner = len(platform), platform.unit_sizes[0]
        shared = platform.shared_level is not None
        self._places = [(d // inner, platform.link_of(d) if shared else 0) for d in range(self._devices)]
        self._idle = problem.chain.timed(platform.slowest(range(self._devices)).times)  # where nothing takes longer

    def longer(self, stages: tuple[Stage, ...], stop: int) -> Iterator[tuple[tuple[Stage, ...], int]]:
        """Yield ``stages``, which begin at layer ``stop``, behind each stage that may end there, and the least period
        (ns) by the work of its devices and of all."""
        chain, before = self.problem.chain, self._before
        loads: dict[tuple[int, ...], int] = {}
        for stage in stages:
            again = sum(int(chain.sums.forward_ns[b] - chain.sums.forward_ns[a]) for a, b in stage.checkpoint)
            more = before[stage.stop] - before[stage.start] + (0 if self._own_times else again)
            loads[stage.devices] = loads.get(stage.devices, 0) + more
        everywhere, all_speeds = before[stop] + sum(loads.values()), sum(self._speeds)
        fresh = list(self._fresh({d for group in loads for d in group}))
        for start in range(stop - 1, -1, -1):
            if time_model.work_ns(self._idle, self.problem.policy, start, stop) == 0:
                continue
            work = before[stop] - before[start]
            for group in (*loads, *fresh):
                share = len(group) * min(self._speeds[d] for d in group)
                for again, checkpoint in self._menu(start, stop):
                    load = loads.get(group, 0) + work + again
                    least = max(ceil(load / share), ceil((everywhere + again) / all_speeds))
                    yield (Stage(start, stop, group, checkpoint), *stages), least

    def least(self, stages: tuple[Stage, ...], low: int) -> int | None:
        """Return the least period, from ``low`` on, at which the last ``stages`` may be scheduled, None for none."""
        problem = self.problem
        graph = stage_graph(problem.chain, problem.platform, problem.policy, stages, free_sums=True)
        low = max(low, graph.period_floor_ns)
        if may_reach(graph, low):
            return low
        found = smallest(lambda period: may_reach(graph, period) or None, low + 1, max(low + 1, graph.path_ns))
        return None if found is None else found[0]

    @property
    def _own_times(self) -> bool:
        return self.problem.platform.devices[0].times is not None

    def _fresh(self, used: set[int]) -> Iterator[tuple[int, ...]]:
        """Yield the groups of devices that are left, of those that are alike the first alone.

        In which order they take microbatches matters where they are in several units, or send by several links.
        """
        left = [d for d in range(self._devices) if d not in used]
        seen = set()
        for size in range(1, (len(left) if self.problem.replicas else 1) + 1):
            for some in combinations(left, size):
                several = len({self._places[d] for d in some}) > 1
                for group in permutations(some) if several else (some,):
                    look = tuple((self.problem.platform.devices[d], self._places[d]) for d in group)
                    if look not in seen:
                        seen.add(look)
                        yield group

    def _menu(self, start: int, stop: int) -> list[tuple[int, Segments]]:
        """Return the segments that may be recomputed, with their time, of those that another betters in all none."""
        if (start, stop) not in self._menus:
            chain, policy = self.problem.chain, self.problem.policy
            rated = []
            for choice in self._choices(start, stop):
                kept, peak, cost = memory_model.stage_activations(policy, chain, start, stop, choice)
                rated.append((cost, kept, peak, choice))
            best: list[tuple[int, int, int, Segments]] = []
            for one in sorted(rated):
                if not any(x[1] <= one[1] and x[2] <= one[2] and self._cheaper(x[3], one[3]) for x in best):
                    best.append(one)
            self._menus[start, stop] = [(0 if self._own_times else one[0], one[3]) for one in best]
        return self._menus[start, stop]

    def _cheaper(self, one: Segments, other: Segments) -> bool:
        """Whether the first of two choices takes no longer on any device, where it doesn't by the chain's times."""
        again = ({i for a, b in choice for i in range(a, b)} for choice in (one, other))
        return not self._own_times or next(again) <= next(again)

    def _choices(self, start: int, stop: int) -> Iterator[Segments]:
        yield ()
        if self.problem.checkpointing == "stages":
            yield ((start, stop),)
        elif self.problem.checkpointing == "segments":
            yield from _segments(start, stop)


def _segments(start: int, stop: int) -> Iterator[Segments]:
    """Yield every non-empty choice of segments between ``start`` and ``stop``."""
    for first in range(start, stop):
        for last in range(first + 1, stop + 1):
            yield ((first, last),)
            for rest in _segments(last, stop):
                yield ((first, last), *rest)
