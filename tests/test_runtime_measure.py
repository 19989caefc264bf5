"""Reports from made-up measurements, so that every figure can be told in advance."""

import pytest
from test_runtime_instructions import chain_of

from pipeplan.plan import Allocation, Plan, Provenance, Schedule, Stage
from pipeplan.problem import Platform, Policy
from pipeplan.program import Step
from pipeplan.runtime.measure import OpTime, RankMeasurement, make_report
from pipeplan.runtime.prepare import prepare
from pipeplan.schedule.one_f_one_b import best_one_f_one_b_star
from pipeplan.stages import stage_graph

STAGES = (Stage(0, 1, (0,)), Stage(1, 2, (1,)))


def script_of(policy, schedule, steps, times=((100, 200), (100, 200)), output=0):
    chain = chain_of(times, output)
    platform = Platform.flat(2, 10**12, 10**9)
    pattern = best_one_f_one_b_star(stage_graph(chain, platform, policy, STAGES))
    plan = Plan(chain, platform, policy, Allocation(STAGES), pattern, (), Provenance("by hand"), schedule)
    return prepare(plan, steps)


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
            transfer_ns={},
            versions={rank: 2},
        )
        for rank in (0, 1)
    ]


def _last(lane):
    return lane.steps[-1].microbatch, lane.steps[-1].position


def test_a_run_like_the_simulation_measures_the_simulated_period():
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 20)
    report = make_report(script, replayed(script, 3))
    assert report.planned_period_ns == 300
    assert report.calibrated_period_ns == report.measured_period_ns == report.mean_period_ns == 900
    assert report.losses == tuple(float(m) for m in range(40))
    assert report.step_losses[:2] == (0.5, 2.5)
    assert report.samples_per_s == 1e9 / 900
    assert [(s.forward_ns, s.backward_ns, s.update_ns) for s in report.stages] == [(300, 600, 0)] * 2
    assert [(s.planned_forward_ns, s.planned_backward_ns, s.versions) for s in report.stages] == [(100, 200, 2)] * 2
    assert [(a.device, a.rank, a.planned_bytes, a.measured_bytes) for a in report.activations] == [
        (0, 0, 8, 10),  # two in flight, each with the input of 4 bytes
        (1, 1, 0, 20),
    ]
    assert len(report.times) == 2


def test_a_drained_run_measures_the_makespan_and_the_update():
    script = script_of(Policy("flush", accumulate=4), Schedule("flush", 4), 5)
    makespan = script.timeline.makespan_ns
    assert makespan == 5 * 300  # (4 + 2 - 1) microbatches
    report = make_report(script, replayed(script, 2, update=40))
    assert report.planned_period_ns == makespan / 4
    assert report.measured_period_ns == 2 * (makespan + 40) / 4
    # a microbatch is charged a quarter of the update: on the longest path four backwards of one stage and one of other
    assert report.calibrated_period_ns == (2 * makespan + 5 * 20) / 4


def test_transfers_and_data_enter_the_calibrated_period():
    script = script_of(Policy("2bw", accumulate=3), Schedule(), 20, output=50)
    measurements = replayed(script, 1)
    transfers = {("F", 0): 1000, ("B", 1): 1000}
    report = make_report(
        script,
        [
            RankMeasurement(0, measurements[0].times, {}, 0, transfers, {}),
            RankMeasurement(1, measurements[1].times, measurements[1].losses, 0, {}, {}),
        ],
    )
    assert report.calibrated_period_ns == 2000  # the link has become the bottleneck
    slow = tuple(OpTime("DATA", t.stage, t.microbatch, 0, 5000) for t in measurements[0].times if t.activity == "F")
    report = make_report(
        script,
        [
            RankMeasurement(0, measurements[0].times + slow, {}, 0, {}, {}),
            RankMeasurement(1, measurements[1].times, measurements[1].losses, 0, {}, {}),
        ],
    )
    assert report.stages[0].data_ns == 5000
    assert report.calibrated_period_ns == 5000 + 300


def test_a_short_run_has_no_steady_state():
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 2)
    report = make_report(script, replayed(script, 1))
    assert report.measured_period_ns is None
    assert report.mean_period_ns is None
    assert report.samples_per_s == pytest.approx(4 / report.seconds)
