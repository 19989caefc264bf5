"""When do things happen on a device, what is to be done once they have, and how many bytes are held at most?

A CPU does what it is told at once. A GPU is told ahead of time: marks are CUDA events in its stream, read when it has
passed them, oldest first. The host runs at most :data:`AHEAD` notes ahead, so what waits stays small: events, buffers
for messages, losses that nobody has looked at. Of long runs the times in the middle are forgotten.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage

from ..device import await_event
from .times import Activity, OpTime

AHEAD: Final = 12  # about four passes with their data, waits and losses
COMPARED: Final = 5  # events by which clocks are compared, as a host that has other work hears of some late
KEPT: Final = 60_000  # operations of the begin and as many of the end: 20 MB at most, some 17,000 microbatches


def kept_off_ns() -> int:
    """Return for how long this thread was ready to go on and had no core; 0 where no kernel counts that."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


class Times:
    """When operations happened: all of a run's, or of a long one the first ``kept`` and the last.

    For the share ``kept_off`` of all that time others had the core.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.kept_off = 0.0
        self._kept = kept
        self._first: list[OpTime] = []
        self._last: deque[OpTime] = deque(maxlen=kept)
        self._count = 0

    def add(self, time: OpTime) -> None:
        """Keep ``time``, and forget one in the middle if there are too many."""
        self._count += 1
        (self._first if len(self._first) < self._kept else self._last).append(time)

    @property
    def forgotten(self) -> int:
        """How many are not kept."""
        return self._count - len(self._first) - len(self._last)

    def last_end_ns(self, activity: Activity, stage: int, within: range) -> int | None:
        """Return when an activity of a stage ended for the last time on one of the microbatches ``within``."""
        for times in (reversed(self._last), reversed(self._first)):
            for x in times:
                if x.activity == activity and x.stage == stage and x.microbatch in within:
                    return x.end_ns
        return None

    def __iter__(self) -> Iterator[OpTime]:
        yield from self._first
        yield from self._last


class Recorder:
    """Marks on a device's time line, in the monotonic clock of rank 0's machine once they are read: here a CPU's, where
    everything is done when the call returns.

    ``offset_ns`` is added to this machine's clock. ``times`` are those that were read so far. ``lag_ns`` is by how much
    the device's clock has stayed behind the host's when it is settled.
    """

    def __init__(self, offset_ns: int = 0) -> None:
        self._offset_ns = offset_ns
        self.times, self.lag_ns = Times(), 0

    def mark(self) -> Any:
        """Return a mark at this moment of the device's work."""
        return time.monotonic_ns() + self._offset_ns

    def note(self, activity: Activity, stage: int, microbatch: int, start: Any, end: Any = None) -> None:
        """Note that an activity went on from the mark ``start`` until ``end``, or now."""
        self.times.add(OpTime(activity, stage, microbatch, start, self.mark() if end is None else end))

    def later(self, action: Callable[[], None]) -> None:
        """Do ``action`` when the device has done what it was given so far; actions keep their order."""
        action()

    def settle(self) -> Times:
        """Wait for the device, do all that is left to be done, and return what was noted."""
        return self.times


class CudaRecorder(Recorder):
    """For a GPU: events in the current stream of the process's device.

    DeviceWaits where one doesn't come within ``timeout``.
    """

    def __init__(self, timeout: timedelta, offset_ns: int = 0, ahead: int = AHEAD) -> None:
        super().__init__(offset_ns)
        self._timeout, self._ahead = timeout, ahead
        self._waiting: deque[tuple[Any, Callable[[], None]]] = deque()
        self._base: tuple[Any, int] = self.mark(), 0
        later_ns = self._heard_later_ns()
        self._base = self._base[0], self._base[1] + later_ns

    def mark(self) -> Any:
        """Return an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def note(self, activity: Activity, stage: int, microbatch: int, start: Any, end: Any = None) -> None:
        """Note what ends at the event ``end``, or at one recorded now."""
        end = self.mark() if end is None else end

        def read() -> None:
            begin = self._ns(start)
            self.times.add(OpTime(activity, stage, microbatch, begin, self._ns(end)))

        self._await(end, read)

    def later(self, action: Callable[[], None]) -> None:
        """Do it when the GPU has passed an event recorded now."""
        self._await(self.mark(), action)

    def settle(self) -> Times:
        """Wait for the last event, and see how far the clocks have run apart."""
        while self._waiting:
            self._oldest()
        self.lag_ns = self._heard_later_ns()
        return self.times

    def _await(self, event: Any, action: Callable[[], None]) -> None:
        self._waiting.append((event, action))
        while len(self._waiting) > self._ahead:
            self._oldest()

    def _oldest(self) -> None:
        """Do what waits longest."""
        event, action = self._waiting.popleft()
        await_event(event, self._timeout)
        action()

    def _heard_later_ns(self) -> int:
        """Return by how much later, at least, the host hears of events than they are by the GPU's clock."""
        late = []
        for _ in range(COMPARED):
            event = self.mark()
            await_event(event, self._timeout)
            late.append(time.monotonic_ns() + self._offset_ns - self._ns(event))
        return min(late)

    def _ns(self, event: Any) -> int:
        """Return an event's time. Distances are floats in ms, exact only when short: from one event to the next."""
        base, base_ns = self._base
        at: int = base_ns + round(base.elapsed_time(event) * 1e6)
        self._base = event, at
        return at


def recorder_of(device: torch.device, offset_ns: int, timeout: timedelta) -> Recorder:
    """Return the recorder for ``device``, which ends or waits for other ranks at most ``timeout``.

    ``offset_ns`` is what this machine's clock lacks to rank 0's.
    """
    return CudaRecorder(timeout, offset_ns) if device.type == "cuda" else Recorder(offset_ns)


# --- bytes ------------------------------------------------------------------------------------------------------------

Holding = dict[int, UntypedStorage]  # by identity; holding the storage keeps its identity from being used again


class HeldBytes:
    """Bytes held now and at most, by one rank."""

    def __init__(self) -> None:
        self._holders: Counter[int] = Counter()
        self._bytes: dict[int, int] = {}
        self.held_bytes = 0
        self.peak_bytes = 0
        self.most_at_home = 0  # of those that wait in host memory

    def hold(self, holding: Holding, tensor: Tensor) -> None:
        """Add ``tensor`` to ``holding``."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in holding:
            return
        holding[key] = storage
        if not self._holders[key]:
            self._bytes[key] = storage.nbytes()
            self.held_bytes += self._bytes[key]
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._holders[key] += 1

    def release(self, holding: Holding) -> None:
        """Remove all that ``holding`` holds."""
        for key in holding:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.held_bytes -= self._bytes.pop(key)
        holding.clear()


Kept = Callable[[], Iterator[tuple[Tensor, bool]]]  # tensors, and whether they are in host memory for want of room


class StateBytes:
    """Most bytes of what stages train, on the device and, offloaded, in host memory; noted while updates are made.

    A storage counts once and in full. ``open`` until everything has been at its largest, because counting takes time.
    """

    def __init__(self) -> None:
        self._watched: list[Kept] = []
        self.device_bytes = 0
        self.host_bytes = 0
        self.open = True

    def watch(self, kept: Kept) -> None:
        """Count what ``kept`` yields as well."""
        self._watched.append(kept)

    def note(self) -> None:
        """Count what is there now."""
        if not self.open:
            return
        sizes: dict[int, tuple[int, bool]] = {}
        for kept in self._watched:
            for tensor, on_host in kept():
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes(), on_host
        self.device_bytes = max(self.device_bytes, sum(n for n, on_host in sizes.values() if not on_host))
        self.host_bytes = max(self.host_bytes, sum(n for n, on_host in sizes.values() if on_host))
