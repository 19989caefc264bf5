"""How is a Chrome trace written, for ui.perfetto.dev and chrome://tracing? Tracks, slices, arrows, counters.

Format: "Trace Event Format" of the Chromium project. What Perfetto adds to it: ids of arrows are integers (text is
dropped), times are cut off to whole ns, process and thread 0 are the kernel's, and a thread whose number is its
process's stands before all others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nextafter
from typing import Any

TRACKS = 10**5  # of a process: its threads are numbered from the process's number times this


@dataclass(frozen=True, slots=True)
class Track:
    """One line of the picture: a thread of a process, by their numbers."""

    process: int
    thread: int


@dataclass(frozen=True, slots=True)
class Slice:
    """A box on a track, from ``start_ns`` to ``end_ns``."""

    track: Track
    start_ns: int
    end_ns: int


class ChromeTrace:
    """The events of a trace, in the order of its tracks."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._arrows = self._processes = 0
        self._tracks: dict[int, int] = {}  # process to how many it has

    def process(self, name: str) -> int:
        """Add a group of tracks below those there are; return its number."""
        self._processes += 1
        number = self._processes
        self._tracks[number] = 0
        self._about("process_name", Track(number, number * TRACKS), name=name)
        self._about("process_sort_index", Track(number, number * TRACKS), sort_index=number)
        return number

    def track(self, process: int, name: str) -> Track:
        """Add a track below those that ``process`` has."""
        place = self._tracks[process]
        self._tracks[process] += 1
        track = Track(process, process * TRACKS + place)
        self._about("thread_name", track, name=name)
        self._about("thread_sort_index", track, sort_index=place)
        return track

    def slice(
        self, track: Track, name: str, category: str, start_ns: int, end_ns: int, args: Mapping[str, Any]
    ) -> Slice:
        """Add a box. Those of a track follow each other or lie in each other."""
        length = microseconds(end_ns - start_ns)
        self._event("X", track, start_ns, name=name, cat=category, dur=length, args=dict(args))
        return Slice(track, start_ns, end_ns)

    def counter(self, process: int, name: str, at_ns: int, unit: str, value: float) -> None:
        """Say that the counter ``name`` has ``value`` from now on."""
        self._event("C", Track(process, process * TRACKS), at_ns, name=name, args={unit: value})

    def arrow(self, name: str, through: Sequence[Slice]) -> None:
        """Add an arrow from the end of the first box through those between to the start of the last.

        None where that would go back in time, as clocks that differ may have it; a box without length holds no arrow.
        """
        boxes = [box for box in through if box.end_ns > box.start_ns]
        if len(boxes) < 2 or boxes[0].start_ns > boxes[-1].start_ns:
            return
        first, *between, last = boxes
        points = [("s", first, min(first.end_ns - 1, last.start_ns))]
        points += [("t", box, box.start_ns) for box in between if points[0][2] <= box.start_ns <= last.start_ns]
        for phase, box, at in [*points, ("f", last, last.start_ns)]:
            binding = {"bp": "e"} if phase == "f" else {}
            self._event(phase, box.track, at, name=name, cat="transfer", id=self._arrows, **binding)
        self._arrows += 1

    def text(self, about: Mapping[str, Any] | None = None) -> str:
        """Return the file, with ``about`` as its ``otherData``."""
        head: dict[str, Any] = {"displayTimeUnit": "ms"} | ({} if about is None else {"otherData": about})
        return json.dumps(head | {"traceEvents": self.events}) + "\n"

    def _about(self, kind: str, track: Track, **args: Any) -> None:
        self.events.append({"ph": "M", "name": kind, "pid": track.process, "tid": track.thread, "args": args})

    def _event(self, phase: str, track: Track, at_ns: int, **fields: Any) -> None:
        at = {"pid": track.process, "tid": track.thread, "ts": microseconds(at_ns)}
        self.events.append({"ph": phase} | at | fields)


def microseconds(ns: int) -> float:
    """Return ``ns`` in microseconds, so that 1000 times as much, cut off, is ``ns``: slices never overlap by 1 ns."""
    value = ns / 1000
    return value if int(value * 1000) == ns else nextafter(value, inf)


def numbered(names: Sequence[int]) -> list[str]:
    """Return numbers as text of one width, which sorts as they do."""
    width = len(str(max(names, default=0)))
    return [f"{number:0{width}d}" for number in names]
