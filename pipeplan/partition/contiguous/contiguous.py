"""Which stages, each on devices of its own, have the shortest period?

Exact: optimal among allocations whose stages take devices in any order that keeps servers together (:mod:`.orders`; any
may stay unused), each stage with any number of replicas and recomputed as the problem allows, under schedules that
repeat every period (1F1B*, ALGORITHMS sections 4 and 5). A period can be met or not (:mod:`.decision`); here the
smallest one that can is searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from ...cost import relaxations
from ...deadline import OutOfTime
from ...integers import Ints
from ...plan import Allocation, Stage
from ...problem import Problem
from ..cuts import legal_cuts, near_cuts, spread_cuts
from ..devices.orders import Orders
from ..recompute.pareto import Resolution
from ..recompute.segments import LabelEffort, too_many_labels, with_lowest_peaks, with_segments
from ..tables.device_counts import device_counts
from ..tables.stages import SearchTables, near, stage_tables, thinned
from .claims import (
    MOST_PLACES,
    Grouped,
    best_with_sums,
    claim,
    claimed,
    claimed_ns,
    first_within,
    group_sizes,
    grouped,
    longest_period_ns,
    plain_delays,
    shortest_between,
    smaller,
    sums_bound_periods,
)
from .decision import decide

_MOST_CUTS = 112  # more are thinned out to about 64 before segments are searched
_REFINED = 4  # times that cuts are moved where tables have only some
_TURNS, _NEARLY = 8, 1024  # on smaller groups: until periods are as near
_MANY_CUTS = 400  # of more the segments of each stage get less work
_LAST = Resolution(exact=16, cost_buckets=8, peak_buckets=4)
_COARSE = LabelEffort((Resolution(exact=64, cost_buckets=40, peak_buckets=10),), _LAST, work=3 * 10**6)
_FINE = LabelEffort(
    (
        Resolution(exact=8192),
        Resolution(exact=256, cost_buckets=60, peak_buckets=16),
        Resolution(exact=64, cost_buckets=40, peak_buckets=10),
    ),
    _LAST,
    work=10**7,
)
_QUICK = LabelEffort(
    (Resolution(exact=8192), Resolution(exact=64, cost_buckets=40, peak_buckets=10)), _LAST, work=10**6
)


def contiguous(problem: Problem) -> Iterator[Allocation]:
    """Yield the allocation of the smallest period, or nothing when no contiguous one fits the memory.

    Where servers share links that is the smallest if they didn't, and so a lower bound.

    ``claimed_period_ns`` is the smallest integer period, and exact where it equals ``lower_bound_ns``: always, but with
    segments only while the ways to recompute a stage (:mod:`.labels`) stay few enough to be kept whole, as they do for
    chains of up to about 80 layers; beyond, a heuristic plan comes with a weaker bound (:func:`_with_segments`). So
    does one of a chain with too many cuts for tables of all (:func:`.stages.stage_tables`), one on devices of too many
    kinds (:mod:`.orders`), and one whose replicas sum the gradients of weights that stages share (:mod:`.claims`). The
    decision for one period is a dynamic program over (first layer, what is left of the devices), with replicas O(L^2
    P^2) for L layers and P equal devices before pruning.
    """
    best = _remembered(problem)
    if best is not None:
        yield best


def _remembered(problem: Problem, as_listed: bool = False) -> Allocation | None:
    """Return :func:`smallest_period`; searches ask for the same again and again."""
    listed = as_listed and (Orders.of(problem).count > 1 or bool(group_sizes(problem)))  # else it is the same
    return _found(problem, listed, problem.deadline.remaining_s)


@lru_cache(maxsize=4)
def _found(problem: Problem, as_listed: bool, clock: Callable[[], float]) -> Allocation | None:
    return smallest_period(problem, as_listed=as_listed)  # of one clock: what was found late is no less late again


def feasible(problem: Problem, period: int, near: Sequence[Stage] = ()) -> Allocation | None:
    """Return a contiguous allocation that has a valid pattern of ``period`` ns, or None when there is none.

    Of those that have, one with the smallest delay at its first stage, so the first to drain. The allocation claims its
    own smallest period, which may be shorter. With segments that holds while all ways to recompute a stage can be kept;
    beyond, a plan may be missed or drain later, but never when the period is so long that memory alone decides. Among
    very many cuts or devices some are looked at, those ``near`` the ends of given stages among them.
    """
    if not len(problem.chain) or period < 1:
        return None
    if sums_bound_periods(problem):
        period = min(period, longest_period_ns(problem))
        return first_within(problem, period, lambda easier: feasible(easier, period))
    longest = longest_period_ns(problem)
    period = min(period, longest)
    for size in group_sizes(problem):
        groups = grouped(problem, size)
        of_groups = feasible(groups.problem, period * size, groups.groups(near))
        found = None if of_groups is None else claimed(problem, groups.stages(of_groups.stages))
        if found is not None and claimed_ns(found) <= period:
            return found
    if group_sizes(problem):
        best = None if near else _remembered(problem)
        if best is not None and claimed_ns(best) <= period:
            return best
        problem = replace(problem, replicas=False)
    tables = stage_tables(problem)
    few = problem.checkpointing == "segments" and period < longest and len(tables.cuts) > _MANY_CUTS
    if few:
        tables = thinned(tables, near)
        if too_many_labels(tables, period, longest):
            return feasible(replace(problem, checkpointing="stages"), period)
    least_delay = plain_delays(tables)
    if problem.checkpointing == "segments":
        if period == longest:
            tables = with_lowest_peaks(tables, period, longest)
        else:
            effort = _QUICK.over(len(legal_cuts(problem)), _MANY_CUTS)
            labelled = with_segments(tables, period, period, longest, least_delay, effort)
            if labelled is None:
                return None
            tables = labelled[0]
    for some in [tables] if tables.orders is None else map(tables.in_order, tables.orders.first()):
        stages = decide(some, period, least_delay)
        if stages is not None:
            return claim(problem, stages, period)
    return None


def tables_within(problem: Problem, slack: Fraction) -> tuple[SearchTables, int, bool] | None:
    """Return (tables of all stages that take at most ``slack`` times the smallest period, that time, whether the tables
    have every way to recompute them).

    For searches with another goal than the period, with up to 2P microbatches in flight on P devices. None when no
    contiguous allocation fits the memory at any period. Stages take devices as these are listed.
    """
    best = _remembered(problem, as_listed=True)
    if best is None:
        return None
    tables = stage_tables(problem)
    most = math.ceil(claimed_ns(best) * slack)
    if problem.checkpointing != "segments":
        return tables, most, True
    longest = longest_period_ns(problem)
    least = max(1, longest // len(problem.platform))  # twice as many microbatches in flight as devices
    found = with_segments(tables, most, least, longest, plain_delays(tables), _QUICK)
    assert found is not None, "the best allocation is among them"
    return found[0], most, found[1]


def smallest_period(
    problem: Problem, upper: int | None = None, lower: int | None = None, as_listed: bool = False
) -> Allocation | None:
    """Return the contiguous allocation of the smallest period, or None when there is none of at most ``upper`` ns.

    ``lower`` is a period known to be a lower bound; the search starts there. Periods are bisected with the decision;
    first among few cuts, then among those near the best ones found, so that the exact search starts from a narrow gap.
    The result's ``lower_bound_ns`` is what has been proved; it is optimal where that equals ``claimed_period_ns``. At
    the problem's deadline it is the best so far; OutOfTime when there is none. Stages take devices in any order, of
    many kinds in some (:mod:`.orders`), or ``as_listed``.
    """
    if not len(problem.chain):
        return None
    if sums_bound_periods(problem):
        best = best_with_sums(problem, lambda easier: smallest_period(easier, upper, lower, as_listed))
        return None if best is None or (upper is not None and claimed_ns(best) > upper) else best
    if not as_listed and (sizes := group_sizes(problem)):
        best = _on_groups(problem, sizes)
        return None if best is None or (upper is not None and claimed_ns(best) > upper) else best
    tables = stage_tables(problem)
    if as_listed:
        tables = replace(tables, orders=None)
    high = longest_period_ns(problem) if upper is None else min(upper, longest_period_ns(problem))
    least_delay = plain_delays(tables)
    if high < 1 or device_counts(tables, high, least_delay) is None:
        return None
    floor = shared_work(problem, max(1, lower or 1), high)
    low = _least_possible(tables, floor, high, least_delay)
    if problem.checkpointing == "segments":
        best, bound = _with_segments(tables, least_delay, low, high, as_listed)
        if best is None and upper is None and not as_listed and len(tables.cuts) > _MOST_CUTS:
            best = feasible(problem, high)  # one that takes least memory, between all cuts, if not least time
        return _bounded(tables, best, bound, floor)
    best = None
    try:
        for index, tolerance in (
            (spread_cuts(problem, tables.cuts, max(32, 4 * len(problem.platform))), 32),
            (None, 256),
        ):
            if index is None:
                index = None if best is None else near_cuts(tables.cuts, best.stages, 24)
            if index is not None:
                best, _ = shortest_between(tables.select(index), least_delay[index], low, high, best, tolerance)
        if best is not None:
            high = claimed_ns(best)
            low = _least_possible(tables, low, high, least_delay)
        best, low = shortest_between(tables, least_delay, low, high, best, None)
        if best is not None and not tables.complete:
            best = _refined(tables, best, floor)
    except OutOfTime:
        if best is None:
            raise
    return _bounded(tables, best, low, floor)


def _on_groups(problem: Problem, sizes: Sequence[int]) -> Allocation | None:
    """Return a good allocation with groups of one of the ``sizes`` in the place of devices, the first that has any, and
    then of smaller ones; without replicas where none has."""
    floor = shared_work(problem, 1, longest_period_ns(problem))
    for some in (grouped(problem, size) for size in sizes):
        other = smaller(some)
        most = MOST_PLACES // len(other.problem.platform) ** 2  # cuts to look at
        easier = () if problem.checkpointing != "segments" else (replace(some.problem, checkpointing="stages"),)
        for asked in (*easier, some.problem):  # segments take long, and smaller groups can have them, too
            of_groups = smallest_period(asked)
            best = None if of_groups is None else claimed(problem, some.stages(of_groups.stages))
            few = best is not None and 4 * len(best.stages) <= most
            if best is not None and (few or asked is some.problem):
                best = _on_smaller_groups(problem, other, best, floor, most) if few else best
                return replace(best, lower_bound_ns=min(floor, claimed_ns(best)))
    best = smallest_period(replace(problem, replicas=False))
    return None if best is None else replace(best, lower_bound_ns=min(floor, claimed_ns(best)))


def _on_smaller_groups(problem: Problem, some: Grouped, best: Allocation, floor: int, most: int) -> Allocation:
    """Return the best allocation on ``some`` groups that comes of ``best`` by moving its cuts, each turn some of about
    the ``most``; at the deadline the best so far."""
    cuts, longest, low, failed = legal_cuts(problem), longest_period_ns(some.problem), floor * some.size, 0
    with suppress(OutOfTime):
        for turn in range(_TURNS):
            high = claimed_ns(best) * some.size - 1
            tables = stage_tables(some.problem, cuts[near(cuts, best.stages, turn, most)])
            least_delay, of_groups = plain_delays(tables), None
            if problem.checkpointing == "segments" and high >= low:
                effort = _COARSE.over(len(cuts), _MANY_CUTS)
                labelled = with_segments(tables, high, low, longest, least_delay, effort)
                tables, high = (tables, 0) if labelled is None else (labelled[0], high)
            if high >= low:
                of_groups, _ = shortest_between(tables, least_delay, low, high, None, _NEARLY)
            found = None if of_groups is None else claimed(problem, some.stages(of_groups.stages))
            if found is not None and claimed_ns(found) < claimed_ns(best):
                best, failed = found, 0
            elif (failed := failed + 1) == 2:
                break
    return best


def _refined(tables: SearchTables, best: Allocation, low: int) -> Allocation:
    """Return the best allocation that comes of ``best`` by moving its cuts, of which ``tables`` have only some."""
    problem, cuts = tables.problem, legal_cuts(tables.problem)
    for _ in range(_REFINED):
        index = near_cuts(cuts, best.stages, max(2, 300 // len(best.stages)))
        if index is None:
            break
        some = stage_tables(problem, cuts[index])
        found, _ = shortest_between(
            replace(some, states=tables.states, orders=tables.orders), plain_delays(some), low, low, best, 256
        )
        if found is None or found is best:
            break
        best = found
    return best


def _with_segments(
    tables: SearchTables, least_delay: Ints, low: int, high: int, as_listed: bool
) -> tuple[Allocation | None, int]:
    """Return the best allocation with segments from ``low`` to ``high`` ns (ALGORITHMS section 5, "Segments"), and a
    period below which there is none.

    The plan that recomputes all or nothing, or as it takes least memory, bounds what recomputation may cost, and so how
    many ways to recompute a stage are worth keeping; a search that keeps few of them bounds it tighter, and the last
    ones are exact where they keep all. Of many cuts some are looked at, which is never exact.
    """
    problem, longest = tables.problem, longest_period_ns(tables.problem)
    best = _remembered(replace(problem, checkpointing="stages"), as_listed)
    if best is not None and claimed_ns(best) > high:
        best = None
    if len(tables.cuts) > _MOST_CUTS and too_many_labels(thinned(tables), low, longest):
        return best, low
    if best is None:
        some = thinned(tables) if len(tables.cuts) > _MANY_CUTS else tables
        best, _ = shortest_between(with_lowest_peaks(some, low, longest), plain_delays(some), low, high, None, 256)
    return _with_labels(tables, least_delay, low, high, best)


def _with_labels(
    tables: SearchTables, least_delay: Ints, low: int, high: int, best: Allocation | None
) -> tuple[Allocation | None, int]:
    """Do the same by labels between all cuts, or some of many, the better the more often."""
    longest, bound = longest_period_ns(tables.problem), low
    many = len(tables.cuts) > _MOST_CUTS
    repeats = 1 if many else 3  # a better plan leaves recomputation less time, and fronts less to hold
    try:
        for turn, (effort, tolerance) in enumerate(((_COARSE, 256), *((_FINE, None),) * repeats)):
            upper = high if best is None else claimed_ns(best) - 1
            if upper < low:
                break
            some, ends = tables, least_delay
            if many:
                some = thinned(tables, () if best is None else best.stages, turn)
                ends = plain_delays(some)
            found = with_segments(some, upper, low, longest, ends, effort.over(len(tables.cuts), _MANY_CUTS))
            exact, before, reached = not many and (found is None or found[1]), best, upper + 1
            if found is not None:
                best, reached = shortest_between(found[0], ends, low, upper, best, tolerance)
            if exact:
                bound = reached
            if effort is _FINE and (exact or best is before):  # nothing is left, or another round would be the same
                break
    except OutOfTime:
        if best is None:
            raise
    return best, bound


def _bounded(tables: SearchTables, best: Allocation | None, bound: int, floor: int) -> Allocation | None:
    """Return the allocation with the lower bound that was proved, ``floor`` where not all cuts were looked at."""
    return None if best is None else replace(best, lower_bound_ns=bound if tables.complete else floor)


def shared_work(problem: Problem, low: int, high: int) -> int:
    """Return a period in ``low..high`` below which all devices together are too slow."""
    relaxed = relaxations.relative(problem)
    sums, speed = relaxed.chain.sums, sum(x.speed for x in relaxed.platform.devices)
    return min(high, max(low, math.ceil(int(sums.forward_ns[-1] + sums.backward_ns[-1]) / speed)))


def _least_possible(tables: SearchTables, low: int, high: int, least_delay: Ints) -> int:
    """Return a period in ``low..high`` below which there are not enough devices; ``high`` is long enough.

    Within a thousandth of the largest such period.
    """
    width = max(1, low // 64)
    while high - low > low // 1024:
        period = min(low + width, low + (high - low) // 2)
        if device_counts(tables, period, least_delay) is None:
            low, width = period + 1, 2 * width
        else:
            high = period
    return low
