"""Brute force for patterns and MadPipe's dynamic program: the truth on small instances, straight from the definitions.

Nothing here shares a line with the searches it checks; only stage costs and the judge's memory count come from the
package.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise, product
from math import ceil, lcm

from pipeplan.cost import memory_model, time_model
from pipeplan.cost.saved import saved_bytes
from pipeplan.cost.stage_graph import StageGraph
from pipeplan.problem import Problem
from pipeplan.schedule.pattern import memory_fits, most_in_flight


def pattern_starts(graph: StageGraph, period: int) -> list[int] | None:
    """Return the starts of some valid pattern of ``period``, or None when there is none.

    Integer starts suffice: for a fixed order the rules are differences with integer bounds. No operation needs to wait
    for as long as the least common multiple of the resources' periods: all after it could run that much earlier.
    """
    if any(stage.sync_period_ns > period for stage in graph.stages):
        return None
    operations = graph.operations
    steps = [graph.resources[op.resource].replicas * period for op in operations]
    loads = [0] * len(graph.resources)
    for op in operations:
        loads[op.resource] += op.duration_ns
    if any(load > resource.replicas * period for load, resource in zip(loads, graph.resources, strict=True)):
        return None
    longest_wait = lcm(*steps)
    rest = [sum(op.duration_ns for op in operations[v:]) for v in range(len(operations) + 1)]
    limit = graph.policy.accumulate if graph.policy.weights == "2bw" else None
    fixed = [0] * len(graph.resources)
    for stage in graph.stages:
        weights = memory_model.weights_bytes(graph.policy, stage.weight_bytes, stage.parameters, 1)
        fixed[stage.resource] += weights + stage.waiting_bytes + stage.buffer_bytes
    starts: list[int] = []

    def hopeless(end: int) -> bool:
        """Whether too much is held even if, from ``end`` on, nothing waits any more."""
        placed = len(starts)
        if limit is not None and end + rest[placed] > limit * period:
            return True
        forwards = [(s, starts[at]) for s in range(len(graph.stages)) if (at := graph.position["F", s]) < placed]
        ends = {}
        for s, _ in forwards:
            at = graph.position["B", s]
            begin = starts[at] if at < placed else end + rest[placed] - rest[at]
            ends[s] = begin + operations[at].duration_ns
        for s, now in forwards:
            resource = graph.stages[s].resource
            step = graph.resources[resource].replicas * period
            held = fixed[resource]
            for q, begin in forwards:
                if graph.stages[q].resource == resource:
                    held += ((now - begin) // step - (now - ends[q]) // step) * graph.stages[q].kept_bytes
            if held > (graph.resources[resource].memory_bytes or 0):
                return True
        return False

    def place(v: int, ready: int) -> bool:
        if v == len(operations):
            return memory_fits(graph, starts, period)
        step, duration = steps[v], operations[v].duration_ns
        rivals = [u for u in range(v) if operations[u].resource == operations[v].resource]
        for start in range(ready, ready + (longest_wait if v else 1)):
            if all(operations[u].duration_ns <= (start - starts[u]) % step <= step - duration for u in rivals):
                starts.append(start)
                if not hopeless(start + duration) and place(v + 1, start + duration):
                    return True
                starts.pop()
        return False

    if not place(0, 0):
        return None
    assert limit is None or most_in_flight(graph, starts, period) <= limit
    return starts


# --- MadPipe's dynamic program --------------------------------------------------------------------------------------


def one_special_claim(problem: Problem, charge: str, split: bool) -> int | None:
    """Return the smallest period that MadPipe's rules grant to any allocation with one special device, or None.

    Every cut of the chain and every choice of special stages; devices are equal.
    """
    layers, devices = len(problem.chain), len(problem.platform)
    longest = _longest(problem)
    best: int | None = None
    for stages in special_stages(layers, devices, split):
        if not _granted(problem, stages, longest if best is None else best - 1, charge):
            continue
        low, high = 1, longest if best is None else best - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _granted(problem, stages, middle, charge) else (middle + 1, high)
        best = low
    return best


def special_stages(layers: int, devices: int, split: bool) -> Iterator[tuple[tuple[int, int, bool], ...]]:
    """Yield every list of (start, stop, whether special) with at most ``devices`` - 1 others."""
    for choice in product((False, True), repeat=layers - 1):
        cuts = [0, *(i for i, cut in enumerate(choice, 1) if cut), layers]
        for special in product((False, True), repeat=len(cuts) - 1):
            neighbours = any(one and other for one, other in pairwise(special))
            if special.count(False) < devices and (split or not neighbours):
                yield tuple((i, j, x) for (i, j), x in zip(pairwise(cuts), special, strict=True))


def _longest(problem: Problem) -> int:
    total = sum(
        time_model.Passes(problem.chain, problem.policy, i, i + 1).forward_ns + _backward(problem, i, i + 1)
        for i in range(len(problem.chain))
    )
    return total + sum(2 * problem.platform.transfer_ns(size, 0) for size in problem.chain.cut_bytes[1:-1])


def _backward(problem: Problem, start: int, stop: int) -> int:
    return int(time_model.Passes(problem.chain, problem.policy, start, stop).backward_ns())


def _granted(problem: Problem, stages: tuple[tuple[int, int, bool], ...], period: int, charge: str) -> bool:
    """Whether MadPipe's rules grant ``period`` to ``stages``, walking from the last one to the first."""
    chain, platform, policy = problem.chain, problem.platform, problem.policy
    memory = platform.devices[0].memory_bytes
    delay, special_work, special_bytes, first = 0, 0, 0, None
    for s in reversed(range(len(stages))):
        start, stop, special = stages[s]
        work = time_model.Passes(chain, problem.policy, start, stop).forward_ns + _backward(problem, start, stop)
        if work == 0:
            return False
        delay = _plus(delay, work, period)
        group = ceil(Fraction(delay, period))
        if policy.weights == "2bw" and policy.accumulate is not None and group > policy.accumulate:
            return False
        size = int(chain.sums.weight_bytes[stop] - chain.sums.weight_bytes[start])
        parameters = int(chain.sums.parameters[stop] - chain.sums.parameters[start])
        held = int(memory_model.weights_bytes(policy, size, parameters, group))
        for neighbour, cut in ((s - 1, start), (s + 1, stop)):
            if 0 <= neighbour < len(stages) and not (
                special and stages[neighbour][2] and stages[neighbour] != stages[s]
            ):
                held += 2 * chain.cut_bytes[cut]
        if special:
            charged = {"paper": group - 1, "full": group, "tight": group if first is None else max(first, group - 1)}
            first = first or group
            special_work += work
            special_bytes += held + charged[charge] * saved_bytes(chain, start, stop)
        elif work > period or held + group * saved_bytes(chain, start, stop) > memory:
            return False
        if s > 0 and not (special and stages[s - 1][2]):
            transfer = platform.transfer_ns(chain.cut_bytes[start], 0)
            if transfer * (1 if platform.full_duplex else 2) > period:
                return False
            delay = delay + 2 * transfer if platform.full_duplex else _plus(delay, 2 * transfer, period)
    return special_work <= period and special_bytes <= memory


def _plus(delay: int, work: int, period: int) -> int:
    """The definition of (+) in exact fractions."""
    full = ceil(Fraction(delay, period))
    return delay + work if ceil(Fraction(delay + work, period)) == full else full * period + work
