"""How long a batch takes on a grid of equal message-driven pipelines: one of them simulated, in a few operations a step.

What ``simulate`` finds for the program of ``message_driven`` on one pipeline, for searches that try thousands; the tests
hold the two to the same times, counts and bytes, and what is kept of a search is simulated there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from . import costs
from .plan import Stage
from .problem import Problem
from .stages import StageGraph, stage_graph


@dataclass(frozen=True, slots=True)
class Drained:
    """A batch on one pipeline: its time with all-reduces, and by stage the microbatches held and the bytes too many.

    ``exact`` tells whether every microbatch was simulated; ``steps`` is the simulation's effort.
    """

    batch_ns: int
    in_flight: tuple[int, ...]
    over_bytes: tuple[int, ...]
    steps: int
    exact: bool

    @property
    def fits(self) -> bool:
        """Whether every stage stays within its memory."""
        return max(self.over_bytes) <= 0


def drained(problem: Problem, stages: Sequence[Stage], microbatches: int, limit: int, rounds: int = 8) -> Drained:
    """Return how one pipeline of the grid that ``stages`` make runs ``microbatches`` microbatches, message-driven.

    The pipelines run alike. They share the link between two stages and come to it at the same time, so that the last
    waits for all others: its transfers last as many times as long as there are pipelines. Of a long batch the first
    rounds * limit microbatches are simulated (at least 32), and the rest goes on at the pace of their middle.
    """
    graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
    count = min(microbatches, max(32, rounds * limit))
    run = _Run(graph, count, limit)
    rest = 0
    if count < microbatches:
        first, window = count // 4, count // 2
        rest = -(-(run.left[first + window] - run.left[first]) * (microbatches - count) // window)
    over = []
    for stage, held, activations in zip(graph.stages, run.most, run.peak, strict=True):
        weights = costs.weights_bytes(graph.policy, stage.weight_bytes, stage.parameters, max(1, held))
        memory = graph.resources[stage.resource].memory_bytes
        assert memory is not None, "links have no stages"
        over.append(weights + stage.buffer_bytes + activations - memory)
    batch = max(
        free + stage.sync_period_ns * stage.update_interval for free, stage in zip(run.free, graph.stages, strict=False)
    )
    return Drained(batch + rest, tuple(run.most), tuple(over), count * len(graph.operations), count == microbatches)


class _Run:
    """One simulation. Lanes are the stages in order, then the links; each has a queue for either direction.

    ``free``: when each lane has done everything; ``left``: when each microbatch has left; ``most``, ``peak``: by stage
    the most microbatches and activation bytes held.
    """

    def __init__(self, graph: StageGraph, microbatches: int, limit: int) -> None:
        pipelines, count = graph.resources[0].replicas, len(graph.stages)
        length, half = len(graph.operations), len(graph.operations) // 2
        link_lanes: dict[int, int] = {}
        lanes, durations = [], []
        for op in graph.operations:
            is_link = graph.resources[op.resource].is_link
            lanes.append(link_lanes.setdefault(op.resource, count + len(link_lanes)) if is_link else op.stage)
            durations.append(op.duration_ns * pipelines if is_link else op.duration_ns)
        kept = [stage.kept_bytes for stage in graph.stages]
        transient = [stage.peak_bytes - stage.kept_bytes for stage in graph.stages]
        self.free = free = [0] * (count + len(link_lanes))
        self.left = left = [0] * microbatches
        self.most, self.peak = most, peak = [0] * count, [0] * count
        held = [0] * count
        ahead: list[deque[tuple[int, int, int]]] = [deque() for _ in free]  # forwards: (arrival, microbatch, position)
        back: list[deque[tuple[int, int, int]]] = [deque() for _ in free]
        ahead[0].extend((0, m, 0) for m in range(min(limit, microbatches)))
        events = [(0, 0)]
        while events:
            now, lane = heappop(events)
            if free[lane] > now:
                continue
            forwards, backwards = ahead[lane], back[lane]
            can_forward = bool(forwards) and forwards[0][0] <= now
            can_back = bool(backwards) and backwards[0][0] <= now
            if can_forward and can_back:
                if lane >= count:  # links carry what came first
                    ahead_first = forwards[0] < backwards[0]
                elif (lane == 0) != (lane == count - 1):  # what no message brings follows at once
                    ahead_first = lane == 0
                else:
                    ahead_first = forwards[0][0] < backwards[0][0]
            elif can_forward or can_back:
                ahead_first = can_forward
            else:
                continue
            _, m, position = (forwards if ahead_first else backwards).popleft()
            end = now + durations[position]
            free[lane] = end
            heappush(events, (end, lane))
            if lane < count:
                if ahead_first:
                    held[lane] += 1
                    most[lane] = max(most[lane], held[lane])
                    peak[lane] = max(peak[lane], held[lane] * kept[lane])
                else:
                    peak[lane] = max(peak[lane], held[lane] * kept[lane] + transient[lane])
                    held[lane] -= 1
            following = position + 1
            if following < length:
                lane = lanes[following]
                (ahead if following < half else back)[lane].append((end, m, following))
                heappush(events, (end, lane))
            else:
                left[m] = end
                if m + limit < microbatches:
                    ahead[0].append((end, m + limit, 0))
