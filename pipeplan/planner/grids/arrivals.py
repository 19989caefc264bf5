"""How long does a batch take message-driven, and what do devices hold meanwhile? In a few operations for each step.

What ``simulate`` finds for the program of ``message_driven``, for searches that try thousands of splits; the tests hold
the two to the same times, counts and bytes, and what a search keeps is simulated there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ...cost.stage_graph import StageGraph, stage_graph, updates_end_ns
from ...deadline import NEVER, Deadline
from ...integers import ceil_div
from ...plan import Stage
from ...problem import Platform, Problem


@dataclass(frozen=True, slots=True)
class BatchTime:
    """A batch on a grid: its time with all-reduces, and by stage the microbatches held and the bytes too many.

    ``exact`` tells whether the whole batch was simulated; ``steps`` is the simulation's effort.
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


def batch_time(
    problem: Problem, stages: Sequence[Stage], microbatches: int, limit: int, *, whole: bool = True, rounds: int = 4
) -> BatchTime:
    """Return how the grid that ``stages`` make runs a batch of ``microbatches`` microbatches for each pipeline.

    Message-driven, at most ``limit`` microbatches in a pipeline. One pipeline is simulated for all, unless they share
    links: ``whole``, or of a long batch rounds * limit microbatches (at least 32), and the rest goes on at the pace of
    their middle.
    """
    graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
    count = microbatches if whole else min(microbatches, max(32, rounds * limit))
    pipelines = graph.resources[0].replicas
    alone = all(resource.replicas == pipelines for resource in graph.resources)
    each = 1 if alone else pipelines
    run = _PipelineRun(graph, count * each, limit * each, problem.deadline, alone=alone)
    rest = 0
    if count < microbatches:
        first, window = count // 4, count // 2
        took = run.left[(first + window) * each] - run.left[first * each]
        rest = ceil_div(took * (microbatches - count), window)
    over = []
    for stage in graph.stages:
        memory = graph.resources[stage.resource].memory_bytes
        assert memory is not None, "links have no stages"
        over.append(max(map(run.peak_bytes, run.lanes[stage.resource])) - memory)
    held = tuple(max(most) for most in run.most)
    steps = count * each * len(graph.operations)
    return BatchTime(updates_end_ns(graph, run.done) + rest, held, tuple(over), steps, count == microbatches)


def batch_on(
    graph: StageGraph, platform: Platform, microbatches: int, limit: int, deadline: Deadline = NEVER
) -> tuple[int, int]:
    """Return the time of a batch of ``microbatches`` in all on any stages, and the bytes that it needs too many.

    The latter are of the device that lacks most, negative where all have room; ``limit`` counts for each replica of the
    first stage.
    """
    run = _PipelineRun(graph, microbatches, limit * graph.resources[graph.stages[0].resource].replicas, deadline)
    over = (
        run.peak_bytes(lane) - platform.devices[device].memory_bytes
        for resource, lanes in zip(graph.resources, run.lanes, strict=True)
        if not resource.is_link
        for device, lane in zip(resource.devices, lanes, strict=True)
    )
    return updates_end_ns(graph, run.done), max(over)


class _PipelineRun:
    """One simulation. Lanes are the devices in order, then the links; ``lanes`` lists those of each resource.

    What a lane may run next waits in two queues: what no message brings (the first stage's forwards, the last one's
    backwards) goes first. ``left``: when each microbatch has left; ``done``: when each stage's last backward has ended;
    ``most``: by stage and replica the most microbatches held. ``alone``: only those of the first replicas run.
    """

    def __init__(
        self, graph: StageGraph, microbatches: int, limit: int, deadline: Deadline, *, alone: bool = False
    ) -> None:
        self.graph, self.deadline = graph, deadline
        self.lanes = _lanes(graph, microbatches, alone)
        self.left = [0] * microbatches
        self.done = [0] * len(graph.stages)
        self.most = [[0] * len(self.lanes[stage.resource]) for stage in graph.stages]
        self._activations = [0] * sum(map(len, self.lanes))  # most bytes held, by lane
        self._simulate(microbatches, limit)

    def peak_bytes(self, lane: int) -> int:
        """Return what the device of a lane holds at most: weights, buffers and activations."""
        graph, total = self.graph, self._activations[lane]
        for s, stage in enumerate(graph.stages):
            if lane in self.lanes[stage.resource]:
                most = self.most[s][self.lanes[stage.resource].index(lane)]
                total += graph.weights_bytes(s, graph.versions(s, most, most)) + stage.buffer_bytes
        return total

    def _simulate(self, microbatches: int, limit: int) -> None:
        graph, peak, left, done = self.graph, self._activations, self.left, self.done
        length, half, last = len(graph.operations), len(graph.round_trips), len(graph.stages) - 1
        free, bytes_held = [0] * len(peak), [0] * len(peak)
        held = [[0] * len(most) for most in self.most]
        inline: list[list[tuple[int, bool, int, int]]] = [[] for _ in free]  # (arrival, ahead, microbatch, position)
        others: list[list[tuple[int, bool, int, int]]] = [[] for _ in free]
        path = []  # of each position: lanes, duration, queues, whether it goes before backwards, its stage if computed
        for position, op in enumerate(graph.operations):
            is_link, ahead = graph.resources[op.resource].is_link, position < half
            queues = inline if not is_link and op.stage == (0 if ahead else last) else others
            stage_of = -1 if is_link else op.stage
            path.append((self.lanes[op.resource], op.duration_ns, queues, ahead and not is_link, stage_of))
        entry, _, queues, ahead, _ = path[0]
        for m in range(min(limit, microbatches)):
            heappush(queues[entry[m % len(entry)]], (0, ahead, m, 0))
        events = sorted((0, lane) for lane in entry)
        while events:
            self.deadline.check()
            now, lane = heappop(events)
            if free[lane] > now:
                continue
            queue = inline[lane]
            if not queue or queue[0][0] > now:
                queue = others[lane]
                if not queue or queue[0][0] > now:
                    continue
            _, _, m, position = heappop(queue)
            lanes, duration, _, _, s = path[position]
            free[lane] = end = now + duration
            heappush(events, (end, lane))
            if s >= 0:
                stage, replica, counts = graph.stages[s], m % len(lanes), held[s]
                if position < half:
                    counts[replica] += 1
                    self.most[s][replica] = max(self.most[s][replica], counts[replica])
                    bytes_held[lane] += stage.kept_bytes
                    peak[lane] = max(peak[lane], bytes_held[lane])
                else:
                    peak[lane] = max(peak[lane], bytes_held[lane] + stage.peak_bytes - stage.kept_bytes)
                    counts[replica] -= 1
                    bytes_held[lane] -= stage.kept_bytes
                    done[s] = max(done[s], end)
            position += 1
            if position < length:
                lanes, _, queues, ahead, _ = path[position]
                lane = lanes[m % len(lanes)]
                heappush(queues[lane], (end, ahead, m, position))
                heappush(events, (end, lane))
            else:
                left[m] = end
                if m + limit < microbatches:
                    _, _, queues, ahead, _ = path[0]
                    heappush(queues[lane], (end, ahead, m + limit, 0))


def _lanes(graph: StageGraph, microbatches: int, alone: bool) -> list[list[int]]:
    """Return the lanes of each resource: one when ``alone``, else of each device, and of each link with work."""
    widths = [
        1 if alone else min(resource.replicas, microbatches) if resource.is_link else resource.replicas
        for resource in graph.resources
    ]
    order = sorted(
        (resource.is_link, -1 if resource.is_link else resource.devices[replica], index, replica)
        for index, (resource, width) in enumerate(zip(graph.resources, widths, strict=True))
        for replica in range(width)
    )
    lanes = [[0] * width for width in widths]
    for lane, (_, _, index, replica) in enumerate(order):
        lanes[index][replica] = lane
    return lanes
