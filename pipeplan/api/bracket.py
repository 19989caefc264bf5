"""By how much have a model's layers become slower or faster since a plan was made? They are measured again, shortly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..names import shown
from ..partition.granularity import merging
from ..plan import Plan
from ..planner.what_if.carry import carried
from ..problem import AUTOCAST, Chain
from ..zoo import ZOO
from .profiles import profile

if TYPE_CHECKING:
    from ..runtime.model.build.spec import ModelSpec

STEPS, SECONDS = 20, 10.0  # of measuring, what comes first
CONVERTED = ("bfloat16", "float16", "float64")  # what a model may have been converted to for the plan's profile


def period_now(plan: Plan, model: ModelSpec, threads: int = 1, **heard: Any) -> float:
    """Return the period of ``plan`` with a new profile of its ``model`` over that with its own.

    The profile is made here, as the plan's was: beside as many others, with as many microbatches in flight; ``heard``
    are the listeners of :func:`.profiles.profile`. BadInput where the plan's layers aren't those that a profile has by
    default, or its order isn't possible with the new times.
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
    periods = [carried(plan, each).period_ns for each in (chain, _alike(chain, found.chain))]
    if None in periods:
        raise BadInput("--bracket: with the times of now the plan's order isn't possible")
    own, now = map(float, filter(None, periods))
    return now / own


def _alike(chain: Chain, found: Chain) -> Chain:
    """Return ``found`` with the layers of ``chain``, by their names, in the same order."""
    names = [layer.name for layer in chain.in_own_order().layers]
    for merge in (Chain.in_own_order, merging(), merging("articulation")):
        merged: Chain = merge(found)
        if [layer.name for layer in merged.layers] == names:
            return merged if chain.order is None else merged.reordered(chain.order)
    raise BadInput(
        f"--bracket: the layers of {shown(chain.name)} aren't those that pipeplan profile measures by default"
    )
