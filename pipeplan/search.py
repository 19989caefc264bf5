"""The one search over integers: the least period (or memory, or number of GPUs) at which a monotone test succeeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def smallest(attempt: Callable[[int], Found | None], low: int, high: int) -> tuple[int, Found] | None:
    """Return the least integer in [low, high] at which ``attempt`` returns something, with what it returned.

    ``attempt`` must be monotone: once it succeeds, it succeeds at every larger value. None when it fails at ``high``.
    """
    found = attempt(high) if low <= high else None
    if found is None:
        return None
    best = high, found
    while low < best[0]:
        middle = (low + best[0]) // 2
        found = attempt(middle)
        if found is None:
            low = middle + 1
        else:
            best = middle, found
    return best
