"""Draw which version of the weights every pass uses under each policy, on three GPUs: docs/reference/weights.md.

    python -m scripts.studies.weights docs/images

writes ``weights-POLICY.svg``. Rows are GPUs, boxes passes with the numbers of their microbatches, colours versions. A
backward takes twice a forward, and nothing takes time between GPUs. The pictures follow from the simulated schedules of
plans, and a test compares them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem, Weights
from pipeplan.schedule.kinds import plan_timeline
from pipeplan.schedule.timeline import flush_makespan_ns
from pipeplan.schedule.weight_versions import used, weight_policy

GPUS, MICROBATCHES, POINT = 3, 10, 10**6  # a forward takes a POINT
INTERVALS: dict[Weights, int] = {"flush": 4, "2bw": 3, "stash": 1, "latest": 2}
POINTS = 30  # that are drawn
BOX, HIGH, LEFT, TOP = 27, 34, 52, 24  # pixels: of a point, of a row, of what is beside and above the boxes
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
    versions = sorted({box.version for box in shown})
    width, height = LEFT + POINTS * BOX + 8, TOP + GPUS * HIGH + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for gpu in range(GPUS):
        lines.append(f'<text x="{LEFT - 26}" y="{TOP + gpu * HIGH + HIGH // 2 + 4}">GPU {gpu}</text>')
    for box in shown:
        left, right = (LEFT + round(min(point, POINTS) * BOX) for point in (box.start, box.end))
        top, colour = TOP + box.gpu * HIGH, VERSIONS[box.version % len(VERSIONS)]
        edge = "#555" if box.text[0] == "B" else "#aaa"
        lines.append(
            f'<rect x="{left}" y="{top}" width="{right - left - 1}" height="{HIGH - 3}" fill="{colour}" '
            f'stroke="{edge}"/>'
        )
        if box.end <= POINTS:
            lines.append(f'<text x="{(left + right) // 2}" y="{top + HIGH // 2 + 3}">{escape(box.text)}</text>')
    for box in shown:
        if box.updates and box.end <= POINTS:
            left, top = LEFT + round(box.end * BOX) - 2, TOP + box.gpu * HIGH - 2
            lines.append(f'<rect x="{left}" y="{top}" width="3" height="{HIGH + 1}" fill="#c00"/>')
    for place, version in enumerate(versions):
        left, top = LEFT + place * 80, TOP + GPUS * HIGH + 10
        colour = VERSIONS[version % len(VERSIONS)]
        lines.append(f'<rect x="{left}" y="{top}" width="14" height="14" fill="{colour}" stroke="#aaa"/>')
        lines.append(f'<text x="{left + 20}" y="{top + 11}" text-anchor="start">version {version}</text>')
    lines.append(
        f'<text x="{LEFT}" y="15" text-anchor="start">--weights {weights}; red: the GPU updates its weights</text>'
    )
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for name in INTERVALS:
        path = Path(sys.argv[1], f"weights-{name}.svg")
        path.write_text(picture(name))
        print(f"written to {path}")
