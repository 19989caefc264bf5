"""Made-up measurements of ranks that did what the simulation says."""

from dataclasses import replace

from cases.lowering import chain_of

from pipeplan.cost.stage_graph import stage_graph
from pipeplan.plan import Allocation, Plan, Provenance, Stage
from pipeplan.problem import Platform
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.runtime.measure.times import OpTime, RankMeasurement
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from pipeplan.schedule.program import Step

STAGES = (Stage(0, 1, (0,)), Stage(1, 2, (1,)))


def script_of(policy, schedule, steps, times=((100, 200), (100, 200)), output=0, optimizer_ns=0, about=({}, {})):
    """A run of two stages; ``about`` has further fields of its chain and of its platform."""
    chain = chain_of(times, output)
    layers = tuple(replace(layer, optimizer_ns=optimizer_ns) for layer in chain.layers)
    chain = replace(chain, layers=layers, **about[0])
    platform = replace(Platform.flat(2, 10**12, 10**9), **about[1])
    pattern = best_one_f_one_b_star(stage_graph(chain, platform, policy, STAGES))
    plan = Plan(chain, platform, policy, Allocation(STAGES), pattern, (), Provenance("by hand"), schedule)
    return lower_run(plan, steps)


def replayed(script, factor, update=0):
    """Measurements of ranks that did exactly what the simulation says, ``factor`` times as slowly."""
    count = script.program.microbatches
    span = (script.timeline.makespan_ns + update) * factor
    times = [[], []]
    for batch in range(script.steps if script.drains else 1):
        for lane in script.program.lanes[:2]:
            for step in lane.steps:
                op = script.graph.operations[step.position]
                start = batch * span + factor * script.timeline.start_ns[step.microbatch][step.position]
                m = step.microbatch + batch * count
                waited(times[lane.device], op, m, start)
                times[lane.device].append(OpTime(op.kind, op.stage, m, start, start + factor * op.duration_ns))
            if script.drains:
                end = batch * span + factor * script.timeline.end_ns(Step(*_last(lane)))
                times[lane.device].append(OpTime("UPDATE", lane.device, batch + 1, end, end + factor * update))
    return [
        RankMeasurement(
            rank=rank,
            times=tuple(times[rank]),
            losses={m: float(m) for m in range(script.microbatches)} if rank == 1 else {},
            peak_activation_bytes=10 * (rank + 1),
            versions={rank: 2},
        )
        for rank in (0, 1)
    ]


def waited(times, op, microbatch, until):
    """Add the wait of a pass, if there is one."""
    before = times[-1].end_ns if times else 0
    if before < until:
        times.append(OpTime(f"WAIT_{op.kind}", op.stage, microbatch, before, until))


def _last(lane):
    return lane.steps[-1].microbatch, lane.steps[-1].position
