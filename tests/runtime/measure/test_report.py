"""Reports from made-up measurements, so that every figure can be told in advance."""

import json
from dataclasses import replace

import pytest
from cases.measured import replayed, script_of

from pipeplan.plan import Schedule
from pipeplan.problem import Policy
from pipeplan.report.tables.run import print_run
from pipeplan.report.traces import measured_trace
from pipeplan.runtime.measure import report as report_room
from pipeplan.runtime.measure.calibrate import HandOver, occupied, sums_ns
from pipeplan.runtime.measure.report import make_report
from pipeplan.runtime.measure.times import OpTime, RankMeasurement


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


@pytest.mark.parametrize(
    ("bracket", "kept_off", "verdict"),
    [
        (None, 0.0, None), ((2.9, 3.2), 0.0, "times moved"), ((1.0, 3.0), 0.0, "as planned"),
        ((0.9, 1.1), 0.01, "the run itself"), ((4.0, 5.0), 0.3, "other load"),
    ],
)  # fmt: skip
def test_a_run_of_three_times_the_planned_period_is_judged_by_what_layers_took_around_it(
    bracket, kept_off, verdict, capsys
):
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 20)
    first, *others = replayed(script, 3)
    report = make_report(script, [replace(first, kept_off=kept_off), *others])
    assert report.kept_off == kept_off
    report = replace(report, bracket=bracket)
    assert report.verdict == verdict
    print_run(script.plan, report, width=120)
    out = capsys.readouterr().out
    assert (" by a profile right before, " in out) == (bracket is not None)
    assert ("waited 30% of the time for a core" in out) == (kept_off == 0.3)


def test_a_drained_run_measures_the_makespan_and_the_update():
    script = script_of(Policy("flush", accumulate=4), Schedule("flush", 4), 5)
    makespan = script.timeline.makespan_ns
    assert makespan == 5 * 300  # (4 + 2 - 1) microbatches
    report = make_report(script, replayed(script, 2, update=40))
    assert report.planned_period_ns == makespan / 4
    assert report.measured_period_ns == 2 * (makespan + 40) / 4
    assert report.calibrated_period_ns == report.measured_period_ns  # the update comes once, behind the last backward


@pytest.mark.parametrize(("weights", "charged"), [("2bw", 2), ("flush", 0)])
def test_planned_backwards_are_shown_without_the_share_of_the_update_as_measured_ones_are(weights, charged, capsys):
    """Where optimizer steps come behind a batch, the model charges backwards none, and there is nothing to take off."""
    ms = 10**6
    policy, schedule = Policy(weights, accumulate=4), Schedule("flush", 4) if weights == "flush" else Schedule()
    script = script_of(policy, schedule, 5, times=((ms, 4 * ms), (ms, 4 * ms)), optimizer_ns=8 * ms)
    assert [cost.backward_ns for cost in script.graph.stages] == [(4 + charged) * ms] * 2
    assert [cost.update_share_ns for cost in script.graph.stages] == [charged * ms] * 2
    report = make_report(script, replayed(script, 1))
    assert [stage.planned_backward_ns for stage in report.stages] == [4 * ms] * 2
    print_run(script.plan, report, width=120)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert f"0 1.000 ms 1.000 ms {4 + charged}.000 ms 4.000 ms".split() in rows


@pytest.mark.parametrize("coarsening", [None, 2])
def test_steps_are_charged_to_the_end_of_a_batch_not_to_backwards(coarsening):
    """The last backward of the first stage ends a batch; then it agrees in 20, waits 100 for a sum, and steps 40."""
    policy = Policy("flush", accumulate=4, coarsening=coarsening)
    script = script_of(policy, Schedule("flush", 4), 5, times=((100, 400), (100, 400)), optimizer_ns=40)
    report = make_report(script, with_waits(replayed(script, 1, update=40), (20, 420), (100, 30)))
    assert report.calibrated_period_ns == (5 * 500 + 20 + 100 + 40) / 4


def test_the_wait_for_what_was_sent_before_is_not_a_stages_own_work():
    """A pass of 100, a wait of 300 for a slow receiver, and 10 to send what it made."""
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 4)
    times = []
    for m in range(8):
        begin = 1000 * m
        for kind, start, end in (("F", 0, 100), ("ROOM_F", 100, 400), ("SEND_F", 400, 410), ("WAIT_B", 410, 1000)):
            times.append(OpTime(kind, 0, m, begin + start, begin + end))
    assert occupied(script, [RankMeasurement(0, tuple(times), {}, 0, {0: 1})])["F", 0] == 110


def test_times_are_medians_of_means_over_as_many_microbatches_as_an_update_has():
    """Every second forward takes 300 instead of 100, which a median alone wouldn't show; one update is disturbed."""
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 10)
    now, times = 0, []
    for m in range(20):
        ns = 10**6 if m == 12 else 100 + m % 2 * 200
        times.append(OpTime("F", 0, m, now, now + ns))
        now += ns
    assert occupied(script, [RankMeasurement(0, tuple(times), {}, 0, {0: 1})])["F", 0] == 200


def test_a_sum_takes_as_long_as_its_exchanges_and_not_what_is_between_them():
    """Replicas that share steps sum beside passes, and gather the new weights when these are needed."""
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 20)
    notes = [OpTime("REDUCE", 0, 1, *span) for span in ((0, 100), (50, 150), (900, 930), (920, 950))]
    assert sums_ns(script, [RankMeasurement(0, tuple(notes), {}, 0, {0: 1})]) == [200, 0]


def test_planned_reading_and_overhead_are_shown_beside_what_they_took_and_not_in_passes(capsys):
    ms = 10**6
    about = {"reading_ns": ms // 4}, {"overhead_ns": ms // 2}
    times = ((ms, 2 * ms), (ms, 2 * ms))
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 20, times, output=50, about=about)
    assert [cost.forward_ns for cost in script.graph.stages] == [3 * ms // 2] * 2
    here, there = replayed(script, 1)
    report = make_report(script, [here, there])
    assert [(x.planned_data_ns, x.planned_exchange_ns) for x in report.stages] == [(ms // 4, ms)] * 2
    assert [(x.planned_forward_ns, x.planned_backward_ns) for x in report.stages] == [(3 * ms // 4, 2 * ms)] * 2
    print_run(script.plan, report, width=120)
    assert "stages work 0.000 ms of each microbatch for messages, 1.000 ms planned" in capsys.readouterr().out


def with_waits(measurements, agree_ns, reduce_ns, sums=1):
    """Each rank agrees and then sums before its updates, in so many ns; what comes after is so much later."""
    found = []
    for x, agreed, summed in zip(measurements, agree_ns, reduce_ns, strict=True):
        times, late = [], 0
        for t in x.times:
            if t.activity == "UPDATE":
                for kind, stage, ns in (("AGREE", -1, agreed), *[("REDUCE", t.stage, summed // sums)] * sums):
                    if ns:
                        times.append(OpTime(kind, stage, t.microbatch, t.start_ns + late, t.start_ns + late + ns))
                        late += ns
            times.append(replace(t, start_ns=t.start_ns + late, end_ns=t.end_ns + late))
        found.append(replace(x, times=tuple(times)))
    return found


@pytest.mark.parametrize("sums", [1, 2])
def test_a_drained_run_is_charged_what_updates_waited_for(sums):
    """The last stage is done 200 before the first, for which it waits; what that one waits is the agreement.

    Tied weights are summed first, then those that replicas alone have.
    """
    script = script_of(Policy("flush", accumulate=4), Schedule("flush", 4), 5)
    plain = make_report(script, replayed(script, 1, update=40))
    report = make_report(script, with_waits(replayed(script, 1, update=40), (30, 230), (100, 0), sums))
    assert report.calibrated_period_ns == plain.calibrated_period_ns + (30 + 100) / 4
    assert report.stages[0].update_ns == 40


def test_without_drains_a_wait_for_a_sum_is_charged_to_backwards():
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 20)
    measurements = replayed(script, 1)
    first, late = [], 0
    for t in measurements[0].times:
        if t.activity == "F" and t.microbatch % 2 == 0 and t.microbatch:
            at, version = t.start_ns + late, t.microbatch // 2
            late += 50  # a mini-batch's sum delays all that follows
            first += [OpTime("REDUCE", 0, version, at, at + 50), OpTime("UPDATE", 0, version, at + 50, at + 50)]
        first.append(replace(t, start_ns=t.start_ns + late, end_ns=t.end_ns + late))
    measurements[0] = replace(measurements[0], times=tuple(first))
    assert make_report(script, measurements).calibrated_period_ns == 300 + 50 / 2


def test_transfers_and_data_enter_the_calibrated_period(monkeypatch):
    script = script_of(Policy("2bw", accumulate=3), Schedule(), 20, output=50)
    measurements = replayed(script, 1)
    took = HandOver(1000, 1000, 1)
    with monkeypatch.context() as patch:
        patch.setattr(report_room, "handed_over", lambda *_: {("F", 0): took, ("B", 1): took})
        report = make_report(script, measurements)
    assert [(t.kind, t.stage, t.measured_ns) for t in report.transfers] == [("B", 1, 1000), ("F", 0, 1000)]
    assert report.calibrated_period_ns == 1000  # either direction of the link has become the bottleneck
    slow, late = [], 0
    for t in measurements[0].times:
        if t.activity == "F":
            slow.append(OpTime("DATA", t.stage, t.microbatch, t.start_ns + late, t.start_ns + late + 5000))
            late += 5000
        slow.append(OpTime(t.activity, t.stage, t.microbatch, t.start_ns + late, t.end_ns + late))
    report = make_report(
        script,
        [
            RankMeasurement(0, tuple(slow), {}, 0, {}),
            RankMeasurement(1, measurements[1].times, measurements[1].losses, 0, {}),
        ],
    )
    assert report.stages[0].data_ns == 5000
    assert report.stages[0].exchange_ns == 0
    assert report.calibrated_period_ns == 5000 + 300


@pytest.mark.parametrize("cut", range(100, 109))  # in all places of a round
def test_a_long_run_is_reported_from_its_begin_and_its_end(cut, capsys):
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 100, output=50)
    whole = replayed(script, 3)
    parts = [replace(x, times=x.times[:cut] + x.times[-cut:], forgotten=len(x.times) - 2 * cut) for x in whole]
    expected, report = make_report(script, whole), make_report(script, parts)
    assert report.measured_period_ns == expected.measured_period_ns == 3 * script.timeline.steady_period_ns()
    assert report.calibrated_period_ns == expected.calibrated_period_ns
    assert report.stages == expected.stages
    assert report.seconds == expected.seconds
    assert report.losses == expected.losses
    assert report.forgotten == sum(x.forgotten for x in parts) > 2 * cut
    print_run(script.plan, report, width=120)
    assert f"begin and end; {report.forgotten} operations between them weren't kept" in capsys.readouterr().out
    assert json.loads(measured_trace(script.plan, report))["otherData"]["forgotten_operations"] == report.forgotten


def test_a_short_run_has_no_steady_state():
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 2)
    report = make_report(script, replayed(script, 1))
    assert report.measured_period_ns is None
    assert report.mean_period_ns is None
    assert report.samples_per_s == pytest.approx(4 / report.seconds)


def test_hand_overs_are_measured_where_the_receiver_waited():
    """Two stages of 100 and 200, alone in turn: a send works for 30, 70 later its message is there; posts take 5."""
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 20, output=50)
    here, there = [], []
    now = 0
    for m in range(script.microbatches):
        here += [OpTime("F", 0, m, now, now + 100), OpTime("SEND_F", 0, m, now + 110, now + 140)]
        there += [
            OpTime("WAIT_F", 1, m, there[-1].end_ns if there else now, now + 210),
            OpTime("F", 1, m, now + 215, now + 315),
            OpTime("B", 1, m, now + 315, now + 515),
            OpTime("SEND_B", 1, m, now + 515, now + 545),
        ]
        if m % 2:
            here.append(OpTime("WAIT_B", 0, m, now + 140, now + 615))
        else:  # the gradient has to wait for its receiver
            here += [OpTime("SAVE", -1, m, now + 140, now + 700), OpTime("WAIT_B", 0, m, now + 700, now + 701)]
        here.append(OpTime("B", 0, m, here[-1].end_ns + 5, here[-1].end_ns + 205))
        now = here[-1].end_ns
    measurements = [
        RankMeasurement(0, tuple(here), {}, 0, {}),
        RankMeasurement(1, tuple(there), dict.fromkeys(range(script.microbatches), 0.0), 0, {}),
    ]
    report = make_report(script, measurements)
    settled = script.microbatches * 3 // 4
    assert [(t.kind, t.stage, t.measured_ns, t.count) for t in report.transfers] == [
        ("B", 1, 100, settled // 2),
        ("F", 0, 100, settled),
    ]
    assert [stage.exchange_ns for stage in report.stages] == [10 + 30 + 5, 5 + 30]
    assert report.calibrated_period_ns == (140 + 70 + 105 + 230 + 70 + 205) / 2  # two in flight
