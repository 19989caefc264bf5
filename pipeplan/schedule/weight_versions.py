"""Which version of the weights each pass of a simulated nF1B run uses, and how many versions a stage holds at once.

Versions count the updates of a stage: 0 is the start, each backward of a mini-batch makes the next. The weights that a
pass gets are those of the updates that are over when it starts.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from .program import Step

if TYPE_CHECKING:
    from .timeline import Timeline

Used = tuple[tuple[int, ...], ...]  # [microbatch][position] -> version of the weights


def versions_used(timeline: Timeline, vertical_sync: bool) -> Used:
    """Return the version of the weights that each operation on the path of each microbatch uses.

    With vertical sync a pass uses what all stages had when it started on its first one, so it waits for the first
    stage's backward; without, what its own stage has. Transfers are listed with what their sender's pass would use.
    Source: TiMePReSt section 4.2 and its equation (2).
    """
    program, graph = timeline.program, timeline.program.graph
    leaders = range(program.batch - 1, program.microbatches, program.batch)
    made = [
        [timeline.end_ns(Step(m, program.position["B", stage])) for m in leaders] for stage in range(len(graph.stages))
    ]
    half = len(graph.operations) // 2
    stages = [op.stage for op in graph.operations]
    rows = []
    for starts in timeline.start_ns:
        if vertical_sync:
            forward, backward = bisect_right(made[0], starts[0]), bisect_right(made[0], starts[half])
            rows.append((forward,) * half + (backward,) * (len(stages) - half))
        else:
            rows.append(tuple(bisect_right(made[s], at) for s, at in zip(stages, starts, strict=False)))
    return tuple(rows)


def live_versions(timeline: Timeline, used: Used, stage: int) -> int:
    """Return the most versions of its weights that ``stage`` holds at once.

    A version lives from the end of the backward that makes it until it is neither newest nor still to be used.
    """
    program = timeline.program
    last_use: dict[int, int] = {}
    made = [0]
    device = program.graph.resources[program.graph.stages[stage].resource].devices[0]
    lane = next(lane for lane in program.lanes if lane.device == device)
    for step in lane.steps:
        end, version = timeline.end_ns(step), used[step.microbatch][step.position]
        last_use[version] = max(last_use.get(version, 0), end)
        if program.operations[step.position].kind == "B":
            made.append(end)
    changes = [(0, 1)]
    for version, superseded in enumerate(made[1:]):
        changes += [(superseded, 1), (max(superseded, last_use.get(version, 0)), -1)]
    live = most = 0
    for _, change in sorted(changes):  # at equal times what is not needed any more goes first
        live += change
        most = max(most, live)
    return most
