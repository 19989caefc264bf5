"""Which layers share weights and so must be on the same devices? Where stages make their updates at different times.

Where all stages make every update from the same microbatches (flush, 2bw), copies on several devices stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..names import shown
from ..plan import Stage
from ..problem import Chain, Policy


def tied_violations(chain: Chain, policy: Policy, stages: Sequence[Stage]) -> list[str]:
    """Return which layers share weights although their stages, on different devices, would let copies drift apart."""
    if policy.updates_together:
        return []
    found = []
    for one, other in chain.tied:
        holders = [
            next((s for s, stage in enumerate(stages) if stage.start <= layer < stage.stop), None)
            for layer in (one, other)
        ]
        if None in holders or len({stages[s].devices for s in holders if s is not None}) > 1:
            names = [f"{layer} ({shown(chain.layers[layer].name)})" for layer in (one, other)]
            found.append(
                f"layers {names[0]} and {names[1]} share weights but are in stages {holders[0]} and {holders[1]} on "
                "different GPUs; only --weights 2bw and flush can keep copies equal"
            )
    return found


def kept_together(chain: Chain, policy: Policy) -> str | None:
    """Return in a sentence which layers the policy keeps on one GPU because they share weights; None for none."""
    if policy.updates_together or not chain.tied:
        return None
    widest = max(chain.tied, key=lambda pair: (pair[1] - pair[0], pair))
    one, other = (f"{i} ({shown(chain.layers[i].name)})" for i in widest)
    more = len(chain.tied) - 1
    others = f" (and {more} more pair{'s' if more > 1 else ''})" if more else ""
    return f"layers {one} and {other}{others} share weights and must stay on one GPU under --weights {policy.weights}"
