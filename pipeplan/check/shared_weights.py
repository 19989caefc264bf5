"""Which layers share weights and so must be in one stage? Where stages make their updates at different times.

Where all stages make every update from the same microbatches (flush, 2bw), copies in several stages stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..names import shown
from ..plan import Stage
from ..problem import Chain, Policy


def tied_violations(chain: Chain, policy: Policy, stages: Sequence[Stage]) -> list[str]:
    """Return which layers share weights although their stages, with the policy, would let them drift apart."""
    if policy.updates_together:
        return []
    found = []
    for one, other in chain.tied:
        holders = [
            next((s for s, stage in enumerate(stages) if stage.start <= layer < stage.stop), None)
            for layer in (one, other)
        ]
        if holders[0] != holders[1]:
            names = [f"{layer} ({shown(chain.layers[layer].name)})" for layer in (one, other)]
            found.append(
                f"layers {names[0]} and {names[1]} share weights but are in stages {holders[0]} and {holders[1]}; only "
                "--weights 2bw and flush can keep them equal"
            )
    return found


def kept_together(chain: Chain, policy: Policy) -> str | None:
    """Return in a sentence which layers the policy keeps in one stage because they share weights; None for none."""
    if policy.updates_together or not chain.tied:
        return None
    widest = max(chain.tied, key=lambda pair: (pair[1] - pair[0], pair))
    one, other = (f"{i} ({shown(chain.layers[i].name)})" for i in widest)
    more = len(chain.tied) - 1
    others = f" (and {more} more pair{'s' if more > 1 else ''})" if more else ""
    return f"layers {one} and {other}{others} share weights and must stay in one stage under --weights {policy.weights}"
