"""Which plan is best of those that a target can express, and how far is it from what nothing of them can beat?

How good is what somebody runs with a target today: what does the target's best plan change?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ...check.bounds import any_bound
from ...check.targets import TARGETS, Target, as_run_by, refuse_chain
from ...check.units import CannotExpress, Unit
from ...choices import DRAINED
from ...errors import BadInput, Infeasible, NoBetter
from ...integers import ceil_div
from ...names import shown
from ...plan import Bound, Provenance, Schedule, ScheduleKind, Stage
from ...problem import MICROBATCHES_PER_DEVICE, WEIGHTS, Chain, Problem, Weights
from ...version import __version__
from ..drained.block_search import BlockSearch
from ..drained.search import EFFORTS
from ..least_late import found_quickly
from ..periodic.incumbent import Settings
from ..periodic.interval import at_interval
from ..periodic.portfolio import MOST_PLACES, places
from ..plan import Planned, checked
from .towers import make_towers_plan

PRICED = [weights for weights, rules in WEIGHTS.items() if rules.together and not rules.fresher]
BINDS_LOOKS = 10**5  # at the clock, while it is sought what binds
MUCH = 1.1  # times as long as without the restriction: what binds is then said


def make_target_plan(
    problem: Problem,
    name: str,
    settings: Settings | None = None,
    effort: str = "normal",
    kinds: Sequence[ScheduleKind] = (),
    found: Callable[[Planned], None] | None = None,
    beat_ns: int | None = None,
) -> Planned:
    """Return the validated plan of the best that the target ``name`` can express; Infeasible, explained, if none fits,
    NoBetter if none has a period below ``beat_ns``.

    ``found`` gets the best of the even splits, which are simulated first, if any fits; for variants see :mod:`.towers`.

    The policy drains; an undecided ``accumulate`` is four microbatches per device. ``kinds``: only these schedules.
    Every shape of pipelines is bounded, and searched where that may pay: the split whose bound is least, which proves
    itself the best where it takes no longer, some even ones, and local moves of the best, as many as ``effort`` says.
    """
    assert problem.policy.drains, "what others run drains"
    if problem.chain.variants:
        return make_towers_plan(problem, name, beat_ns)
    if problem.policy.accumulate is None:
        problem = at_interval(problem, MICROBATCHES_PER_DEVICE * len(problem.platform))
    refuse_chain(problem.chain, name)
    problem = as_run_by(problem, name)
    all_kinds = TARGETS[name].kinds
    search = BlockSearch(problem, name, TARGETS[name].of(problem.chain), kinds or all_kinds, settings or Settings())
    search.cutoff_ns = None if beat_ns is None else beat_ns * (problem.policy.accumulate or 1)

    def planned(stopped: str | None, of_any: Bound) -> Planned:
        best, count = search.best, problem.policy.accumulate or 1
        assert best is not None
        one, kind = set(search.kinds) != set(all_kinds), best.config.kind
        classes = dict.fromkeys((kind if one else None, kind)) if len(all_kinds) > 1 else (None,)
        allowed = "none" if problem.checkpointing == "none" else "segments"
        bounds = [
            Bound(name, problem.replicas, allowed, ceil_div(search.bound_ns(own), count), schedule=own)  # type: ignore[arg-type]  # targets are classes
            for own in classes
        ]
        told = Provenance("target", {"for": name, "effort": effort}, solver_status=stopped, version=__version__)
        return checked(problem, best.stages, (*bounds, of_any), told, Schedule(kind, count))

    def first() -> None:
        if found is not None and search.best is not None:  # at once, by the quick bound, if nothing follows
            found(planned("interrupted", any_bound(problem, up_to=1)))

    stopped = search.run(EFFORTS[effort].block_steps, first)
    if search.best is None and beat_ns is not None:
        raise NoBetter(ceil_div(search.bound_ns(), problem.policy.accumulate or 1))
    if search.best is None:
        raise Infeasible(search.why_none(stopped))
    return planned(stopped, any_bound(problem))


def target_bound(problem: Problem, name: str, kind: ScheduleKind | None = None) -> int | None:
    """Return a period (ns) below which the target ``name`` has no plan of a problem, None where nothing fits; with
    ``kind`` none under that schedule."""
    target = TARGETS[name].of(problem.chain)
    search = BlockSearch(problem, name, target, target.kinds if kind is None else (kind,), Settings())
    search.run(EFFORTS["normal"].block_steps)
    if search.best is None:
        return None
    return ceil_div(search.bound_ns(kind), problem.policy.accumulate or 1)


def priced(problem: Problem, planned: Planned, name: str, settings: Settings) -> Planned:
    """Return the plan of the target ``name`` with what the restriction costs, and what binds where that is much.

    Both are looked for quickly; what is not found is left out. A KeyboardInterrupt ends it, too.
    """
    problem = at_interval(problem, planned.plan.policy.accumulate)
    with suppress(KeyboardInterrupt):
        planned = with_price(planned, unrestricted(problem, settings))
        settings.status.phase = "what binds"
        binds = what_binds(replace(problem, deadline=problem.deadline.of_looks(BINDS_LOOKS)), planned, name)
        if binds is not None:
            planned = replace(planned, plan=planned.plan.telling(binds=binds))
    return planned


def what_binds(problem: Problem, planned: Planned, name: str) -> str | None:
    """Return in words which restriction makes a plan of the target ``name`` take much longer than without any.

    Each is lifted alone, and even splits are tried; the one that gains most is said if that is half of the price. None
    where the price is small or not known.
    """
    own = planned.evaluation.period_ns
    price = planned.plan.provenance.options.get("price", {}).get(DRAINED, own)
    if own < MUCH * price:
        return None
    count, best, only = problem.policy.accumulate or 1, own - (own - price) // 2, TARGETS[name]
    sentence = f"{only.what} runs equal pipelines of whole units under {' or '.join(only.kinds)}, nothing else"
    for text, lifted, target in _lifted(as_run_by(problem, name), name):
        with suppress(BadInput):
            search = BlockSearch(lifted, name, target, target.kinds, Settings())
            search.cutoff_ns = (best - 1) * count + 1  # others round up to no less
            found = search.look()
            if found is not None:
                best, sentence = ceil_div(found.makespan_ns, count), text
    return sentence


def _lifted(problem: Problem, name: str) -> Iterator[tuple[str, Problem, Target]]:
    """Yield what each restriction of the target ``name`` is, in words, and the problem and the target without it."""
    target, chain = TARGETS[name].of(problem.chain), problem.chain
    if chain.tied and not target.ties:
        ends = ((chain.layers[i].name.split(".."), chain.layers[i].module) for i in chain.tied[0])
        one, other = (f"`{shown(parts[-1] if module == '' else parts[0])}`" for parts, module in ends)
        summing = " or ".join(f"--for {x}" for x, row in TARGETS.items() if row.ties and _has_units(row, chain))
        instead = f"untie them{f', or {summing}' if summing else ''}"
        yield (
            f"{one} and {other} share weights, which {target.what} can't split: {instead}",
            problem,
            replace(target, ties=True),
        )
    if len(target.units(chain)) < chain.modules:
        yield f"{target.what} doesn't cut inside of blocks", problem, replace(target, units=_layers)
    if target.engine is not None:
        text = f"{target.what} holds buffers for all microbatches of an update: a smaller --batch leaves more room"
        yield text, problem.with_policy(replace(problem.policy, engine=None)), target
    free = replace(target, rules=("none", "first", "every"), recomputes=lambda unit: True, longest=None)
    if problem.checkpointing != "none":
        least = "recomputes nothing of models that it traces"
        way = least if target.rules == ("none",) else "recomputes by one rule in all stages"
        yield f"{target.what} {way}", problem, free


def _has_units(target: Target, chain: Chain) -> bool:
    with suppress(CannotExpress):
        return bool(target.units(chain))
    return False


def _layers(chain: Chain) -> tuple[Unit, ...]:
    ends = [*range(1, chain.modules), len(chain)]
    return tuple(Unit(chain.layers[i].name, i, stop, min(stop, chain.modules), True) for i, stop in enumerate(ends))


def unrestricted(problem: Problem, settings: Settings | None = None) -> dict[Weights, int]:
    """Return the periods (ns) of what a quick search finds without a target's restriction, drained and under 2bw, for
    the same updates; nothing of what doesn't fit, or takes long. A KeyboardInterrupt ends all of it."""
    found: dict[Weights, int] = {}
    settings = settings or Settings()
    for weights in filter(problem.policy.goes_with, PRICED if places(problem) <= MOST_PLACES else ()):
        settings.status.phase = f"price: weights {weights} without the restriction"
        if settings.progress:
            settings.progress(settings.status.phase)
        free = problem.with_policy(replace(problem.policy, weights=weights, engine=None))
        planned = found_quickly(free, settings)
        if planned is not None and planned.plan.provenance.solver_status == "interrupted":
            raise KeyboardInterrupt
        if planned is not None:
            found[weights] = planned.evaluation.period_ns
    return found


def with_price(planned: Planned, free: Mapping[Weights, int]) -> Planned:
    """Return the plan with what was found :func:`unrestricted` in ``provenance.options["price"]``.

    Where that is no shorter it is the plan's own period: all may run it that has no restriction.
    """
    own = planned.evaluation.period_ns
    price = {weights: min(period, own) for weights, period in free.items()}
    return replace(planned, plan=planned.plan.telling(price=price))


IMPORTED = "imported"


@dataclass(frozen=True, slots=True)
class Judged:
    """The plan that is run today, and the best that was found of what its target can express, which may be the same."""

    today: Planned
    best: Planned


def judge(
    problem: Problem,
    name: str,
    stages: Sequence[Stage],
    kind: ScheduleKind,
    settings: Settings | None = None,
    effort: str = "normal",
    others: Sequence[Problem] = (),
) -> Judged:
    """Return the validated plan of ``stages`` under ``kind``, and the best one of the target ``name``, for the same
    updates, of this problem and of ``others``: the same in other tensor degrees.

    Both have the bounds of the target's class. InvalidPlan says where today's breaks a rule, memory first of all.
    """
    problem = as_run_by(problem, name)
    told = Provenance(IMPORTED, {"from": name}, version=__version__)
    schedule = Schedule(kind, problem.policy.accumulate)
    today = checked(problem, stages, (any_bound(problem),), told, schedule)
    try:
        best = make_target_plan(problem, name, settings, effort)
    except Infeasible:  # the time was too short to find any
        return Judged(today, today)
    period = today.evaluation.period_ns
    bounds = [replace(x, period_ns=min(x.period_ns, period)) for x in best.plan.lower_bounds]
    today = checked(problem, stages, [x for x in bounds if x.schedule in (None, kind)], told, schedule)
    best = best if best.evaluation.period_ns < period else today
    for other in others:
        with suppress(Infeasible, BadInput):
            beat = best.evaluation.period_ns * other.chain.microbatch // best.plan.chain.microbatch
            best = make_target_plan(other, name, settings, effort, beat_ns=beat)
    return Judged(today, best)
