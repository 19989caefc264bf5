"""Integer arithmetic that every room shares: ceilings, the groups of 1F1B*, and a search for a least value.

A group is a run of consecutive stages whose work fits into one period. Groups are numbered from 1, the last of the
chain, as in MadPipe section 4.1. ``delay`` is the time between the end of a stage's forward and the start of its
backward on the same microbatch. Functions take integers or integer arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
IntLike = Any  # an int or an array of them
Number = TypeVar("Number", int, Ints)
Found = TypeVar("Found")
NEVER = 2**61  # above every time (ns) and every size, and two of them still fit into an int64


def plain(value: IntLike) -> IntLike:
    """Return a NumPy scalar as an int, so that Python's unbounded arithmetic applies; arrays stay arrays."""
    return value if isinstance(value, np.ndarray) and value.ndim else int(value)


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


def extend_array(delay: Ints, work: Ints, period: Ints | int) -> Ints:
    """Return :func:`extend` element by element."""
    start = ceil_div(delay, period)
    return np.where(ceil_div(delay + work, period) == start, delay, start * period) + work


def most_in_common(count: int) -> int:
    """Return the largest least common multiple of two positive numbers whose sum is at most ``count``; 1 for less."""
    return max((lcm(n // 2 - k, n - n // 2 + k) for n in (count - 1, count) for k in range(3) if n // 2 > k), default=1)


def smallest(
    attempt: Callable[[int], Found | None], low: int, high: int, guess: int | None = None
) -> tuple[int, Found] | None:
    """Return the least integer in [low, high] at which ``attempt`` returns something, with what it returned.

    ``attempt`` must be monotone: once it succeeds, it succeeds at every larger value. None when it fails at ``high``.
    With a ``guess``, from ``low`` to ``high``, it is only tried far above that if it fails nearer.
    """
    if low > high:
        return None
    at, step = high if guess is None else guess, 1
    while (found := attempt(at)) is None:
        if at == high:
            return None
        low, at, step = at + 1, min(at + step, high), 2 * step
    best = at, found
    while low < best[0]:
        middle = (low + best[0]) // 2
        found = attempt(middle)
        if found is None:
            low = middle + 1
        else:
            best = middle, found
    return best


def largest_each(fits: Callable[[Ints], npt.NDArray[np.bool_]], low: Ints, high: Ints) -> Ints:
    """Return the largest numbers up to ``high`` that fit, each by itself; ``low`` are taken to, and all below one that
    does."""
    while (low < high).any():
        middle = low + (high - low + 1) // 2
        found = fits(middle)
        low, high = np.where(found, middle, low), np.where(found, high, middle - 1)
    return low
