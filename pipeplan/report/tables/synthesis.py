"""What was found of a synthesised order: drawn in the terminal, with its figures, its lower bound and its gap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...schedule.synthesis.synthesize import Synthesis
from ...schedule.timeline import flush_makespan_ns, lane_use, longest_span_ns, most_held
from ...units import format_bytes, format_ns
from ..gantt import print_panels, timeline_rows, working_devices
from ..looks import console


def figures(found: Synthesis) -> dict[str, Any]:
    """Return every figure under a name with its unit."""
    timeline = found.timeline
    devices = working_devices(timeline)
    return {
        "microbatches": timeline.program.microbatches,
        "stages": len(timeline.program.graph.stages),
        "gpus": len(devices),
        "barrier": found.barrier,
        "makespan_ns": flush_makespan_ns(timeline),
        "longest_span_ns": longest_span_ns(timeline),
        "lower_bound_ns": found.bound_ns,
        "gap": found.gap,
        "proved_optimal": found.optimal,
        "longest_stage_bubble": timeline.longest_stage_bubble(),
        "most_held": max(most_held(timeline, lane) for lane, _ in devices),
        "peak_bytes": max(lane_use(timeline, lane).peak_bytes for lane, _ in devices),
        "recompute_apart": sorted(timeline.program.apart),
        "moves": found.moves,
        "cut": found.cut,
    }


def print_synthesis(found: Synthesis, took_s: float, *, plain: bool, width: int | None = None) -> None:
    """Print the run, its figures and how far from the best it can be; times are ``plain`` numbers without a unit."""
    out = console(width)
    timeline, figure = found.timeline, figures(found)
    time: Callable[[int], str] = str if plain else format_ns
    print_panels(out, timeline, [row for row in timeline_rows(timeline) if row.device is not None], time)
    peak = "" if plain else f", {format_bytes(figure['peak_bytes'])} on the fullest"
    out.print(f"makespan {time(figure['makespan_ns'])}, bubble {figure['longest_stage_bubble']:.2%} on the busiest GPU")
    out.print(f"span     {time(figure['longest_span_ns'])} of one GPU at most")
    out.print(f"held     {figure['most_held']} activations on a GPU at most{peak}")
    if figure["recompute_apart"]:
        stages = ", ".join(map(str, figure["recompute_apart"]))
        out.print(f"again    stages {stages} recompute in passes of their own, R, which torch doesn't know")
    proved = "proved best" if found.optimal else f"gap {found.gap:.2%}"
    what = "makespan" if found.barrier else "span"
    out.print(f"bound    {time(found.bound_ns)}: no order has a shorter {what}; {proved}")
    cut = "" if found.cut is None else f", ended early: {found.cut}"
    out.print(f"search   {found.moves} moves, {took_s:.1f} s{cut}")
