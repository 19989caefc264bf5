"""How do operations over time get onto an HTML page? Their data for the page's script, and what stands around them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ...names import format_devices
from ...runtime.measure.times import OpTime
from ...schedule.program import PASSES
from ...schedule.timeline import Timeline
from ..gantt import NAMES, Bar, GanttRow, timeline_rows
from ..traces import apart

MOST_LINKED = 16  # GPUs of a chart that shows links, and replicas of a stage apart, unasked
OF_MICROBATCHES = (*PASSES, "SEND_F", "SEND_B", "DATA")  # what a rank does for one; else it is for an update
IDLE = ("WAIT_F", "WAIT_B", "ROOM_F", "ROOM_B")  # what a rank does that does nothing


@dataclass(frozen=True)
class Chart:
    """Rows of operations from ``start_ns`` to ``end_ns``. Charts of one ``group`` share their time axis.

    ``batch`` is how many microbatches one backward covers: those up to the one that it is called by.
    """

    name: str
    group: str
    rows: Sequence[GanttRow]
    start_ns: int
    end_ns: int
    batch: int = 1

    @property
    def folds(self) -> list[list[int]]:
        """The rows under each row: of many GPUs those that run the same stages stand as one, until it is opened."""
        return folded(
            [
                (frozenset(bar.stage for bar in row.bars), row.name.partition(",")[2]) if row.device is not None else i
                for i, row in enumerate(self.rows)
            ]
        )

    def data(self) -> dict[str, Any]:
        """Return it as the script reads it."""
        heads = {i: rows[0] for rows in self.folds for i in rows}
        return {
            "group": self.group,
            "rows": [[row.name, int(row.device is None), heads[i]] for i, row in enumerate(self.rows)],
            "batch": self.batch,
            "start": self.start_ns,
            "end": self.end_ns,
            "ops": [
                [i, bar.kind, bar.stage, bar.microbatch, bar.start_ns, bar.end_ns - bar.start_ns, int(bar.chunk > 0)]
                for i, row in enumerate(self.rows)
                for bar in row.bars
            ],
        }

    def html(self) -> str:
        """Return its place on the page."""
        under = {rows[0]: rows for rows in self.folds if len(rows) > 1}
        names = "".join(self._name(i, under.get(i, [])) for i in range(len(self.rows)))
        return (
            f'<div class="chart" id="{self.name}"><div class="names">{names}</div>'
            f'<canvas tabindex="0" role="img" aria-label="{self.name}: what GPUs and links do when"></canvas></div>'
        )

    def _name(self, i: int, under: Sequence[int]) -> str:
        """Return the name of a row, for several GPUs as a button that opens them."""
        name = escape(self.rows[i].name)
        if not under:
            return f'<div title="{name}">{name}</div>'
        gpus = format_devices([x.device for x in map(self.rows.__getitem__, under) if x.device is not None], ", ")
        text = f"GPU {gpus} x{len(under)}"
        return f'<div title="{text}: open" role="button" tabindex="0" data-one="{name}">{text}</div>'


def folded(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the places of equal keys together, where there are many; else each by itself."""
    if len(keys) <= MOST_LINKED:
        return [[i] for i in range(len(keys))]
    places: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        places.setdefault(key, []).append(i)
    return list(places.values())


def run_chart(name: str, group: str, timeline: Timeline) -> Chart:
    """Return the chart of a simulated run: GPUs, then links, those that do something."""
    rows = sorted((row for row in timeline_rows(timeline) if row.bars), key=lambda row: row.device is None)
    return Chart(name, group, rows, 0, timeline.makespan_ns, timeline.program.batch)


def measured_chart(
    name: str, group: str, operations: Mapping[int, Sequence[OpTime]], first: int, count: int, batch: int
) -> Chart:
    """Return the chart of ``count`` microbatches of a run from ``first`` on, what a GPU does (not: waits for) in each.

    Microbatches, and time, count from the first. Sums of gradients, which go on beside, have rows of their own.
    """
    every = [x for times in operations.values() for x in times if x.activity in ("F", "B")]
    mine = [x for x in every if first <= x.microbatch < first + count]
    begin, end = min((x.start_ns for x in mine), default=0), max((x.end_ns for x in mine), default=0)
    end = max(end, min((x.start_ns for x in every if x.microbatch >= first + count), default=end))

    def shows(x: OpTime) -> bool:
        of_these = first <= x.microbatch < first + count if x.activity in OF_MICROBATCHES else begin <= x.start_ns < end
        return of_these and x.activity not in IDLE

    def bar(x: OpTime, home: int) -> Bar:
        number = x.microbatch - first if x.activity in OF_MICROBATCHES else x.microbatch
        return Bar(x.start_ns - begin, x.end_ns - begin, x.activity, x.stage, number, int(x.stage > home))

    rows = []
    for device, times in operations.items():
        seen = [x for x in times if shows(x)]
        home = min((x.stage for x in seen if x.stage >= 0), default=0)
        sums = apart(x for x in seen if x.activity == "REDUCE")
        for what, some in [("", [x for x in seen if x.activity != "REDUCE"]), *((", sums", row) for row in sums)]:
            rows.append(GanttRow(f"GPU {device}{what}", tuple(bar(x, home) for x in some), device))
    end = max((x.end_ns for row in rows for x in row.bars), default=0)
    return Chart(name, group, rows, 0, end, batch)


def toolbar(charts: Sequence[Chart]) -> str:
    """Return the legend of charts that share a group, and what zooms them."""
    group = charts[0].group
    found = {(bar.kind, bar.chunk > 0) for chart in charts for row in chart.rows for bar in row.bars}
    names = NAMES | {"UPDATE": "update"}
    spans = [
        f'<span><i style="background:var(--{kind}{"2" if later else ""})"></i>{name}'
        f"{', later stages of the GPU' if later else ''}</span>"
        for kind, name in names.items()
        for later in (False, True)
        if (kind, later) in found and not (later and kind not in PASSES)
    ]
    if any(kind not in names for kind, _ in found):
        spans.append('<span><i style="background:var(--OTHER)"></i>anything else</span>')
    if any(row.device is None for chart in charts for row in chart.rows):
        gpus = max(sum(row.device is not None for row in chart.rows) for chart in charts)
        checked = " checked" if gpus <= MOST_LINKED else ""
        spans.append(f'<label><input type="checkbox" data-links="{group}"{checked}> links</label>')
    buttons = "".join(
        f'<button data-group="{group}" data-zoom="{factor}" title="{what}" aria-label="{what}">{sign}</button> '
        for factor, sign, what in ((2, "&minus;", "zoom out"), (0.5, "+", "zoom in"), (0, "all", "show all"))
    )
    return f'<div class="bar">{"".join(spans)}<span class="zoom">{buttons}</span></div>'
