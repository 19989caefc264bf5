"""Which weights where nobody says? Drained where that takes no longer; else the least late, if nearly the fastest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from math import ceil

from ..check.bounds import reaches
from ..check.lateness import plan_delays
from ..check.validate import check
from ..deadline import OutOfTime
from ..errors import BadInput, Infeasible
from ..plan import Alternative
from ..problem import Problem
from ..schedule.periodic.one_f_one_b_star import emptiest_one_f_one_b_star
from ..schedule.periodic.turns import emptiest
from ..schedule.weight_versions import average_delay
from ..status import Status
from .periodic.incumbent import Settings
from .plan import Planned, make_plan

DEARER = Fraction(1, 50)  # that a period may be longer for gradients that are less late
AS_LONG = Fraction(1, 1000)  # that it may be for gradients that aren't late at all
FAR = Fraction(9, 8)  # of a period, from which on a longer search, which gains 6 to 7%, is taken not to make up for it
LONGER = Fraction(1, 1000), Fraction(1, 200), DEARER  # that a period may be for fewer microbatches in flight
WORTH = 10  # with gradients late by one update training takes a tenth longer, by scripts/bench/time_to_loss.py
NODES = 2 * 10**5  # splits of orders times operations squared: about a second
LOOKS = 4 * 10**5  # at the clock, which a quick search may take: some seconds where there is much to simulate

Found = tuple[Planned, Problem]  # the problem may have its layers in another order
Quickly = Callable[[int], Planned | None]
Hint = Callable[[Problem], Planned | None]


def least_late(
    problem: Problem, find: Callable[[Problem], Found], drained: Quickly | None = None, hint: Hint | None = None
) -> Found:
    """Return of what ``find`` finds of ``problem``, whose policy is 2bw, under that and ``stash`` the plan whose
    gradients are least late on average, of those within 2% of the best period; it names what the others take.

    Where the best that ``drained`` finds with updates every so many microbatches takes at most 1.001 times as long, it
    is what ``find`` finds that drains, if that does so, too. 2bw is only searched if its plans can be so much shorter:
    without replicas ``stash`` holds no more and waits for nothing. Where what a quick search, the ``hint``, finds under
    ``stash`` takes :data:`FAR` as long as 2bw, or what drains no longer than either, no other looks for more. An open
    interval is one of 2bw alone, which can have any. Infeasible where neither has a plan.
    """
    if problem.policy.open or not problem.policy.goes_with("stash"):
        return find(problem)
    found = _delayed(problem, find, drained, hint)
    quick = None if drained is None or problem.deadline.passed else drained(found[0].plan.interval)
    if quick is None or found[0].plan.provenance.solver_status == "interrupted":
        return found
    if _as_long(quick, found[0]):
        with suppress(BadInput, Infeasible, OutOfTime):
            other = find(problem.with_policy(quick.plan.policy))
            if _as_long(other[0], found[0]):
                return _naming(other, found[0])
    return _naming(found, quick, quickly=True) if quick.plan.provenance.solver_status != "time limit" else found


def fresher(found: Planned, problem: Problem) -> Planned:
    """Return the plan with the pattern of its stages whose gradients are less late, if that pays: of the patterns with
    the fewest microbatches in flight at periods up to :data:`LONGER` so much, and its own, the one of the shortest
    period, of which each update that gradients are late on average adds a :data:`WORTH`.

    Exact where stages have their GPUs for themselves, by 1F1B*, and for few stages; else as far as :data:`NODES` tell.
    """
    plan, graph = found.plan, found.evaluation.graph
    if plan.pattern is None or plan.policy.drains or plan.policy.rules.fresher or not _late(found):
        return found
    if problem.deadline.passed or plan.provenance.solver_status == "interrupted":
        return found
    nodes = NODES // len(graph.operations) ** 2
    others = dict[int, Planned]()  # by period
    for longer in LONGER:
        high = int(plan.pattern.period_ns * (1 + longer))
        pattern = (
            emptiest_one_f_one_b_star(graph, high) if graph.separate else emptiest(graph, plan.pattern, high, nodes)
        )
        if pattern is not None and pattern != plan.pattern and pattern.period_ns not in others:
            other = replace(plan, pattern=pattern)
            others[pattern.period_ns] = Planned(other, check(other))
    return min((found, *others.values()), key=lambda x: x.evaluation.period_ns * (1 + _late(x) / WORTH))


def drained_quickly(problem: Problem, interval: int, settings: Settings) -> Planned | None:
    """Return the best plan with updates every ``interval`` microbatches that drains, by a quick search under all
    schedules, or the best so far after :data:`LOOKS` at the clock; None without any."""
    return found_quickly(problem.with_policy(problem.policy.drained(interval)), settings)


def found_quickly(problem: Problem, settings: Settings) -> Planned | None:
    """Return the best plan of a quick search, without bounds, or the best so far after :data:`LOOKS` at the clock; None
    without any."""
    settings = replace(settings, explained=False, bounded=False, simplest=False, progress=None, status=Status())
    with suppress(BadInput, Infeasible, OutOfTime):  # some have too many steps to be simulated
        return make_plan(replace(problem, deadline=problem.deadline.of_looks(LOOKS)), settings=settings, effort="quick")
    return None


def _naming(found: Found, other: Planned, quickly: bool = False) -> Found:
    """Return what was found, its plan naming what ``other`` takes, and what that names."""
    plan, second = found[0].plan, other.plan
    told = Alternative(second.policy.weights, second.interval, other.evaluation.period_ns, quickly)
    named = (*plan.provenance.alternatives, *second.provenance.alternatives, told)
    provenance = replace(plan.provenance, alternatives=named)
    return replace(found[0], plan=replace(plan, provenance=provenance)), found[1]


def _as_long(one: Planned, other: Planned) -> bool:
    """Whether one takes no longer than the other, within :data:`AS_LONG`."""
    return one.evaluation.period_ns <= other.evaluation.period_ns * (1 + AS_LONG)


def _delayed(problem: Problem, find: Callable[[Problem], Found], drained: Quickly | None, hint: Hint | None) -> Found:
    """Return the least late of the two policies that never drain."""
    stashed = problem.with_policy(replace(problem.policy, weights="stash"))
    half = problem.deadline.part(2)
    first: Found | None = None
    second: Found | None = None
    quick = None if hint is None else hint(stashed)
    if quick is not None and quick.plan.provenance.solver_status != "time limit" and _worth_asking(problem, quick):
        with suppress(Infeasible):
            second = find(replace(problem, deadline=half))
        if second is not None and second[0].plan.provenance.solver_status == "interrupted":
            return second
        if second is not None and _settled(second[0], quick, drained):
            return _naming(second, quick, quickly=True)
    try:
        first = find(stashed if second is not None else replace(stashed, deadline=half))
    except Infeasible:
        if _holds_no_more(problem):
            raise
    if first is not None and second is None and not _worth_asking(problem, first[0]):
        return first
    try:
        second = second or find(problem)
    except Infeasible:
        if first is None:
            raise
        return first
    if first is None:
        return second
    one, other = sorted((first, second), key=lambda found: _late(found[0]))
    if one[0].evaluation.period_ns > other[0].evaluation.period_ns * (1 + DEARER):
        one, other = other, one
    return _naming(one, other[0])


def _settled(found: Planned, quick: Planned, drained: Quickly | None) -> bool:
    """Whether nothing more need be found under the policy of ``quick``, as it takes far longer, or what drains doesn't
    take longer than either."""
    if quick.evaluation.period_ns >= found.evaluation.period_ns * FAR:
        return True
    soon = None if drained is None else drained(found.plan.interval)
    return soon is not None and _as_long(soon, found) and _as_long(soon, quick)


def _worth_asking(problem: Problem, stashed: Planned) -> bool:
    """Whether 2bw may be preferred to a plan under ``stash``."""
    if stashed.plan.provenance.solver_status == "interrupted" or problem.deadline.passed:
        return False
    if _late(stashed) > 1:
        return True
    period = stashed.evaluation.period_ns
    return not _holds_no_more(problem) and not reaches(problem, ceil(period / (1 + DEARER)))


def _holds_no_more(problem: Problem) -> bool:
    """Whether what fits under 2bw does under ``stash``, in the same time: with no more than two versions of weights."""
    several = problem.replicas and len(problem.platform) > 1
    return not several and not problem.chain.tied and problem.policy.update_interval() >= 2 * len(problem.platform)


def _late(planned: Planned) -> float:
    """Return by how many updates the gradients of a plan are late, on average over its stages."""
    return average_delay(plan_delays(planned.plan, planned.evaluation.graph))
