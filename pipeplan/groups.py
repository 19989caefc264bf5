"""The arithmetic of 1F1B*: delays grow by whole groups, and a stage holds as many microbatches as its group says.

A group is a run of consecutive stages whose work fits into one period. Groups are numbered from 1, the last of the
chain, as in MadPipe section 4.1. ``delay`` is the time between the end of a stage's forward and the start of its
backward on the same microbatch. All functions take integers or integer arrays.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", int, npt.NDArray[np.int64])


def ceil_div(numerator: Number, denominator: Number | int) -> Number:
    """Return the quotient rounded up, exactly."""
    return -(-numerator // denominator)


def extend(delay: int, work: int, period: int) -> int:
    """Return ``delay (+) work`` at ``period``: the delay seen before an element that takes ``work`` ns per microbatch.

    The element joins the current group when the group's count does not grow, and opens a new group otherwise
    (MadPipe section 4.2.2). Nondecreasing in both ``delay`` and ``work``.
    """
    group = ceil_div(delay, period)
    return delay + work if ceil_div(delay + work, period) == group else group * period + work


def extend_array(
    delay: npt.NDArray[np.int64], work: npt.NDArray[np.int64], period: npt.NDArray[np.int64] | int
) -> npt.NDArray[np.int64]:
    """Return :func:`extend` element by element."""
    start = ceil_div(delay, period)
    return np.where(ceil_div(delay + work, period) == start, delay, start * period) + work
