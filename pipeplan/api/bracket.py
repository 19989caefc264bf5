"""By how much have a model's layers become slower or faster since a plan was made? They are measured again, shortly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..plan import Plan
from ..planner.what_if.carry import carried, matching_chain
from ..problem import AUTOCAST
from ..zoo import ZOO
from .given.profiling import profile

if TYPE_CHECKING:
    from ..runtime.model.build.spec import ModelSpec

STEPS, SECONDS = 20, 10.0  # of measuring, what comes first
CONVERTED = ("bfloat16", "float16", "float64")  # what a model may have been converted to for the plan's profile


def period_now(plan: Plan, model: ModelSpec, threads: int = 1, **heard: Any) -> float:
    """Return the period of ``plan`` with a new profile of its ``model`` over that with its own.

    The profile is made here, as the plan's was: beside as many others, with as many microbatches in flight; ``heard``
    are the listeners of :func:`.given.profiling.profile`. BadInput where the plan's layers aren't those that a profile
    has by default, or its order isn't possible with the new times.
    """
    chain = plan.chain
    if chain.width > 1 or chain.variants:
        raise BadInput("--bracket: GPUs run layers of the plan together, and a profile measures whole ones")
    named = model.build if ":" in model.build else ZOO + model.build
    found = profile(
        named,
        microbatch=chain.microbatch,
        data=model.data,
        device="cpu" if chain.of_cpu else "auto",
        dtype=chain.dtype if chain.dtype.startswith((*CONVERTED, AUTOCAST)) and "+" not in chain.dtype else None,
        optimizer=plan.policy.optimizer,
        beside=chain.beside,
        in_flight=chain.in_flight,
        split_backward=any(layer.backward_weight_ns is not None for layer in chain.layers),
        threads=threads,
        **{"steps": STEPS, "seconds": SECONDS, **heard},
    )
    there = matching_chain(plan, found.chain, found.chain, lambda layer: layer.name)
    periods = [carried(plan, each).period_ns for each in (chain, there)]
    if None in periods:
        raise BadInput("--bracket: with the times of now the plan's order isn't possible")
    own, now = map(float, filter(None, periods))
    return now / own
