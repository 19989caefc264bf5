"""What kinds of schedules can a plan have, and what does each of them mean to planner, validator, reports and runtime?

One table answers, and nothing else asks for a kind by name: a new kind is a row of :data:`KINDS`. Below it, what stages
can be simulated under whether or not plans are made for that, and a plan's program and simulated run whatever its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache, partial
from math import ceil
from typing import Any

from ..cost.stage_graph import StageGraph, stage_graph
from ..deadline import NEVER, Deadline
from ..errors import BadInput, PipeplanError
from ..plan import Pattern, Plan, Schedule, ScheduleKind
from ..problem import WEIGHTS, Weights
from ..registry import Late
from .pattern import Group, groups, most_in_flight, starts_of
from .program import Program, no_pipelines, not_one_each, operations_of, unroll
from .registered import Kind, Limit
from .simulate import simulate
from .timeline import Timeline

MOST_STEPS = 2**22  # of one simulated run: they take 0.8 GB, and up to half a minute
MOST_SHOWN = 2**20  # of a run of a pattern whose length nobody says


def _mini_batches_to_try(graph: StageGraph) -> tuple[int, ...]:
    """With transfers, which take their time, more has to be inside."""
    stages = len(graph.stages)
    return tuple(dict.fromkeys((stages, max(default_limit(graph), stages))))


def loop(devices: int, chunks: int) -> list[int]:
    """Place stages round and round over the devices, ``chunks`` times."""
    return list(range(devices)) * chunks


def vee(devices: int, chunks: int) -> list[int]:
    """Place two stages on each device, down the devices and back up again."""
    return [*range(devices), *reversed(range(devices))]


_DRAINING = tuple(weights for weights, rules in WEIGHTS.items() if rules.drains)
_DRAINS = "the schedule drains every mini-batch, which is for weights flush; the policy is {weights}"
_drained = partial(Kind, _DRAINING, refusal=_DRAINS, drains=True)
_SPLIT = ("weight_keeps",)


def _own(path: str) -> Late:
    """Return what a file of ``programs`` has."""
    return Late(f"schedule.programs.{path}")


one_f_one_b = _own("one_f_one_b:one_f_one_b")
default_limit = _own("deciding:default_limit")
no_vee = _own("vees:no_vee")
not_interleaved = _own("loops:not_interleaved")
unfit: Callable[..., str | None] = Late("schedule.written:unfit")


def _ordered(program: Callable[..., Program], summary: str, source: str, words: str, **more: Any) -> Kind:
    """Return a drained kind whose order is fixed, by what is said of its schedule and in its headline."""
    return _drained(program, summary, source, headline=lambda schedule: ("order", f"{words}, drained"), **more)


def _within(name: ScheduleKind, program: Callable[..., Program], called: str, memory: str) -> Kind:
    """Return a drained kind with stages placed like a V that holds no more than ``memory``, in words."""
    return _ordered(
        program,
        f"split backward, two chunks per GPU placed like a V, {memory}",
        "Controllable Memory (Qi et al. 2024)",
        f"{called}: stages d and 2p - 1 - d on GPU d, weight gradients later, {memory}",
        homes=vee,
        refuses=lambda graph: no_vee(graph, name),
        options=_SPLIT,
    )


KINDS: dict[ScheduleKind, Kind] = {  # of those that go with a weights policy the first is the default
    "flush": _drained(),
    "nf1b": Kind(
        ("latest",),
        _own("deciding:nf1b"),
        "one backward for a mini-batch of several microbatches, newest weights, no flush",
        "TiMePReSt section 4.2",
        refusal="nf1b takes the newest weights, which is for weights latest; the policy is {weights}",
        refuses=lambda graph: not_one_each(graph, "nf1b"),
        replicas=False,
        options=("batch", "limit"),
        steady=_own("deciding:steady_nf1b"),
        limit=Limit("mini-batch", "mini-batches", "", _mini_batches_to_try),
        headline=lambda schedule: (
            "nf1b",
            f"one backward for a mini-batch of {schedule.microbatches} microbatches, at most {schedule.limit} "
            "mini-batches inside",
        ),
    ),
    "message-driven": _drained(
        _own("deciding:message_driven"),
        "every GPU runs what arrives first, at most a limit of microbatches at a time, drained",
        "Myelin section IV, Algorithm 2",
        options=("limit",),
        limit=Limit("microbatch", "microbatches", " per pipeline", lambda graph: (default_limit(graph),)),
        by_arrival=True,
        headline=lambda schedule: ("order", f"message-driven, microbatches in a pipeline: {schedule.limit} at most"),
    ),
    "1f1b": _ordered(
        one_f_one_b,
        "1F1B, drained before every update",
        "PipeDream-Flush (Narayanan et al. 2021)",
        "1F1B: stage s of p runs p - s forwards ahead",
        refuses=_own("one_f_one_b:shared_replicas"),
    ),
    "interleaved": _ordered(
        _own("loops:interleaved"),
        "1F1B with several chunks of the model per GPU, drained",
        "Megatron-LM (Narayanan et al. 2021)",
        "interleaved 1F1B, several stages on each GPU in turn",
        homes=loop,
        options=("chunks",),
        refuses=not_interleaved,
    ),
    "gpipe": _ordered(
        _own("one_f_one_b:gpipe"),
        "all forwards, then all backwards, then the update",
        "GPipe (Huang et al. 2019)",
        "GPipe: all forwards, then all backwards",
    ),
    "breadth-first": _ordered(
        _own("loops:breadth_first"),
        "several chunks of the model per GPU, all microbatches through each of them in turn",
        "Breadth-First (Lamy-Poirier 2023)",
        "breadth first: all microbatches through one stage of a GPU after the other",
        homes=loop,
        refuses=lambda graph: not_interleaved(graph, "breadth-first"),
        options=("chunks",),
    ),
    "zb1p": _ordered(
        _own("zero_bubble:zb1p"),
        "split backward, weight gradients fill the bubble within 1F1B's memory (ZB-H1)",
        "Zero Bubble (Qi et al. 2024)",
        "ZB-H1: 1F1B with weight gradients later, in its bubbles",
        refuses=lambda graph: no_pipelines(graph, "zb1p"),
        options=_SPLIT,
    ),
    "zb2p": _ordered(
        _own("zero_bubble:zb2p"),
        "split backward, twice the activations, nearly no bubble (ZB-H2)",
        "Zero Bubble (Qi et al. 2024)",
        "ZB-H2: about 2p - 1 forwards ahead, weight gradients later",
        refuses=lambda graph: no_pipelines(graph, "zb2p"),
        options=_SPLIT,
        searches=True,
    ),
    "interleaved-zb": _ordered(
        _own("loops:interleaved_zero_bubble"),
        "interleaved 1F1B with split backward, weight gradients fill the bubble",
        "Zero Bubble (Qi et al. 2024), as in torch",
        "interleaved 1F1B with weight gradients later, in its bubbles",
        homes=loop,
        refuses=lambda graph: not_interleaved(graph, "interleaved-zb"),
        options=("chunks", *_SPLIT),
    ),
    "zbv": _ordered(
        _own("vees:zbv"),
        "split backward, two chunks per GPU placed like a V, nearly no bubble within 1F1B's memory",
        "Controllable Memory (Qi et al. 2024)",
        "ZBV: stages d and 2p - 1 - d on GPU d, weight gradients later",
        homes=vee,
        refuses=no_vee,
        options=_SPLIT,
    ),
    "v-half": _within("v-half", _own("controlled:v_half"), "V-Half", "half of 1F1B's activations"),
    "v-min": _within("v-min", _own("controlled:v_min"), "V-Min", "a third of 1F1B's activations"),
    "dualpipev": _ordered(
        _own("vees:dualpipev"),
        "two chunks per GPU placed like a V, forwards run together with backwards of other microbatches",
        "DualPipe (DeepSeek-V3 2024), as in torch",
        "DualPipeV: stages d and 2p - 1 - d on GPU d, forwards together with backwards of others",
        homes=vee,
        refuses=lambda graph: no_vee(graph, "dualpipev"),
        options=("overlap", *_SPLIT),
    ),
    "written": _ordered(
        Late("schedule.written:written_program"),
        "an order of its own for every GPU",
        "a file as torch reads it",
        "written for these stages",
        options=("order",),
    ),
    "pattern": Kind(
        tuple(weights for weights in WEIGHTS if weights not in _DRAINING),
        summary="the plan's own periodic pattern, any allocation",
        source="MadPipe section 3",
        refusal="weights {weights} drain the pipeline after every mini-batch; the schedule is an endless pattern",
    ),
}
OTHERS: dict[str, Kind] = {  # that stages can be simulated under, and no plan has
    "pipedream": Kind(
        ("stash",),
        one_f_one_b,
        "1F1B without flush, NOAM microbatches in flight, one weight version for each; 1F1B-RR with replicas",
        "PipeDream section 3.2",
        options=("depth",),
    )
}


def schedules() -> dict[str, Kind]:
    """Return by name every schedule that stages can be simulated under, the pattern that a plan may have first."""
    own: dict[str, Kind] = {name: kind for name, kind in KINDS.items() if kind.build is not None and not kind.written}
    return {"pattern": KINDS["pattern"], **OTHERS, **own}


def named(name: str) -> Kind:
    """Return a schedule, or a kind that plans have, by its name."""
    return next(row for own, row in (*OTHERS.items(), *KINDS.items()) if own == name)


def drained_programs(graph: StageGraph, microbatches: int, weight_keeps: Fraction = Fraction(1)) -> Iterator[Program]:
    """Yield a mini-batch under every schedule that drains and can run these stages, whose passes are the usual ones."""
    for kind in schedules().values():
        if kind.build is None or not kind.drains or kind.refuses(graph) is not None:
            continue
        options = {"weight_keeps": weight_keeps} if kind.splits else {}
        try:
            program = kind.build(graph, microbatches, **options)
        except PipeplanError:  # which says more than ``refuses``
            continue
        if program.operations == operations_of(graph, 1, program.split):
            yield program


def kind_of(plan: Plan) -> Kind:
    """Return the row of a plan's kind of schedule."""
    return KINDS[plan.schedule.kind]


def kinds_for(weights: Weights) -> list[ScheduleKind]:
    """Return the kinds of schedules that plans with a weights policy can be made for, the default first."""
    return [name for name, kind in KINDS.items() if weights in kind.weights and not kind.written]


def refused(graph: StageGraph, schedule: Schedule) -> str | None:
    """Return why stages cannot run under a schedule, or None."""
    kind = KINDS[schedule.kind]
    if kind.written:
        return unfit(graph, schedule.order or (), schedule.mini_batch)
    return kind.refuses(graph)


def too_long(operations: int, schedule: Schedule) -> str | None:
    """Return in words why no plan is judged that takes so long to simulate, or None.

    ``operations`` are those on the path of a microbatch.
    """
    kind, count, limit = KINDS[schedule.kind], schedule.mini_batch, schedule.limit or 1
    if kind.drains:
        return endless(count * operations, f"a mini-batch of {count} microbatches")
    steps = 4 * limit * (count + 1) * (operations // 2)
    what = f"mini-batches of {count} microbatches, {limit} admitted at once,"
    return None if kind.steady is None else endless(steps, what)


def endless(steps: int, what: str) -> str | None:
    """Return in words that ``what`` is not simulated, in so many steps, or None where they are few enough."""
    return f"{what} would take {steps} steps; up to {MOST_STEPS} are simulated" if steps > MOST_STEPS else None


def graph_of(plan: Plan) -> StageGraph:
    """Return the stage graph of a plan."""
    return stage_graph(plan.chain, plan.platform, plan.policy, plan.allocation.stages)


def plan_groups(plan: Plan) -> list[Group]:
    """Return the groups of a plan's pattern; none where it has no pattern."""
    return [] if plan.pattern is None else groups(graph_of(plan), plan.pattern)


def program_of_kind(graph: StageGraph, schedule: Schedule, pattern: Pattern | None, microbatches: int) -> Program:
    """Return the program that runs ``microbatches`` microbatches of ``graph`` under a plan's schedule.

    ``pattern`` is what the kinds that have one unroll.
    """
    kind = KINDS[schedule.kind]
    if kind.build is None:
        return unroll(graph, _known(pattern), microbatches)
    own = {"batch": schedule.mini_batch, "limit": schedule.limit, "order": schedule.order}
    return kind.build(graph, microbatches, **{name: own[name] for name in kind.options if name in own})


def plan_program(plan: Plan, microbatches: int) -> Program:
    """Return the program that runs ``microbatches`` microbatches of ``plan`` under its own schedule."""
    return program_of_kind(graph_of(plan), plan.schedule, plan.pattern, microbatches)


def plan_timeline(plan: Plan, microbatches: int | None = None) -> Timeline:
    """Return the simulated run of ``plan`` under its own schedule.

    By default one mini-batch of a schedule that drains, and otherwise as many microbatches as show a steady state.
    """
    if microbatches is None:
        microbatches = shown_microbatches(plan)
    return simulated_run(graph_of(plan), plan.schedule, plan.pattern, microbatches, NEVER)


@lru_cache(maxsize=1)
def simulated_run(
    graph: StageGraph, schedule: Schedule, pattern: Pattern | None, microbatches: int, deadline: Deadline
) -> Timeline:
    """Return the run of :func:`program_of_kind`; the last one is remembered, as it is judged and then shown."""
    return simulate(program_of_kind(graph, schedule, pattern, microbatches), deadline=deadline)


def shown_microbatches(plan: Plan) -> int:
    """Return how many microbatches a run of ``plan`` needs to show all that matters: see :func:`plan_timeline`."""
    kind, schedule = kind_of(plan), plan.schedule
    if kind.drains:
        return schedule.mini_batch
    graph = graph_of(plan)
    if kind.steady is not None:
        return schedule.mini_batch * max(ceil(64 / schedule.mini_batch), 8 * (schedule.limit or len(graph.stages)))
    pattern = _known(plan.pattern)
    enough = 16 * most_in_flight(graph, starts_of(pattern), pattern.period_ns)
    return max(64, min(enough, MOST_SHOWN // len(graph.operations)))


def _known(pattern: Pattern | None) -> Pattern:
    if pattern is None:
        raise BadInput("the plan has no pattern: nothing says when its operations run")
    return pattern
