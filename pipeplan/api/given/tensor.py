"""Which degree of tensor parallelism is best, and is it worth to run the cores of attention again? The same question of
every variant that a profile has, until a bound says that no other is better."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from ...check.bounds import proof
from ...check.units import CannotExpress
from ...deadline import Deadline
from ...errors import BadInput, Infeasible, NoBetter, PipeplanError
from ...planner.plan import Planned
from ...problem import Problem, Variant
from ...status import Status
from ...units import parse_bandwidth
from .profiles import Profile
from .variants import DEGREES, degrees

EACH = "each"  # stage has a degree of its own


def parts(profile: Profile, asked_for: Mapping[str, Any], selective: bool | None = None) -> list[Profile]:
    """Return the profile in each of the degrees that are ``asked_for``, all that it has where nobody says, of each as
    it is before that which is ``selective``, or either alone, and with ``offload_activations`` all of them again with
    activations in host memory; BadInput for one that it hasn't."""
    chain = profile.chain
    found = sorted(chain.choices, key=lambda x: x.degrees)
    for name in DEGREES:
        said = asked_for.get(name)
        known = dict.fromkeys(getattr(x, name) for x in found)
        asked = None if said is None else degrees(said, f"--{name}")
        for degree in asked or ():
            if degree not in known:
                raise BadInput(
                    f"--{name} {degree}: the profile has degree {', '.join(map(str, known))}; a profile with others is "
                    f"made by profile --estimate GPU --{name} 1,2,4,8"
                )
        found = [x for x in found if getattr(x, name) in (asked or known)]
    link = _link(asked_for.get("offload_activations"))
    found += [replace(x, offloaded=link) for x in found if link]
    return [replace(profile, chain=replace(x, either=())) for x in found if selective in (None, x.selective)]


def by_layer(profile: Profile) -> Profile:
    """Return the profile on single GPUs whose layers may each run the core of their attention again."""
    own = (x for x in profile.chain.variants if x.selective and x.width == 1)
    return replace(profile, chain=replace(profile.chain, variants=tuple(own)))


def for_each(profile: Profile, offload_activations: int | str | None) -> Profile:
    """Return the profile with all variants that stages choose among: of each it has also one with activations in host
    memory, where a link to that is named."""
    chain, link = profile.chain, _link(offload_activations)
    more = ({x.name: getattr(part, x.name) for x in fields(Variant)} for part in chain.choices if link)
    offloaded = (Variant(**{**x, "offloaded": link}) for x in more)
    return replace(profile, chain=replace(chain, variants=(*chain.variants, *offloaded)))


def _link(rate: int | str | None) -> int:
    """Return the bandwidth in bytes/s that ``--offload-activations`` says, 0 where it says none."""
    if rate is None:
        return 0
    return parse_bandwidth(f"{rate}B/s" if isinstance(rate, int) else rate, "--offload-activations")


@dataclass(frozen=True)
class OfDegree:
    """The problem of one degree, and what was assumed."""

    problem: Problem
    assumptions: list[str]

    @property
    def name(self) -> str:
        """What it is called beside others."""
        return self.problem.chain.variant


class Worth(NamedTuple):
    """What plans are weighed by: its name, what a plan has of it (ns), what none of a problem's has less than, by
    averages, and what a plan has proved that none has less than; of each microbatch, or of a batch (``whole``)."""

    name: str
    of: Callable[[Planned], int]
    least: Callable[[Problem], int]
    proved: Callable[[Planned], int]
    whole: bool = False


def best_degree(
    profiles: Sequence[Profile],
    ask: Callable[[Profile], OfDegree],
    plan: Callable[[OfDegree, int | None], Planned],
    worth: Worth,
    deadline: Deadline,
    status: Status,
) -> tuple[Planned, OfDegree]:
    """Return the best of the plans that ``plan`` makes of each part, by what it is ``worth``, and what it is of;
    Infeasible where there is none, BadInput where no part can be asked for.

    Degrees come in the order of what no plan of theirs takes less than, but for those for which that is no less than
    what the best takes, which ``plan`` gets to beat; last comes one for each stage. All have an equal share of the time
    that is left.
    """
    if len(profiles) == 1:
        return plan(one := ask(profiles[0]), None), one
    queue, told, why = _in_order(profiles, ask, worth)
    best: tuple[Planned, OfDegree] | None = None
    period = None
    for k, (bound, asked) in enumerate(queue):
        several = 1 if worth.whole else asked.problem.chain.several
        if period is not None and bound >= period:
            continue
        status.phase = f"tensor degree {asked.name}"
        until = deadline.part(len(queue) - k)
        try:
            beat = None if period is None else period * several
            found = plan(replace(asked, problem=replace(asked.problem, deadline=until)), beat)
        except NoBetter as error:
            told[asked.name] = None, max(bound, error.bound_ns // several)
        except (BadInput, CannotExpress, Infeasible) as error:
            known = proof(asked.problem) if isinstance(error, Infeasible) else None
            told[asked.name] = None, None if known is None or known.infeasible else known.period_ns // several
            why[asked.name] = error
        except KeyboardInterrupt:
            if best is None:
                raise
            break
        else:
            taken = worth.of(found) // several
            told[asked.name] = taken, worth.proved(found) // several
            if period is None or taken < period:
                best, period = (found, asked), taken
    if best is None:
        kind = BadInput if all(isinstance(x, BadInput) for x in why.values()) else Infeasible
        raise kind("; ".join(f"tensor degree {name}: {why[name]}" for name in told if name in why))
    said = {x: {worth.name: taken, "bound_ns": bound} for x, (taken, bound) in told.items()}
    return replace(best[0], plan=best[0].plan.telling(tensor=said)), best[1]


Told = dict[str, tuple[int | None, int | None]]  # by degree: what it takes and a bound, None where there is no plan


def _in_order(
    profiles: Sequence[Profile], ask: Callable[[Profile], OfDegree], worth: Worth
) -> tuple[list[tuple[int, OfDegree]], Told, dict[str, PipeplanError]]:
    """Return what can be asked for with its bound, least first, and what is to be said of each degree so far."""
    queue, told, why = list[tuple[int, OfDegree]](), Told(), dict[str, PipeplanError]()
    for profile in profiles:
        degree = profile.chain.variant
        try:
            asked = ask(profile)
            queue.append((worth.least(asked.problem) // (1 if worth.whole else asked.problem.chain.several), asked))
            told[degree] = None, queue[-1][0]
        except BadInput as error:
            if degree == EACH:  # which somebody asked for, and degrees for all by the way
                raise
            told[degree], why[degree] = (None, None), error
    return sorted(queue, key=lambda x: (bool(x[1].problem.chain.variants), x[0], x[1].problem.chain.tensor)), told, why
