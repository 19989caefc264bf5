"""Where may a chain be cut into stages, and what crosses there?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..cost.saved import storages
from ..cost.stage_tables import crossing_bytes
from ..integers import Ints
from ..plan import Stage
from ..problem import Chain, Platform, Problem


def legal_cuts(problem: Problem, several: bool = False) -> Ints:
    """Return the positions (layers before a cut) at which stages may begin and end, 0 and L included.

    Layers that share weights stay in one stage, but where copies in several stages get equal updates, or where one
    device may have ``several`` stages: see :func:`parting`.
    """
    legal = np.ones(len(problem.chain) + 1, dtype=np.bool_)
    if problem.tied == "together" or not (several or problem.policy.updates_together):
        for one, other in problem.chain.tied:
            legal[min(one, other) + 1 : max(one, other) + 1] = False
    return np.flatnonzero(legal)


def parting(problem: Problem, cuts: Ints) -> npt.NDArray[np.bool_]:
    """Return, over pairs of ``cuts``, whether the layers between them share weights with others that a stage with these
    layers must have on its own device."""
    parts = np.zeros((len(cuts), len(cuts)), dtype=np.bool_)
    if not problem.policy.updates_together:
        for pair in problem.chain.tied:
            one, other = ((cuts[:, None] <= layer) & (layer < cuts[None, :]) for layer in pair)
            parts |= one != other
    return parts


def round_trips_ns(chain: Chain, platform: Platform, cuts: Ints, level: int) -> list[int]:
    """Return the time of both directions of each of ``cuts`` on a path over ``level``; 0 for the chain's two ends."""
    return [2 * platform.transfer_ns(size, level) for size in crossing_bytes(chain)[cuts].tolist()]


def spread_cuts(problem: Problem, cuts: Ints, bins: int) -> Ints | None:
    """Return the indices of up to ``bins`` of the ``cuts`` with small transfers, spread over the chain's time.

    None where that is most of the cuts.
    """
    count, chain = len(cuts), problem.chain
    if 3 * count < 4 * bins:
        return None
    time, saved = (chain.sums.forward_ns + chain.sums.backward_ns)[cuts], storages(chain).totals[cuts]
    share = time / max(1, int(time[-1]))
    if problem.checkpointing == "segments":  # which need cuts where bytes are saved, too
        share = (share + saved / max(1, int(saved[-1]))) / 2
    place = np.minimum((share * bins).astype(np.int64), bins - 1)
    trips = np.array(round_trips_ns(chain, problem.platform, cuts, 0), dtype=np.int64)
    order = np.lexsort((np.arange(count), trips, place))
    first = order[np.concatenate([[True], np.diff(place[order]) > 0])]
    return np.unique(np.concatenate([[0], first, [count - 1]]))


def near_cuts(cuts: Ints, stages: Sequence[Stage], most: int) -> Ints | None:
    """Return the indices of the ``cuts`` between ``stages`` and up to ``most`` neighbours on each side; None where
    those are most of the cuts."""
    count = len(cuts)
    width = min(most, max(2, count // (8 * len(stages))))
    at = np.searchsorted(cuts, [stage.start for stage in stages] + [stages[-1].stop])
    near = np.unique(np.clip(at[:, None] + np.arange(-width, width + 1), 0, count - 1))
    return None if 4 * len(near) > 3 * count else near
