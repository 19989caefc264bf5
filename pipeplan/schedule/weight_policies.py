"""Weight policies: which version of the weights each pass of a microbatch uses. The only way in which they differ.

Versions are numbered from 0, the initial weights; update j makes version j + 1 from mini-batch j. A policy says which
version a forward and a backward get; when a version may be overwritten follows from the instructions (see
``versions``). So a policy has no state, and all of a run's versions are known before it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import BadInput
from ..problem import Policy


@dataclass(frozen=True, slots=True)
class WeightPolicy:
    """Two rules. ``made`` is the number of updates that the stage has made when the operation's turn comes.

    ``forward_version(minibatch, made, entered)`` gives the version of a forward, where ``entered`` is the version with
    which the first stage ran the microbatch forward; ``backward_version(forward, made, common)`` that of the backward
    whose forward used version ``forward``, where ``common`` is the newest version that all stages had when the last one
    began the backward. ``most_versions`` is how many may be needed at once, None when the schedule decides. With
    ``drains`` the pipeline empties before every update. With ``renews`` a backward differentiates what the forward has
    stored, but with other weights than the forward's.
    """

    drains: bool
    most_versions: int | None
    forward_version: Callable[[int, int, int], int]
    backward_version: Callable[[int, int, int], int]
    renews: bool = False


def _newest(minibatch: int, made: int, entered: int) -> int:
    return made


def _delayed_by_one(minibatch: int, made: int, entered: int) -> int:
    return max(minibatch - 1, 0)


def _as_entered(minibatch: int, made: int, entered: int) -> int:
    return entered


def _as_forward(forward: int, made: int, common: int) -> int:
    return forward


def _newest_again(forward: int, made: int, common: int) -> int:
    return made


def _newest_in_common(forward: int, made: int, common: int) -> int:
    return common


WEIGHT_POLICIES = {
    # GPipe, 1F1B with flush: every pass of a mini-batch uses the weights that all mini-batches before it have made
    "flush": WeightPolicy(drains=True, most_versions=1, forward_version=_newest, backward_version=_as_forward),
    # PipeDream-2BW: W(t+1) = W(t) - lr * grad f(W(t-1)), in both passes (ALGORITHMS sections 3 and 10.6)
    "2bw": WeightPolicy(drains=False, most_versions=2, forward_version=_delayed_by_one, backward_version=_as_forward),
    # PipeDream's weight stashing: the stage's newest weights, kept for the backward (PipeDream section 3.3)
    "stash": WeightPolicy(drains=False, most_versions=None, forward_version=_newest, backward_version=_as_forward),
    # TiMePReSt without vertical sync: the newest weights in either pass, so one version
    "latest": WeightPolicy(
        drains=False, most_versions=1, forward_version=_newest, backward_version=_newest_again, renews=True
    ),
}
WITH_VERTICAL_SYNC = {
    # PipeDream's: on every stage the version with which the microbatch entered the first
    "stash": WeightPolicy(drains=False, most_versions=None, forward_version=_as_entered, backward_version=_as_forward),
    # TiMePReSt's: a pass, in either direction, uses on every stage what is newest on all of them when it starts
    "latest": WeightPolicy(
        drains=False, most_versions=None, forward_version=_as_entered, backward_version=_newest_in_common, renews=True
    ),
}


def weight_policy(policy: Policy) -> WeightPolicy:
    """Return the rules of ``policy.weights``; BadInput where vertical sync has no meaning."""
    if not policy.vertical_sync:
        return WEIGHT_POLICIES[policy.weights]
    if policy.weights not in WITH_VERTICAL_SYNC:
        raise BadInput(f"plan: vertical sync goes with --weights stash or latest; this plan has {policy.weights!r}")
    return WITH_VERTICAL_SYNC[policy.weights]
