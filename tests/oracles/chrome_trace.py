"""What does a viewer make of a Chrome trace? The rules of the Trace Event Format as ui.perfetto.dev imports it.

Written from the format's document and the importer's behaviour, without a look at the writer: times are cut off to
whole ns, slices of a thread must nest, an arrow's ids are integers and its ends lie in a slice that is open then.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

Thread = tuple[int, int]
ABOUT = {f"{group}_{key}": key for group in ("process", "thread") for key in ("name", "sort_index")}
FIELDS = {
    "X": {"ph", "pid", "tid", "ts", "name", "cat", "dur", "args"},
    "C": {"ph", "pid", "tid", "ts", "name", "args"},
    "M": {"ph", "pid", "tid", "name", "args"},
    "s": {"ph", "pid", "tid", "ts", "name", "cat", "id"},
    "t": {"ph", "pid", "tid", "ts", "name", "cat", "id"},
    "f": {"ph", "pid", "tid", "ts", "name", "cat", "id", "bp"},
}


@dataclass
class Shown:
    """What is to be seen: names of threads from above, slices by thread, arrows as the slices they join, counters."""

    processes: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    slices: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    arrows: list[list[str]] = field(default_factory=list)
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=dict)


def shown(text: str) -> Shown:
    """Return what a viewer shows of a trace; AssertionError names a rule that it breaks."""
    trace = json.loads(text, parse_constant=_refuse)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        _check(event)
    names, order = _about(events)
    result = Shown([names[p, None] for p in sorted({p for p, t in names if t is None}, key=lambda p: order[p, None])])
    threads = sorted((key for key in names if key[1] is not None), key=lambda key: (order[key[0], None], order[key]))
    result.threads = [names[key] for key in threads]
    assert len({tid for _, tid in threads}) == len(threads), "a thread's number is used in two processes"
    _replay(events, names, result)
    return result


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _check(event: dict[str, Any]) -> None:
    phase = event["ph"]
    assert set(event) == FIELDS[phase], event
    for number in ("pid", "tid"):
        assert type(event[number]) is int, event
        assert 0 < event[number] < 2**31, f"the kernel's, or no number of a process: {event}"
    assert event["pid"] != event["tid"], f"stands before all others: {event}"
    assert isinstance(event["name"], str), event
    assert event["name"], event
    for time in {"ts", "dur"} & set(event):
        assert isinstance(event[time], Real), event
        assert event[time] >= 0, event
    if phase in "stf":
        assert type(event["id"]) is int, f"is dropped: {event}"
        assert event.get("bp", "e") == "e", event
    if phase == "C":
        assert len(event["args"]) == 1, f"makes a counter for each: {event}"
        assert all(type(value) in (int, float) for value in event["args"].values()), event


def _about(events: list[dict[str, Any]]) -> tuple[dict[Any, str], dict[Any, int]]:
    """Return names and places of processes (number, None) and threads; each is said once, in the order of its place."""
    names: dict[Any, str] = {}
    order: dict[Any, int] = {}
    for event in (x for x in events if x["ph"] == "M"):
        key = event["pid"], (event["tid"] if event["name"].startswith("thread") else None)
        kept = names if ABOUT[event["name"]] == "name" else order
        assert key not in kept, f"is said twice: {event}"
        kept[key] = event["args"][ABOUT[event["name"]]]
    assert names.keys() == order.keys()
    for event in events:
        if event["ph"] != "M":
            assert (event["pid"], None) in names, event
        if event["ph"] not in "MC":
            assert (event["pid"], event["tid"]) in names, event
    return names, order


def _ns(microseconds: float) -> int:
    return int(microseconds * 1000)


def _replay(events: list[dict[str, Any]], names: dict[Any, str], result: Shown) -> None:
    """Take events by time, those of one time as they stand in the file, as an importer does."""
    open_slices: dict[Thread, list[tuple[int, str]]] = {}
    arrows: dict[tuple[Any, ...], list[str]] = {}
    for event in sorted((x for x in events if x["ph"] != "M"), key=lambda x: _ns(x["ts"])):
        at, thread = _ns(event["ts"]), (event["pid"], event["tid"])
        stack = open_slices.setdefault(thread, [])
        while stack and stack[-1][0] <= at:
            stack.pop()
        if event["ph"] == "X":
            end = at + _ns(event["dur"])
            assert not stack or end <= stack[-1][0], f"{event} goes on beside {stack[-1][1]}"
            stack.append((end, event["name"]))
            result.slices.setdefault(names[thread], []).append((at, end, event["name"]))
        elif event["ph"] == "C":
            ((unit, value),) = event["args"].items()
            steps = result.counters.setdefault(f"{event['name']} {unit}", [])
            assert not steps or steps[-1][0] < at, f"two values at one time: {event}"
            steps.append((at, value))
        else:
            key = event["id"], event["cat"], event["name"]
            assert stack, f"binds to no slice: {event}"
            assert (event["ph"] == "s") == (key not in arrows), f"begins twice, or goes on without a begin: {event}"
            arrows.setdefault(key, []).append(stack[-1][1])
            if event["ph"] == "f":
                result.arrows.append(arrows.pop(key))
    assert not arrows, f"arrows without an end: {list(arrows)}"
