"""How many bytes does torch's allocator hold at most? Counted from its own record of all that it gave and took back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def most_bytes(work: Callable[[], T]) -> tuple[int, T]:
    """Return how many bytes more than before there are at most while ``work`` runs, and what it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        made = work()
    events = found.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most, made
