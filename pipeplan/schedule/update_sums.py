"""How long does a microbatch take where updates wait for the sums of replicas' gradients, while nothing drains?

A pattern leaves room for the load of sums, but says of no update when it comes. With ``stash`` and ``latest`` a
stage's replicas stop at every update until their sum is over; under 2bw, where a second gradient has room, the passes
of a round hide it. So an update of k microbatches takes a stage of r replicas k / r times its work and a sum, at least.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import replace
from math import lcm

from ..cost.stage_graph import StageGraph
from ..integers import ceil_div
from ..plan import Pattern
from .pattern import most_in_flight, starts_of
from .program import Program, Step, Sum, unroll
from .simulate import simulate

MOST_STEPS = 2**16  # that are simulated to find a period


def waiting_floor_ns(graph: StageGraph, beside: Collection[int] = ()) -> int:
    """Return the least period (ns) with which the work and the sums of a stage can keep up, but for those that sum
    ``beside`` passes: load / replicas + sum / interval."""
    least = 0
    for s in graph.summing:
        if s not in beside:
            at = graph.stages[s].resource
            load = sum(graph.operations[i].duration_ns for i in graph.on_resource[at])
            least = max(least, ceil_div(load, graph.resources[at].replicas) + graph.stages[s].sync_period_ns)
    return least


def interval_of(graph: StageGraph) -> int:
    """Return the microbatches between two updates: each replica of a stage has one."""
    return graph.policy.update_interval(max(resource.replicas for resource in graph.resources))


def with_sums(program: Program, pattern: Pattern, beside: Collection[int]) -> Program:
    """Return a program that runs ``pattern`` with its updates' sums.

    Of an update's last backward the pattern says which passes of the other replicas come behind it: these wait, but
    for stages that sum ``beside`` passes, where the forwards of the next mini-batch but one do.
    """
    graph, starts = program.graph, starts_of(pattern)
    interval, found = interval_of(graph), list[Sum]()

    def when(step: Step) -> tuple[int, int, Step]:
        start = starts[step.position] + step.microbatch * pattern.period_ns
        return start, graph.operations[step.position].duration_ns, step

    for s in graph.summing:
        resource = graph.resources[graph.stages[s].resource]
        lanes = [lane.steps for lane in program.lanes if lane.device in resource.devices]
        backward, forward = graph.position["B", s], graph.position["F", s]
        for end in range(interval, program.microbatches + 1, interval):
            after = tuple(Step(m, backward) for m in range(end - resource.replicas, end))
            if s in beside:
                first = range(end + interval, min(end + interval + resource.replicas, program.microbatches))
                before = tuple(Step(m, forward) for m in first)
            else:
                places = [(steps, bisect_right(steps, when(after[-1]), key=when)) for steps in lanes]
                before = tuple(steps[place] for steps, place in places if place < len(steps))
            found.append(Sum(graph.stages[s].sync_period_ns * interval, after, before))
    return replace(program, sums=tuple(found))


def shown_with_sums(graph: StageGraph, pattern: Pattern) -> int | None:
    """Return how many microbatches show the period with sums; None where none is waited for, or it takes too many."""
    if not graph.summing:
        return None
    again = lcm(interval_of(graph), *(resource.replicas for resource in graph.resources))  # all is as it was
    held = most_in_flight(graph, starts_of(pattern), pattern.period_ns)
    count = ceil_div(3 * held, again) * again + 3 * again + held
    return count if count * len(graph.operations) <= MOST_STEPS else None


def summed_period_ns(graph: StageGraph, pattern: Pattern, beside: Collection[int]) -> int:
    """Return the time per microbatch (ns) of ``pattern`` with its updates' sums: as simulated, or where that takes
    long what each stage needs at least."""
    floor = max(pattern.period_ns, waiting_floor_ns(graph, beside))
    count = shown_with_sums(graph, pattern)
    if count is None:
        return floor
    reached = simulate(with_sums(unroll(graph, pattern, count), pattern, beside)).steady_period_ns()
    assert reached is not None, "so many microbatches have a middle"
    return max(floor, -int(-reached // 1))
