"""How soon can a mini-batch be over on equal pipelines with several stages of whole units on each GPU?

Stages are taken apart: one of n units has the least work, and holds the least, of any n units that it can be. What is
left is how many units each stage has, looked at in all ways for one GPU, and put together over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from ....cost import memory_model, time_model
from ....integers import Ints, ceil_div
from ....partition.blocks import Pipe
from ....plan import ScheduleKind
from ....problem import Problem
from ....schedule.occupancy import held_at_first
from ....schedule.programs.interleaved import occupancy
from ...targets import Shape
from .tables import NEVER

IMPOSSIBLE_NS = 2**62
_MOST = 2 * 10**6  # ways to have so many units in each of its stages, of one GPU, that are looked at one by one


def looped_bound(pipes: Iterable[tuple[str, Callable[[], Pipe]]], shape: Shape) -> int:
    """Return a time (ns) below which no interleaved stages of a shape run a mini-batch, whichever of ``pipes`` they
    are: the rule of what they recompute, and what makes them, of each rule with more and more work.

    Rank r begins when the first microbatch has come through the stages before its first one, of a unit at least
    each, and has done M microbatches in all its stages before the last goes back through those. Summed over p
    ranks, p times the makespan is at least M times the work of all stages and what is before each of them. And the
    sums of a rank's gradients begin when the first of its stages is over, with the passes that its order then has
    left. The last rank has the last unit, and one more in each other stage at least. That is with the least
    recomputation under which whole units fit the memory of the ranks, as they hold them when each has most.
    """
    least: int | None = None
    enough: str | None = None  # a rule whose other ways take no less, whatever the memory
    for rule, make in pipes:
        if rule == enough:
            continue
        pipe = make()
        problem, count = pipe.tables.problem, pipe.microbatches
        problem.deadline.check()
        have = occupancy(shape.ranks, shape.chunks, count)
        shared, steps, sums = _shared(problem, shape)
        before = pipe.before[: shape.ranks]
        work = pipe.least_sum(pipe.times)
        if work is None:
            continue  # no stages of the shape have whole units
        if least is not None and ceil_div(count * work + sum(before) - steps, shape.ranks) >= least:
            enough = rule
            continue
        dealt = least_dealt(pipe, have.all, before, shared, steps)
        if dealt is None:
            continue
        summed = pipe.least_sum(pipe.summing(have.left))
        assert summed is not None, "there is one"
        total = max(count * max(work, dealt.work) + sum(before), summed - sums) - steps
        last = count * pipe.last_ns(shape.chunks) - steps + before[-1]
        total = max(ceil_div(total, shape.ranks), last, dealt.longest)
        least = total if least is None else min(least, total)
    return IMPOSSIBLE_NS if least is None else least


def split_bound(pipe: Pipe, kind: ScheduleKind, shape: Shape) -> int:
    """Return a time (ns) below which no stages of a shape run a mini-batch under a kind with split backwards.

    Rank r begins with its first forward and has the passes of whole units, as many as fit its memory when its first
    backward begins: forwards and backwards have a fixed order, and no weight part comes before.
    """
    shared, steps, _ = _shared(pipe.tables.problem, shape)
    before = pipe.arrivals[: shape.ranks]
    dealt = least_dealt(pipe, held_at_first(kind, shape.ranks, shape.chunks, pipe.microbatches), before, shared, steps)
    if dealt is None:
        return IMPOSSIBLE_NS
    return max(ceil_div(pipe.microbatches * dealt.work + sum(before) - steps, shape.ranks), dealt.longest)


def _shared(problem: Problem, shape: Shape) -> tuple[int, int, int]:
    """Return the bytes, steps (ns) of a mini-batch and sums (ns) of weights of several layers, which one GPU may have
    once."""
    policy, groups, replicas = problem.policy, shape.groups(), shape.pipelines
    paths = {problem.platform.paths[problem.platform.level_of(group)] for group in groups}
    count = (policy.accumulate or 1) // replicas
    size = steps = sums = 0
    for n, x in enumerate(problem.chain.sums.shared):
        more = int(x.holders[-1]) - 1
        size += more * int(memory_model.weights_bytes(policy, x.weight_bytes, x.parameters, 1))
        steps += more * count * max(_step_share_ns(problem, n, group) for group in set(groups))
        gradient = int(memory_model.gradient_bytes(policy, x.weight_bytes, x.parameters))
        sums += more * max(int(time_model.ring_all_reduce_ns(gradient, replicas, *path)) for path in paths)
    return size, steps, sums


def _step_share_ns(problem: Problem, shared: int, group: tuple[int, ...]) -> int:
    """Return what a microbatch's backward on a group is charged at most of a step of weights that layers share."""
    device, policy, replicas = problem.platform.slowest(group), problem.policy, len(group)
    step_ns = problem.chain.timed(device.times).sums.shared[shared].optimizer_ns
    share = time_model.update_share_ns(policy, step_ns, replicas, policy.sharers(replicas))
    return int(time_model.scaled(share, device.speed))


@dataclass(frozen=True, slots=True)
class Dealt:
    """The least ``work`` (ns) of a microbatch on all GPUs, and of a mini-batch, with what comes before it, on the one
    that takes ``longest``."""

    work: int
    longest: int


def least_dealt(
    pipe: Pipe, held: Sequence[int], before: Sequence[int], shared_bytes: int, shared_ns: int
) -> Dealt | None:
    """Return what the stages of a pipeline on the same GPUs take at least, None where they fit in no way.

    At an instant stage s is ``held`` so often at least. No GPU begins earlier than ``before`` says, by the order in
    which they have their first stages. Of each GPU's memory and time layers may share so much.
    """
    count = len(pipe.groups)
    pairs = zip(pipe.times, pipe.holding(held), strict=True)
    least = [tuple(least_of(table, s, count) for table in pair) for s, pair in enumerate(pairs)]
    platform = pipe.tables.problem.platform
    works = []
    for group in dict.fromkeys(pipe.groups):
        own = [(work, size, size) for s, (work, size) in enumerate(least) if pipe.groups[s] == group]
        found = of_one(own, platform.slowest(group).memory_bytes + shared_bytes)
        works.append(np.where(found < NEVER, found * pipe.microbatches, NEVER))
    among = deal(works, before, shared_ns)
    return None if among is None else replace(among, work=among.work // pipe.microbatches)


def deal(works: Sequence[Ints], before: Sequence[int], shared_ns: int) -> Dealt | None:
    """Return what GPUs take at least of which ``works`` say so by the units of each; None where they cannot have all.

    None begins before what ``before`` says; of its time so much may be ``shared_ns``.
    """
    total = works[0]
    for other in works[1:]:
        total = _joined(total, other)
    if total[-1] >= NEVER:
        return None
    ends = [
        np.where(table < NEVER, table + early - shared_ns, NEVER) for table, early in zip(works, before, strict=True)
    ]
    return Dealt(int(total[-1]), _least_longest(ends))


def least_of(table: Ints, stage: int, stages: int) -> Ints:
    """Return the least of ``table``, of shape (cuts, cuts), by the number of units of a stage, which leaves one at
    least to each of the others; the first has the first unit, the last the last."""
    last, behind = len(table) - 1, stages - 1 - stage
    found = np.full(last + 1, NEVER, dtype=np.int64)
    for count in range(1, last + 1):
        first = last - count if not behind else stage
        final = 0 if not stage else last - behind - count
        if first <= final:
            starts = np.arange(first, final + 1)
            found[count] = min(NEVER, int(table[starts, starts + count].min()))
    return found


def of_one(stages: Sequence[tuple[Ints, Ints, Ints]], room: int, price: float = 0.0) -> Ints:
    """Return the least work of a GPU's ``stages``, by the units in all of them.

    Of each stage its work, what it keeps, and what it must keep, in bytes, by its units. For each byte that it keeps
    beyond the ``room`` it pays a ``price``. Of many stages the least of each of the three is taken for itself.
    """
    units = len(stages[0][0]) - 1
    most = units - len(stages) + 1
    if most ** len(stages) > _MOST:
        work, size, least = (reduce(_joined, column) for column in zip(*stages, strict=True))
        count = np.arange(units + 1)
    else:
        work, size, least, count = (np.zeros(1, dtype=np.int64) for _ in range(4))
        more = np.arange(1, most + 1)
        for stage in stages:
            own = [column[more] for column in stage] + [more]
            sums = zip((work, size, least, count), own, strict=True)
            work, size, least, count = ((one[:, None] + other[None, :]).ravel() for one, other in sums)
    fits = (count <= units) & (least <= room)
    again = np.minimum(np.maximum(size - room, 0) * price, NEVER).astype(np.int64)
    found = np.full(units + 1, NEVER, dtype=np.int64)
    np.minimum.at(found, count[fits], np.minimum(work + again, NEVER)[fits])
    return found


def _joined(one: Ints, other: Ints) -> Ints:
    """Return the least of both together, by the units in all."""
    size = len(one)
    found = np.full(size, NEVER, dtype=np.int64)
    for count in range(size):
        found[count] = min(NEVER, int((one[: count + 1] + other[count::-1]).min()))
    return found


def _least_longest(ends: Sequence[Ints]) -> int:
    """Return the least time within which all GPUs are over and have all units."""
    units = len(ends[0]) - 1
    times = sorted({int(x) for end in ends for x in end if x < NEVER})
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if _dealt_within(ends, times[middle], units):
            high = middle
        else:
            low = middle + 1
    return times[low]


def _dealt_within(ends: Sequence[Ints], time: int, units: int) -> bool:
    """Whether all units can be dealt out to GPUs that are all over within ``time``; a bit stands for a number."""
    reached = 1
    for end in ends:
        more = 0
        for count in np.flatnonzero(end <= time).tolist():
            more |= reached << count
        reached = more & ((1 << (units + 1)) - 1)
    return bool(reached >> units & 1)
