"""What runs when where every device runs what arrives, in the order in which it arrives? (Myelin, AxoNN)"""

from __future__ import annotations

from collections.abc import Sequence

from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ..program import Arrival, Decide, Program, make_program


def message_driven(graph: StageGraph, microbatches: int, limit: int | None = None) -> Program:
    """Return the program of Myelin's Algorithm 2, drained at the end; devices decide by :func:`next_message`.

    ``limit`` is the paper's ``pipeline_limit``: microbatches in one pipeline at most, and there are as many pipelines
    as replicas of the first stage. With 4 devices, limit 4 and backwards twice as long as forwards, one column per
    forward::

        device 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 -- F4 B1 -- F5 B2 -- ...
        device 1  .  F0 F1 F2 F3 .  .  .  B0 -- .  B1 -- F4 B2 -- F5 ...
        device 2  .  .  F0 F1 F2 F3 B0 -- .  B1 -- .  B2 -- F4 B3 -- ...
        device 3  .  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- ...

    The default is that of :func:`default_limit`. Without transfers balanced stages take (m + p - 1)(f + b) for p up to
    4; with more devices first come, first served loses a little.

    A real run decides anew by what really arrives, so its order may differ from the simulated one. What holds in any
    order is the limit: no GPU ever holds more than ``limit`` microbatches of each of its stages for each pipeline that
    it serves. A plan's memory figures are the simulated peak, which may be less; the runtime keeps to it where a GPU's
    memory has no room for more.
    Source: Myelin section IV, Algorithm 2; its line 25 is read as "while microbatches remain".
    """
    if limit is not None and limit < 1:
        raise BadInput(f"limit: {limit} is not positive")
    stages = len(graph.stages)
    pipelines = graph.resources[graph.stages[0].resource].replicas
    rules = {
        (index, replica): lambda: next_message(stages)
        for index, resource in enumerate(graph.resources)
        if not resource.is_link
        for replica in range(resource.replicas)
    }
    return make_program(graph, microbatches, {}, rules=rules, limit=pipelines * (limit or default_limit(graph)))


def default_limit(graph: StageGraph) -> int:
    """Return how many microbatches one pipeline holds unless a limit is given: p without transfers, else 2p - 1.

    With transfers p microbatches are too few, and 2p - 1 suffice while both transfers of a cut take no longer than a
    forward and a backward (within 5% of no limit).
    """
    stages = len(graph.stages)
    return 2 * stages - 1 if any(op.kind.startswith("SEND") for op in graph.operations) else stages


def next_message(stages: int) -> Decide:
    """Return the decision function of Algorithm 2, which simulator and runtime share.

    What no message brings follows at once: the last stage's backward its forward, and the first stage's next forward
    the backward that made room for it. Otherwise the oldest message, backwards first at equal times.
    """

    def decide(now_ns: int, announced: Sequence[Arrival]) -> Arrival | None:
        def rank(arrival: Arrival) -> tuple[bool, int, bool, Arrival]:
            inline = arrival.stage == (stages - 1 if arrival.kind == "B" else 0)
            return not inline, arrival.at_ns, arrival.kind != "B", arrival

        return min((arrival for arrival in announced if arrival.has_come(now_ns)), key=rank, default=None)

    return decide
