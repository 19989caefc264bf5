"""How long must a run of layers recompute at least so that one microbatch fits beside its weights and buffers?

A microbatch holds most where its backward comes to some segment: what all segments up to that one keep, and what that
one holds while it is recomputed. The least of that by the time of recomputation follows from the last layer to the
first, for all runs at once. Times are counted in cells, rounded down segment by segment, so none is too long.
"""

from __future__ import annotations

import numpy as np

from ...integers import NEVER, Ints

CELLS = 256  # of the time of all forwards
MOST_LAYERS = 128


def least_recomputed(
    forward: Ints, kept: Ints, first_kept: Ints, input_kept: Ints, while_recomputed: Ints, room: Ints
) -> Ints:
    """Return the least recomputation, in ticks as ``forward``, of each run; NEVER where nothing helps.

    ``room`` are bytes, tables ``[first, end]`` by numbers of replicas, (R, L + 1, L + 1), as what is returned; the rest
    is by layer, as :class:`.facts.Facts` says.
    """
    cell = max(1, -(-int(forward.sum()) // CELLS))
    peaks = _peaks(forward, cell, kept, first_kept, input_kept, while_recomputed)
    cells = np.stack([(peaks > one[:, :, None]).sum(axis=2) for one in room])
    return np.where(cells > CELLS, NEVER, cells * cell)


def _peaks(forward: Ints, cell: int, kept: Ints, first_kept: Ints, input_kept: Ints, while_recomputed: Ints) -> Ints:
    """Return the least that one microbatch holds at its worst instant; table ``[first, end, cells]``, bytes."""
    count = len(forward)
    inside = np.full((count + 1, count + 1, CELLS + 1), NEVER, dtype=np.int64)  # behind other parts of the run
    table = inside.copy()
    inside[count, count] = 0
    for i in range(count - 1, -1, -1):
        inside[i, i] = 0
        segments = np.full((count + 1, CELLS + 1), NEVER, dtype=np.int64)
        held = np.cumsum(while_recomputed[i, i:]).tolist()
        again = (np.cumsum(forward[i:]) // cell).tolist()
        for end, size, cells in zip(range(i + 1, count + 1), held, again, strict=True):
            into = segments[end:, cells:]
            np.minimum(into, np.maximum(size, inside[end, end:, : CELLS + 1 - cells]), out=into)
        segments += int(input_kept[i])
        for rows, stored in ((inside, kept[i]), (table, first_kept[i])):
            np.minimum(segments[i + 1 :], inside[i + 1, i + 1 :] + int(stored), out=rows[i, i + 1 :])
    return table
