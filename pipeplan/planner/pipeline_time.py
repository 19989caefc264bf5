"""How long a batch takes on a grid of equal message-driven pipelines, in a few operations for each step.

What ``simulate`` finds for the program of ``message_driven``, for searches that try thousands of splits; the tests hold
the two to the same times, counts and bytes, and what a search keeps is simulated there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ...cost import memory_model
from ...cost.stage_graph import StageGraph, stage_graph, updates_end_ns
from ...plan import Stage
from ...problem import Problem


@dataclass(frozen=True, slots=True)
class Drained:
    """A batch on a grid: its time with all-reduces, and by stage the microbatches held and the bytes too many.

    ``exact`` tells whether every step was simulated; ``steps`` is the simulation's effort.
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


def drained(
    problem: Problem, stages: Sequence[Stage], microbatches: int, limit: int, *, whole: bool = True, rounds: int = 4
) -> Drained:
    """Return how the grid that ``stages`` make runs a batch of ``microbatches`` microbatches for each pipeline.

    Message-driven, at most ``limit`` microbatches in a pipeline. ``whole``: every step of every pipeline is simulated.
    Else the pipelines are taken to run alike: they come to the links that they share at the same time, so the last one
    waits for all others, and its transfers last as many times as long as there are pipelines (up to 5% too slow). Of
    a long batch rounds * limit microbatches are simulated then (at least 32), and the rest goes on at the pace of their
    middle.
    """
    graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
    pipelines = graph.resources[0].replicas
    if whole:
        count, run = microbatches, _Run(graph, pipelines, microbatches * pipelines, limit * pipelines, 1)
    else:
        count = min(microbatches, max(32, rounds * limit))
        run = _Run(graph, 1, count, limit, pipelines)
    rest = 0
    if count < microbatches:
        first, window = count // 4, count // 2
        rest = -(-(run.left[first + window] - run.left[first]) * (microbatches - count) // window)
    over, done, width = [], [], 1 if not whole else pipelines
    for s, stage in enumerate(graph.stages):
        lanes = slice(s * width, (s + 1) * width)
        weights = memory_model.weights_bytes(graph.policy, stage.weight_bytes, stage.parameters, max(run.most[lanes]))
        memory = graph.resources[stage.resource].memory_bytes
        assert memory is not None, "links have no stages"
        over.append(weights + stage.buffer_bytes + max(run.peak[lanes]) - memory)
        done.append(max(run.free[lanes]))
    held = tuple(max(run.most[s * width : (s + 1) * width]) for s in range(len(graph.stages)))
    steps = count * width * len(graph.operations)
    exact = whole or (pipelines == 1 and count == microbatches)
    return Drained(updates_end_ns(graph, done) + rest, held, tuple(over), steps, exact)


class _Run:
    """One simulation. Lanes are the devices, stage by stage, then the links; each has a queue for either direction.

    ``free``: when each lane has done everything; ``left``: when each microbatch has left; ``most``, ``peak``: by device
    the most microbatches and activation bytes held. Transfers last ``slower`` times as long as in ``graph``.
    """

    def __init__(self, graph: StageGraph, pipelines: int, microbatches: int, limit: int, slower: int) -> None:
        count = len(graph.stages)
        devices = count * pipelines
        length, half = len(graph.operations), len(graph.operations) // 2
        links: dict[int, int] = {}
        bases, widths, durations = [], [], []  # the lane of a position: base + microbatch % width
        for op in graph.operations:
            is_link = graph.resources[op.resource].is_link
            bases.append(links.setdefault(op.resource, devices + len(links)) if is_link else op.stage * pipelines)
            widths.append(1 if is_link else pipelines)
            durations.append(op.duration_ns * slower if is_link else op.duration_ns)
        kept = [stage.kept_bytes for stage in graph.stages for _ in range(pipelines)]
        transient = [stage.peak_bytes - stage.kept_bytes for stage in graph.stages for _ in range(pipelines)]
        self.free = free = [0] * (devices + len(links))
        self.left = left = [0] * microbatches
        self.most, self.peak = most, peak = [0] * devices, [0] * devices
        held = [0] * devices
        last = devices - pipelines  # the first device of the last stage
        ahead: list[list[tuple[int, int, int]]] = [[] for _ in free]  # forwards: (arrival, microbatch, position)
        back: list[list[tuple[int, int, int]]] = [[] for _ in free]
        for m in range(min(limit, microbatches)):
            ahead[m % pipelines].append((0, m, 0))
        events = [(0, lane) for lane in range(pipelines)]
        while events:
            now, lane = heappop(events)
            if free[lane] > now:
                continue
            forwards, backwards = ahead[lane], back[lane]
            if forwards and forwards[0][0] <= now:
                if not backwards or backwards[0][0] > now:
                    goes_ahead = True
                elif lane >= devices:  # links carry what came first
                    goes_ahead = forwards[0] < backwards[0]
                elif count > 1 and (lane < pipelines or lane >= last):  # what no message brings follows at once
                    goes_ahead = lane < pipelines
                else:
                    goes_ahead = forwards[0][0] < backwards[0][0]
            elif backwards and backwards[0][0] <= now:
                goes_ahead = False
            else:
                continue
            _, m, position = heappop(forwards if goes_ahead else backwards)
            end = now + durations[position]
            free[lane] = end
            heappush(events, (end, lane))
            if lane < devices:
                if goes_ahead:
                    held[lane] += 1
                    most[lane] = max(most[lane], held[lane])
                    peak[lane] = max(peak[lane], held[lane] * kept[lane])
                else:
                    peak[lane] = max(peak[lane], held[lane] * kept[lane] + transient[lane])
                    held[lane] -= 1
            position += 1
            if position < length:
                lane = bases[position] + m % widths[position]
                heappush((ahead if position < half else back)[lane], (end, m, position))
                heappush(events, (end, lane))
            else:
                left[m] = end
                if m + limit < microbatches:
                    heappush(ahead[lane], (end, m + limit, 0))
