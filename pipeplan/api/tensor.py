"""Which degree of tensor parallelism is best? The same question of every variant that a profile has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..deadline import Deadline
from ..errors import BadInput, Infeasible
from ..problem import Chain
from ..status import Status
from .profiles import Profile, degrees
from .result import PlanResult


def parts(profile: Profile, tensor: str | int | None) -> list[Profile]:
    """Return the profile in each of the ``tensor`` degrees (None: 1, or that of which it is), the least work of all
    its GPUs first; BadInput for a degree that it hasn't."""
    chain = profile.chain
    if tensor is None:
        return [replace(profile, chain=replace(chain, variants=()))]
    own = {chain.tensor: replace(chain, variants=())} | {x.tensor: chain.part(x) for x in chain.variants}
    asked = degrees(tensor)
    for degree in asked or ():
        if degree not in own:
            raise BadInput(
                f"--tensor {degree}: the profile has degree {', '.join(map(str, own))}; a profile with others is made "
                "by profile --estimate GPU --tensor 1,2,4,8"
            )
    found = sorted((own[x] for x in asked or own), key=_work)
    return [replace(profile, chain=x) for x in found]


def _work(chain: Chain) -> int:
    """Return how long all GPUs of a group compute together for a microbatch, exchanges left out."""
    return chain.tensor * int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])


def best_degree(
    profiles: Sequence[Profile], plan: Callable[[Profile, Deadline], PlanResult], deadline: Deadline, status: Status
) -> PlanResult:
    """Return the plan of least period among those that ``plan`` makes of each part; Infeasible where there is none.

    Degrees come in the order of their work; each has an equal share of the time that is left.
    """
    best, tried, why = None, dict[int, int | None](), list[str]()
    for k, profile in enumerate(profiles):
        degree = profile.chain.tensor
        status.phase = f"tensor degree {degree}"
        try:
            found = plan(profile, deadline.part(len(profiles) - k))
        except (BadInput, Infeasible) as error:
            if len(profiles) == 1:
                raise
            tried[degree] = None
            why.append(f"degree {degree}: {error}")
            continue
        tried[degree] = found.period_ns
        if best is None or found.period_ns < best.period_ns:
            best = found
    if best is None:
        raise Infeasible("; ".join(why))
    provenance = best.plan.provenance
    told = {str(degree): tried[degree] for degree in sorted(tried)}
    return replace(
        best,
        plan=replace(best.plan, provenance=replace(provenance, options={**provenance.options, "tensor": told})),
    )
