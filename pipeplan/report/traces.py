"""What ran when, simulated or measured? Runs as Chrome traces: a track for each GPU and link, arrows, and memory.

For ui.perfetto.dev and chrome://tracing, in the "Trace Event Format" of the Chromium project. What Perfetto adds to it:
ids of arrows are integers (text is dropped), times are cut off to whole ns, process and thread 0 are the kernel's, and
a thread whose number is its process's stands before all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from math import inf, nextafter
from typing import Any, NamedTuple

from ..check.evaluate import evaluate
from ..plan import Plan
from ..problem import Platform
from ..runtime.measure.report import RunReport
from ..runtime.measure.times import OpTime
from ..runtime.measure.trace_file import figures_of
from ..schedule.kinds import plan_program, shown_microbatches
from ..schedule.pattern import DeviceUse
from ..schedule.program import PASSES, Program, Step
from ..schedule.timeline import Change, Timeline, activation_steps, run_uses, step_changes

TRACKS = 10**5  # of a process: its threads are numbered from the process's number times this


class Track(NamedTuple):
    """One line of the picture: a thread of a process, by their numbers."""

    process: int
    thread: int


class Slice(NamedTuple):
    """A box on a track, from ``start_ns`` to ``end_ns``."""

    track: Track
    start_ns: int
    end_ns: int


class ChromeTrace:
    """The events of a trace, in the order of its tracks."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._arrows = 0
        self._tracks: dict[int, int] = {}  # process to how many it has

    def process(self, name: str) -> int:
        """Add a group of tracks below those there are; return its number."""
        number = len(self._tracks) + 1
        self._tracks[number] = 0
        self._about("process", Track(number, number * TRACKS), name, number)
        return number

    def track(self, process: int, name: str) -> Track:
        """Add a track below those that ``process`` has."""
        place = self._tracks[process]
        self._tracks[process] += 1
        track = Track(process, process * TRACKS + place)
        self._about("thread", track, name, place)
        return track

    def slice(
        self, track: Track, name: str, category: str, start_ns: int, end_ns: int, args: Mapping[str, Any]
    ) -> Slice:
        """Add a box. Those of a track follow each other or lie in each other."""
        length = microseconds(end_ns - start_ns)
        self._event("X", track, start_ns, name=name, cat=category, dur=length, args=dict(args))
        return Slice(track, start_ns, end_ns)

    def hold(self, process: int, name: str, use: DeviceUse, steps: Iterable[tuple[int, int]]) -> None:
        """Add the one counter of a GPU: weights, buffers and activations, in GB."""
        for at_ns, held in steps:
            args = {"GB": (use.static_bytes + held) / 1e9}
            self._event("C", Track(process, process * TRACKS), at_ns, name=name, args=args)

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

    def _about(self, what: str, track: Track, name: str, place: int) -> None:
        for kind, args in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
            about = {"ph": "M", "name": f"{what}_{kind}", "pid": track.process, "tid": track.thread, "args": args}
            self.events.append(about)

    def _event(self, phase: str, track: Track, at_ns: int, **fields: Any) -> None:
        at = {"pid": track.process, "tid": track.thread, "ts": microseconds(at_ns)}
        self.events.append({"ph": phase} | at | fields)


def microseconds(ns: int) -> float:
    """Return ``ns`` in microseconds, so that 1000 times as much, cut off, is ``ns``: slices never overlap by 1 ns."""
    value = ns / 1000
    return value if int(value * 1000) == ns else nextafter(value, inf)


def simulated_trace(timeline: Timeline, platform: Platform) -> ChromeTrace:
    """Return a simulated run: every step on the track of its GPU or link, what each GPU holds, an arrow a transfer.

    An arrow goes from each pass whose output travels, through its transfer, to the pass that reads it.
    """
    trace, program, uses = ChromeTrace(), timeline.program, run_uses(timeline, platform)
    working = [(i, lane) for i, lane in enumerate(program.lanes) if lane.steps]
    devices = {i: lane.device for i, lane in working if lane.device is not None}
    names = dict(zip(devices, _gpus(devices.values()), strict=True))
    gpus, links = trace.process("GPUs"), trace.process("links")
    slices: dict[Step, Slice] = {}
    for i, lane in working:  # GPUs first, in order
        track = trace.track(gpus if i in devices else links, names.get(i, lane.name))
        for step in lane.steps:
            work = program.operations[step.position]
            args = {"stage": work.stage, "microbatch": step.microbatch, "covers": work.covers}
            begin, end = timeline.begin_ns(step), timeline.end_ns(step)
            slices[step] = trace.slice(track, program.name(step), work.kind, begin, end, args)
    for step, sent in slices.items():
        if sent.track.process == links:
            before, after = (Step(step.microbatch, step.position + way) for way in (-1, 1))
            trace.arrow(program.name(step), (slices[before], sent, slices[after]))
    memory = trace.process("memory")
    for i, device in devices.items():
        trace.hold(memory, f"{names[i]} holds", uses[device], activation_steps(timeline, i))
    return trace


def measured_trace(plan: Plan, report: RunReport) -> str:
    """Return the file of a run: every operation of every rank, arrows between them, what each GPU held, and figures.

    Figures are those of :func:`figures_of`, as ``otherData``. A long run keeps the operations of its begin and its
    end. What a GPU held is by the plan's sizes, at the times that the run took.
    """
    trace, program = ChromeTrace(), plan_program(plan, shown_microbatches(plan))
    devices = [x.device for x in report.activations]
    names = [f"{name} (rank {rank})" for rank, name in enumerate(_gpus(devices))]
    origin = min(time.start_ns for times in report.times for time in times)
    gpus = trace.process("GPUs, measured")
    slices: dict[tuple[str, int, int], Slice] = {}
    for device, name, times in zip(devices, names, report.times, strict=True):
        sums = apart(x for x in times if x.activity == "REDUCE")  # on tracks of their own: they go on beside the rest
        titles = [f"{name}, sums of gradients{f' {i}' if i else ''}" for i in range(len(sums))]
        for title, row in zip([name, *titles], [[x for x in times if x.activity != "REDUCE"], *sums], strict=True):
            track = trace.track(gpus, title)
            for x in row:
                called = f"{x.stage if x.stage >= 0 else ''}{x.activity}{x.microbatch}"
                args = {"stage": x.stage, "microbatch": x.microbatch, "device": device}
                box = trace.slice(track, called, x.activity, x.start_ns - origin, x.end_ns - origin, args)
                slices[x.activity, x.stage, x.microbatch] = box
    for (kind, stage, m), box in slices.items():
        to = slices.get((kind, stage + (1 if kind == "F" else -1), m))
        if kind in ("F", "B") and to is not None and to.track != box.track:
            sent = slices.get((f"SEND_{kind}", stage, m))
            trace.arrow(f"{stage}SEND_{kind}{m}", (box, to) if sent is None else (box, sent, to))
    memory = trace.process("memory, by the plan's sizes")
    uses = evaluate(plan).devices
    for device, name, times in zip(devices, names, report.times, strict=True):
        trace.hold(memory, f"{name} holds", uses[device], _held(program, times, origin))
    return trace.text(figures_of(plan, report))


def apart(times: Iterable[OpTime]) -> list[list[OpTime]]:
    """Return ``times`` in as few rows as let none of a row overlap."""
    rows: list[list[OpTime]] = []
    for x in sorted(times, key=lambda x: x.start_ns):
        free = next((row for row in rows if row[-1].end_ns <= x.start_ns), None)
        if free is None:
            rows.append([x])
        else:
            free.append(x)
    return rows


def _held(program: Program, times: Sequence[OpTime], origin_ns: int) -> list[tuple[int, int]]:
    """Return (time, activation bytes from then on) of a rank: of microbatches whose passes are all known."""
    known = {(x.activity, x.stage, x.microbatch): x for x in times if x.activity in PASSES}
    changes: list[Change] = [(0, 0)]
    for kind, stage, m in known:
        if kind != "B":
            continue
        covers = program.operations[program.position["B", stage]].covers
        passes: list[tuple[int, OpTime | None]] = []
        for other in PASSES:
            if (other, stage) in program.position:
                count = covers if other == "F" else 1
                passes += [(program.position[other, stage], known.get((other, stage, m - k))) for k in range(count)]
        if all(x for _, x in passes):
            for position, x in passes:
                assert x is not None
                changes += step_changes(program, position, x.start_ns - origin_ns, x.end_ns - origin_ns)
    changes.sort()
    held = accumulate(change for _, change in changes)
    together = groupby(zip((at for at, _ in changes), held, strict=True), key=lambda step: step[0])
    return [list(steps)[-1] for _, steps in together]


def _gpus(devices: Iterable[int]) -> list[str]:
    """Name GPUs by numbers of one width, which sort as they do."""
    numbers = list(devices)
    width = len(str(max(numbers, default=0)))
    return [f"GPU {number:0{width}d}" for number in numbers]
