"""What does TiMePReSt's schedule look like, drawn as in the paper? One box per pass, with the weights that it uses."""

from __future__ import annotations

from matplotlib.patches import Patch, Rectangle

from pipeplan.report.gantt import COLOURS, LATER, make_figure, save_figure

from .analysis import Analysis
from .report import cells

FILL = {("F", 1): COLOURS["F"], ("F", 0): LATER["F"], ("B", 1): COLOURS["B"]}
NAMES = {("F", 1): "forward, odd mini-batches", ("F", 0): "forward, even mini-batches", ("B", 1): "backward"}
ROW = 2  # rows of a Gantt chart that one row here takes, for two lines of text
WIDTH_POINTS = 900  # of the drawn area, about
CHARACTER = 0.6  # width over height of a character


def save_staircase(analysis: Analysis, path: str, time_points: int, title: str = "") -> None:
    """Draw the first ``time_points`` of the schedule into ``path``, an .svg, .png or .pdf.

    A forward is labelled ``3C``: microbatch C of mini-batch 3, a backward by its mini-batch; ``w1`` below says that the
    pass uses the weights that mini-batch 1 made (w0: the first ones). Idle time is white, as in the paper.
    """
    unit = analysis.unit_ns
    figure, (axes,) = make_figure([ROW * analysis.workers])
    largest = WIDTH_POINTS / time_points
    for cell in cells(analysis):
        left, right = cell.start_ns / unit, min(cell.end_ns / unit, time_points)
        if left >= time_points:
            continue
        colour = FILL[cell.kind, cell.parity]
        axes.add_patch(
            Rectangle((left, cell.worker - 0.5), right - left, 1, facecolor=colour, edgecolor="white", linewidth=1)
        )
        ink = "white" if (cell.kind, cell.parity) == ("F", 0) else "black"
        size = min(9.0, largest * (right - left) / (CHARACTER * max(len(cell.label), len(f"w{cell.version}"))))
        middle = (left + right) / 2
        axes.text(middle, cell.worker - 0.17, cell.label, ha="center", va="center", fontsize=size, color=ink)
        axes.text(
            middle, cell.worker + 0.25, f"w{cell.version}", ha="center", va="center", fontsize=0.75 * size, color=ink
        )
    axes.set_xlim(0, time_points)
    axes.set_ylim(analysis.workers - 0.5, -0.5)
    axes.set_xticks(range(0, time_points + 1, 1 + time_points // 40))
    axes.set_yticks(range(analysis.workers), [f"worker {w}" for w in range(1, analysis.workers + 1)], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("time points; w3: with the weights that mini-batch 3 made, w0: with the first ones", fontsize=8)
    axes.legend(
        handles=[Patch(color=FILL[key], label=name) for key, name in NAMES.items()],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize=7,
        frameon=False,
    )
    described = f"W = {analysis.workers}, N = {analysis.microbatches}, backward {analysis.backward}"
    sync = "vertical sync" if analysis.vertical_sync else "no vertical sync"
    version = " or ".join(map(str, analysis.version_differences))
    save_figure(figure, axes, f"{title or 'TiMePReSt'}: {described}, {sync}; version difference {version}", path)
