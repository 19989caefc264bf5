"""Clocks that the profiler marks a step with: of the CPU, of a GPU, or an estimate's own (:mod:`.estimate`)."""

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
