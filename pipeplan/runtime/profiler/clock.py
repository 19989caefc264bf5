"""Clocks that the profiler marks a step with: the device's, CPU time, or an estimate's own (:mod:`.estimate`)."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks on a time line, read once it is settled."""

    def mark(self) -> Any:
        """Return a mark at this moment of the device's work."""

    def settle(self) -> None:
        """Wait until all marks can be read."""

    def between(self, start: Any, end: Any) -> int:
        """Return the nanoseconds from one mark to a later one."""


class DeviceClock:
    """The monotonic clock on a CPU, CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Return a mark: nanoseconds, or an event in the stream of kernels."""
        if not self._cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        """Wait for the GPU."""
        if self._cuda:
            torch.cuda.synchronize()

    def between(self, start: Any, end: Any) -> int:
        """Return the nanoseconds between two marks."""
        return round(start.elapsed_time(end) * 1e6) if self._cuda else int(end - start)


class ThreadClock:
    """CPU time of the calling thread: one thread's work, whatever else the machine is busy with."""

    def mark(self) -> int:
        """Return the nanoseconds that this thread has run."""
        return time.thread_time_ns()

    def settle(self) -> None:
        """Nothing is under way."""

    def between(self, start: int, end: int) -> int:
        """Return the nanoseconds between two marks."""
        return end - start
