"""What does a plan say of what was searched beside it? Other plans, degrees, orders and restrictions, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..check.evaluate import Evaluation
from ..check.targets import TARGETS
from ..names import SENTENCE, shown
from ..plan import Plan
from ..units import format_bandwidth, format_bytes, format_ns

SAME_LAYERS = 1.05  # of two estimates of the same layers in other plans the ratios of 9 of 10 pairs were off by less
MOST_NAMED = 3
OTHER_LAYERS = 0.91  # likewise of other layers, of another microbatch or degree: by so much of what one estimate spans


def undecided(plan: Plan, result: Evaluation) -> str | None:
    """Return which of the others that were found may be faster, as two estimates are off by different factors."""
    if plan.chain.within is None:
        return None
    low, high = plan.chain.within
    others = max(SAME_LAYERS, OTHER_LAYERS * high / low)
    told = [name for name, ratio, same in _beside(plan, result) if 1 < ratio < (SAME_LAYERS if same else others)]
    more = f" and {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else ""
    words = f"{', '.join(told[:MOST_NAMED])}{more} may be faster: estimates are off by more than these differ"
    return words if told else None


def _beside(plan: Plan, result: Evaluation) -> Iterator[tuple[str, float, bool]]:
    """Yield the name of each other that was found, by what it takes longer, and whether it has the same layers."""
    options, own = plan.provenance.options, result.period_ns
    zero, tensor, grids, grid = (options.get(name) for name in ("zero", "tensor", "grids", "grid"))
    found: list[tuple[str, int | None, bool]] = [
        (x.weights, x.period_ns, True) for x in plan.provenance.alternatives if x.microbatches == plan.interval
    ]
    found += [(f"--zero {shown(k)}", number_in(zero, k), True) for k in zero] if isinstance(zero, dict) else []
    found += [("one stage on all GPUs", number_in(options, "unpipelined_ns"), True)]
    found += [("a pipeline", number_in(options, "pipeline_ns"), True)]
    yield from ((name, ns / own, same) for name, ns, same in found if ns is not None)
    degrees = {k: _taken(v) for k, v in tensor.items() if isinstance(v, dict)} if isinstance(tensor, dict) else {}
    chosen = degrees.get(plan.chain.variant)
    yield from ((f"tensor degree {shown(k)}", ns / chosen, False) for k, ns in degrees.items() if ns and chosen)
    if isinstance(grids, list) and isinstance(grid, dict):
        for x in grids:
            if "batch_ns" in x:
                name = f"{x['inter']} x {x['data']} of microbatches of {x['microbatch']}"
                yield name, x["batch_ns"] / grid["batch_ns"], x["microbatch"] == grid["microbatch"]


def moves(plan: Plan, result: Evaluation) -> str | None:
    """Return in words what goes on elsewhere where training has come from another plan; None where it hasn't."""
    told = plan.provenance.options.get("resumed")
    if not isinstance(told, dict) or (held := number_in(told, "held_bytes")) is None:
        return None
    coming = number_in(told, "coming_bytes") or 0
    units = "servers" if len((plan.platform.whole or plan.platform).levels) > 1 else "GPUs"
    words = (
        f"{format_bytes(coming)} of {format_bytes(held)}, weights and optimizer state, to {units} without them so far"
    )
    best, more = number_in(told, "best_period_ns"), number_in(told, "best_coming_bytes")
    if not best or more is None:
        return words
    return f"{words}; {format_bytes(more)} in the best plan, {result.period_ns / best - 1:.1%} faster"


def restriction(plan: Plan, result: Evaluation) -> list[str]:
    """Return what a plan was restricted to, and at which price, in lines; nothing where it wasn't."""
    options = plan.provenance.options
    target, price = TARGETS.get(str(options.get("for"))), options.get("price")
    if target is None:
        return []
    lines = [f"for         {target.what}: whole units, equal pipelines, {' or '.join(target.kinds)}"]
    if any(bound.schedule == "interleaved" and bound.period_ns < result.period_ns for bound in plan.lower_bounds):
        lines.append(
            "leaves out  the bound for interleaved: which units stages have beside how many, and waits between them"
        )
    if plan.policy.engine is not None:
        most = max(use.buffer_bytes for use in result.devices)
        lines.append(f"holds       buffers for all microbatches of a step: up to {format_bytes(most)} of a GPU")
    if isinstance(price, dict) and price:
        found = [f"{shown(str(x))} {format_ns(ns)} ({longer(ns, result)})" for x, ns in price.items()]
        lines.append(f"price       without that restriction {', '.join(found)}")
    if isinstance(options.get("binds"), str):
        lines.append(f"binds       {shown(options['binds'], SENTENCE)}")
    return lines


def tensor_degree(plan: Plan) -> list[str]:
    """Return how many GPUs run each layer together, and what other degrees would take, in lines; nothing for one."""
    found = plan.provenance.options.get("tensor")
    tried = {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}
    chain = plan.chain
    if chain.variant == "1" and len(tried) < 2:
        return []
    along = ", with sequence parallelism" if chain.sequence_parallel else ""
    along += ", attention's core again in backwards (selective recomputation)" if chain.selective else ""
    if chain.experts > 1:
        even = (
            "tokens taken evenly over them"
            if chain.imbalance == 1
            else f"the fullest has {chain.imbalance:g} times its share of tokens"
        )
        along += f"; {chain.experts} GPUs share the experts of each layer, {even}"
    if chain.context > 1:
        along += f"; {chain.context} of them share each sequence, " + (
            "by heads in attention" if chain.by_heads else "whose keys and values go round"
        )
    if chain.offloaded:
        along += f"; activations wait in host memory, over a link of {format_bandwidth(chain.offloaded)} per GPU"
    told = [f"tensor degree {chain.tensor}{along}"]
    if chain.variants:
        stages = plan.allocation.stages
        each = [chain.of(x.way) for x in stages]
        link = max(x.offloaded for x in each)
        over = f"; offloaded: activations wait in host memory, over {format_bandwidth(link)} per GPU" if link else ""
        told = [f"tensor degrees of their own: {', '.join(x.variant for x in each)} by stage{over}"]
        again = (
            f"layers {', '.join(f'{a}-{b - 1}' for a, b in x.selective)} of stage {s}"
            for s, x in enumerate(stages)
            if x.selective
        )
        if max(x.width for x in each) == 1 and not link:
            cores = "; ".join(again) or "no layer"
            told = [f"attention's core again in backwards (selective recomputation) in {cores}"]
    if len(tried) > 1:
        told.append(f"  by degree: {', '.join(f'{shown(k)} {_of_degree(v)}' for k, v in tried.items())}")
        least = min((number_in(v, "bound_ns") or 0 for v in tried.values() if v.get("bound_ns") is not None), default=0)
        own = _taken(tried.get(plan.chain.variant, {}))
        if own is not None and 0 < least <= own:
            told[-1] += f"; none is below {format_ns(least)}: gap {own / least - 1:.2%}"
    return told


def _taken(found: dict[str, Any]) -> int | None:
    return number_in(found, "period_ns") or number_in(found, "batch_ns")


def number_in(found: dict[str, Any], name: str) -> int | None:
    """Return the positive number that ``found`` has by a name, None where that is none."""
    value = found.get(name)
    return value if type(value) is int and value > 0 else None


def _of_degree(found: dict[str, Any]) -> str:
    """Return what was found of a degree, in words."""
    taken, bound = _taken(found), number_in(found, "bound_ns")
    if taken is not None:
        return format_ns(taken)
    return "no plan" if bound is None else f"at least {format_ns(bound)}"


def ordering(plan: Plan) -> list[str]:
    """Return how good the order of passes is at least, in a line; nothing of plans whose order no search has found."""
    found = plan.provenance.options.get("order")
    if not isinstance(found, dict):
        return []
    bound, value = number_in(found, "bound_ns"), number_in(found, "value_ns")
    if bound is None or value is None or bound > value:
        return []
    gap = "proved best" if bound == value else f"gap {value / bound - 1:.2%}"
    return [f"orders      no other order of these stages drains before {format_ns(bound)}: {gap}"]


def longer(period_ns: int, result: Evaluation) -> str:
    """Return in words how much longer or shorter a period is than the plan's."""
    ratio = period_ns / result.period_ns
    if max(ratio, 1 / ratio) >= 1.1:
        return f"{ratio:.2f} times longer" if ratio > 1 else f"{1 / ratio:.2f} times shorter"
    share = f"{abs(ratio - 1):.1%}"
    return "as long" if share == "0.0%" else f"{share} {'longer' if ratio > 1 else 'shorter'}"
