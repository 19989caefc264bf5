"""Draw schedules, and which version of the weights every pass uses: docs/schedules.md and docs/reference/weights.md.

    python -m scripts.studies.pictures docs/images

writes ``schedules.svg`` and ``weights-POLICY.svg``. Rows are GPUs, boxes passes with the numbers of their microbatches,
colours kinds of passes or versions. A backward takes twice a forward, half of it for the weights' gradients, and
nothing takes time between GPUs. The pictures follow from the simulated schedules of plans, and a test compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem, Weights
from pipeplan.schedule.kinds import plan_timeline
from pipeplan.schedule.program import Step
from pipeplan.schedule.timeline import flush_makespan_ns
from pipeplan.schedule.weight_versions import used, weight_policy

GPUS, MICROBATCHES, POINT = 3, 10, 10**6  # a forward takes a POINT
INTERVALS: dict[Weights, int] = {"flush": 4, "2bw": 3, "stash": 1, "latest": 2}
POINTS = 30  # that are drawn
BOX, HIGH, LEFT, TOP = 27, 34, 52, 24  # pixels: of a point, of a row, of what is beside and above the boxes
STAGES, PASSES = 4, 6
SCHEDULES: Mapping[Any, str] = {
    "gpipe": "all forwards, then all backwards",
    "1f1b": "one forward and one backward in turn",
    "zb1p": "the weights' gradients fill idle time",
    "zbv": "two stages on each GPU, down and back up",
}
KINDS, MEANING = ("F", "B", "W"), ("F: forward", "B: backward, or its input's part", "W: the weights' gradients")
COLOURS = ("#cfe2f3", "#f9d8a8", "#c9e7c5")
VERSIONS = (
    "#cfe2f3", "#f9d8a8", "#c9e7c5", "#ead1e8", "#f4c7c3", "#dddddd", "#fff2a8", "#b7e1dc", "#e6c9a8", "#c3c6ee",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Box:
    """A pass on a GPU from ``start`` to ``end``, in points, and the version of the weights that it uses."""

    gpu: int
    text: str
    start: float
    end: float
    version: int
    updates: bool


def boxes(weights: Weights) -> list[Box]:
    """Return the passes of a plan of three equal stages that are drawn."""
    layers = tuple(Layer(f"layer{i}", POINT, 2 * POINT, 10**6, 0) for i in range(GPUS))
    platform = Platform.flat(GPUS, 10**12, 10**15)
    interval = INTERVALS[weights]
    problem = Problem(Chain("equal", layers, 1), platform, Policy(weights, interval), replicas=False)
    plan = make_plan(problem, "balance", schedule="1f1b" if weights == "flush" else None).plan
    timeline = plan_timeline(plan, interval if plan.policy.drains else MICROBATCHES + interval)
    found = []
    for stage, uses in enumerate(used(timeline, weight_policy(plan.policy), interval)):
        for use in uses:
            last, work = use.step.microbatch, timeline.program.operations[use.step.position]
            text = str(last) if work.covers == 1 else f"{last + 1 - work.covers}-{last}"
            begin, end = (ns / POINT for ns in (timeline.begin_ns(use.step), timeline.end_ns(use.step)))
            found.append(Box(stage, f"{work.kind}{text}", begin, end, use.version, bool(use.makes)))
    if not plan.policy.drains:
        return found
    again, more = flush_makespan_ns(timeline) / POINT, []
    for box in found:
        number = int(box.text[1:]) + interval
        more.append(
            Box(box.gpu, f"{box.text[0]}{number}", box.start + again, box.end + again, box.version + 1, box.updates)
        )
    return found + more


def picture(weights: Weights) -> str:
    """Return the picture of a policy as SVG."""
    shown = [box for box in boxes(weights) if box.start < POINTS]
    lines = [said(f"--weights {weights}; red: the GPU updates its weights", TOP - 9), *rows(shown, GPUS, TOP, VERSIONS)]
    for box in shown:
        if box.updates and box.end <= POINTS:
            left, top = LEFT + round(box.end * BOX) - 2, TOP + box.gpu * HIGH - 2
            lines.append(f'<rect x="{left}" y="{top}" width="3" height="{HIGH + 1}" fill="#c00"/>')
    names = {version: f"version {version}" for version in sorted({box.version for box in shown})}
    return drawn([*lines, *key(names, TOP + GPUS * HIGH, VERSIONS)], TOP + GPUS * HIGH + 34)


def schedules() -> str:
    """Return the picture of :data:`SCHEDULES`, one below the other."""
    lines, top = [], TOP
    for name, idea in SCHEDULES.items():
        layers = tuple(Layer(f"layer{i}", POINT, 2 * POINT, 10**6, 0, backward_weight_ns=POINT) for i in range(8))
        platform = Platform.flat(STAGES, 10**12, 10**15)
        problem = Problem(Chain("equal", layers, 1), platform, Policy("flush", PASSES), replicas=False)
        timeline = plan_timeline(make_plan(problem, "auto", schedule=name).plan, PASSES)
        program = timeline.program
        found = [
            Box(
                work.resource,
                f"{work.kind}{microbatch}",
                timeline.begin_ns(step) / POINT / 2,
                timeline.end_ns(step) / POINT / 2,
                KINDS.index(work.kind),
                False,
            )
            for position, work in enumerate(program.operations)
            if work.kind in KINDS
            for microbatch in range(PASSES)
            if (step := Step(microbatch, position))
        ]
        ends = max(box.end for box in found)
        lines += [said(f"{name}: {idea}; {ends:g} forwards long", top - 9), *rows(found, STAGES, top, COLOURS)]
        top += STAGES * HIGH + TOP
    return drawn([*lines, *key(dict(enumerate(MEANING)), top - TOP, COLOURS, 215)], top + 10)


def rows(shown: Sequence[Box], gpus: int, top: int, colours: Sequence[str]) -> list[str]:
    """Return the boxes of ``gpus`` rows from ``top`` down, as far as :data:`POINTS`."""
    lines = [f'<text x="{LEFT - 26}" y="{top + gpu * HIGH + HIGH // 2 + 4}">GPU {gpu}</text>' for gpu in range(gpus)]
    for box in shown:
        left, right = (LEFT + round(min(point, POINTS) * BOX) for point in (box.start, box.end))
        above, colour = top + box.gpu * HIGH, colours[box.version % len(colours)]
        edge = "#555" if box.text[0] == "B" else "#aaa"
        lines.append(
            f'<rect x="{left}" y="{above}" width="{right - left - 1}" height="{HIGH - 3}" fill="{colour}" '
            f'stroke="{edge}"/>'
        )
        if box.end <= POINTS and right - left > 8 * len(box.text):
            lines.append(f'<text x="{(left + right) // 2}" y="{above + HIGH // 2 + 3}">{escape(box.text)}</text>')
    return lines


def key(names: Mapping[int, str], top: int, colours: Sequence[str], wide: int = 80) -> list[str]:
    """Return what the colours of ``names`` mean."""
    lines = []
    for place, (number, name) in enumerate(names.items()):
        left = LEFT + place * wide
        colour = colours[number % len(colours)]
        lines.append(f'<rect x="{left}" y="{top + 10}" width="14" height="14" fill="{colour}" stroke="#aaa"/>')
        lines.append(f'<text x="{left + 20}" y="{top + 21}" text-anchor="start">{name}</text>')
    return lines


def said(text: str, y: int) -> str:
    """Return a line above rows."""
    return f'<text x="{LEFT}" y="{y}" text-anchor="start">{text}</text>'


def drawn(lines: Sequence[str], height: int) -> str:
    """Return the picture of ``lines``."""
    width = LEFT + POINTS * BOX + 8
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11" text-anchor="middle">'
    )
    return "\n".join([begin, f'<rect width="{width}" height="{height}" fill="white"/>', *lines, "</svg>\n"])


def pictures() -> dict[str, str]:
    """Return all of them by their files' names."""
    return {"schedules.svg": schedules(), **{f"weights-{name}.svg": picture(name) for name in INTERVALS}}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for name, text in pictures().items():
        path = Path(sys.argv[1], name)
        path.write_text(text)
        print(f"written to {path}")
