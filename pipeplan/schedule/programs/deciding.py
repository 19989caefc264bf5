"""What runs when where devices decide as they go? Message-driven, they run what arrives, in the order in which it
arrives (Myelin, AxoNN); under nF1B a mini-batch's forwards one microbatch at a time, and its backward as one
(TiMePReSt).

And when does a run of nF1B repeat itself? It has no pattern; but its times are whole numbers, so that after some
mini-batches the pipeline is mostly in a state in which it was before.
"""

from __future__ import annotations

from functools import lru_cache

from ...cost import memory_model
from ...cost.stage_graph import StageGraph
from ...deadline import NEVER, Deadline
from ...errors import BadInput
from ...problem import Platform
from ..pattern import DeviceUse, alike, unused
from ..program import Decide, Program, make_program, not_one_each, oldest, on_devices, refuse
from ..registered import DEFAULT_BATCH, SteadyRun
from ..simulate import STEP_S, simulate
from ..timeline import Timeline


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
    rules = on_devices(graph, lambda: next_message(stages))
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
    return oldest(lambda kind, stage: stage == (stages - 1 if kind == "B" else 0))


def nf1b(graph: StageGraph, microbatches: int, batch: int = DEFAULT_BATCH, limit: int | None = None) -> Program:
    """Return TiMePReSt's program: ``batch`` (N) microbatches are one mini-batch, with one backward for all of them.

    A device runs a backward as soon as its gradient is there, and forwards in order otherwise; nothing drains between
    mini-batches. ``limit`` bounds the mini-batches admitted (default: the stages). With 3 devices, N = 2 and a backward
    as long as one forward, one column per time point; mini-batch 0 is microbatches A and B, 1 C and D, 2 E and F::

        device 0  A  B  C  D  E  F  b0 .  .  b1 .  .  b2
        device 1  .  A  B  C  D  b0 E  F  b1 .  .  b2
        device 2  .  .  A  B  b0 C  D  b1 E  F  b2

    Closed forms (time points, backward = b, W devices; see ALGORITHMS section 8): mini-batch k starts its backward on
    stage s, both from 1, at W - 1 + k(N + 1) + W - s for b = 1; stage s holds N + (W - s)(b + 1) microbatches at most.
    Source: TiMePReSt section 4.2.
    """
    refuse(not_one_each(graph, "nf1b"))
    if batch < 1 or microbatches % batch:
        raise BadInput(f"nf1b: {microbatches} microbatches are not a whole number of mini-batches of {batch}")
    if limit is not None and limit < 1:
        raise BadInput(f"limit: {limit} is not positive")
    backward_first = oldest(lambda kind, stage: kind == "B")  # both come in order
    rules = {(stage.resource, 0): lambda: backward_first for stage in graph.stages}
    return make_program(graph, microbatches, {}, rules=rules, batch=batch, limit=limit or len(graph.stages))


MOST_STEPS = 40_000  # that are simulated to find a steady state
MOST_CYCLE = 64  # mini-batches after which a steady state is looked for to repeat


@lru_cache(maxsize=16)
def steady_nf1b(graph: StageGraph, batch: int, limit: int, deadline: Deadline = NEVER) -> SteadyRun:
    """Return the run of nF1B until its state repeats; exact and deterministic.

    The state when a mini-batch enters is what the up to ``limit`` - 1 mini-batches inside have started, and when. All
    that follows depends on it alone, so two equal states are one period apart. Looks at runs of doubled lengths up to
    :data:`MOST_STEPS` steps: stages that are nearly, but not quite, as slow as the slowest fill up to the limit over
    so many mini-batches that no steady state shows before.
    """
    steps = (batch + 1) * len(graph.round_trips)
    most = max(4 * limit + 4, MOST_STEPS // steps)
    count = min(most, max(4 * limit, 2 * limit + 8))
    while True:
        deadline.check(count * steps * STEP_S)
        timeline = simulate(nf1b(graph, count * batch, batch, limit), deadline=deadline)
        found = _repeat(timeline, limit)
        if found is not None:
            return SteadyRun(timeline, *found, True)
        if count == most:
            half = count // 2
            first, last = half * batch - 1, count * batch - 1
            return SteadyRun(timeline, count - half, timeline.left_ns(last) - timeline.left_ns(first), False)
        count = min(most, 2 * count)


def _repeat(timeline: Timeline, limit: int) -> tuple[int, int] | None:
    """Return the fewest mini-batches, and their time, after which the state at the last entry had been there before."""
    batch = timeline.program.batch
    entries = [row[0] for row in timeline.start_ns[::batch]]
    last = len(entries) - 1
    state = _state(timeline, last, limit)
    for cycle in range(1, min(MOST_CYCLE, last - limit) + 1):
        if _state(timeline, last - cycle, limit) == state:
            return cycle, entries[last] - entries[last - cycle]
    return None


def _state(timeline: Timeline, entering: int, limit: int) -> list[int | None]:
    """Return when, before mini-batch ``entering`` enters, each step of those inside started; None if not yet."""
    batch = timeline.program.batch
    now = timeline.start_ns[entering * batch][0]
    rows = timeline.start_ns[(entering - limit + 1) * batch : entering * batch]
    return [start - now if start < now else None for row in rows for start in row]


def admitted_uses(steady: SteadyRun, platform: Platform) -> list[DeviceUse]:
    """Return what each device of an nF1B run holds at most however far it goes: all that the limit admits.

    The last stage has its gradient at once and holds one mini-batch, but under vertical sync it keeps the weights with
    which each one inside has entered, as all stages do.
    """
    program = steady.timeline.program
    graph, limit = program.graph, program.limit or 1
    uses = unused(platform)
    for s, stage in enumerate(graph.stages):
        admitted = limit if s < len(graph.stages) - 1 else 1
        count = admitted * program.batch
        kept = limit + 1 if graph.policy.vertical_sync else 1
        device = graph.resources[stage.resource].devices[0]
        uses[device] = DeviceUse(
            platform.devices[device].memory_bytes,
            graph.weights_bytes(s, kept),
            int(memory_model.held_bytes(stage.kept_bytes, stage.peak_bytes, count)),
            program.buffer_bytes(s),
            (count,),
        )
    return alike(graph, uses, platform)
