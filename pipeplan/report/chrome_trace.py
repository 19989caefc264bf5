"""What ran when, for ui.perfetto.dev and chrome://tracing? A simulated run as a Chrome trace."""

from __future__ import annotations

import json
from typing import Any

from ..problem import Platform
from ..schedule.memory import activation_steps, run_uses
from ..schedule.program import Step
from ..schedule.timeline import Timeline

GPUS, LINKS = 1, 2  # process numbers


def trace_text(timeline: Timeline, platform: Platform) -> str:
    """Return the JSON of a run's trace: real microseconds, one thread per GPU and link, memory counters, flow arrows.

    An arrow goes from each pass whose output travels, through its transfer, to the pass that reads it. Format: "Trace
    Event Format" of the Chromium project.
    """
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events(timeline, platform)}, indent=None) + "\n"


def trace_events(timeline: Timeline, platform: Platform) -> list[dict[str, Any]]:
    """Return the events of :func:`trace_text`, times in microseconds."""
    program, uses = timeline.program, run_uses(timeline, platform)
    events: list[dict[str, Any]] = [_name("process_name", GPUS, 0, "GPUs"), _name("process_name", LINKS, 0, "links")]
    thread: dict[Step, tuple[int, int]] = {}
    for i, lane in enumerate(program.lanes):
        place = (LINKS, i) if lane.device is None else (GPUS, lane.device)
        events.append(_name("thread_name", *place, lane.name if lane.device is None else f"GPU {lane.device}"))
        for step in lane.steps:
            work = program.operations[step.position]
            thread[step] = place
            events.append(
                {
                    "ph": "X",
                    "name": program.name(step),
                    "cat": work.kind,
                    "pid": place[0],
                    "tid": place[1],
                    "ts": timeline.begin_ns(step) / 1000,
                    "dur": timeline.length_ns(step) / 1000,
                    "args": {"stage": work.stage, "microbatch": step.microbatch, "covers": work.covers},
                }
            )
        if lane.device is not None and lane.steps:
            static = uses[lane.device].static_bytes
            for at, held in activation_steps(timeline, i):
                events.append(
                    {
                        "ph": "C",
                        "name": f"GPU {lane.device} memory (MB)",
                        "pid": GPUS,
                        "ts": at / 1000,
                        "args": {
                            "weights and buffers": static / 1e6,
                            "activations": held / 1e6,
                            "free": max(0, platform.devices[lane.device].memory_bytes - static - held) / 1e6,
                        },
                    }
                )
    return events + _flows(timeline, thread)


def _flows(timeline: Timeline, thread: dict[Step, tuple[int, int]]) -> list[dict[str, Any]]:
    program = timeline.program
    events = []
    for send, place in thread.items():
        if place[0] != LINKS:
            continue
        source, target = Step(send.microbatch, send.position - 1), Step(send.microbatch, send.position + 1)
        name = {"name": program.name(send), "cat": "transfer", "id": program.name(send)}
        inside = min(timeline.length_ns(source), 1) / 1000  # the arrow leaves from within the slice, at its end
        for phase, step, at in (
            ("s", source, timeline.end_ns(source) / 1000 - inside),
            ("t", send, timeline.begin_ns(send) / 1000),
            ("f", target, timeline.begin_ns(target) / 1000),
        ):
            pid, tid = thread[step]
            events.append(
                {**name, "ph": phase, "pid": pid, "tid": tid, "ts": at, **({"bp": "e"} if phase == "f" else {})}
            )
    return events


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
