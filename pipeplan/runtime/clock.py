"""What marks moments of a device's work? Its clock, CPU time, or an estimate's own (:mod:`.profiler.estimate`)."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..problem import Exchange, PassWork


class Clock:
    """Marks on a time line, read once it is settled: here numbers of ns, which can be read at once.

    ``warm_s`` is how long the device has to be at work before it is at full speed.
    """

    warm_s = 0.0

    def mark(self) -> Any:
        """Return a mark at this moment of the device's work."""
        raise NotImplementedError

    @property
    def host(self) -> Clock:
        """What marks the host's own work."""
        return self

    def settle(self) -> None:
        """Wait until all marks can be read."""

    def between(self, start: Any, end: Any) -> int:
        """Return the nanoseconds from one mark to a later one."""
        ns: int = round(end - start)
        return ns

    def exchanges(self, start: Any, end: Any, backward: bool) -> list[Exchange]:
        """Return what a group's ranks exchanged between two marks, where that is counted."""
        return []

    def work(self, start: Any, end: Any) -> PassWork | None:
        """Return what was asked of the device between two marks, where that is counted."""
        return None


class HostClock(Clock):
    """The monotonic clock."""

    def mark(self) -> int:
        """Return the time."""
        return time.perf_counter_ns()


class ThreadClock(Clock):
    """CPU time of the calling thread: one thread's work, whatever else the machine is busy with."""

    def mark(self) -> int:
        """Return the nanoseconds that this thread has run."""
        return time.thread_time_ns()


class CudaClock(Clock):
    """Events in the stream of a GPU's kernels."""

    warm_s = 1.0  # idle clocks are a fraction of those under load

    def mark(self) -> Any:
        """Return an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @property
    def host(self) -> Clock:
        """The monotonic clock, as the host works beside the GPU."""
        return HostClock()

    def settle(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def between(self, start: Any, end: Any) -> int:
        """Return the nanoseconds between two events."""
        return super().between(0, start.elapsed_time(end) * 1e6)


def clock_of(device: torch.device) -> Clock:
    """Return the clock of ``device``."""
    return CudaClock() if device.type == "cuda" else HostClock()
