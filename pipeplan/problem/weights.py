"""How can weights be kept? A row for each policy: which version each pass uses, and all that follows for others.

Versions are numbered from 0, the initial weights; update j makes version j + 1 from mini-batch j. A policy is two rules
that say which version a forward and a backward get. It has no state: with them all of a run's versions follow from the
order of its passes, before it starts. Nobody else compares the names of policies; a new one is a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..choices import Weights


@dataclass(frozen=True, slots=True)
class WeightRules:
    """Two rules, and what follows. ``made`` is the number of updates that a stage has made when an operation's turn
    comes.

    ``forward_version(minibatch, made, entered)`` gives the version of a forward, where ``entered`` is the version with
    which the first stage ran the microbatch forward; ``backward_version(forward, made, common)`` that of the backward
    whose forward used version ``forward``, where ``common`` is the newest version that all stages had when the last one
    began the backward. ``most_versions`` is how many may be needed at once, None: one for each update that a microbatch
    in flight misses. ``fresher`` names the policy that has the same plans, with gradients that are less late.

    ``drains``: the pipeline empties before every update. ``together``: all stages make every update from the same
    microbatches. ``within_update``: at most the microbatches of one update are in flight at once. ``any_interval``:
    plans may be asked for without saying how often to update. ``reads_newest``: a backward differentiates what the
    forward has stored, but with other weights than the forward's. ``synced`` are the rules with vertical sync, None
    where that has no meaning; ``alone`` names the policy of which each stage keeps the versions that its own
    microbatches need and no more: a relaxation, for searches that see one stage at a time.
    """

    forward_version: Callable[[int, int, int], int]
    backward_version: Callable[[int, int, int], int]
    most_versions: int | None
    meaning: str = ""
    drains: bool = False
    together: bool = False
    within_update: bool = False
    any_interval: bool = False
    reads_newest: bool = False
    synced: WeightRules | None = None
    alone: Weights | None = None
    fresher: Weights | None = None


def _newest(minibatch: int, made: int, entered: int) -> int:
    return made


def _newest_of_two(minibatch: int, made: int, entered: int) -> int:
    return max(minibatch - 1, made)


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


_TWO = WeightRules(
    _newest_of_two,
    _as_forward,
    most_versions=2,
    meaning="at most two versions, forwards read the newest that is made, never drained",
    together=True,
    within_update=True,
    any_interval=True,
)
WEIGHTS: dict[Weights, WeightRules] = {
    # GPipe, 1F1B with flush: every pass of a mini-batch uses the weights that all mini-batches before it have made
    "flush": WeightRules(
        _newest,
        _as_forward,
        most_versions=1,
        meaning="one version, the pipeline drains before every update",
        drains=True,
        together=True,
    ),
    # PipeDream-2BW's two versions, of which a forward reads the newer where its stage has made that
    "2bw": _TWO,
    # PipeDream-2BW: W(t+1) = W(t) - lr * grad f(W(t-1)), in both passes (ALGORITHMS sections 3 and 10.6)
    "2bw-uniform": replace(
        _TWO,
        forward_version=_delayed_by_one,
        meaning="two versions of them, every gradient one update late, never drained",
        fresher="2bw",
    ),
    # PipeDream's weight stashing: the stage's newest weights, kept for the backward (PipeDream section 3.3)
    "stash": WeightRules(
        _newest,
        _as_forward,
        most_versions=None,
        meaning="a version for each update that a microbatch in flight misses, never drained",
        # PipeDream's vertical sync: on every stage the version with which the microbatch entered the first
        synced=WeightRules(_as_entered, _as_forward, most_versions=None, alone="stash"),
    ),
    # TiMePReSt without vertical sync: the newest weights in either pass, so one version
    "latest": WeightRules(
        _newest,
        _newest_again,
        most_versions=1,
        meaning="one version, forward and backward on the newest",
        reads_newest=True,
        # TiMePReSt's: a pass, in either direction, uses on every stage what is newest on all of them when it starts
        synced=WeightRules(_as_entered, _newest_in_common, most_versions=None, reads_newest=True, alone="stash"),
    ),
}
