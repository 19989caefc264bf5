"""Chrome traces of simulated and measured runs, judged by what a viewer makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from cases.measured import replayed, script_of
from cases.plans import straight
from cases.schedules import balanced
from oracles.chrome_trace import shown

from pipeplan.plan import Schedule
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.problem import Platform, Policy
from pipeplan.report.traces import ChromeTrace, measured_trace, microseconds, simulated_trace
from pipeplan.runtime.measure.report import make_report
from pipeplan.runtime.measure.times import OpTime
from pipeplan.schedule.kinds import schedules
from pipeplan.schedule.programs.one_f_one_b import one_f_one_b
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import lane_use


def test_microseconds_cut_off_are_the_ns_again():
    assert all(int(microseconds(ns) * 1000) == ns for ns in [*range(10_000), *(10**15 - k for k in range(1000))])
    assert any(int(ns / 1000 * 1000) != ns for ns in range(10_000))  # which is why


def test_slices_are_the_steps_and_arrows_go_through_the_links():
    timeline = simulate(one_f_one_b(balanced(3, 1500, 3000, 500), 4))
    seen = shown(simulated_trace(timeline, Platform.flat(3, 10**9)).text())
    program = timeline.program
    for lane in program.lanes:
        name = lane.name if lane.device is None else f"GPU {lane.device}"
        steps = [(timeline.begin_ns(x), timeline.end_ns(x), program.name(x)) for x in lane.steps]
        assert seen.slices[name] == steps
    assert seen.processes == ["GPUs", "links", "memory"]
    assert seen.threads == ["GPU 0", "GPU 1", "GPU 2", *(x.name for x in program.lanes if x.device is None)]
    assert len(seen.arrows) == 4 * 4  # two cuts, both ways, four microbatches
    assert [arrow for arrow in seen.arrows if arrow[0].endswith("2")] == [
        ["0F2", "0SEND_F2", "1F2"],
        ["1F2", "1SEND_F2", "2F2"],
        ["2B2", "2SEND_B2", "1B2"],
        ["1B2", "1SEND_B2", "0B2"],
    ]


def test_there_is_one_memory_counter_a_gpu_with_all_that_it_holds():
    run = simulate_plan(straight(), 16)
    seen = shown(simulated_trace(run.timeline, straight().platform).text())
    assert list(seen.counters) == [f"GPU {d} holds GB" for d in range(4)]
    use = run.uses[1]
    held = [round(value * 1e9) for _, value in seen.counters["GPU 1 holds GB"]]
    assert max(held) == use.peak_bytes == use.static_bytes + lane_use(run.timeline, 1).activation_bytes
    assert held[0] >= held[-1] == use.static_bytes


@pytest.mark.parametrize("schedule", schedules())
def test_every_schedule_gives_a_trace_that_a_viewer_takes(schedule):
    timeline = simulate_plan(straight(), 8, schedule).timeline
    seen = shown(simulated_trace(timeline, straight().platform).text())
    sends = sum(len(lane.steps) for lane in timeline.program.lanes if lane.device is None)
    assert len(seen.arrows) == sends > 0


def test_tracks_of_many_gpus_stand_in_order_by_name_too():
    timeline = simulate(one_f_one_b(balanced(12, 100, 200, 50), 2))
    seen = shown(simulated_trace(timeline, Platform.flat(12, 10**9)).text())
    gpus = [name for name in seen.threads if name.startswith("GPU")]
    assert gpus == sorted(gpus) == [f"GPU {d:02d}" for d in range(12)]
    assert list(seen.counters) == sorted(seen.counters)


def test_an_arrow_that_would_go_back_in_time_or_from_an_empty_box_is_left_out():
    trace = ChromeTrace()
    here, there = (trace.track(trace.process(name), name) for name in ("one", "two"))
    times = {here: {"a": (100, 200), "b": (200, 200), "c": (200, 300)},
             there: {"early": (20, 60), "beside": (150, 250), "late": (300, 400)}}  # fmt: skip
    boxes = {
        name: trace.slice(track, name, "F", start, end, {})
        for track, named in times.items()
        for name, (start, end) in named.items()
    }
    for through in ("a early", "b late", "a b late", "a beside", "c beside late"):
        trace.arrow(through, [boxes[name] for name in through.split()])
    assert shown(trace.text()).arrows == [["a", "beside"], ["a", "late"], ["c", "late"]]


# --- measured -------------------------------------------------------------------------------------------------------


def run_of(factor, extra=()):
    """A plan with 50 bytes across its cut, and the report of a run as slow as ``factor`` that also did ``extra``."""
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 20, output=50)
    measurements = replayed(script, factor)
    measurements[0] = replace(measurements[0], times=(*measurements[0].times, *extra))
    return script.plan, make_report(script, measurements)


def test_the_trace_of_a_run_has_names_arrows_and_what_was_held():
    at = 10**6
    sums = [
        OpTime("REDUCE", 0, 1, at, at + 5),
        OpTime("REDUCE", 0, 1, at + 3, at + 9),
        OpTime("REDUCE", 0, 2, at + 5, at + 6),
    ]
    plan, report = run_of(2, [*sums, OpTime("AGREE", -1, 1, at, at + 5)])
    later = ([replace(x, start_ns=x.start_ns + 700, end_ns=x.end_ns + 700) for x in row] for row in report.times)
    report = replace(report, times=tuple(map(tuple, later)))
    text = measured_trace(plan, report)
    seen = shown(text)
    assert seen.processes == ["GPUs, measured", "memory, by the plan's sizes"]
    beside = [f"GPU 0 (rank 0), sums of gradients{more}" for more in ("", " 1")]  # two at once
    assert seen.threads == ["GPU 0 (rank 0)", *beside, "GPU 1 (rank 1)"]
    assert sum(map(len, seen.slices.values())) == sum(map(len, report.times))
    assert [[name for _, _, name in seen.slices[row]] for row in beside] == [["0REDUCE1", "0REDUCE2"], ["0REDUCE1"]]
    assert seen.slices["GPU 0 (rank 0)"][-1][2] == "AGREE1"
    assert len(seen.arrows) == 2 * report.microbatches
    assert ["0F3", "1F3"] in seen.arrows
    assert ["1B3", "0B3"] in seen.arrows
    origin = min(t.start_ns for times in report.times for t in times)
    mine = [(t.start_ns - origin, t.end_ns - origin) for t in report.times[1]]
    assert [(start, end) for start, end, _ in seen.slices["GPU 1 (rank 1)"]] == mine
    held = [value for _, value in seen.counters["GPU 0 (rank 0) holds GB"]]
    assert len(seen.counters) == 2
    assert held[0] >= held[-1] == min(held)
    events = json.loads(text)["traceEvents"]
    assert {x["args"]["device"] for x in events if x["ph"] == "X"} == {0, 1}


def test_a_run_exactly_as_simulated_holds_what_was_simulated():
    plan, report = run_of(1)
    simulated = shown(simulated_trace(simulate_plan(plan, report.microbatches).timeline, plan.platform).text())
    measured = shown(measured_trace(plan, report))
    for d in (0, 1):
        wanted = [v for _, v in simulated.counters[f"GPU {d} holds GB"]]
        assert max(v for _, v in measured.counters[f"GPU {d} (rank {d}) holds GB"]) == max(wanted)


def test_passes_that_were_forgotten_hold_nothing():
    plan, report = run_of(1)
    times = tuple(tuple(t for t in row if (t.activity, t.microbatch) != ("B", 5)) for row in report.times)
    seen = shown(measured_trace(plan, replace(report, times=times)))
    for steps in seen.counters.values():
        assert steps[-1][1] == min(v for _, v in steps)
        assert all(a < b for (a, _), (b, _) in pairwise(steps))


def test_the_command_writes_a_trace(pipeplan, tmp_path):
    from pipeplan.files.profiles import profile_text

    profile, plan, trace = tmp_path / "p.json", tmp_path / "plan.json", tmp_path / "trace.json"
    profile.write_text(profile_text(straight().chain))
    pipeplan("plan", str(profile), "--gpus", "4", "--mem", "16GB", "--algorithm", "balance", "-o", str(plan))
    code, _, err = pipeplan("simulate", str(plan), "--schedule", "1f1b", "--trace", str(trace))
    assert code == 0, err
    assert shown(trace.read_text()).arrows
