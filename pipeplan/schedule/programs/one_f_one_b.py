"""What runs when under GPipe, and under 1F1B? All forwards, then all backwards; or a few forwards ahead, then one
forward, one backward in turn, PipeDream's or flushed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ...integers import ceil_div
from ..program import Arrival, Decide, Program, make_program, on_devices, refuse, replicas_of
from .slots import staircase


def gpipe(graph: StageGraph, microbatches: int) -> Program:
    """Return GPipe's program for a drained mini-batch, for any stages on any devices.

    With 3 stages and 3 microbatches, one column per slot (balanced stages take (m + p - 1)(F + B))::

        device 0  F0 F1 F2 .  .  .  .  B0 B1 B2
        device 1  .  F0 F1 F2 .  .  B0 B1 B2
        device 2  .  .  F0 F1 F2 B0 B1 B2

    Source: Huang et al. 2019 (GPipe), with backwards in the order of the forwards, as torch runs them.
    """
    stages = len(graph.stages)

    def slot(kind: str, stage: int, m: int) -> int:
        return m + stage if kind == "F" else microbatches + 2 * stages - 1 + m - stage

    return staircase(graph, microbatches, slot)


def one_f_one_b(graph: StageGraph, microbatches: int, depth: int | None = None) -> Program:
    """Return the 1F1B program: stage s of S runs S - s forwards, then a backward and a forward in turn, then drains.

    With 3 stages and 4 microbatches, one column per slot (balanced stages take (m + p - 1)(F + B))::

        device 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        device 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
        device 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3

    With replicas it is 1F1B-RR: a replica of stage s runs ceil(devices of stages s.. / replicas of s) forwards ahead.
    ``depth`` is the number of microbatches in flight at each input replica, unless given PipeDream's NOAM: ceil(devices
    / replicas of the first stage). With more, which hides transfers, later stages run ahead in proportion. With fewer
    there is nothing to alternate with at times, so devices take what has come, backwards first, and balanced stages
    reach depth / NOAM of the throughput. Where a middle stage has the most replicas, NOAM is too few (1-3-1: 7 are
    needed, not 5). Stages may share devices when none has replicas. Source: PipeDream section 3.2 and Figure 18.
    """
    if depth is not None and depth < 1:
        raise BadInput(f"depth: {depth} is not positive")
    refuse(shared_replicas(graph))
    replicas = replicas_of(graph)
    ahead = _hiding(replicas)
    depth = depth or ahead[0]
    if depth < ahead[0]:
        return _eager(graph, microbatches, depth, ahead)
    if not graph.contiguous:
        return _shared(graph, microbatches, depth)
    deeper = _deeper(replicas, depth, ahead)

    def slot(kind: str, stage: int, m: int) -> int:
        if kind == "F":  # comes right behind the backward that is as many microbatches before as the stage runs ahead
            return slot("B", stage, m - deeper[stage] * replicas[stage]) + 1
        return 2 * m - stage

    return staircase(graph, microbatches, slot)


def shared_replicas(graph: StageGraph) -> str | None:
    """Return why the stages of ``graph`` cannot run under 1F1B, or None."""
    if graph.contiguous or set(replicas_of(graph)) == {1}:
        return None
    return "1F1B-RR gives each stage its GPUs for itself; in this plan some replicated stages share GPUs"


def _hiding(replicas: Sequence[int]) -> list[int]:
    """Return how many forwards a replica of each stage runs before its first backward, when nothing limits it."""
    return [ceil_div(sum(replicas[s:]), replicas[s]) for s in range(len(replicas))]


def forwards_ahead(replicas: Sequence[int]) -> list[int]:
    """Return how many forwards a replica of each stage runs before its first backward under 1F1B, unless it has
    fewer microbatches."""
    return _within(_hiding(replicas), replicas)


def _within(ahead: Sequence[int], replicas: Sequence[int]) -> list[int]:
    """Return ``ahead`` with no stage further than the one before it lets it.

    Otherwise a replica's first backward would wait for a forward that waits for this backward.
    """
    found = list(ahead)
    for s in range(1, len(found)):
        found[s] = min(found[s], (found[s - 1] * replicas[s - 1] - 1) // replicas[s] + 1)
    return found


def ahead_of(graph: StageGraph, depth: int | None = None) -> list[int]:
    """Return how many forwards a replica of each stage runs before its first backward, with ``depth`` in flight (None:
    NOAM) and stages that have their devices for themselves; BadInput for less than NOAM."""
    replicas = replicas_of(graph)
    ahead = _hiding(replicas)
    depth = depth or ahead[0]
    if depth < ahead[0]:
        raise BadInput(f"depth: with {depth}, fewer than NOAM's {ahead[0]}, forwards and backwards don't alternate")
    return _deeper(replicas, depth, ahead)


def _deeper(replicas: Sequence[int], depth: int, ahead: Sequence[int]) -> list[int]:
    return _within([1 + (depth - 1) * (own - 1) // max(1, ahead[0] - 1) for own in ahead], replicas)


def _shared(graph: StageGraph, microbatches: int, depth: int) -> Program:
    """A microbatch every two slots, and every microbatch passes its path in increasing slots.

    So stages that share a device cannot wait for each other. Backwards come later where the depth is more than needed.
    """
    stages = len(graph.stages)

    def slot(kind: str, stage: int, m: int) -> int:
        if kind == "F":
            return 2 * m + stage
        later = stages - 1 - stage
        return 2 * m + stages + later + 2 * (depth - stages) * later // max(1, stages - 1)

    return staircase(graph, microbatches, slot)


def _eager(graph: StageGraph, microbatches: int, depth: int, ahead: list[int]) -> Program:
    """What has come, backwards first; no replica holds more than ``depth``, or than it would with the full depth."""
    most = [min(depth, own) for own in ahead]

    def rule() -> Decide:
        held: Counter[int] = Counter()

        def decide(now_ns: int, announced: Sequence[Arrival]) -> Arrival | None:
            allowed = (x for x in announced if x.has_come(now_ns) and (x.kind == "B" or held[x.stage] < most[x.stage]))
            chosen = min(allowed, key=lambda x: (x.kind != "B", -x.stage, x.step), default=None)
            if chosen is not None:
                held[chosen.stage] += 1 if chosen.kind == "F" else -1
            return chosen

        return decide

    limit = depth * graph.resources[graph.stages[0].resource].replicas
    return make_program(graph, microbatches, {}, rules=on_devices(graph, rule), limit=limit)
